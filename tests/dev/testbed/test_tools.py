"""The cache key of a build depends on everything that decides it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from testbed import build, tools
from testbed.errors import BedError
from testbed.tools import KUBE, PAUSE, TOOLS, Tool, content_key

ROOT = Path(__file__).parents[3]


def key(tool: Tool, *, go_version: str = "go1.26.8", platform: str = "linux/x86_64") -> str:
    return content_key(tool, go_version=go_version, platform=platform)


def copied(tool: Tool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The tool with its sources in a folder where they can be changed."""
    shutil.copytree(tool.source, folder / tool.name)
    monkeypatch.setattr(tools, "SOURCES", folder)
    return tool


@pytest.mark.parametrize("file", ["go.mod", "main.go"])
def test_changed_source_has_another_key(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(PAUSE)
    tool = copied(PAUSE, tmp_path, monkeypatch)
    changed = tmp_path / "pause" / file
    changed.write_text(changed.read_text() + "\n")

    assert key(tool) != before


def test_compiler_target_and_flags_are_part_of_the_key() -> None:
    keys = {
        key(PAUSE),
        key(PAUSE, go_version="go1.27.0"),
        key(PAUSE, platform="linux/aarch64"),
        key(replace(PAUSE, tags=("netgo",))),
        key(replace(PAUSE, variables={"main.version": "1"})),
    }

    assert len(keys) == 5


def test_kubernetes_reports_the_version_that_its_module_pins() -> None:
    pinned = re.search(r"k8s\.io/kubernetes v(\S+)", (KUBE.source / "go.mod").read_text())

    assert pinned is not None
    assert pinned[1] == tools.KUBERNETES


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_every_pin_has_its_checksum(tool: Tool) -> None:
    module = (tool.source / "go.mod").read_text()

    assert module.startswith(f"module penstock.dev/testbed/{tool.source.name}\n")
    assert ("require" in module) == (tool.source / "go.sum").exists()


def test_the_documents_name_the_oldest_go_that_builds_the_modules() -> None:
    needed = {
        folder.name: tools.oldest_go(folder) for folder in tools.SOURCES.iterdir() if (folder / "go.mod").exists()
    }
    keda = needed.pop("keda")
    usual = max(needed.values(), key=lambda version: tuple(map(int, version.split("."))))

    row = next(line for line in (ROOT / "docs/reference/test-bed.md").read_text().splitlines() if "| Needs |" in line)
    assert f"Go {usual} or newer to build ({keda} for KEDA)" in row
    assert f"Go {usual} or newer ({keda} for" in (ROOT / "docs/how-to/local-cluster.md").read_text()
    assert f"Go {usual} or newer" in (ROOT / "docs/tutorial/cluster.md").read_text()


@pytest.mark.parametrize("tool", [PAUSE, TOOLS["prometheus"]], ids=lambda tool: tool.name)
def test_an_older_go_is_refused_with_the_version_of_the_module(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    oldest = tools.oldest_go(tool.source)
    monkeypatch.setattr(build, "_go", lambda *_: f"go1.{int(oldest.split('.')[1]) - 1}.9")

    with pytest.raises(BedError, match=rf"is too old for {tool.name}\. Install Go {re.escape(oldest)} or later"):
        build.binary(tool)


def test_without_go_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BedError, match=r"Install Go 1\.24 or later .* PENSTOCK_TEST_KUBECONFIG"):
        build.binary(PAUSE)
