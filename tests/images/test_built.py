"""What is in the images that were built: no more than is needed, nothing of the machine that built them."""

from __future__ import annotations

import json
import platform
import re
import socket
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from images.archive import Archive
from images.build import Builder
from images.machine import debian_sources
from images.target import SOURCE_DATE_EPOCH, USUAL, project_version

MOST_MEGABYTES = {"operator": 300, "runtime": 500, "optimizer": 900, "optimizer-demo": 1000}
"""Unpacked. docs/decisions/images.md says what they weigh."""

WORDS = {
    "operator": ["penstock-operator"],
    "runtime": ["penstock-container", "penstock_runtime.pod"],
    "optimizer": ["penstock-container", "penstock_optimizer.pod"],
    "optimizer-demo": ["penstock-container", "penstock_optimizer.pod"],
}

Of = Callable[[str], Archive]

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("name", USUAL)]


@cache
def files(archive: Archive) -> dict[str, tarfile.TarInfo]:
    return archive.files()


def settings(archive: Archive) -> dict[str, Any]:
    found: dict[str, Any] = archive.configuration["config"]
    return found


def test_it_runs_as_a_user_without_rights(archive: Of, name: str) -> None:
    assert settings(archive(name))["User"] == "65532:65532"


def test_it_starts_what_it_is_for(archive: Of, name: str) -> None:
    config = settings(archive(name))

    assert config["Entrypoint"] == WORDS[name]
    assert not config.get("Cmd")
    assert config["WorkingDir"] == "/"


def test_it_says_what_it_is(archive: Of, name: str) -> None:
    labels = settings(archive(name))["Labels"]

    assert labels["org.opencontainers.image.title"] == f"penstock-{name}"
    assert labels["org.opencontainers.image.version"] == project_version()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.description"]


def test_only_what_answers_requests_has_a_port_and_says_how_to_see_its_health(archive: Of, name: str) -> None:
    config = settings(archive(name))
    serves = name != "operator"

    assert list(config.get("ExposedPorts", {})) == (["8080/tcp"] if serves else [])
    assert ("dev.penstock.health.ready" in config["Labels"]) == serves
    assert ("PENSTOCK_HOST=0.0.0.0" in config["Env"]) == serves


def test_its_size_is_within_what_is_promised(archive: Of, name: str) -> None:
    assert archive(name).unpacked_bytes() / 1e6 < MOST_MEGABYTES[name]


def packages(archive: Archive) -> set[str]:
    """Names of the Python packages that are there, as their metadata have them."""
    found = (re.search(r"/([^/]+)-[^/-]+\.dist-info/METADATA$", path) for path in files(archive))
    return {match.group(1).lower().replace("_", "-") for match in found if match}


def test_it_has_the_packages_of_its_part_and_no_others(archive: Of, name: str) -> None:
    has = packages(archive(name))

    serving = {"numpy", "tokenizers", "onnxruntime", "openvino", "orjson", "uvloop", "s3fs"}
    optimising = {"onnx", "nncf", "safetensors", "huggingface-hub"}
    operating = {"kopf", "kubernetes"}
    wanted = {
        "operator": operating,
        "runtime": serving,
        "optimizer": serving | optimising,
        "optimizer-demo": serving | optimising,
    }[name]
    assert wanted <= has
    assert not (serving | optimising | operating) - wanted & has - {"numpy"}
    assert not has & {"torch", "transformers", "pip", "setuptools", "wheel", "pytest", "mypy"}
    assert not [package for package in has if package.startswith("nvidia-")]


def test_nobody_who_can_start_it_can_change_it(archive: Of, name: str) -> None:
    """Everything belongs to root and only root may write, but for the folders that are meant for it."""
    writable = {
        "tmp",
        "var/tmp",
        "run/lock",
        "var/lib/penstock",
        "var/lib/penstock/artefacts",
        "var/lib/penstock/models",
    }

    entries = files(archive(name))

    ours = {path for path, entry in entries.items() if entry.uid == 65532}
    open_to_all = {path for path, entry in entries.items() if entry.mode & 0o002 and not entry.issym()}
    assert ours <= writable
    assert open_to_all <= writable


def test_every_compiled_module_holds_for_good(archive: Of, name: str) -> None:
    """A .pyc that asks for its source's time would be stale in an image whose files have one time."""
    checked = [
        member.name
        for _, member, content in archive(name).entries()
        if member.name.endswith(".pyc") and int.from_bytes(content[4:8], "little") != 0b01
    ]
    modules = [path for path in files(archive(name)) if path.endswith(".pyc")]

    assert checked == []
    assert len(modules) > 300


def test_no_file_carries_another_time_than_the_release_s(archive: Of, name: str) -> None:
    times = {int(member.mtime) for layer, member, _ in archive(name).entries()}

    assert times == {SOURCE_DATE_EPOCH}
    assert archive(name).configuration["created"].startswith("2026-11-21T00:00:00")


def test_what_building_leaves_behind_is_not_there(archive: Of, name: str) -> None:
    left = re.compile(
        r"^(var/lib/apt/lists/.+|var/cache/apt/.+|var/log/.+|root/.+|tmp/.+|var/tmp/.+|mnt/.+|media/.+|build/?.*|"
        r"opt/builder/?.*|usr/share/(doc|man|locale)/.+|.*/pip/_internal/.*|run/secrets/?.*)$"
    )
    ours = re.compile(r"^root/\.(bashrc|profile)$")

    assert [path for path in files(archive(name)) if left.match(path) and not ours.match(path)] == []


def test_nothing_of_the_building_machine_is_in_any_layer_or_in_the_configuration(
    archive: Of, images: Builder, name: str
) -> None:
    """Layers are looked through one by one: what a higher one hides is still there for whoever has the image."""
    image, machine = archive(name), images.machine
    secrets = traces(images)
    text = json.dumps([image.configuration, image.manifest]).encode()
    assert [secret for secret in secrets if secret in text] == []
    assert not [value for value in settings(image)["Env"] if re.match(r"(?i)(pip_|uv_|.*proxy|.*ssl|.*cert)", value)]

    found, touched = [], []
    for _, member, content in image.entries():
        # Certificates and programs are full of bytes that could be anything; texts are where settings stand.
        if len(content) < 4_000_000:
            found += [(member.name, secret) for secret in secrets if secret in content]
        if re.fullmatch(r"\.?/?(etc/(pip\.conf|hosts|hostname|resolv\.conf)|.*/pip\.conf|.*/\.netrc)", member.name):
            touched.append((member.name, content))

    assert found == []
    assert [entry for entry in touched if entry[1].strip()] == []
    assert machine.certificates is None or len(certificates(image)) > 0


def traces(images: Builder) -> list[bytes]:
    """What would give the building machine away: its name, its own settings of apt and pip, its proxies and paths."""
    machine = images.machine
    lines = [
        *machine.apt,
        *(machine.proxies or {}).values(),
        *(value for option, value in (machine.pip or {}).items() if option != "timeout"),
        str(images.root) if len(str(images.root)) > 6 else "",
        str(images.cache),
        socket.gethostname() if len(socket.gethostname()) > 6 else "",
        platform.node() if len(platform.node()) > 6 else "",
        "penstock-build-",
    ]
    public = debian_sources()
    return sorted({line.encode() for line in lines if line and line not in public and line != "localhost"})


def certificates(image: Archive) -> set[bytes]:
    for _, member, content in image.entries():
        if member.name.endswith("etc/ssl/certs/ca-certificates.crt"):
            return set(re.findall(rb"-----BEGIN CERTIFICATE-----\n.*?-----END CERTIFICATE-----", content, re.DOTALL))
    return set()


def test_it_trusts_whom_debian_trusts_and_nobody_else(archive: Of, name: str) -> None:
    debian: set[bytes] = set()
    for _, member, content in archive(name).entries():
        if "usr/share/ca-certificates/mozilla/" in member.name and member.isfile():
            debian.add(content.strip())

    assert certificates(archive(name)) == debian
    assert len(debian) > 100
    assert not [path for path in files(archive(name)) if path.startswith("usr/local/share/ca-certificates/")]


def test_debian_s_sources_are_the_public_ones(archive: Of, name: str) -> None:
    sources = [
        content.decode()
        for _, member, content in archive(name).entries()
        if Path(member.name).parent.name == "sources.list.d" and member.isfile()
    ]

    assert sources == [debian_sources()]
