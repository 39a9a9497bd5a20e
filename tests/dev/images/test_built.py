"""The built images contain what they need, and nothing of the machine that built them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from images.archive import WHITEOUT, Archive
from images.build import Builder
from images.machine import debian_sources
from images.target import SOURCE_DATE_EPOCH, USUAL, project_version
from tests.dev.images.contents import Contents, look_through, traces_of_the_machine

MOST_MEGABYTES = {"operator": 300, "runtime": 500, "gateway": 150, "optimizer": 900, "optimizer-demo": 1000}
"""Unpacked. docs/decisions/images.md lists their sizes."""

WORDS = {
    "operator": ["python", "-I", "-u", "-m", "penstock_operator"],
    "runtime": ["penstock-container", "penstock_runtime.pod"],
    "gateway": ["python3", "-P", "-m", "penstock_gateway"],
    "optimizer": ["penstock-container", "penstock_optimizer.pod"],
    "optimizer-demo": ["penstock-container", "penstock_optimizer.pod"],
}
OPERATING = {"kopf", "kubernetes"}
SERVING = {"numpy", "tokenizers", "onnxruntime", "openvino", "orjson", "uvloop", "obstore"}
OPTIMISING = {"onnx"}
PACKAGES = {
    "operator": OPERATING,
    "runtime": SERVING,
    "gateway": set(),
    "optimizer": SERVING | OPTIMISING,
    "optimizer-demo": SERVING | OPTIMISING,
}

pytestmark = pytest.mark.slow


# The demonstration's image is `optimizer` and the example's model.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.extended) if name == "optimizer" else name for name in USUAL],
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def contents(name: str, archive: Callable[[str], Archive], images: Builder) -> Contents:
    return look_through(archive(name), traces_of_the_machine(images))


def test_an_image_is_described_and_runs_its_program_as_an_unprivileged_user(contents: Contents, name: str) -> None:
    settings, labels, serves = contents.settings, contents.settings["Labels"], name != "operator"

    assert (settings["User"], settings["WorkingDir"]) == ("65532:65532", "/")
    assert (settings["Entrypoint"], settings.get("Cmd") or None) == (WORDS[name], None)
    assert labels["org.opencontainers.image.title"] == f"penstock-{name}"
    assert labels["org.opencontainers.image.version"] == project_version()
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.description"]
    # Only images that answer requests have a port and a health check.
    ports = [] if not serves else ["8080/tcp", "8404/tcp"] if name == "gateway" else ["8080/tcp"]
    assert sorted(settings.get("ExposedPorts", {})) == ports
    assert ("dev.penstock.health.ready" in labels) == serves
    # The gateway listens everywhere unless it is configured otherwise.
    assert ("PENSTOCK_HOST=0.0.0.0" in settings["Env"]) == (serves and name != "gateway")


def test_the_size_is_within_the_documented_limit(contents: Contents, name: str) -> None:
    unpacked = sum(entry.size for entry in contents.paths.values() if entry.isfile())

    assert unpacked / 1e6 < MOST_MEGABYTES[name]


def test_an_image_has_exactly_the_packages_of_its_extras(contents: Contents, name: str) -> None:
    has = contents.packages

    assert PACKAGES[name] <= has
    assert (OPERATING | SERVING | OPTIMISING) & has == PACKAGES[name]
    assert not has & {"torch", "transformers", "pip", "setuptools", "wheel", "pytest", "mypy"}
    assert not [package for package in has if package.startswith("nvidia-")]


def test_the_native_engine_is_compiled_and_the_compiler_is_not_in_the_image(contents: Contents, name: str) -> None:
    compiled = {path for path in contents.paths if path.endswith("/libpenstock_native.so")}

    # The code is one layer, shared by all images except the gateway's.
    folder = "opt/penstock-code/penstock_runtime/engines/native"
    assert compiled == (set() if name == "gateway" else {f"{folder}/libpenstock_native.so"})
    assert not {path for path in contents.paths if re.fullmatch(r"usr/bin/(.*-)?(gcc|cc|ld|as)(-\d+)?", path)}


def test_the_user_cannot_write_the_files_of_the_image(contents: Contents) -> None:
    """Everything belongs to root and only root may write, but for the folders that are meant for it."""
    ours = {path for path, entry in contents.paths.items() if entry.uid == 65532}
    open_to_all = {path for path, entry in contents.paths.items() if entry.mode & 0o002 and not entry.issym()}

    assert ours == {"var/lib/penstock", "var/lib/penstock/artefacts", "var/lib/penstock/models"}
    assert open_to_all <= {"tmp", "var/tmp", "run/lock"}


def test_every_compiled_module_has_an_unchecked_hash(contents: Contents) -> None:
    """A .pyc that asks for its source's time would be stale in an image whose files have one time."""
    unchecked_hash = 0b01

    assert [path for path, flags in contents.compiled.items() if flags != unchecked_hash] == []
    assert len(contents.compiled) > 300


def test_every_file_has_the_time_of_the_release(contents: Contents) -> None:
    assert {int(entry.mtime) for entry in contents.entries} == {SOURCE_DATE_EPOCH}
    assert contents.archive.configuration["created"].startswith("2026-11-21T00:00:00")


def test_no_account_has_the_date_of_the_build(contents: Contents) -> None:
    accounts = [line.split(":") for line in contents.texts["etc/shadow"].decode().splitlines()]

    assert {int(account[2]) for account in accounts} == {SOURCE_DATE_EPOCH // 86_400}


def test_an_image_has_no_build_files(contents: Contents) -> None:
    left = re.compile(
        r"(var/lib/apt/lists|var/cache/apt|var/log|root|tmp|var/tmp|mnt|media|build|opt/builder|run/secrets)/.+|"
        r"usr/share/(doc|man|locale)/.+|.*/pip/_internal/.*"
    )
    # The base's, and empty: apt's locks.
    debian_s_own = re.compile(r"root/\.(bashrc|profile)|var/(cache/apt/archives|lib/apt/lists)/(\.wh\.)?lock")

    files = [path for path, entry in contents.paths.items() if not entry.isdir()]
    assert [path for path in files if left.fullmatch(path) and not debian_s_own.fullmatch(path)] == []


def test_no_layer_replaces_or_deletes_files_of_a_lower_one(contents: Contents) -> None:
    """Hidden files are still downloaded by everyone who pulls the image."""
    hidden = {entry.name for entry in contents.entries if entry.name.rpartition("/")[2].startswith(WHITEOUT)}

    # buildah takes the empty folders that it mounted on away with the mounts; dpkg and ldconfig write their state anew.
    mounts = {".wh.mnt", ".wh.media"}
    assert {path for path in hidden - mounts if not re.search(r"var/(lib/dpkg|cache|lib/apt)/", path)} == set()


def test_layers_and_configuration_contain_no_data_of_the_build_machine(contents: Contents) -> None:
    of_the_machine = re.compile(r"etc/(pip\.conf|hosts|hostname|resolv\.conf)|(.*/)?(pip\.conf|\.netrc)")

    assert contents.traces == []
    assert {path: text for path, text in contents.texts.items() if of_the_machine.fullmatch(path) and text} == {}
    assert [one for one in contents.settings["Env"] if re.match(r"(?i)(pip_|uv_|\w*proxy|\w*ssl|\w*cert)", one)] == []


def test_its_certificate_authorities_are_those_of_debian(contents: Contents) -> None:
    bundle = contents.texts["etc/ssl/certs/ca-certificates.crt"]
    trusted = set(re.findall(rb"-----BEGIN CERTIFICATE-----\n.*?-----END CERTIFICATE-----", bundle, re.DOTALL))
    debian_s = {text.strip() for path, text in contents.texts.items() if "/mozilla/" in path}

    assert trusted == debian_s
    assert len(debian_s) > 100
    assert not [path for path in contents.paths if path.startswith("usr/local/share/ca-certificates/")]


def test_debian_s_sources_are_the_public_ones(contents: Contents) -> None:
    sources = [text.decode() for path, text in contents.texts.items() if path.startswith("etc/apt/sources.list")]

    assert sources == [debian_sources()]
