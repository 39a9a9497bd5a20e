"""The ModelEndpoint as a plan needs it: who it is, what it wants, what its status said last."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.resources.endpoint import ModelEndpoint, ModelEndpointSpec
from penstock_operator.plan.names import API_VERSION, runtime_labels
from penstock_operator.plan.settings import Json


@dataclass(frozen=True)
class Endpoint:
    """A readable ModelEndpoint."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ModelEndpointSpec
    status: Json = field(default_factory=dict)

    @classmethod
    def from_object(cls, value: Json) -> Endpoint:
        """Read the object of the API; SpecError when this version does not understand its spec."""
        metadata = value["metadata"]
        # managedFields and the like are the API server's business; only the spec can be wrong.
        readable: Json = {key: value[key] for key in ("apiVersion", "kind", "spec") if key in value}
        readable["metadata"] = {"name": metadata["name"]}
        endpoint = ModelEndpoint.from_object(readable, origin=f"ModelEndpoint {metadata['name']}")
        return cls(
            name=metadata["name"],
            namespace=metadata.get("namespace") or "default",
            uid=metadata.get("uid") or "",
            generation=int(metadata.get("generation") or 1),
            spec=endpoint.spec,
            status=dict(value.get("status") or {}),
        )

    def owned(self, api_version: str, kind: str, spec: Json, *, name: str | None = None) -> Json:
        """An object of this endpoint: it carries its name and labels, and goes when it goes."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name or self.name,
                "namespace": self.namespace,
                "labels": runtime_labels(self.name),
                "ownerReferences": [
                    {
                        "apiVersion": API_VERSION,
                        "kind": "ModelEndpoint",
                        "name": self.name,
                        "uid": self.uid,
                        "controller": True,
                        "blockOwnerDeletion": False,
                    }
                ],
            },
            "spec": spec,
        }

    @property
    def url(self) -> str:
        """Where requests go, from inside the cluster."""
        return f"http://{self.name}.{self.namespace}.svc"
