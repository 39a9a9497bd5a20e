"""The C sources compile without a warning, to the same file each time, and pass the sanitisers."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import ArtefactError
from penstock_runtime.engines.native import compiler, library
from penstock_runtime.engines.native.compiler import FLAGS, LIBRARY, WARNINGS, NotCompiled, compile_library
from tests.kept import kept

ROOT = Path(__file__).parents[4]
needs_compiler = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")
SANITISED = (
    *(flag for flag in FLAGS if flag != "-O3"),
    *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
)
LONG = "any_number_of_lines"
"""Part of the name of a test that is left out: it opens many models, and others run the same code."""
TESTS = (
    "tests/runtime/engines/native/test_native_engine.py",
    "tests/runtime/engines/native/test_kernels.py",
    "tests/runtime/engines/native/test_decoder_kernels.py",
    "tests/runtime/engines/native/test_native_streams.py",
    "tests/runtime/engines/native/test_decoder_engine.py",
)


@pytest.mark.slow
@needs_compiler
def test_the_library_compiles_without_warnings_and_reproducibly(tmp_path: Path) -> None:
    """Compiled again, from sources in another folder, it is the library that the installation has made."""
    sources = shutil.copytree(compiler.SOURCES, tmp_path / "other sources")

    made = compile_library(tmp_path / LIBRARY.name, flags=(*FLAGS, *WARNINGS), sources=sources)

    assert made.read_bytes() == LIBRARY.read_bytes(), "installed from other sources: rm .venv/.test && make install"
    assert str(tmp_path).encode() not in made.read_bytes()


def test_without_a_compiler_the_error_has_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)

    with pytest.raises(NotCompiled, match="no C compiler"):
        compile_library(tmp_path / LIBRARY.name)


@needs_compiler
def test_sources_that_do_not_compile_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int f(void) { return x; }\n")

    with pytest.raises(NotCompiled, match="x"):
        compile_library(tmp_path / LIBRARY.name, sources=tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["wrong.c"]


def test_an_installation_without_the_library_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, str(tmp_path / LIBRARY.name))
    library.load_library.cache_clear()
    try:
        with pytest.raises(ArtefactError, match="was not compiled") as error:
            library.load_library()
        assert "gcc" in error.value.remedy
    finally:
        library.load_library.cache_clear()


def compile_sanitised(folder: Path) -> None:
    compile_library(folder / LIBRARY.name, flags=SANITISED)


def sources_and_compiler() -> str:
    """A digest of all that decides what `compile_sanitised` makes."""
    digest = hashlib.sha256(repr(SANITISED).encode())
    for path in [Path(compiler.__file__), *sorted(compiler.SOURCES.iterdir())]:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    command = compiler.compiler()
    assert command is not None
    digest.update(subprocess.run([command, "-v"], capture_output=True, check=True).stderr)
    return digest.hexdigest()


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute of CPU, next to a cluster that has precedence
def test_the_sanitisers_find_nothing() -> None:
    """Memory errors and undefined behaviour: the other tests run again with an instrumented library."""
    folder, _ = kept("sanitised-engine", compile_sanitised, sources_and_compiler())
    command = compiler.compiler()
    assert command is not None
    runtime = subprocess.run([command, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("the compiler has no libasan")
    environment = {
        **os.environ,
        library.VARIABLE: str(folder / LIBRARY.name),
        "LD_PRELOAD": runtime.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until the end
    }

    files = [str(ROOT / name) for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", f"not {LONG}", *files],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
