"""What an installation sets for all pods: the user, CA certificates, proxies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_operator.endpoint.optimization.collection import CollectionHome, CollectionTarget, job
from penstock_operator.facts.installation import PlanSettings
from penstock_operator.settings import Settings
from tests.operator.endpoint.kube import SETTINGS, Kube

CAS = replace(SETTINGS, ca_config_map="company", ca_key="bundle.pem")


def pods(settings: PlanSettings) -> dict[str, Any]:
    """The pod specs of an endpoint with a gateway: job, serving pod, gateway, and the job that collects garbage."""
    kube = Kube(settings=settings, gateway={"mode": "Always"})
    kube.reconcile()
    found = {"job": kube.objects["Job", kube.job]["spec"]["template"]["spec"]}
    kube.job_succeeds()
    kube.reconcile()
    found |= {
        name: value["spec"]["template"]["spec"] for (kind, name), value in kube.objects.items() if kind == "Deployment"
    }
    collection = job(CollectionTarget(CollectionHome("a")), 1, settings, ["sha256:" + "a" * 64])
    found["collection"] = collection["spec"]["template"]["spec"]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("user", [65532, 1000])
def test_all_pods_run_as_the_installations_user(user: int) -> None:
    for name, pod in pods(replace(SETTINGS, pod_user=user)).items():
        security = pod["securityContext"]
        assert {security[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {user}, name
        assert security["runAsNonRoot"] is True


def test_without_a_user_the_platform_chooses_it() -> None:
    for name, pod in pods(replace(SETTINGS, pod_user=0)).items():
        assert pod["securityContext"].keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}, name
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_jobs_and_serving_pods_trust_the_installations_ca_certificates() -> None:
    made = pods(CAS)
    for name in ("job", "emotion", "collection"):
        (container,) = made[name]["containers"]
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
            assert env[variable] == "/etc/penstock/ca/bundle.pem"
        assert {"name": "ca", "configMap": {"name": "company"}} in made[name]["volumes"]
        assert {"name": "ca", "mountPath": "/etc/penstock/ca", "readOnly": True} in container["volumeMounts"]
    assert "ca" not in [volume["name"] for pod in pods(SETTINGS).values() for volume in pod["volumes"]]


def test_a_variable_of_the_installation_is_not_set_twice() -> None:
    own = replace(CAS, extra_env=(("SSL_CERT_FILE", "/other.pem"),))
    (container,) = pods(own)["job"]["containers"]

    assert [one["value"] for one in container["env"] if one["name"] == "SSL_CERT_FILE"] == ["/other.pem"]


def test_a_value_of_a_variable_may_have_commas() -> None:
    text = r"NO_PROXY=localhost\,10.0.0.0/8,HTTPS_PROXY=http://proxy:3128"
    settings = Settings.load({"PENSTOCK_OPERATOR_EXTRA_ENV": text}).plan_settings()

    assert settings.extra_env == (("NO_PROXY", "localhost,10.0.0.0/8"), ("HTTPS_PROXY", "http://proxy:3128"))
