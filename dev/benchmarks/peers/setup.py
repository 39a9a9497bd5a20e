"""Sets up the peers that PyPI has, each in a virtual environment outside the repository.

    python -m benchmarks.peers.setup [infinity litserve mlserver sentence-transformers]

Their libraries contradict each other and ours. `requirements/` pins versions that work together. The environments go to
~/.cache/penstock/peers (PENSTOCK_PEERS names another folder); an environment that is there for the same pins is kept.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.program import Program

REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
STAMP = "penstock-requirements.sha256"


def peers_folder() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("PENSTOCK_PEERS") or Path.home() / ".cache" / "penstock" / "peers")


def interpreter(name: str) -> Path:
    """The Python of a peer's environment."""
    return peers_folder() / name / "bin" / "python"


def is_installed(name: str) -> bool:
    """The environment is there and has the pins of now."""
    stamp = peers_folder() / name / STAMP
    return stamp.is_file() and stamp.read_text() == _digest(name)


def install(name: str) -> None:
    """Make the environment, or bring it up to date."""
    uv = [sys.executable, "-m", "uv"]
    folder = peers_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(folder)], check=True)
    subprocess.run(
        [*uv, "pip", "install", "--quiet", "--python", str(interpreter(name)), "-r", str(REQUIREMENTS / f"{name}.txt")],
        check=True,
    )
    # Compiled now, not during a start that is measured. Code for a newer Python does not compile,
    # and is not imported either.
    subprocess.run([str(interpreter(name)), "-m", "compileall", "-qq", str(folder / "lib")], check=False)
    (folder / STAMP).write_text(_digest(name))


def _digest(name: str) -> str:
    return hashlib.sha256((REQUIREMENTS / f"{name}.txt").read_bytes()).hexdigest()


@click.command(cls=Program, help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
def main(names: tuple[str, ...]) -> None:
    """Set up the named peers, or all."""
    for name in names or NAMES:
        if is_installed(name):
            click.echo(f"{name}: there already ({peers_folder() / name})")
            continue
        click.echo(f"{name}: installing into {peers_folder() / name}")
        install(name)


if __name__ == "__main__":
    main()
