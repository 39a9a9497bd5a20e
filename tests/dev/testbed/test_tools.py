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


def key(tool: Tool, *, go_version: str = "go1.26.8", platform: str = "linux/x86_64") -> str:
    return content_key(tool, go_version=go_version, platform=platform)


def copied(tool: Tool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """The tool with its sources in a folder where they can be changed."""
    shutil.copytree(tool.source, folder / tool.name)
    monkeypatch.setattr(tools, "SOURCES", folder)
    return tool


def test_the_key_does_not_depend_on_the_path_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = key(PAUSE)

    assert key(copied(PAUSE, tmp_path, monkeypatch)) == here


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


def test_built_binary_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "CACHE", tmp_path)
    messages: list[str] = []

    first = build.binary(PAUSE, report=messages.append)
    second = build.binary(PAUSE, report=messages.append)

    assert first == second
    assert first.stat().st_mode & 0o111
    assert [line.split(" in ")[0] for line in messages if line.startswith("built")] == ["built pause"]


def test_broken_source_gives_the_compiler_error_and_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = copied(PAUSE, tmp_path, monkeypatch)
    monkeypatch.setattr(build, "CACHE", tmp_path / "cache")
    (tmp_path / "pause" / "main.go").write_text("package main\n\nfunc main() { undefined() }\n")

    with pytest.raises(BedError, match="undefined: undefined"):
        build.binary(tool, report=lambda _: None)

    assert not build.is_built(tool)


def test_without_go_the_error_has_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BedError, match=r"Install Go 1\.24 or later .* PENSTOCK_TEST_KUBECONFIG"):
        build.binary(PAUSE)
