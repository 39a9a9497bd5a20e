"""A Prometheus process, optionally with TLS and a password, which tests can kill."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock_operator.scaling.read.prometheus import PrometheusAccess, PrometheusSource
from testbed.identities import Authority
from testbed.ports import some_free_ports

RULES = Path(__file__).parents[3] / "charts/penstock/files/recording-rules.yaml"
HASH = "$2b$04$AFhFAAdNUvxW55C197kcvOPQH7ZJS0Wkwbjr1r5/Hsd7HLW5m9tAa"
"""The bcrypt hash of `opensesame`."""


class Server:
    """One Prometheus process."""

    def __init__(
        self, program: Path, folder: Path, scrapes: Sequence[Mapping[str, Any]], *, secure: bool = True
    ) -> None:
        """`secure`: over TLS, and with a password."""
        self.folder = folder
        self.secure = secure
        (self.port,) = some_free_ports(1)
        self.authority = Authority.create()
        identity = self.authority.server("prometheus", ["localhost", "127.0.0.1"])
        (folder / "tls.crt").write_bytes(identity.certificate)
        (folder / "tls.key").write_bytes(identity.key)
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "scrape_configs": list(scrapes),
            "rule_files": [str(folder / "rules.yml")],
        }
        web = {
            "tls_server_config": {"cert_file": str(folder / "tls.crt"), "key_file": str(folder / "tls.key")},
            "basic_auth_users": {"penstock": HASH},
        }
        if not secure:
            web = {}
        rules = yaml.safe_load(RULES.read_text())["rules"]
        (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "penstock", "rules": rules}]}))
        # JSON is YAML.
        (folder / "prometheus.yml").write_text(json.dumps(config))
        (folder / "web.yml").write_text(json.dumps(web))
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--web.config.file={folder / 'web.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stderr=log,
            )

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://127.0.0.1:{self.port}"

    @property
    def secret(self) -> dict[str, str]:
        """The `data` of a Secret with valid credentials."""
        data = {"username": b"penstock", "password": b"opensesame", "ca.crt": self.authority.certificate}
        return {key: base64.b64encode(value).decode() for key, value in data.items()}

    @property
    def source(self) -> PrometheusSource:
        return PrometheusSource(self.url, PrometheusAccess.from_secret(self.secret))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
