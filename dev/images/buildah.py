"""The builder: buildah as root, with its storage in the cache and nothing of it elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from images.errors import ImageError, ToolMissing

POLICY = {"default": [{"type": "insecureAcceptAnything"}]}
"""Images come from this storage and, where BASE names a registry, from there; signatures are not looked at."""

MOUNTED = "mounted-"
"""How the names of containers begin that `Buildah.mounted` made; the process's number follows."""

Progress = Callable[[str], None]
"""Called with a line of progress."""


def require(*tools: str) -> None:
    """Raise ToolMissing if a program is missing, with the way to get it."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ToolMissing(
            f"{', '.join(missing)} missing: images are built with Debian's packages "
            f"(apt-get install {' '.join(missing)}). Elsewhere: docker build --target runtime ."
        )
    if os.geteuid() != 0:
        raise ToolMissing("images are built as root here: mounts need it. Without: docker build --target runtime .")


@dataclass(frozen=True)
class Buildah:
    """Buildah over one storage. `folder` holds images, layers and temporary files."""

    folder: Path

    def prepare(self) -> None:
        """Make the folders and the policy."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        self.policy.write_text(json.dumps(POLICY))

    @property
    def temporary(self) -> Path:
        """Temporary files of buildah."""
        return self.folder / "tmp"

    @property
    def policy(self) -> Path:
        """The signature policy, which Debian does not bring."""
        return self.folder / "policy.json"

    def words(self, verb: str, *words: str) -> list[str]:
        """A command line: global options, the verb, its words."""
        storage = ["--root", str(self.folder / "storage"), "--runroot", str(self.folder / "run")]
        return ["buildah", *storage, "--storage-driver", "overlay", verb, *words]

    def environment(self) -> dict[str, str]:
        """Ours, with temporary files in the storage's neighbourhood: layers of 500 MB do not fit into every /tmp."""
        return {**os.environ, "TMPDIR": str(self.temporary)}

    def run(self, verb: str, *words: str) -> str:
        """Run to the end and return what it printed. ImageError with its last words."""
        run = subprocess.run(
            self.words(verb, *words), capture_output=True, text=True, env=self.environment(), check=False
        )
        if run.returncode != 0:
            raise ImageError(f"buildah {verb} {' '.join(words)} failed: {run.stderr.strip()[-800:]}")
        return run.stdout.strip()

    def layer_bytes(self) -> int:
        """Bytes of the storage's layers on the disk."""
        run = subprocess.run(["du", "-sk", str(self.folder / "storage")], capture_output=True, text=True, check=False)
        return int(run.stdout.split()[0]) * 1024 if run.stdout else 0

    def image(self, reference: str) -> str:
        """The identity of the image of that name; empty when the storage has none."""
        listed = json.loads(self.run("images", "--json") or "[]") or []
        return next((str(image["id"]) for image in listed if reference in (image.get("names") or [])), "")

    def remove(self, image: str) -> None:
        """Remove an image and the layers that no other image has; a mounted image stays."""
        with contextlib.suppress(ImageError):
            self.run("rmi", image)

    @contextlib.contextmanager
    def mounted(self, archive: Path) -> Iterator[Path]:
        """The file system of an archive's image, while the block runs."""
        name = f"{MOUNTED}{os.getpid()}-{secrets.token_hex(4)}"
        source = ["--signature-policy", str(self.policy), f"oci-archive:{archive}"]
        self.run("from", "-q", "--pull-never", "--name", name, *source)
        try:
            yield Path(self.run("mount", name))
        finally:
            self.run("umount", name)
            self.run("rm", name)

    def remove_leftovers(self) -> None:
        """Remove what builds and mounts left that did not get to their end: it keeps layers from being removed. To be
        called while nothing is built."""
        for container in json.loads(self.run("containers", "--json") or "[]") or []:
            if not _in_use(str(container["containername"])):
                self.run("rm", str(container["id"]))

    def follow(self, verb: str, words: Sequence[str], log: Path, tell: Progress) -> None:
        """Run something long: everything into the log, each step of the Dockerfile to `tell` with its time."""
        began = time.monotonic()
        with (
            log.open("a", encoding="utf-8") as kept,
            subprocess.Popen(
                self.words(verb, *words),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self.environment(),
            ) as process,
        ):
            assert process.stdout is not None  # noqa: S101 - a pipe
            for line in process.stdout:
                kept.write(line)
                if "STEP " in line:
                    tell(f"{time.monotonic() - began:6.1f} s  {line.strip()[:110]}")
        if process.returncode != 0:
            raise ImageError(f"buildah {verb} failed after {time.monotonic() - began:.0f} s: {last_words(log)}")


def _in_use(container: str) -> bool:
    """Whether the process that mounted it is there; the containers of a build are used by that build alone."""
    process = container.removeprefix(MOUNTED).partition("-")[0]
    return container.startswith(MOUNTED) and Path("/proc", process).is_dir()


def last_words(log: Path, lines: int = 15) -> str:
    """The end of a log, and where the rest is."""
    return "\n".join([f"the end of {log}:", *log.read_text(errors="replace").splitlines()[-lines:]])
