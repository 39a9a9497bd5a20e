"""Frequent requests of tests to an API server, without kubectl: each process of kubectl is a sixth of a second of CPU.

Only successful answers are handled here. `Kubectl` repeats failed requests with kubectl for its messages.
"""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
CONNECTIONS = 4
SECONDS = 30.0

Json = dict[str, Any]


class NotAnswered(Exception):
    """The request failed or was refused; the message is kubectl's."""


@dataclass(frozen=True)
class Kind:
    """A kind that the API server knows."""

    version: str
    """As in `apiVersion`."""
    name: str
    """As in `kind`."""
    plural: str
    namespaced: bool

    def path(self, namespace: str, name: str = "") -> str:
        """Of the collection, or of one object."""
        root = "/apis" if "/" in self.version else "/api"
        middle = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}/{self.version}{middle}/{self.plural}{f'/{name}' if name else ''}"


class Api:
    """One user's connections to one API server."""

    def __init__(self, server: str, pool: urllib3.PoolManager) -> None:
        self._server = server
        self._pool = pool
        self._kinds: dict[str, Kind] = {}
        self._learning = threading.Lock()

    def get(self, kind: str, name: str, namespace: str) -> Json:
        """One object. NotAnswered when there is none."""
        return _as_shown(self._ask("GET", self._kind(kind).path(namespace, name)))

    def items(self, kinds: str, namespace: str, selector: str) -> list[Json]:
        """All objects of some kinds, comma-separated, that a label selector chooses."""
        found = []
        for kind in map(self._kind, kinds.split(",")):
            answer = self._ask("GET", kind.path(namespace), {"labelSelector": selector} if selector else {})
            # Lists of Kubernetes' own kinds leave out what all of their items are.
            found += [_as_shown({"apiVersion": kind.version, "kind": kind.name, **item}) for item in answer["items"]]
        return found

    def apply(self, manifest: Mapping[str, Any], namespace: str) -> Json:
        """Server-side apply as `kubectl apply --server-side --force-conflicts` does it; the object that comes of it."""
        metadata = manifest.get("metadata", {})
        kind = self._kind(f"{manifest.get('kind')}/{manifest.get('apiVersion')}")
        path = kind.path(metadata.get("namespace", namespace), str(metadata.get("name", "")))
        wanted = {"fieldManager": "kubectl", "force": "true", "fieldValidation": "Strict"}
        return self._ask("PATCH", path, wanted, json.dumps(manifest).encode())

    def _kind(self, name: str) -> Kind:
        """By plural, singular or short name, with its group where there are several; or by `kind/apiVersion`."""
        with self._learning:
            if name.lower() not in self._kinds:
                self._kinds = self._discovered()
            try:
                return self._kinds[name.lower()]
            except KeyError:
                raise NotAnswered(f"no kind {name}") from None

    def _discovered(self) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        for root in ("/api", "/apis"):
            for group in self._ask("GET", root, accept=DISCOVERY)["items"]:
                for version in group["versions"]:
                    for one in version.get("resources", ()):
                        _enter(found, group["metadata"].get("name", ""), version["version"], one)
        return found

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        accept: str = "application/json",
    ) -> Json:
        headers = {"accept": accept, **({"content-type": "application/apply-patch+yaml"} if body else {})}
        address = f"{self._server}{path}{f'?{urlencode(query)}' if query else ''}"
        try:
            answer = self._pool.request(method, address, body=body, headers=headers, timeout=SECONDS)
        except urllib3.exceptions.HTTPError as error:
            raise NotAnswered(str(error)) from error
        if answer.status not in {200, 201}:
            raise NotAnswered(f"{method} {path}: {answer.status}")
        found: Json = json.loads(answer.data)
        return found


def _as_shown(body: Json) -> Json:
    """Without what kubectl shows on demand only."""
    body.get("metadata", {}).pop("managedFields", None)
    return body


def _enter(found: dict[str, Kind], group: str, version: str, resource: Json) -> None:
    """Every name of a resource; of two resources with one name the first counts, as with kubectl."""
    kind = resource["responseKind"]
    if not kind.get("kind") or not {"list", "get"} <= set(resource["verbs"]):
        return
    of = f"{group}/{version}" if group else version
    entered = Kind(of, kind["kind"], resource["resource"], resource["scope"] == "Namespaced")
    names = {resource["resource"], resource.get("singularResource") or kind["kind"], *resource.get("shortNames", ())}
    for name in {*names, *(f"{name}.{group}" for name in names if group), f"{kind['kind']}/{of}"}:
        found.setdefault(name.lower(), entered)


def api_of(kubeconfig: Path) -> Api | None:
    """The credentials of a file with a certificate; None for other ways to sign in, which kubectl knows better.

    Raises OSError when it cannot be read.
    """
    return _known(kubeconfig.read_bytes())


@cache
def _known(text: bytes) -> Api | None:
    """One for each content of a kubeconfig: its connections stay open."""
    body = yaml.safe_load(text)
    try:
        (cluster,), (user,) = body["clusters"], body["users"]
        authority = base64.b64decode(cluster["cluster"]["certificate-authority-data"])
        pair = [base64.b64decode(user["user"][f"client-{part}-data"]) for part in ("certificate", "key")]
    except (KeyError, TypeError, ValueError):
        return None
    context = ssl.create_default_context(cadata=authority.decode())
    with tempfile.NamedTemporaryFile() as file:  # which ssl wants, and with a mode that only its owner reads by
        file.write(b"\n".join(pair))
        file.flush()
        context.load_cert_chain(file.name)
    pool = urllib3.PoolManager(maxsize=CONNECTIONS, ssl_context=context, retries=urllib3.Retry(1, redirect=False))
    return Api(cluster["cluster"]["server"], pool)
