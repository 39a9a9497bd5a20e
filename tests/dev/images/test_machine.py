"""How the build reaches package servers: found on the machine, passed to the build, and stored nowhere else."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from images.machine import MIRROR, Machine, pip_options, read_machine


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".config/pip").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"index-url": "https://file.example/simple"}),
        ({"PIP_INDEX_URL": "https://variable.example/simple"}, {"index-url": "https://variable.example/simple"}),
        ({"PIP_PROXY": "http://proxy.example:3128"}, {"proxy": "http://proxy.example:3128"}),
        # The file wins over uv's variable: pip is what the build uses.
        ({"UV_DEFAULT_INDEX": "https://uv.example/simple"}, {"index-url": "https://file.example/simple"}),
    ],
)
def test_pip_s_files_and_variables_are_read_as_pip_reads_them(
    home: Path, environment: dict[str, str], expected: dict[str, str]
) -> None:
    (home / ".config/pip/pip.conf").write_text(
        "[global]\nindex-url = https://file.example/simple\nuser = true\n[install]\nno-deps = true\n"
    )

    options = pip_options(environment, home)

    assert expected.items() <= options.items()
    assert not {"user", "no-deps"} & set(options)


def test_without_pip_s_own_index_uv_s_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("images.machine.PIP_VARIABLES", {"PIP_INDEX_URL": "index-url"})

    options = pip_options({"UV_DEFAULT_INDEX": "https://uv.example/simple"}, home)

    assert options["index-url"] == "https://uv.example/simple"


def test_mounted_settings_name_paths_inside_the_build(tmp_path: Path) -> None:
    bundle = tmp_path / "corporate.pem"
    bundle.write_text("certificates")
    machine = Machine(
        apt=('Acquire::Retries "5";',),
        pip={"index-url": "https://user:secret@index.example/simple"},
        certificates=bundle,
        mirror="http://mirror.example/debian",
    )

    machine.write(tmp_path / "machine")

    parser = configparser.RawConfigParser()
    parser.read(tmp_path / "machine/pip.conf")
    assert dict(parser["global"]) == {
        "index-url": "https://user:secret@index.example/simple",
        "cert": "/mnt/ca.crt",
    }
    assert (tmp_path / "machine/ca.crt").read_text() == "certificates"
    assert 'Acquire::https::CAInfo "/mnt/ca.crt";' in (tmp_path / "machine/apt.conf").read_text()
    assert 'Acquire::Retries "5";' in (tmp_path / "machine/apt.conf").read_text()
    assert "URIs: http://mirror.example/debian\n" in (tmp_path / "machine/debian.sources").read_text()


def test_files_that_may_hold_passwords_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    Machine().write(tmp_path / "machine")

    assert (tmp_path / "machine").stat().st_mode & 0o777 == 0o700


def test_mirrors_and_proxies_come_from_the_environment(home: Path) -> None:
    machine = read_machine(
        {"DEBIAN_MIRROR": "http://mirror.example/debian", "https_proxy": "http://proxy.example", "HOME": "/nowhere"},
        home,
    )

    assert machine.mirror == "http://mirror.example/debian"
    assert machine.proxies == {"https_proxy": "http://proxy.example"}


def test_without_settings_debians_own_mirror_is_used(home: Path) -> None:
    assert read_machine({}, home).mirror == MIRROR
