"""Credentials of pods: which keys of a Secret become environment variables.

The Secrets are in the namespace of an endpoint, and its users write them. As a whole in the environment, they could
load other code (PYTHONPATH), read other files (AWS_CONFIG_FILE) or send requests elsewhere (HF_ENDPOINT, HTTPS_PROXY).
Those variables are for the administrator: `extraEnv` and `store.s3.endpointUrl` of the chart.
"""

from __future__ import annotations

from enum import StrEnum

from penstock_operator.facts.names import Json

KEYS: dict[str, tuple[str, ...]] = {
    "hf": ("HF_TOKEN",),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION"),
    # No connection string, which may name another server.
    "az": (
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_STORAGE_TENANT_ID",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
        "AZURE_TENANT_ID",
    ),
    "oci": (".dockerconfigjson",),
    # gs:// needs a service account: google-auth reads no credential from a variable, only the path of a file.
}
"""Scheme of a model source or an artefact store -> the keys that its client reads as credentials."""
_VARIABLES = {".dockerconfigjson": "PENSTOCK_REGISTRY_AUTH"}
"""Variables for keys that have other names."""


def secret_variables(secret: str, scheme: StrEnum) -> list[Json]:
    """The variables that a Secret of this name gives to a client of this scheme. Keys that it lacks are left out."""
    return [
        {
            "name": _VARIABLES.get(key, key),
            "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}},
        }
        for key in KEYS.get(scheme.value, ())
    ]
