"""From a checkout to OCI archives in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from images.base import make_base
from images.buildah import Buildah, Progress, require
from images.content import content_key, copy_sources
from images.emulation import EMULATORS, own_architecture, require_emulator
from images.errors import ImageError
from images.machine import Machine, read_machine
from images.target import ROOT, SOURCE_DATE_EPOCH, Target, project_version

CACHE = Path("~/.cache/penstock/images")
"""Where archives, the base and buildah's layers are kept unless PENSTOCK_IMAGES_CACHE names another folder."""
KEPT = 2
"""Archives of one target that the cache keeps, so that switching between branches rebuilds nothing."""
MOST_LAYER_BYTES = 8_000_000_000
"""Layers of earlier images beyond this are forgotten; the next build takes minutes instead of seconds."""
OWN_BASE = "localhost/penstock-base:trixie"
"""The Debian made on the spot, for this machine's processor."""


@dataclass(frozen=True)
class Builder:
    """Builds targets of one checkout into one cache.

    base: a reference that buildah can pull, or None for a Debian made on the spot.
    architecture: the processor that images are for: `amd64`, `arm64`. Where it is not this machine's, commands of the
    image itself are emulated; what only fetches packages or compiles for it is not (see the Dockerfile).
    machine: how packages are reached. tell: called with a line for every step.
    """

    cache: Path
    machine: Machine
    tell: Progress
    base: str | None = None
    root: Path = ROOT
    architecture: str = field(default_factory=own_architecture)

    @property
    def log(self) -> Path:
        """Output of all tools."""
        return self.cache / "build.log"

    @property
    def buildah(self) -> Buildah:
        """The builder over the cache's storage."""
        return Buildah(self.cache)

    @property
    def suffix(self) -> str:
        """What names of images for another processor end with."""
        return "" if self.architecture == own_architecture() else f"-{self.architecture}"

    @property
    def own_base(self) -> str:
        """The Debian made on the spot."""
        return self._own_bases[self.architecture]

    @property
    def _own_bases(self) -> dict[str, str]:
        """The Debians made on the spot, by processor: the images' and the one that builds run on."""
        return {own_architecture(): OWN_BASE, self.architecture: OWN_BASE + self.suffix}

    def archive(self, target: Target) -> Path:
        """Where the image of this checkout is, or will be."""
        key = content_key(self.root, (target.name, self.base or self.own_base, project_version(self.root)))
        return self.cache / f"penstock-{target.name}{self.suffix}-{key}.oci.tar"

    def build(self, target: Target) -> Path:
        """The archive of this checkout's image, built where the cache has none; ImageError on failure."""
        archive = self.archive(target)
        if archive.is_file():
            os.utime(archive)  # the cache deletes what was unused for the longest time
            return archive
        self._require_tools(makes_base=self.base is None)
        self.cache.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if not archive.is_file():
                archive = self._make(target, archive)
        return archive

    def rebuild(self, target: Target, archive: Path) -> Path:
        """Build from the first line again, without any kept layer, into an archive of the caller's choice."""
        self._require_tools(makes_base=self.base is None)
        with self._alone():
            return self._make(target, archive, fresh=True)

    def refresh_base(self) -> None:
        """Make the base again from Debian as it is today; images that stand on it are built again."""
        self._require_tools(makes_base=True)
        with self._alone():
            self.buildah.prepare()
            for old in self.cache.glob("*.oci.tar"):
                old.unlink()
            self._make_bases()

    def clean(self) -> None:
        """Remove everything that building has left in the cache: archives, layers, the base."""
        if not self.cache.is_dir():
            return
        for architecture in EMULATORS:
            replace(self, cache=self.cache / architecture).clean()
        with self._alone():
            if (self.cache / "storage").is_dir() and shutil.which("buildah"):
                self.buildah.prepare()
                self.buildah.run("rm", "--all")  # takes their mounts away
                self.buildah.run("rmi", "--all", "--force")
            for path in self.cache.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()

    def _require_tools(self, *, makes_base: bool) -> None:
        for_base = ["mmdebstrap", *(["arch-test"] if self.suffix else [])]
        require("buildah", *(for_base if makes_base else []))
        require_emulator(self.architecture)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One build at a time: two would do the same work, and buildah's storage is one."""
        with (self.cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make(self, target: Target, archive: Path, *, fresh: bool = False) -> Path:
        began = time.monotonic()
        self.buildah.prepare()
        self.buildah.remove_leftovers()
        if self.base is None:
            self._make_bases(missing=True)
        reference = target.reference(project_version(self.root)) + self.suffix
        before = self.buildah.image(reference)
        self.tell(f"building {reference}")
        with tempfile.TemporaryDirectory(prefix="penstock-build-") as folder:
            machine, context = Path(folder, "machine"), Path(folder, "context")
            self.machine.write(machine)
            copy_sources(self.root, context)
            # Build from a copy: the archive matches its key even if sources change during the build.
            if not fresh:
                archive = replace(self, root=context).archive(target)
            words = self._build_words(target, reference, machine, context, fresh=fresh)
            self.buildah.follow("build", words, self.log, self.tell)
        part = archive.with_suffix(".part")
        part.unlink(missing_ok=True)
        self.buildah.run(
            "push", "-q", "--signature-policy", str(self.buildah.policy), reference, f"oci-archive:{part}:{reference}"
        )
        part.rename(archive)
        if before and before != self.buildah.image(reference):
            self.buildah.remove(before)
        if not fresh:
            self._forget(target)
        self.tell(f"{reference}: {archive.stat().st_size / 1e6:.0f} MB packed, {time.monotonic() - began:.0f} s")
        return archive

    def _forget(self, target: Target) -> None:
        """Remove archives of earlier sources but for the last ones: each has hundreds of megabytes."""
        known = sorted(
            self.cache.glob(f"penstock-{target.name}{self.suffix}-{'[0-9a-f]' * 16}.oci.tar"),
            key=lambda path: -path.stat().st_mtime,
        )
        for old in known[KEPT:]:
            old.unlink()
        if self.buildah.layer_bytes() > MOST_LAYER_BYTES:
            self.tell("forgetting layers of earlier images: they take over 8 GB")
            with contextlib.suppress(ImageError):  # one that a test has mounted stays
                self.buildah.run("rmi", "--prune", "--force")

    def _build_words(self, target: Target, reference: str, machine: Path, context: Path, *, fresh: bool) -> list[str]:
        words = ["--isolation", "chroot", "--network", "host", "--format", "oci", "--identity-label=false"]
        words += ["--signature-policy", str(self.buildah.policy), f"--pull={'missing' if self.base else 'never'}"]
        words += ["--timestamp", str(SOURCE_DATE_EPOCH), "--target", target.name, "--tag", reference]
        words += ["--build-context", f"machine={machine}", "--build-arg", f"BASE={self.base or self.own_base}"]
        if self.base is None:
            words += ["--build-arg", f"BUILD_BASE={OWN_BASE}"]
        words += ["--build-arg", f"VERSION={project_version(self.root)}"]
        for name in self.machine.proxies or {}:
            words += [
                "--build-arg",
                name,
            ]  # the value comes from the environment, not from the arguments that `ps` shows
        if self.suffix:
            # Debian 12's buildah knows the second, but not where a line FROM has it.
            words += ["--platform", f"linux/{self.architecture}"]
            words += ["--build-arg", f"BUILDPLATFORM=linux/{own_architecture()}"]
        words += ["--layers", *(["--no-cache"] if fresh else [])]
        return [*words, str(context)]

    def _make_bases(self, *, missing: bool = False) -> None:
        """Make the bases again, or those that the storage does not have."""
        for architecture, reference in self._own_bases.items():
            if not (missing and self.buildah.image(reference)):
                self._make_base(architecture, reference)

    def _make_base(self, architecture: str, reference: str) -> None:
        tar = self.cache / "base.tar"
        took = "a minute" if architecture == own_architecture() else "ten minutes"
        self.tell(f"making a Debian base for {architecture} with mmdebstrap: {took}, once")
        make_base(self.machine, tar, self.log, architecture)
        container = self.buildah.run("from", "scratch")
        try:
            self.buildah.run("add", "-q", container, str(tar), "/")
            self.buildah.run("config", "--cmd", "bash", "--arch", architecture, container)
            self.buildah.run(
                "commit",
                "-q",
                "--timestamp",
                str(SOURCE_DATE_EPOCH),
                "--identity-label=false",
                "--signature-policy",
                str(self.buildah.policy),
                container,
                reference,
            )
        finally:
            self.buildah.run("rm", container)
            tar.unlink(missing_ok=True)


def builder(tell: Progress, architecture: str | None = None) -> Builder:
    """The builder of this checkout and this machine; PENSTOCK_IMAGES_CACHE and BASE are its settings.

    architecture: what images are for, where that is another processor than this machine's.
    """
    cache = Path(os.environ.get("PENSTOCK_IMAGES_CACHE", CACHE)).expanduser()
    architecture = architecture or own_architecture()
    if architecture != own_architecture():
        # Stages that run here have the same commands for each processor, by which buildah knows layers again.
        cache /= architecture
    machine = read_machine(os.environ, Path.home())
    return Builder(
        cache=cache,
        machine=machine,
        tell=tell,
        base=os.environ.get("BASE") or None,
        architecture=architecture,
    )
