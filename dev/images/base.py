"""A Debian base made on the spot by mmdebstrap, for machines that reach a mirror of Debian but no registry."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from images.errors import ImageError
from images.machine import SUITE, Machine, debian_sources
from images.target import SOURCE_DATE_EPOCH

PACKAGES = ("ca-certificates",)
"""On top of Debian's smallest set, the essential packages and apt."""

UNUSED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
"""What dpkg leaves out, here and in everything that is installed later."""

OF_THE_MACHINE = (
    "/etc/apt/sources.list.d/*",
    "/etc/apt/apt.conf.d/99mmdebstrap",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/var/log/*",
    "/var/cache/ldconfig/aux-cache",
    "/usr/share/info/*",
)
"""What mmdebstrap copies from the machine that it runs on, or that carries the time: taken out at the end."""


def command(machine: Machine, folder: Path, tar: Path, architecture: str) -> list[str]:
    """The mmdebstrap call. folder holds machine.sources and debian.sources."""
    removals = " ".join(f'"$1"{path}' if "*" not in path else f'"$1"{path[:-1]}*' for path in OF_THE_MACHINE)
    return [
        "mmdebstrap",
        "--variant=minbase",
        f"--architectures={architecture}",
        # Devices are the container engine's business.
        "--skip=output/dev",
        f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude={path}" for path in UNUSED),
        *(f"--aptopt={line}" for line in machine.apt),
        f"--customize-hook=rm -rf {removals}",
        # Those who build on this image as it is find Debian's own mirrors.
        f"--customize-hook=copy-in {folder}/debian.sources /etc/apt/sources.list.d",
        SUITE,
        str(tar),
        str(folder / "machine.sources"),
    ]


def make_base(machine: Machine, tar: Path, log: Path, architecture: str) -> None:
    """Write the base for a processor (`amd64`) as a tar: some 80 MB, a minute, ten where it is emulated.

    Two runs on the same state of Debian give the same bytes.
    """
    # Made in a folder that is root's alone, wherever the cache lies: where apt's own user may look into it, some of
    # apt's folders become his.
    with tempfile.TemporaryDirectory(prefix="base-", dir=tar.parent) as name, log.open("ab") as output:
        folder = Path(name)
        (folder / "machine.sources").write_text(machine.sources())
        (folder / "debian.sources").write_text(debian_sources())
        part = tar.with_suffix(".part.tar")
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH), "TMPDIR": name}
        run = subprocess.run(
            command(machine, folder, part, architecture), stdout=output, stderr=output, env=environment, check=False
        )
        if run.returncode != 0:
            part.unlink(missing_ok=True)
            raise ImageError(
                f"mmdebstrap could not make a Debian {SUITE} (status {run.returncode}): see {log}. Is "
                f"{machine.mirror} reachable? DEBIAN_MIRROR names another mirror; "
                "BASE=docker.io/library/debian:trixie-slim takes a registry's image"
            )
        part.rename(tar)
