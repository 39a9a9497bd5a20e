"""`python -m images`: build the images, or print their paths and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from images.archive import Archive
from images.build import builder
from images.emulation import MACHINES
from images.errors import ImageError
from images.sbom import bill_of_materials
from images.target import TARGETS, USUAL, project_version, target_named


def _say(line: str) -> None:
    click.echo(line, err=True)


@click.group
def cli() -> None:
    """Build Penstock's container images with buildah, without a registry.

    PENSTOCK_IMAGES_CACHE: where they are kept (~/.cache/penstock/images). BASE: a Debian 13 from a registry instead of
    one made on the spot. DEBIAN_MIRROR, DEBIAN_SECURITY_MIRROR: other mirrors.
    """


@cli.command
@click.argument("names", nargs=-1, metavar="[TARGET]...")
@click.option("--refresh", is_flag=True, help="Make the Debian base again first: security updates come in.")
@click.option(
    "--architecture",
    type=click.Choice(sorted(MACHINES.values())),
    help="The processor that the images are for. Of another one than this machine's, QEMU installs Debian's packages.",
)
def build(names: tuple[str, ...], *, refresh: bool, architecture: str | None) -> None:
    """Build the TARGETs (default: those that the tests use) and print the archives' paths."""
    working = builder(_say, architecture)
    targets = [target_named(name) for name in names or USUAL]
    if refresh:
        working.refresh_base()
    for target in targets:
        click.echo(working.build(target))


@cli.command
@click.argument("names", nargs=-1, metavar="[TARGET]...")
def sizes(names: tuple[str, ...]) -> None:
    """Say what built images weigh, layer by layer."""
    for name in names or tuple(TARGETS):
        path = builder(_say).archive(target_named(name))
        if not path.is_file():
            click.echo(f"{name}: not built from this state of the sources")
            continue
        archive = Archive(path)
        unpacked: dict[str, int] = {}
        for layer, member, _ in archive.entries():
            unpacked[layer.digest] = unpacked.get(layer.digest, 0) + member.size
        click.echo(
            f"{name}: {archive.unpacked_bytes() / 1e6:.0f} MB unpacked, {path.stat().st_size / 1e6:.0f} MB packed"
        )
        for layer in archive.layers:
            size = unpacked.get(layer.digest, 0)
            click.echo(
                f"  {layer.digest[:19]}  {size / 1e6:6.1f} MB unpacked  {layer.packed_bytes / 1e6:6.1f} MB packed"
            )


@cli.command
@click.argument("names", nargs=-1, metavar="[TARGET]...")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
def sbom(names: tuple[str, ...], *, folder: Path) -> None:
    """Write the software bill of materials of TARGETs (default: as for build) as FOLDER/penstock-NAME.cdx.json."""
    working = builder(_say)
    folder.mkdir(parents=True, exist_ok=True)
    for target in [target_named(name) for name in names or USUAL]:
        bill = bill_of_materials(Archive(working.build(target)), target.reference(project_version()))
        file = folder / f"penstock-{target.name}.cdx.json"
        file.write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
        click.echo(f"{file}: {len(bill['components'])} packages")


@cli.command
def clean() -> None:
    """Remove all images, layers and the base from the cache."""
    builder(_say).clean()


def main() -> None:
    """Errors that a user can put right become one sentence."""
    try:
        cli()
    except ImageError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
