{{- /* Metadata of a definition below its name: labels, and whether helm keeps it. */}}
{{- define "penstock-crds.metadata" -}}
labels:
  {{- with .Values.commonLabels }}{{ toYaml . | nindent 2 }}{{ end }}
  app.kubernetes.io/name: penstock-crds
  app.kubernetes.io/instance: {{ .Release.Name }}
  app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
  app.kubernetes.io/part-of: penstock
  app.kubernetes.io/managed-by: {{ .Release.Service }}
  helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- if .Values.keep }}
annotations:
  helm.sh/resource-policy: keep
{{- end }}
{{- end }}
