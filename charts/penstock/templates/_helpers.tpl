{{- define "penstock.name" -}}
{{- if eq .Release.Name .Chart.Name }}penstock-operator{{ else }}{{ printf "%s-penstock-operator" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
{{ default (include "penstock.name" .) .Values.serviceAccount.name }}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* An image of .Values.images as repository:tag or repository@digest. Call with (dict "image" .Values.images.x "root" $).
       A registry replaces the one of the repository: the part before the first slash, if it is localhost or has a dot or colon. */}}
{{- define "penstock.image" -}}
{{- $registry := default (.root.Values.global).imageRegistry .root.Values.images.registry }}
{{- $repository := .image.repository }}
{{- if $registry }}
{{- $repository = printf "%s/%s" (trimSuffix "/" $registry) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" $repository "") }}
{{- end }}
{{- $repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion .image.tag }}{{ end }}
{{- end }}

{{- /* The version of the optimizer's content: its tag, or the beginning of its digest. */}}
{{- define "penstock.toolchain" -}}
{{- $image := .Values.images.optimizer }}
{{- default (ternary (trunc 19 (default "" $image.digest) | replace ":" "-") (default .Chart.AppVersion $image.tag) (not (empty $image.digest))) .Values.toolchain }}
{{- end }}

{{- /* Whether the operator collects garbage in the store. */}}
{{- define "penstock.collects" -}}
{{- $mode := .Values.store.collect.mode }}
{{- if or (eq $mode "Always") (and (eq $mode "Auto") (eq (include "penstock.store" .) "hostPath") (not .Values.watchNamespaces) (not .Values.ignoreNamespaces)) }}yes{{ end }}
{{- end }}

{{- define "penstock.store" -}}
{{- $kinds := list }}
{{- if .Values.store.hostPath.enabled }}{{ $kinds = append $kinds "hostPath" }}{{ end }}
{{- if .Values.store.claim.enabled }}{{ $kinds = append $kinds "claim" }}{{ end }}
{{- if .Values.store.s3.enabled }}{{ $kinds = append $kinds "s3" }}{{ end }}
{{- if empty $kinds }}
{{- fail (printf `store: choose where optimised models are stored, with one of
  --set store.hostPath.enabled=true    the folder %s of the node: for one node, or a folder that all nodes share
  --set store.claim.enabled=true       a PersistentVolumeClaim %s (ReadWriteMany) in each namespace with endpoints
  --set store.s3.enabled=true,store.s3.uri=s3://bucket/prefix,store.s3.secretName=NAME    an object store
Version 0.2 used hostPath if nothing was chosen. docs/how-to/install.md compares them.
` .Values.store.hostPath.path .Values.store.claim.name) }}
{{- else if gt (len $kinds) 1 }}
{{- fail (printf "store: exactly one of hostPath, claim and s3 is enabled, not %s: set enabled of the others to false" (join " and " $kinds)) }}
{{- end }}
{{- first $kinds }}
{{- end }}

{{- /* A CEL condition: .value equals an entry of .list, or begins with one that ends in `*`; names of the system need their own
       entry. As in the operator (is_allowed). */}}
{{- define "penstock.mayBe" -}}
{{ toJson .list }}.exists(p, p == {{ .value }} || (p.endsWith('*') && {{ .value }}.startsWith(p.substring(0, size(p) - 1)) && (p.startsWith('system-') || !{{ .value }}.startsWith('system-'))))
{{- end }}

{{- /* The rules for Secrets with the given names; nothing without names, which would allow all. */}}
{{- define "penstock.secretRules" -}}
{{- if .names }}
{{- range .rules }}
{{ toYaml (list (merge (dict "resourceNames" $.names) .)) }}
{{- end }}
{{- end }}
{{- end }}
