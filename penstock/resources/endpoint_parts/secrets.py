"""Parts of an endpoint's spec: the Secrets that it names."""

from __future__ import annotations

from pydantic import Field

from penstock.resources.base import Spec
from penstock.resources.fields.rules import ObjectName


class ModelCredentials(Spec):
    """Credentials of the download."""

    secret_name: ObjectName = Field(
        description="A Secret of this namespace with the credentials that the source's client reads, such as HF_TOKEN, "
        "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for oci:// an image pull secret. Other keys are ignored "
        "(docs/how-to/private-models.md)."
    )


class Auth(Spec):
    """Who may send requests."""

    secret_name: ObjectName = Field(
        description="A Secret of this namespace. Each of its keys is the name of a bearer token, and the value is the "
        "token. Requests need one of them. Changes apply within about a minute, without a restart."
    )


class Tls(Spec):
    """HTTPS of the pods."""

    secret_name: ObjectName = Field(
        description="A Secret of this namespace with `tls.crt` and `tls.key`, such as cert-manager makes. The Service "
        "then has port 443. A changed certificate is used within about a minute, without a restart."
    )
