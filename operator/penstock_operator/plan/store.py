"""How pods reach the artefact store: a volume where it is a folder, a Secret's variables where it is a service."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.artefact_store import StoreScheme, StoreUri
from penstock_operator.plan.settings import Json, PlanSettings, StoreVolume

VOLUME = "store"


@dataclass(frozen=True)
class StoreAccess:
    """What a pod needs for it."""

    env: tuple[Json, ...]
    env_from: tuple[Json, ...] = ()
    volumes: tuple[Json, ...] = ()
    mounts: tuple[Json, ...] = ()


def store_access(settings: PlanSettings, *, writes: bool) -> StoreAccess:
    """For a job (`writes`), or for a runtime pod, which reads only."""
    uri = StoreUri.parse(settings.store_uri)
    env: tuple[Json, ...] = ({"name": "PENSTOCK_STORE_URI", "value": str(uri)},)
    secret = settings.store_secret
    env_from: tuple[Json, ...] = ({"secretRef": {"name": secret}},) if secret else ()
    if uri.scheme is not StoreScheme.FILE:
        return StoreAccess(env, env_from)
    where = settings.store_volume or StoreVolume(host_path=uri.location)
    volume: Json = {"name": VOLUME}
    if where.claim:
        volume["persistentVolumeClaim"] = {"claimName": where.claim, "readOnly": not writes}
    else:
        # Not DirectoryOrCreate: the kubelet would make it root's own, and no job could ever write to it.
        volume["hostPath"] = {"path": where.host_path, "type": "Directory"}
    mount: Json = {"name": VOLUME, "mountPath": uri.location, "readOnly": not writes}
    return StoreAccess(env, env_from, (volume,), (mount,))
