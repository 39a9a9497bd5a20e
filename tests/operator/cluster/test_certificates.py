"""The operator verifies the API server's certificate: the chain up to the cluster's authority, and the host name."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import yaml
from kubernetes.aio.client import Configuration

from penstock_operator.cluster.kubernetes import load_configuration
from penstock_operator.control.handlers import connection_info


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """A kubeconfig of a cluster that does not exist: the tests make no request."""
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": "https://cluster.invalid"}}],
                "users": [{"name": "c", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
            }
        )
    )
    return path


def test_chain_and_host_name_are_verified_without_strict_x509_checks(kubeconfig: Path) -> None:
    async def both() -> tuple[Configuration, ssl.SSLContext]:
        configuration = await load_configuration(str(kubeconfig))
        return configuration, (await connection_info(configuration)).as_ssl_context()

    configuration, context = asyncio.run(both())

    assert configuration.verify_ssl
    assert configuration.disable_strict_ssl_verification
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
