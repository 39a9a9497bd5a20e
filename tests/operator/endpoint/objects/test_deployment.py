"""The applied objects: Guaranteed, restricted, on the right nodes, with time to drain."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace

import pytest

from penstock.resources.fields.text_fields import parse_quantity
from penstock_operator.endpoint.pods.credentials import KEYS
from penstock_operator.facts import names
from penstock_operator.facts.installation import PlanSettings, StoreVolume
from penstock_operator.facts.names import Ref
from penstock_operator.facts.scaling import DesiredScale
from tests.operator.endpoint.kube import SETTINGS, Json, Kube, guaranteed, hardware_class, reference, result


def job_of(kube: Kube) -> Json:
    return kube.objects["Job", kube.job]


def container_of(value: Json) -> Json:
    containers = value["spec"]["template"]["spec"]["containers"]
    assert len(containers) == 1
    found: Json = containers[0]
    return found


def env_of(value: Json) -> dict[str, str]:
    entries = container_of(value)["env"]
    assert len({entry["name"] for entry in entries}) == len(entries), "the API server refuses a repeated variable"
    return {entry["name"]: entry["value"] for entry in entries if "value" in entry}


def mounts_of(value: Json) -> dict[str, Json]:
    """The mounts of a container: path to volume, with the effective readOnly."""
    volumes = {volume["name"]: volume for volume in value["spec"]["template"]["spec"]["volumes"]}
    mounts = container_of(value)["volumeMounts"]
    assert {mount["name"] for mount in mounts} == set(volumes)
    return {mount["mountPath"]: {**volumes[mount["name"]], "writes": not mount.get("readOnly")} for mount in mounts}


def both(kube: Kube) -> Iterable[Json]:
    yield job_of(kube)
    yield kube.deployment


def test_pods_are_guaranteed_with_whole_cpus_on_all_threads_of_their_cores() -> None:
    for value in both(Kube().optimised()):
        assert guaranteed(container_of(value))["cpu"] == "4", "2 cores of 2 threads"


def test_no_pod_can_fill_the_disk_of_its_node() -> None:
    kube = Kube(settings=replace(SETTINGS, job_disk=32 * 2**30, runtime_disk=4 * 2**30)).optimised()
    found = {}
    for value in both(kube):
        container = container_of(value)
        sizes = [parse_quantity(one["emptyDir"]["sizeLimit"]) for one in value["spec"]["template"]["spec"]["volumes"]
                 if "emptyDir" in one]  # fmt: skip
        asked, limit = (parse_quantity(container["resources"][part]["ephemeral-storage"])
                        for part in ("requests", "limits"))  # fmt: skip
        assert len(sizes) == 2
        assert 0 < asked < limit
        assert max(sizes) <= limit
        found[value["kind"]] = int(max(sizes))
    assert found["Job"] == 32 * 2**30
    assert 4 * 2**30 < found["Deployment"] < 5 * 2**30, "the artefact's size is added"
    assert env_of(job_of(kube))["PENSTOCK_MODEL_MAX_BYTES"] == str(16 * 2**30)


def test_pods_keep_to_restricted_security() -> None:
    for value in both(Kube(settings=replace(SETTINGS, store_uri="s3://models/here")).optimised()):
        pod = value["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container_of(value)["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert all(set(volume) - {"name"} <= {"emptyDir", "projected"} for volume in pod["volumes"])


def test_pods_have_no_token_no_service_links_and_a_place_to_write() -> None:
    for value in both(Kube().optimised()):
        pod = value["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert "emptyDir" in mounts_of(value)["/tmp"]


def test_pods_run_on_nodes_of_their_class_and_tolerate_its_taints() -> None:
    kube = Kube(pod={"nodeSelector": {"zone": "a"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}).optimised()
    for value in both(kube):
        pod = value["spec"]["template"]["spec"]
        node_affinity = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert node_affinity["nodeSelectorTerms"] == [
            {
                "matchExpressions": [
                    {"key": "penstock.dev/class", "operator": "In", "values": ["icelake"]},
                    {"key": "zone", "operator": "In", "values": ["a"]},
                ]
            }
        ]
        assert [toleration["key"] for toleration in pod["tolerations"]] == ["dedicated", "spot"]


def test_the_class_any_has_no_node_requirements() -> None:
    pod = Kube(hardwareClass="any").optimised().deployment["spec"]["template"]["spec"]
    assert "affinity" not in pod
    assert "tolerations" not in pod


def test_a_class_may_name_architecture_scheduler_runtime_class_and_resources() -> None:
    kube = Kube(hardwareClass="special", cores=3)
    kube.classes["special"] = hardware_class(
        "special",
        architecture="arm64",
        schedulerName="my-scheduler",
        runtimeClassName="fast",
        resources={"example.com/fast": 1},
    )
    for value in both(kube.optimised()):
        pod = value["spec"]["template"]["spec"]
        assert (pod["schedulerName"], pod["runtimeClassName"]) == ("my-scheduler", "fast")
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms == [{"matchExpressions": [{"key": "kubernetes.io/arch", "operator": "In", "values": ["arm64"]}]}]
        limits = container_of(value)["resources"]["limits"]
        assert (limits["cpu"], limits["example.com/fast"]) == ("3", "1")


def test_the_environment_has_all_settings_of_the_runtime() -> None:
    environment = env_of(Kube(serving={"maxInputTokens": 256, "truncate": False}).optimised().deployment)
    assert environment == {
        "PENSTOCK_STORE_URI": "file:///var/lib/penstock/artefacts/namespaces/a",
        "PENSTOCK_ARTEFACT": "sha256:" + "a" * 64,
        "PENSTOCK_NAME": "emotion",
        "PENSTOCK_TASK": "text-classification",
        "PENSTOCK_CORES": "2",
        "PENSTOCK_THREADS_PER_CORE": "2",
        "PENSTOCK_CACHE": "/var/lib/penstock/cache",
        "PENSTOCK_HOST": "0.0.0.0",
        "PENSTOCK_PORT": "8080",
        "PENSTOCK_INTERNAL_PORT": "8081",
        "PENSTOCK_TRUNCATE": "false",
        "PENSTOCK_MAX_INPUT_TOKENS": "256",
        "PENSTOCK_DRAIN_DELAY_SECONDS": "20",
        "PENSTOCK_DRAIN_LIMIT_SECONDS": "55",
        "PENSTOCK_OBJECTIVE_P95_MILLISECONDS": "20.0",
    }


def test_pods_get_the_prompts_of_the_endpoint() -> None:
    from penstock_runtime.pod.variables import PodVariables

    prompts = {"texts": {"query": "frage: ", "none": ""}, "default": "query", "routes": {"/embed": "none"}}
    environment = env_of(Kube(task="feature-extraction", serving={"prompts": prompts}).optimised().deployment)

    parsed = PodVariables.read(environment, others=list(environment)).prompts
    assert parsed is not None
    assert parsed.to_object() == prompts


def test_pods_get_the_policy_for_gateways() -> None:
    from penstock_runtime.pod.variables import PodVariables

    policy = {"labels": {"INJECTION": {"above": 0.9, "category": "illicit"}}, "roles": ["user"], "maxWindows": 3}
    kube = Kube(task="text-classification", serving={"guardPolicy": policy})
    environment = env_of(kube.optimised().deployment)

    parsed = PodVariables.read(environment, others=list(environment)).guard_policy
    assert parsed is not None
    assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == parsed.to_object()
    assert parsed.labels["INJECTION"].above == 0.9
    assert (parsed.roles, parsed.max_windows) == (("user",), 3)


def test_caches_are_settings_and_memory_of_the_pods_and_no_other_optimisation() -> None:
    kube = Kube().optimised()
    before = container_of(kube.deployment)["resources"]["limits"]["memory"]
    kube.edit(serving={"caches": {"answersMebibytes": 256, "tokensMebibytes": 64}})
    made = kube.reconcile()
    environment = env_of(kube.deployment)
    assert environment["PENSTOCK_ANSWER_CACHE_BYTES"] == str(256 * 2**20)
    assert environment["PENSTOCK_TOKEN_CACHE_BYTES"] == str(64 * 2**20)
    after = container_of(kube.deployment)["resources"]["limits"]["memory"]
    assert int(after[:-2]) == int(before[:-2]) + 320
    assert next(one for one in made.status["conditions"] if one["type"] == "Optimized")["status"] == "True"


def test_runtime_and_job_parse_the_variables_of_their_pods() -> None:
    from penstock_optimizer.pod.pod_job import JobVariables
    from penstock_runtime.pod.variables import PodVariables
    from penstock_runtime.settings import SETTINGS as RUNTIME_SETTINGS
    from penstock_runtime.settings import Settings

    kube = Kube(workload={"textsFrom": {"configMapName": "texts", "key": "texts"}})
    kube.texts = ("I like you", "I love you")
    kube.optimised()
    environment = env_of(kube.deployment)
    variables = PodVariables.read(environment, others=[setting.variable for setting in RUNTIME_SETTINGS])
    assert (variables.cores, variables.threads_per_core, variables.name) == (2, 2, "emotion")
    settings = Settings.load(environment, others=variables.names())
    assert settings.drain.drain_delay_seconds == 20
    job = JobVariables.read(env_of(job_of(kube)))
    assert str(job.texts) == "/etc/penstock/texts.txt"


@pytest.mark.parametrize(
    ("task", "rollout", "limit"),
    [
        ("text-classification", {"drainSeconds": 0}, 35),
        ("text-classification", {"drainSeconds": 600}, 635),
        ("text-classification", {"finishSeconds": 60}, 80),
        ("text-generation", {}, 320),
        ("text-generation", {"drainSeconds": 5, "finishSeconds": 5}, 10),
    ],
)
def test_a_pod_drains_within_its_grace_period(task: str, rollout: dict[str, int], limit: int) -> None:
    made = Kube(task=task, rollout=rollout).optimised().deployment
    pod = made["spec"]["template"]["spec"]
    assert env_of(made)["PENSTOCK_DRAIN_LIMIT_SECONDS"] == str(limit)
    assert pod["terminationGracePeriodSeconds"] > limit > int(env_of(made)["PENSTOCK_DRAIN_DELAY_SECONDS"])


def test_rollouts_remove_no_pod_before_a_new_one_serves() -> None:
    spec = Kube(rollout={"maxSurge": 2}).optimised().deployment["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 2, "maxUnavailable": 0}}
    assert spec["minReadySeconds"] > 0


def test_liveness_and_readiness_probes_have_different_paths() -> None:
    container = container_of(Kube().optimised().deployment)
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/healthz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}


def test_probes_and_monitoring_use_the_internal_port_which_the_service_does_not_have() -> None:
    kube = Kube().optimised()
    container = container_of(kube.deployment)
    probed = {container[kind]["httpGet"]["port"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    (port,) = kube.objects["Service", "emotion"]["spec"]["ports"]

    assert {entry["name"]: entry["containerPort"] for entry in container["ports"]} == {"http": 8080, "internal": 8081}
    assert probed == {"internal"}
    assert port["targetPort"] == 8080
    assert kube.deployment["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == "8081"


@pytest.mark.parametrize("labels", [(), (("monitoring", "yes"),)])
def test_only_the_operator_and_monitoring_may_reach_the_internal_port(labels: tuple[tuple[str, str], ...]) -> None:
    settings = replace(SETTINGS, operator_namespace="ops", monitoring_labels=labels)
    kube = Kube(settings=settings, gateway={"mode": "Always"}).optimised()
    namespaces = [{"kubernetes.io/metadata.name": "ops"}, *([dict(labels)] if labels else [])]
    peers = [{"namespaceSelector": {"matchLabels": chosen}} for chosen in namespaces]

    for name, port in (("emotion", 8081), ("emotion-gateway", 8404)):
        requests, monitoring = kube.objects["NetworkPolicy", name]["spec"]["ingress"]
        assert requests == {"ports": [{"port": 8080, "protocol": "TCP"}]}
        assert monitoring == {"ports": [{"port": port, "protocol": "TCP"}], "from": peers}


def test_the_keys_of_an_endpoint_are_mounted_as_files_of_its_runtime_pods_only() -> None:
    kube = Kube(auth={"secretName": "keys"}, gateway={"mode": "Always"}).optimised()
    pod = kube.deployment["spec"]["template"]["spec"]
    (volume,) = [entry for entry in pod["volumes"] if "secret" in entry]
    (mount,) = [entry for entry in container_of(kube.deployment)["volumeMounts"] if entry["name"] == volume["name"]]

    assert volume["secret"] == {"secretName": "keys", "optional": True, "defaultMode": 0o440}
    assert mount["readOnly"] is True
    assert env_of(kube.deployment)["PENSTOCK_AUTH_TOKEN_FOLDER"] == mount["mountPath"]
    assert "keys" not in json.dumps(container_of(kube.deployment)["env"]).replace(mount["mountPath"], "")
    assert "secret" not in json.dumps(job_of(kube)["spec"]["template"]["spec"]["volumes"])


def test_the_keys_are_mounted_into_the_gateway_that_holds_requests() -> None:
    kube = Kube(auth={"secretName": "keys"}, gateway={"mode": "Always"}).optimised()
    pod = kube.objects["Deployment", "emotion-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (volume,) = [entry for entry in pod["volumes"] if "secret" in entry]
    (mount,) = [entry for entry in container["volumeMounts"] if entry["name"] == volume["name"]]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}

    assert volume["secret"]["secretName"] == "keys"
    assert environment["PENSTOCK_GATEWAY_KEYS_FOLDER"] == mount["mountPath"]


def test_an_endpoint_with_a_certificate_serves_https_and_its_probes_stay_on_the_internal_port() -> None:
    ingress = {"host": "emotion.example.com", "ingress": {}}
    kube = Kube(tls={"secretName": "emotion-tls"}, exposure=ingress).optimised()
    kube.reconcile()
    pod = kube.deployment["spec"]["template"]["spec"]
    (volume,) = [entry for entry in pod["volumes"] if "secret" in entry]
    container = container_of(kube.deployment)
    (mount,) = [entry for entry in container["volumeMounts"] if entry["name"] == volume["name"]]
    rule = kube.objects["Ingress", "emotion"]["spec"]["rules"][0]

    assert volume["secret"] == {"secretName": "emotion-tls", "optional": True, "defaultMode": 0o440}
    assert env_of(kube.deployment)["PENSTOCK_TLS_CERTIFICATE"] == f"{mount['mountPath']}/tls.crt"
    assert env_of(kube.deployment)["PENSTOCK_TLS_KEY"] == f"{mount['mountPath']}/tls.key"
    assert kube.objects["Service", "emotion"]["spec"]["ports"] == [
        {"name": "https", "appProtocol": "https", "port": 443, "targetPort": 8080, "protocol": "TCP"}
    ]
    assert rule["http"]["paths"][0]["backend"]["service"]["port"] == {"number": 443}
    assert container["readinessProbe"]["httpGet"]["port"] == "internal"
    assert kube.endpoint["status"]["url"] == "https://emotion.a.svc"
    assert "secret" not in json.dumps(job_of(kube)["spec"]["template"]["spec"]["volumes"])


def test_an_endpoint_without_auth_has_no_keys() -> None:
    kube = Kube().optimised()
    assert "PENSTOCK_AUTH_TOKEN_FOLDER" not in env_of(kube.deployment)
    assert "keys" not in json.dumps(kube.deployment)


def test_the_selector_of_the_deployment_never_changes() -> None:
    kube = Kube().optimised()
    selector = kube.deployment["spec"]["selector"]
    kube.edit(cores=4, pod={"labels": {"a": "b"}})
    kube.reconcile()
    kube.job_succeeds(artefact="sha256:" + "c" * 64)
    kube.reconcile()
    assert kube.deployment["spec"]["selector"] == selector == {"matchLabels": names.runtime_selector("emotion")}
    assert kube.objects["Service", "emotion"]["spec"]["selector"] == names.runtime_selector("emotion")


def test_pod_settings_apply_to_both_pods_and_user_labels_cannot_replace_the_operators() -> None:
    kube = Kube(
        pod={
            "labels": {"team": "search"},
            "annotations": {"note": "x"},
            "serviceAccountName": "reader",
            "priorityClassName": "high",
            "imagePullSecrets": [{"name": "mine"}],
            "topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 2}],
            "memory": "6Gi",
        },
        settings=replace(SETTINGS, image_pull_secrets=("ours", "mine")),
    ).optimised()
    for value in both(kube):
        template = value["spec"]["template"]
        assert template["metadata"]["labels"]["team"] == "search"
        assert template["metadata"]["annotations"]["note"] == "x"
        pod = template["spec"]
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("reader", "high")
        assert pod["imagePullSecrets"] == [{"name": "mine"}, {"name": "ours"}]
        assert container_of(value)["resources"]["limits"]["memory"] == "6144Mi"
    spread = kube.deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [(entry["topologyKey"], entry["maxSkew"]) for entry in spread] == [("topology.kubernetes.io/zone", 2)]
    assert spread[0]["labelSelector"] == {"matchLabels": names.runtime_selector("emotion")}
    assert "topologySpreadConstraints" not in job_of(kube)["spec"]["template"]["spec"]


def test_replicas_are_spread_over_nodes_by_default_where_that_is_possible() -> None:
    spread = Kube().optimised().deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [(entry["topologyKey"], entry["whenUnsatisfiable"]) for entry in spread] == [
        ("kubernetes.io/hostname", "ScheduleAnyway")
    ]


@pytest.mark.parametrize(
    ("settings", "volume"),
    [
        ({}, {"hostPath": {"path": "/var/lib/penstock/artefacts", "type": "Directory"}}),
        ({"store_volume": StoreVolume(host_path="/data")}, {"hostPath": {"path": "/data", "type": "Directory"}}),
        ({"store_volume": StoreVolume(claim="store")}, {"persistentVolumeClaim": {"claimName": "store"}}),
    ],
)
def test_a_store_in_a_folder_is_mounted_and_only_jobs_write_it(settings: Json, volume: Json) -> None:
    kube = Kube(settings=replace(SETTINGS, **settings)).optimised()
    for value, writes in ((job_of(kube), True), (kube.deployment, False)):
        mounted = mounts_of(value)["/var/lib/penstock/artefacts/namespaces/a"]
        assert mounted["writes"] is writes
        kind = next(iter(volume))
        assert volume[kind].items() <= mounted[kind].items()
    written = {path: mount for path, mount in mounts_of(kube.deployment).items() if mount["writes"]}
    assert set(written) == {"/tmp", "/var/lib/penstock/cache"}
    assert all("emptyDir" in mount for mount in written.values())


def secrets_of(value: Json) -> dict[str, str]:
    """Variable -> the Secret that it comes from. Each may lack its key."""
    found = {}
    for entry in container_of(value)["env"]:
        if "valueFrom" in entry:
            reference = entry["valueFrom"]["secretKeyRef"]
            name = {".dockerconfigjson": "PENSTOCK_REGISTRY_AUTH"}.get(reference["key"], reference["key"])
            assert (name, reference["optional"]) == (entry["name"], True)
            found[entry["name"]] = reference["name"]
    return found


def test_a_store_that_is_a_service_is_reached_with_the_credentials_of_its_secret() -> None:
    settings = replace(
        SETTINGS, store_uri="s3://models/here", store_secret="s3", store_endpoint_url="https://s3.example"
    )
    kube = Kube(settings=settings).optimised()
    for value in both(kube):
        assert secrets_of(value) == dict.fromkeys(KEYS["s3"], "s3")
        assert env_of(value)["PENSTOCK_STORE_URI"] == "s3://models/here/namespaces/a"
        assert env_of(value)["AWS_ENDPOINT_URL"] == "https://s3.example"


def test_serving_pods_have_the_secret_that_can_only_read_and_jobs_the_other() -> None:
    settings = replace(SETTINGS, store_uri="s3://models/here", store_secret="s3", store_read_secret="s3-read")
    kube = Kube(settings=settings).optimised()

    assert set(secrets_of(job_of(kube)).values()) == {"s3"}
    assert set(secrets_of(kube.deployment).values()) == {"s3-read"}
    assert '"s3"' not in json.dumps(kube.deployment)


@pytest.mark.parametrize(
    ("model", "variable"),
    [("hf://org/emotion@main", "HF_TOKEN"), ("oci://ghcr.io/org/emotion:v1", "PENSTOCK_REGISTRY_AUTH")],
)
def test_the_models_credentials_reach_the_job_and_no_runtime_pod(model: str, variable: str) -> None:
    kube = Kube(model=model, modelCredentials={"secretName": "of-the-model"}).optimised()
    assert secrets_of(job_of(kube)) == {variable: "of-the-model"}
    assert "of-the-model" not in json.dumps(kube.deployment)


def test_for_a_download_from_the_kind_of_the_store_the_models_credentials_replace_the_stores() -> None:
    kube = Kube(
        model="s3://team/bert",
        modelCredentials={"secretName": "team"},
        settings=replace(SETTINGS, store_uri="s3://models/here", store_secret="s3"),
    ).optimised()
    assert set(secrets_of(job_of(kube)).values()) == {"team"}
    assert set(secrets_of(kube.deployment).values()) == {"s3"}


HOSTILE = (
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "LD_PRELOAD",
    "PATH",
    "HF_ENDPOINT",
    "HTTPS_PROXY",
    "https_proxy",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_CONFIG_FILE",
    "AWS_CA_BUNDLE",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_AUTHORITY_HOST",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "STORAGE_EMULATOR_HOST",
    "FSSPEC_S3",
    "PENSTOCK_FILE_ROOT",
    "PENSTOCK_REGISTRY_HTTP",
    "DOCKER_CONFIG",
    "SSL_CERT_FILE",
)
"""Keys with which the author of a Secret would load code into the job or redirect its downloads."""


@pytest.mark.parametrize(
    "model", ["hf://org/emotion@main", "s3://bucket/x", "az://container/x", "gs://bucket/x", "oci://r:1/x"]
)
def test_a_secret_cannot_load_code_into_a_pod_or_redirect_its_traffic(model: str) -> None:
    """What a kubelet would set from Secrets that hold every hostile key."""
    settings = replace(SETTINGS, store_uri="s3://models/here", store_secret="store")
    kube = Kube(model=model, modelCredentials={"secretName": "mine"}, settings=settings).optimised()
    for value in both(kube):
        container = container_of(value)
        assert "envFrom" not in container
        assert not set(secrets_of(value)) & set(HOSTILE)
        assert container["command"][:2] == ["python", "-I"]


def test_the_installations_variables_go_over_the_keys_of_secrets() -> None:
    settings = replace(
        SETTINGS, store_uri="s3://models/here", store_secret="s3", extra_env=(("AWS_REGION", "eu-west-1"),)
    )
    for value in both(Kube(settings=settings).optimised()):
        assert env_of(value)["AWS_REGION"] == "eu-west-1"
        assert "AWS_REGION" not in secrets_of(value)


def test_with_a_mounted_store_runtime_pods_have_no_egress() -> None:
    policy = Kube().optimised().objects["NetworkPolicy", "emotion"]["spec"]
    assert "egress" not in policy
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"][0] == {"ports": [{"port": 8080, "protocol": "TCP"}]}
    assert policy["podSelector"] == {"matchLabels": names.runtime_selector("emotion")}


@pytest.mark.parametrize(
    ("model", "path", "volume"),
    [
        ("pvc://models/bert", "/var/run/penstock/claims/models", "persistentVolumeClaim"),
        ("file:///models/bert", "/var/run/penstock/files", "hostPath"),
    ],
)
def test_a_model_in_a_volume_is_mounted_read_only_into_the_job(model: str, path: str, volume: str) -> None:
    kube = Kube(model=model).optimised()
    mounted = mounts_of(job_of(kube))[path]
    assert volume in mounted
    assert mounted["writes"] is False
    assert path not in mounts_of(kube.deployment)


def test_the_allowed_folder_of_a_node_is_mounted_at_a_fixed_place_and_the_job_gets_both_names() -> None:
    job = job_of(Kube(model="file:///models/team/bert").optimised())
    mounts = mounts_of(job)
    assert mounts["/var/run/penstock/files"]["hostPath"] == {"path": "/models", "type": "Directory"}
    assert "/models" not in mounts
    assert env_of(job)["PENSTOCK_FILE_PREFIX"] == "/models"
    assert env_of(job)["PENSTOCK_FILE_ROOT"] == "/var/run/penstock/files"


def test_the_job_reads_the_spec_and_the_texts_as_the_key_has_them() -> None:
    kube = Kube(workload={"textsFrom": {"configMapName": "texts", "key": "texts"}})
    kube.texts = ("I like you", "I love you")
    kube.reconcile()
    model = kube.endpoint["status"]["optimizedModel"]
    job = job_of(kube)
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert json.loads(annotations["penstock.dev/spec"]) == kube.objects["OptimizedModel", model]["spec"]
    fields, texts = mounts_of(job)["/etc/penstock"]["projected"]["sources"]
    (field,) = fields["downwardAPI"]["items"]
    assert field == {"path": "spec.json", "fieldRef": {"fieldPath": "metadata.annotations['penstock.dev/spec']"}}
    assert texts["configMap"] == {
        "name": "texts",
        "optional": True,
        "items": [{"key": "texts", "path": "texts.txt"}],
    }
    assert (env_of(job)["PENSTOCK_SPEC"], env_of(job)["PENSTOCK_TEXTS"]) == (
        "/etc/penstock/spec.json",
        "/etc/penstock/texts.txt",
    )
    digest = kube.objects["OptimizedModel", model]["spec"]["textsDigest"]
    assert digest == "sha256:" + hashlib.sha256(b"I like you\nI love you\n").hexdigest()
    assert ("ConfigMap", f"{model}-spec") not in kube.objects
    kube.texts = ("I hate you",)
    kube.reconcile()
    assert kube.endpoint["status"]["optimizedModel"] != model, "other texts are another optimisation"


def test_texts_that_are_empty_are_not_accepted() -> None:
    kube = Kube(workload={"textsFrom": {"configMapName": "texts", "key": "texts"}})
    kube.texts = ()
    made = kube.reconcile()
    assert next(entry for entry in made.status["conditions"] if entry["type"] == "Accepted")["reason"] == "TextsEmpty"


def test_a_job_is_run_once_by_kubernetes_and_ends_a_while_after_its_budget() -> None:
    job = job_of(Kube(optimization={"budgetSeconds": 100.0}).optimised())
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    assert job["spec"]["template"]["spec"]["activeDeadlineSeconds"] == 1000
    assert "activeDeadlineSeconds" not in job["spec"], (
        "activeDeadlineSeconds of the Job would count the time without a node"
    )


def test_variables_of_the_installation_reach_the_pods_and_override_none_of_the_operators() -> None:
    extra = (("HF_ENDPOINT", "http://mirror"), ("PENSTOCK_ARTEFACT", "x"), ("PENSTOCK_STORE_URI", "x"))
    kube = Kube(settings=replace(SETTINGS, extra_env=extra)).optimised()
    for value in both(kube):
        assert env_of(value)["HF_ENDPOINT"] == "http://mirror"
        assert env_of(value)["PENSTOCK_STORE_URI"].startswith("file:")
    assert env_of(kube.deployment)["PENSTOCK_ARTEFACT"].startswith("sha256:")


@pytest.mark.parametrize(("replicas", "there"), [(0, False), (1, False), (2, True), (5, True)])
def test_only_several_replicas_have_a_disruption_budget(replicas: int, there: bool) -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=replicas)
    kube.reconcile()
    assert (("PodDisruptionBudget", "emotion") in kube.objects) is there


def test_the_disruption_budget_is_deleted_with_the_second_replica() -> None:
    kube = Kube(scaling={"mode": "None"}, replicas=2).optimised()
    kube.edit(replicas=1)
    kube.reconcile()
    assert kube.deleted == [Ref("PodDisruptionBudget", "emotion")]


@pytest.mark.parametrize(
    ("scaling", "replicas", "scale", "present", "expected"),
    [
        ({"mode": "None"}, 3, None, None, 3),
        ({"mode": "External"}, 3, DesiredScale(9), 1, 3),
        ({"mode": "Internal", "minReplicas": 2, "maxReplicas": 8}, 1, None, None, 2),
        ({"mode": "Internal", "minReplicas": 2, "maxReplicas": 8}, 1, DesiredScale(5), 2, 5),
        ({"mode": "Internal", "minReplicas": 2, "maxReplicas": 8}, 1, DesiredScale(50), 2, 8),
        ({"mode": "Internal", "minReplicas": 2, "maxReplicas": 8}, 1, None, 6, 6),
        ({"mode": "Internal", "minReplicas": 0, "maxReplicas": 8}, 1, None, None, 1),
        ({"mode": "Internal", "minReplicas": 0, "maxReplicas": 8}, 1, DesiredScale(0), 1, 0),
        ({"mode": "HPA"}, 3, DesiredScale(9), None, None),
        ({"mode": "HPA"}, 3, DesiredScale(9), 4, None),
        ({"mode": "KEDA"}, 3, None, 4, None),
    ],
)
def test_the_number_of_replicas_has_exactly_one_writer(
    scaling: Json, replicas: int, scale: DesiredScale | None, present: int | None, expected: int | None
) -> None:
    kube = Kube(scaling=scaling, replicas=replicas)
    kube.reconcile()
    kube.job_succeeds()
    if present is not None:
        kube.reconcile()
        kube.deployment["spec"]["replicas"] = present
    kube.scale = scale
    desired = kube.plan().object("Deployment") or kube.reconcile().object("Deployment")
    assert desired is not None
    assert desired["spec"].get("replicas") == expected


@pytest.mark.parametrize("mode", ["HPA", "KEDA", "Internal", "None", "External"])
def test_suspending_writes_zero_in_every_mode_and_resuming_restores_the_number(mode: str) -> None:
    kube = Kube(scaling={"mode": mode}).optimised()
    kube.edit(suspend=True)
    suspended = kube.reconcile().object("Deployment")
    assert suspended is not None
    assert suspended["spec"]["replicas"] == 0
    kube.edit(suspend=False)
    resumed = kube.reconcile().object("Deployment")
    assert resumed is not None
    assert resumed["spec"].get("replicas") == (None if mode in {"HPA", "KEDA"} else 1)


def test_an_idle_endpoint_stays_at_zero_without_a_decision() -> None:
    kube = Kube(scaling={"mode": "Internal", "minReplicas": 0}).optimised()
    kube.scale = DesiredScale(0, "idle")
    kube.reconcile()
    kube.scale = None
    kube.reconcile()
    assert kube.deployment["spec"]["replicas"] == 0


@pytest.mark.parametrize(
    ("resident", "size", "expected"),
    [(600_000_000, 250_000_000, "1024Mi"), (None, 250_000_000, "1152Mi"), (None, None, "2048Mi")],
)
def test_memory_is_what_was_measured_else_from_the_size_else_the_default(
    resident: int | None, size: int | None, expected: str
) -> None:
    kube = Kube()
    kube.reconcile()
    kube.job_succeeds(result(residentBytes=resident))
    kube.reconcile()
    model = kube.objects["OptimizedModel", kube.endpoint["status"]["optimizedModel"]]
    model["status"]["artefact"] = reference("sha256:" + "a" * 64, size).to_object()
    kube.reconcile()
    assert container_of(kube.deployment)["resources"]["limits"]["memory"] == expected


@pytest.mark.parametrize("name", ["a", "emotion", "x" * 63])
def test_names_are_dns_labels_of_at_most_63_characters(name: str) -> None:
    kube = Kube(name=name).optimised()
    for _, found in kube.objects:
        assert len(found) <= 63
    for value in both(kube):
        labels = value["spec"]["template"]["metadata"]["labels"]
        assert all(len(text) <= 63 for text in labels.values())


def test_a_name_that_is_cut_stays_deterministic_and_distinct() -> None:
    long, other = "a" * 80, "a" * 81
    assert names.shortened(long, suffix="-1") == names.shortened(long, suffix="-1")
    assert names.shortened(long) != names.shortened(other)
    assert len(names.shortened(long, suffix="-1")) <= 63


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="either"):
        PlanSettings("r", "o", "1", store_volume=StoreVolume("a", "b"))
    with pytest.raises(ValueError, match="max_attempts"):
        PlanSettings("r", "o", "1", max_attempts=0)


@pytest.mark.parametrize(("tls", "protocol"), [(None, "kubernetes.io/h2c"), ({"secretName": "x"}, "grpcs")])
def test_grpc_has_a_port_only_where_the_endpoint_asks_for_it(tls: Json | None, protocol: str) -> None:
    plain = Kube(tls=tls).optimised()
    kube = Kube(tls=tls, serving={"grpc": True}).optimised()

    (_, grpc) = kube.objects["Service", kube.name]["spec"]["ports"]
    assert grpc == {"name": "grpc", "port": 8082, "targetPort": 8082, "protocol": "TCP", "appProtocol": protocol}
    assert len(plain.objects["Service", plain.name]["spec"]["ports"]) == 1
    assert env_of(kube.deployment)["PENSTOCK_GRPC_PORT"] == "8082"
    assert "PENSTOCK_GRPC_PORT" not in env_of(plain.deployment)
    for one, opened in ((kube, [8080, 8082]), (plain, [8080])):
        clients, _ = one.objects["NetworkPolicy", one.name]["spec"]["ingress"]
        assert [port["port"] for port in clients["ports"]] == opened
