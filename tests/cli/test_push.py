"""`penstock push`, and `penstock serve oci://...` of what it wrote, with a real registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.endpoints import run
from tests.endtoend.process import Served
from tests.runtime.models.registry_server import PASSWORD, USER, auth_of, running_registry


def test_a_pushed_artefact_is_served_from_the_registry(artefact: Path, tmp_path: Path) -> None:
    with running_registry(tmp_path / "registry", auth="token") as registry:
        address, environment = f"oci://{registry.address}/team/tiny:v1", {"PENSTOCK_REGISTRY_AUTH": ""}
        environment["DOCKER_CONFIG"] = str(tmp_path)
        refused = run("push", artefact, address, environment=environment)
        (tmp_path / "config.json").write_text(auth_of(registry.address, USER, PASSWORD))

        done = run("push", artefact, address, environment=environment)
        pushed = done.stdout.split()[-1]

        assert refused.returncode == 1
        assert "the registry refuses the push" in refused.stderr
        assert done.returncode == 0, done.stderr
        assert pushed.startswith(f"{address}@sha256:")
        with Served(pushed, "--models", tmp_path / "models", environment=environment) as server:
            server.ready()
            first = server.predict("Ada")
            assert first[0] == 200
            assert server.end() == 0
    with Served(artefact) as server:
        server.ready()
        assert server.predict("Ada") == first
        assert server.end() == 0
    # The registry is gone: the digest is in the cache.
    with Served(pushed, "--models", tmp_path / "models", environment=environment) as server:
        server.ready()
        assert server.get("/info")[1]["name"] == "tiny"
        assert server.end() == 0


@pytest.mark.parametrize("target", ["hf://org/name", f"oci://ghcr.io/a@sha256:{'0' * 64}", "ghcr.io/a"])
def test_a_target_that_is_no_tag_of_a_registry_is_refused(target: str, artefact: Path) -> None:
    done = run("push", artefact, target)

    assert done.returncode == 2
    assert "write oci://registry/repository:tag" in done.stderr


def test_a_folder_without_a_manifest_is_not_pushed(tmp_path: Path) -> None:
    done = run("push", tmp_path, "oci://ghcr.io/a:v1")

    assert done.returncode == 1
    assert "it is no artefact" in done.stderr
