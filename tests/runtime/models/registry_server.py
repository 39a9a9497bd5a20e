"""A real container registry for the tests: Debian's docker-registry, open, with passwords, or with tokens of a small
server here, which the registry verifies."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from penstock_runtime.registry import OCI_MANIFEST, Registry
from tests.runtime.models.s3_server import free_port, wait_for_port

USER, PASSWORD = "reader", "secret"
_HASHED = "$2y$05$abcdefghijklmnopqrstuuOQiyCxlgf/oeuTqixKmWdcYUh4Hjl0a"
ISSUER, SERVICE = "tokens of the tests", "registry of the tests"


@dataclass(frozen=True)
class RealRegistry:
    """A running registry."""

    address: str
    root: Path
    asked: Sequence[str] = ()
    """What its token server was asked for."""

    def push(self, repository: str, layers: Sequence[tuple[str, bytes, Mapping[str, str]]], **manifest: Any) -> str:
        """Write an artefact of layers (media type, content, annotations) under the tag `latest`; returns its digest."""
        registry = Registry.of(f"{self.address}/{repository}")
        described = []
        for kind, content, notes in [(manifest.pop("config", "application/vnd.oci.empty.v1+json"), b"{}", {}), *layers]:
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            registry.upload(digest, len(content), content)
            described.append({"mediaType": kind, "digest": digest, "size": len(content), "annotations": dict(notes)})
        config, *rest = described
        value = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": config, "layers": rest, **manifest}
        return registry.put_manifest("latest", json.dumps(value).encode())

    def blob(self, digest: str) -> Path:
        """The file that has a blob."""
        hexadecimal = digest.removeprefix("sha256:")
        return self.root / "docker/registry/v2/blobs/sha256" / hexadecimal[:2] / hexadecimal / "data"


def auth_of(address: str, user: str = USER, password: str = PASSWORD) -> str:
    """The value of an image pull secret."""
    return json.dumps({"auths": {address: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}}})


@contextlib.contextmanager
def running_registry(root: Path, *, auth: str = "") -> Iterator[RealRegistry]:
    """A registry on a loopback port until the block ends. `auth`: `password`, `token`, or none."""
    if shutil.which("docker-registry") is None:
        pytest.skip("it needs docker-registry: dev/tools/install-system.sh as root")
    root.mkdir()
    port = free_port()
    settings: dict[str, Any] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(root / "storage")}},
        "http": {"addr": f"127.0.0.1:{port}"},
        "log": {"accesslog": {"disabled": True}, "level": "error"},
    }
    with contextlib.ExitStack() as stack:
        asked: list[str] = []
        if auth == "password":
            (root / "htpasswd").write_text(f"{USER}:{_HASHED}\n")
            settings["auth"] = {"htpasswd": {"realm": "tests", "path": str(root / "htpasswd")}}
        elif auth == "token":
            realm = stack.enter_context(_token_server(root / "roots.pem", asked))
            rules = {"realm": realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": str(root / "roots.pem")}
            settings["auth"] = {"token": rules}
        (root / "registry.yml").write_text(yaml.safe_dump(settings))
        log = root / "registry.log"
        output = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(["docker-registry", "serve", root / "registry.yml"], stdout=output, stderr=output)
        try:
            wait_for_port(port, process, log)
            yield RealRegistry(f"127.0.0.1:{port}", root / "storage", asked)
        finally:
            process.terminate()
            process.wait(timeout=60)


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


@contextlib.contextmanager
def _token_server(roots: Path, asked: list[str]) -> Iterator[str]:
    """The address of a server that gives the right user a token for what is asked for, and others none."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    dates = builder.not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
    usage = x509.BasicConstraints(ca=True, path_length=None)
    certificate = dates.serial_number(1).add_extension(usage, critical=True).sign(key, hashes.SHA256())
    roots.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    chain = [base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()]

    def token(scopes: Sequence[str]) -> str:
        parts = [scope.split(":") for scope in scopes]
        access = [{"type": kind, "name": of, "actions": actions.split(",")} for kind, of, actions in parts]
        claims: dict[str, Any] = {"iss": ISSUER, "sub": USER, "aud": SERVICE, "access": access, "jti": "1"}
        claims |= {"exp": int(time.time()) + 300, "nbf": int(time.time()) - 60, "iat": int(time.time()) - 60}
        header = {"typ": "JWT", "alg": "RS256", "x5c": chain}
        text = ".".join(_encoded(json.dumps(one).encode()) for one in (header, claims))
        return f"{text}.{_encoded(key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    class Tokens(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            asked.append(" ".join(query.get("scope", [])))
            right = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
            known = self.headers.get("Authorization") == f"Basic {right}"
            body = json.dumps({"token": token(query.get("scope", []))} if known else {"errors": []}).encode()
            self.send_response(200 if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Tokens) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/token"
        finally:
            server.shutdown()
            thread.join()
