"""Everything that the tests need from the layers of the images, in one pass: 400 MB are unpacked once for all tests."""

from __future__ import annotations

import json
import platform
import re
import socket
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from images.archive import Archive, Layer
from images.build import Builder
from images.machine import debian_sources

TEXT_BYTES = 4_000_000
"""Longer files are programs and data, full of bytes that could be anything; settings stand in texts."""

KEPT = re.compile(
    r"etc/(pip\.conf|hosts|hostname|resolv\.conf|shadow)|(.*/)?(pip\.conf|\.netrc)|etc/apt/sources\.list(\.d/.*)?|"
    r"etc/ssl/certs/ca-certificates\.crt|usr/share/ca-certificates/mozilla/.*"
)
"""Files whose content tests look at."""


@dataclass
class Found:
    """What one layer has."""

    entries: list[tarfile.TarInfo] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    """Path -> content, of what KEPT names."""
    compiled: dict[str, int] = field(default_factory=dict)
    """Path of each .pyc -> its flags (PEP 552)."""
    traces: list[tuple[str, bytes]] = field(default_factory=list)
    """Where something of the building machine was found, and what."""


@dataclass
class Contents(Found):
    """All layers of an image, from the lowest up; what a higher one hides is here, too."""

    archive: Archive = field(kw_only=True)

    @property
    def paths(self) -> dict[str, tarfile.TarInfo]:
        """Path -> entry. The images hide nothing of a lower layer, which a test holds."""
        return {clean(entry.name): entry for entry in self.entries}

    @property
    def settings(self) -> dict[str, Any]:
        """Environment, user, entry point and so on."""
        found: dict[str, Any] = self.archive.configuration["config"]
        return found

    @property
    def packages(self) -> set[str]:
        """Names of the Python packages that are there, as their metadata have them."""
        found = (re.search(r"/([^/]+)-[^/-]+\.dist-info/METADATA$", path) for path in self.paths)
        return {match.group(1).lower().replace("_", "-") for match in found if match}


def clean(name: str) -> str:
    """A path as a tar has it, without what precedes the first folder."""
    return name.removeprefix("./").strip("/")


def look_through(archive: Archive, traces: Sequence[bytes]) -> Contents:
    """Read all layers once. traces: what is looked for in every text, in the configuration and in the manifest."""
    contents = Contents(archive=archive)
    described = json.dumps([archive.configuration, archive.manifest]).encode()
    contents.traces += [("the configuration", trace) for trace in traces if trace in described]
    for layer in archive.layers:
        key = (layer.diff_id, tuple(traces))
        if key not in _known:
            _known[key] = _look_through_layer(archive, layer, traces)
        found = _known[key]
        contents.entries += found.entries
        contents.texts |= found.texts
        contents.compiled |= found.compiled
        contents.traces += found.traces
    return contents


_known: dict[tuple[str, tuple[bytes, ...]], Found] = {}
"""By the digest of a layer's content and by what was looked for: images share most of their layers."""


def _look_through_layer(archive: Archive, layer: Layer, traces: Sequence[bytes]) -> Found:
    found = Found()
    for member, content in archive.members(layer):
        found.entries.append(member)
        path = clean(member.name)
        if KEPT.fullmatch(path) and member.isfile():
            found.texts[path] = content
        if path.endswith(".pyc"):
            found.compiled[path] = int.from_bytes(content[4:8], "little")
        if len(content) < TEXT_BYTES:
            found.traces += [(path, trace) for trace in traces if trace in content]
    return found


def traces_of_the_machine(images: Builder) -> list[bytes]:
    """What would give the building machine away: its name, its own settings of apt and pip, its proxies and paths."""
    machine = images.machine
    names = {socket.gethostname(), platform.node(), str(images.root)}
    lines = [
        *machine.apt,
        *(machine.proxies or {}).values(),
        *(value for option, value in (machine.pip or {}).items() if option != "timeout"),
        *(name for name in names if len(name) > 6 and name != "localhost"),
        str(images.cache),
        "penstock-build-",
    ]
    return sorted({line.encode() for line in lines if line and line not in debian_sources()})
