"""Programs of another processor on this machine: the kernel starts them with QEMU's user emulation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

from images.errors import ToolMissing

HANDLERS = Path("/proc/sys/fs/binfmt_misc")
"""The kernel's table of programs that start files of other formats."""

MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The kernel's name of a processor -> the name in images."""

EMULATORS = {"arm64": "qemu-aarch64"}
"""Processors that can be emulated, and the name of their entry in the kernel's table."""

_MAGIC = r"\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
_MASK = r"\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
"""The head of a 64-bit little-endian ELF file of machine 183 (EM_AARCH64), type executable or shared object: the ELF
specification. The byte of the operating system's ABI is not compared."""


def own_architecture() -> str:
    """This machine's processor: `amd64`, `arm64`."""
    return MACHINES.get(platform.machine(), platform.machine())


def require_emulator(architecture: str) -> None:
    """Make this machine start programs for `architecture`; nothing to do where it does already.

    The entry in the kernel's table stays until the machine restarts, as Debian's own would. ToolMissing where the
    processor cannot be emulated or QEMU is not installed.
    """
    if architecture == own_architecture():
        return
    name = EMULATORS.get(architecture)
    if name is None:
        raise ToolMissing(f"images for {architecture} cannot be built here: choose of {', '.join(EMULATORS)}")
    if not (HANDLERS / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(HANDLERS)], check=False, capture_output=True)
    if (HANDLERS / name).exists():
        return
    emulator = shutil.which(f"{name}-static")
    if emulator is None or not (HANDLERS / "register").exists():
        raise ToolMissing(
            f"images for {architecture} are built with QEMU and the kernel's binfmt_misc: apt-get install "
            f"qemu-user-static. Elsewhere: docker buildx build --platform linux/{architecture} --target runtime ."
        )
    # F: the kernel opens the emulator now, so that it works in an image that does not contain it.
    (HANDLERS / "register").write_text(f":{name}:M::{_MAGIC}:{_MASK}:{emulator}:F")
