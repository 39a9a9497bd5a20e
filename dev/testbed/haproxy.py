"""The HAProxy of each Debian release that the gateway is claimed to work with, as a command in a folder for PATH.

The machine has the version of its release. Another one comes with all its libraries from Debian's packages, into a
folder below ~/.cache/penstock, and runs with these libraries.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from images.machine import SUITE, read_machine
from testbed.errors import BedError

CACHE = Path("~/.cache/penstock/testbed")
VERSIONS = ("2.6", "3.0")
"""Of Debian 12, and of Debian 13, which the gateway's image is made of."""


def installed_version(program: str = "haproxy") -> str:
    """The version of a HAProxy, such as `2.6`."""
    text = subprocess.run([program, "-v"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+\.\d+)", text)
    if found is None:
        raise BedError(f"{program} -v prints no version: {text[:200]!r}")
    return found[1]


def folder_with(version: str) -> Path:
    """A folder that has an executable `haproxy` of this version. BedError if it cannot be had."""
    own = shutil.which("haproxy")
    if own is not None and installed_version(own) == version:
        return Path(own).parent
    if version != "3.0":
        raise BedError(f"HAProxy {version} is not installed: on Debian 12, run dev/tools/install-system.sh")
    folder = CACHE.expanduser() / f"haproxy-{SUITE}"
    if not (folder / "bin/haproxy").exists():
        _unpack(folder)
    found = installed_version(str(folder / "bin/haproxy"))
    if found != version:
        raise BedError(f"Debian {SUITE} has HAProxy {found}, not {version}: correct VERSIONS")
    return folder / "bin"


def _unpack(folder: Path) -> None:
    """HAProxy and its libraries, without running any of their scripts."""
    machine = read_machine(os.environ, Path.home())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="haproxy-", dir=folder.parent) as name:
        root = Path(name) / "root"
        sources = Path(name) / "debian.sources"
        sources.write_text(machine.sources())
        run = subprocess.run(
            [
                "mmdebstrap", "--variant=extract", "--include=haproxy", *(f"--aptopt={line}" for line in machine.apt),
                SUITE, str(root), str(sources),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode != 0:
            raise BedError(f"mmdebstrap could not fetch HAProxy of Debian {SUITE}: {run.stderr[-2000:]}")
        _write_command(root, folder)
        root.rename(folder / "root")


def _write_command(root: Path, folder: Path) -> None:
    """`bin/haproxy`: starts the program with the loader and the libraries of its own release."""
    loaders = [*root.glob("usr/lib*/ld-linux*.so.*"), *root.glob("usr/lib/*/ld-linux*.so.*")]
    libraries = sorted({path.parent for path in root.glob("usr/lib/*/*.so*")})
    inside = folder / "root"
    path = ":".join(str(inside / one.relative_to(root)) for one in libraries)
    command = folder / "bin/haproxy"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(
        "#!/bin/sh\n"
        f'exec {inside / loaders[0].relative_to(root)} --library-path {path} {inside}/usr/sbin/haproxy "$@"\n'
    )
    command.chmod(0o755)
