"""Compiles the C sources with the system's compiler. Standard library only: the wheel's build hook runs this file.

The flags are fixed, and the result does not depend on the machine that compiles: it has kernels for several instruction
sets, and one is chosen at run time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "c"
LIBRARY = Path(__file__).parent / "libpenstock_native.so"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-g0",
    "-Wl,--build-id=none",
)  # fmt: skip
LINKED = {"-shared", "-Wl,--build-id=none"}
"""Flags of the linker alone."""
WARNINGS = ("-Wall", "-Wextra", "-Werror")
"""For the tests only: a new warning of another compiler must not prevent an installation."""
TIMEOUT_SECONDS = 300.0


class NotCompiled(Exception):
    """There is no compiler, or it failed; the message has the reason. Nothing was written."""


def compiler() -> str | None:
    """The compiler in `CC`, or one of the usual ones; None if there is none."""
    named = os.environ.get("CC", "").split()
    return next((found for name in (*named[:1], *COMPILERS) if (found := shutil.which(name))), None)


def platform_tag() -> str:
    """This platform in the name of a wheel, such as `linux_x86_64`."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def compile_library(target: Path = LIBRARY, *, flags: tuple[str, ...] = FLAGS, sources: Path = SOURCES) -> Path:
    """Compile `sources` to `target`, atomically. NotCompiled if that fails."""
    command = compiler()
    if command is None:
        raise NotCompiled("there is no C compiler")
    names = sorted(path.name for path in sources.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        objects = [str((Path(folder) / name).with_suffix(".o").resolve()) for name in names]
        compiled = [flag for flag in flags if flag not in LINKED]
        # In the folder of the sources, with bare file names: no path of this machine gets into the library.
        commands = [
            [command, *compiled, "-c", name, "-o", made_of] for name, made_of in zip(names, objects, strict=True)
        ]
        # One file takes more time than all the rest.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda words: _run(words, sources), commands))
        _run([command, *flags, *objects, "-o", str(made.resolve()), "-lm"], sources)
        made.chmod(0o755)
        made.replace(target)
    return target


def _run(words: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{words[0]} does not run: {error}") from error
    if done.returncode:
        raise NotCompiled(f"{words[0]} failed:\n{done.stderr.strip()}")
