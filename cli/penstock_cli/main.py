"""The `penstock` command group, which imports each command on use, prints errors, and sets up the process.

A PenstockError is printed as `error: what and where. What to do next` with exit status 1. Click reports wrong flags
(status 2). Any other exception is a defect and shows its traceback. Standard output reports write errors.

Weights get large memory pages: one pass over the weights of a model touches thousands of small pages (4 KiB), and a
short run then waits for address translation, twice over in a virtual machine. MiniLM in int8 takes 6 to 10 % longer at
8 tokens (docs/decisions/huge-pages.md). The C library asks the kernel for large pages (2 MiB) only when an environment
variable is set before the process starts, so the process replaces itself once.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from penstock import __version__
from penstock.errors import HostError, PenstockError
from penstock.process import exit_on_signal, print_error, without_collections
from penstock_cli.entry import missing_package

VARIABLE = "GLIBC_TUNABLES"
TUNABLE = "glibc.malloc.hugetlb"
POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CLOSED = 1
"""Exit status of a command after the reader closed the pipe; click and rich use the same."""
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended, as shells use it."""
RAISING_HANDLERS = frozenset({"strict", "surrogateescape"})
"""Error handlers that raise when the output's encoding lacks a character, such as one of a path. Python's defaults."""


def environment_with_huge_pages(environment: Mapping[str, str], policy: str) -> dict[str, str] | None:
    """The environment to restart with; None when a restart would change nothing.

    `policy` is the kernel's, such as `always [madvise] never`. No restart where the kernel gives large pages anyway,
    where it gives none, or where the tunable is already set, to any value.
    """
    tunables = environment.get(VARIABLE, "")
    if "[madvise]" not in policy or TUNABLE in tunables:
        return None
    return {**environment, VARIABLE: ":".join(filter(None, (tunables, f"{TUNABLE}=1")))}


def restart_with_huge_pages() -> None:
    """Replace this process by the same command with large pages, where that helps; otherwise return."""
    try:
        environment = environment_with_huge_pages(os.environ, POLICY.read_text(encoding="ascii"))
    except OSError:
        return  # a kernel without large pages, or another system than Linux
    if environment is not None:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, environment)  # noqa: S606 - the same command


class CheckedStdout(io.TextIOWrapper):
    """Standard output that raises HostError instead of OSError, such as on a full disk.

    A closed pipe remains BrokenPipeError, for which click exits silently.
    """

    failed = False
    """True after either error, so that the exit code can be set."""

    def write(self, text: str, /) -> int:
        """Print; see `io.TextIOBase`."""
        with self._write_errors():
            return super().write(text)

    def flush(self) -> None:
        """Write the buffered text; see `io.IOBase`."""
        with self._write_errors():
            super().flush()

    def discard(self) -> None:
        """Redirect to /dev/null: the buffered text would fail again when the interpreter exits."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self.failed = True
            raise
        except OSError as error:
            self.failed = True
            raise HostError(
                f"what is printed cannot be written: {error.strerror}",
                remedy="Print to a terminal, or to a file on a disk with room for it",
            ) from error


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Make `sys.stdout` a CheckedStdout inside the block, and flush it at the end. A closed one is left as it is."""
    plain = sys.stdout
    if not isinstance(plain, io.TextIOWrapper):
        yield
        return
    plain.flush()
    output = CheckedStdout(
        plain.buffer,
        plain.encoding,
        "backslashreplace" if plain.errors in RAISING_HANDLERS else plain.errors,
        line_buffering=plain.line_buffering,
        write_through=plain.write_through,
    )
    sys.stdout = output
    try:
        yield
    finally:
        sys.stdout = plain
        try:
            if not output.failed:
                output.flush()
        except BrokenPipeError:
            sys.exit(CLOSED)
        finally:
            if output.failed:
                output.discard()
            # Otherwise closing this wrapper would close the file descriptor.
            output.detach()


COMMANDS = {
    "serve": "Serve a model: fp32 at once, the optimised plan when it is found.",
    "optimize": "Make the artefact only: model, evidence, report.",
    "push": "Write an artefact to a container registry.",
    "bench": "Measure an endpoint: cores x lengths x batches.",
    "embed": "Embed a corpus: files of texts to files with vectors.",
    "classify": "Classify the texts of a corpus.",
    "rerank": "Rank the documents of each query of a corpus.",
    "generate": "Continue each prompt of a corpus.",
    "bulk": "Show, verify and complete the output of the four commands before.",
    "plan": "Compare hardware for an endpoint: latency, replicas, cost.",
    "ledger": "List and remove the predictions of plans that were measured.",
    "simulate": "Replay load against autoscalers: ours, HPA, KEDA, Knative's.",
    "status": "Show the endpoints of a cluster.",
    "why": "Explain why an endpoint of a cluster is not ready.",
    "top": "Show load, capacity and latency of the endpoints of a cluster.",
    "report": "Open the report of an endpoint of a cluster.",
    "space": "Show the vector space of a server or an artefact, or compare two.",
    "certify": "Say whether queries of one model may search the index of another.",
    "index": "Say who wrote the vectors of an index.",
    "convert": "Write a ModelEndpoint for a KServe InferenceService.",
    "host": "Show what this machine is: processor, cores, pinning.",
}
"""Command -> description. Each is `command` of the module of the same name. The descriptions are here so that
`penstock --help` imports none of these modules, and no engine."""
FOLDERS = {
    **dict.fromkeys(("status", "why", "top", "report", "convert"), "cluster."),
    **dict.fromkeys(("embed", "classify", "rerank", "generate", "bulk"), "bulk."),
    "plan": "planning.",
    "ledger": "planning.",
}
"""Commands with their modules in a folder."""
HEAVY = frozenset({"serve", "optimize", "bench", "embed", "classify", "rerank", "generate", "bulk"})
"""Commands that run models."""


class LazyGroup(click.Group):
    """Imports a command's module when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All commands, in the order in which users need them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command of that name, or None."""
        if cmd_name not in COMMANDS:
            return None
        try:
            with without_collections():
                command = importlib.import_module(f"penstock_cli.{FOLDERS.get(cmd_name, '')}{cmd_name}").command
        except ModuleNotFoundError as error:
            raise (_not_installed(error, cmd_name) or error) from error
        assert isinstance(command, click.Command)  # noqa: S101 - true for every module in COMMANDS
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print a PenstockError and a missing package as one sentence."""
        try:
            return super().invoke(ctx)
        except click.BadParameter as error:
            error.param_hint = _variable(error) or error.param_hint
            raise
        except PenstockError as error:
            print_error(error)
            ctx.exit(1)
        except KeyboardInterrupt:
            # Of a command without an own message, or before its handler: click would exit with 1.
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except ModuleNotFoundError as error:
            missing = _not_installed(error, ctx.invoked_subcommand)
            if missing is None:
                raise
            print_error(missing)
            ctx.exit(1)


def _not_installed(error: ModuleNotFoundError, command: str | None) -> PenstockError | None:
    package = (error.name or "").partition(".")[0]
    return missing_package(package, command) if package and not package.startswith("penstock") else None


def _variable(error: click.BadParameter) -> str:
    """The environment variable with the wrong value; empty when the value is from the command line."""
    context, parameter = error.ctx, error.param
    if context is None or parameter is None or parameter.name is None:
        return ""
    if context.get_parameter_source(parameter.name) is not ParameterSource.ENVIRONMENT:
        return ""
    # The same lookup as click: the variable of the option, or else one made of the command and the flag.
    return str(parameter.envvar or f"{context.auto_envvar_prefix}_{parameter.name.upper()}")


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "auto_envvar_prefix": "PENSTOCK",
    },
)
@click.version_option(__version__, prog_name="penstock")
def cli() -> None:
    """Optimised model endpoints: optimise a model for this machine, prove its answers, serve it.

    Each flag can be given as an environment variable too: the one that its help names, or else PENSTOCK_, the
    command and the flag, such as PENSTOCK_OPTIMIZE_CORES.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `penstock` script."""
    if os.getpid() == 1:
        exit_on_signal(signal.SIGTERM)
    if arguments is None and HEAVY.intersection(sys.argv[1:2]):
        restart_with_huge_pages()
    try:
        with checked_stdout():
            cli(args=arguments)
    except PenstockError as error:  # a write error before or after the command ran
        print_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
