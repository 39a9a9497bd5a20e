"""How the build reaches package servers: found on the machine, passed to the build, and stored nowhere else."""

from __future__ import annotations

import configparser
from pathlib import Path

from images.machine import Machine


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
