"""`penstock push`: writes an artefact to a container registry, from which `penstock serve oci://...` serves it."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.resources.core import ModelSource, Scheme
from penstock_cli.terminal import fact, read_artefact, transfer_lines
from penstock_runtime.models.sources.fetch import reporting
from penstock_runtime.remote import DEFAULT_RETRIES
from penstock_runtime.store.push import push_artefact


class RegistryTarget(click.ParamType[ModelSource]):
    """`oci://registry/repository:tag`."""

    name = "oci://registry/repository:tag"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> ModelSource:
        """The parsed address."""
        text = str(value)
        found = ModelSource.parse(text) if text.startswith(f"{Scheme.OCI.value}://") else None
        if found is None or found.digest:
            self.fail(f"{text!r} is not the address of a registry with a tag: write {self.name}", param, ctx)
        return found


@click.command
@click.argument("artefact", metavar="ARTEFACT", type=click.Path(file_okay=False, path_type=Path))
@click.argument("target", metavar="oci://REGISTRY/REPOSITORY:TAG", type=RegistryTarget())
def command(artefact: Path, target: ModelSource) -> None:
    """Write an ARTEFACT folder that penstock optimize has made to a container registry.

    Each file is a blob with its name, which other tools (oras pull) read, too. Credentials are those of docker login,
    or of PENSTOCK_REGISTRY_AUTH. The last line has the address with its digest, for penstock serve.
    """
    read_artefact(artefact, otherwise="Give the folder that penstock optimize has written")
    show = transfer_lines("sending")
    fact("pushed", str(push_artefact(artefact, target, reporting(DEFAULT_RETRIES, target, show), show)))
