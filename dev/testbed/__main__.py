"""The test bed for people: `python -m testbed build|up|node|status|down`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click

from testbed import machine, state
from testbed.build import binary, say
from testbed.errors import BedError
from testbed.layout import DEFAULT_NODES, core_list
from testbed.tools import TESTED, TOOLS


class _Commands(click.Group):
    """Prints our errors in one line."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BedError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
def main() -> None:
    """A real Kubernetes on this machine, from its Go modules."""


@main.command()
@click.argument("tools", nargs=-1, type=click.Choice(sorted(TOOLS)))
def build(tools: tuple[str, ...]) -> None:
    """Build the programs that are not built yet (those that tests use, or those named) and print where they lie."""
    for tool in [TOOLS[name] for name in tools] or TESTED:
        print(binary(tool))


@main.command()
@click.option("--nodes", default=DEFAULT_NODES, show_default=True, help="How many nodes share the machine's cores.")
@click.option("--egress", is_flag=True, help="Let pods reach what the machine reaches, such as a model hub.")
def up(nodes: int, *, egress: bool) -> None:
    """Start a cluster: control plane, nodes that own cores, Services, DNS."""
    machine.up(nodes=nodes, egress=egress)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def node(name: str, command: tuple[str, ...]) -> None:
    """Run a command of containerd's client (ctr) on a node: `node a images list`."""
    running = _running()
    if name not in {node.name for node in running.nodes}:
        raise BedError(f"no node {name}: there are {', '.join(node.name for node in running.nodes)}")
    print(running.node(name).ctr(*command), end="")


@main.command()
@click.argument("archives", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def load(archives: tuple[Path, ...]) -> None:
    """Give every node the images of OCI or Docker archives, as a registry would."""
    running = _running()
    for archive in archives:
        running.import_image(archive)
        say(f"loaded {archive} into {len(running.nodes)} nodes")


@main.command()
def status() -> None:
    """What runs on this machine."""
    running = machine.find()
    if running is None:
        left = machine.FOLDER.exists()
        print("part of a cluster is left: `make cluster-down` removes it" if left else "no cluster: `make cluster`")
    else:
        print(f"export KUBECONFIG={shlex.quote(str(running.kubeconfig))}")
        print(f"export PATH={shlex.quote(str(running.kubectl.executable.parent))}:$PATH")
        for node in running.nodes:
            print(f"node {node.name} owns cores {core_list(node.owned)}")
    for folder in sorted(state.PLANES.glob("[!.]*")):
        print(f"control plane of a test run: {folder}")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def kubectl(command: tuple[str, ...]) -> None:
    """Run kubectl on the cluster: `kubectl get pods -A`."""
    running = _running()
    sys.exit(subprocess.call([running.kubectl.executable, "--kubeconfig", running.kubeconfig, *command]))


@main.command()
def down() -> None:
    """End the cluster, and what interrupted test runs left, and undo all that they did to the machine."""
    for folder in state.sweep():
        say(f"removed a control plane that an interrupted run left in {folder}")
    if not machine.down():
        say("no cluster runs on this machine")


def _running() -> machine.Machine:
    running = machine.find()
    if running is None:
        raise BedError("no cluster runs on this machine", remedy="`make cluster` starts one")
    return running


if __name__ == "__main__":
    main(prog_name="python -m testbed")
