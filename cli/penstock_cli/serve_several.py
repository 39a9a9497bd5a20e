"""`penstock serve` of several models: one process, one port, one set of cores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.errors import SettingError, closest
from penstock_cli.serve import ServeOptions, ServeSession, grant_for
from penstock_cli.terminal import fact
from penstock_runtime.app.lifecycle import serve_while
from penstock_runtime.app.server import Server
from penstock_runtime.batching.shared_cores import SharedCores
from penstock_runtime.host import CoreGrant, read_host
from penstock_runtime.serving.status import ServerStatus
from penstock_runtime.settings import AccessSettings, HttpSettings, Settings


async def serve_several(
    options: Sequence[ServeOptions], settings: Sequence[Settings], priorities: Sequence[str]
) -> int:
    """Serve until a signal ends it. Returns the number of connections that were cut off."""
    sessions = [ServeSession(*given, is_member=True) for given in zip(options, settings, strict=True)]
    named = [session.read() for session in sessions]
    names = [one.name for one in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SettingError(
            f"two of the models have the name {twice}",
            field=twice,
            remedy="Give each file another metadata.name, and each artefact's folder another name",
        )
    for one, given in zip(named, options, strict=True):
        if one.cores is None:
            raise SettingError(
                f"{one.name} runs on AWS Inferentia, and several models share the cores of the CPU",
                field=str(given.target),
                remedy="Serve it by itself",
            )
    classes = read_priorities(priorities, names)
    front = settings[0]
    for port in ("internal_port", "grpc_port"):
        if getattr(front.http, port) is not None:
            raise SettingError(
                f"{port} is set, and a server of several models has one port",
                field=f"PENSTOCK_{port.upper()}",
                remedy="Leave it out, or serve each model by itself",
            )
    grant = grant_for(read_host(), max(one.cores or 1 for one in named), ", ".join(names))
    cores = SharedCores(grant.cores)
    members = [
        Server(
            session.status(one, grant),
            settings_of_member(session.settings),
            share=cores.share(one.name, priority=classes.get(one.name, 0), objective_seconds=session.objective_seconds),
        )
        for session, one in zip(sessions, named, strict=True)
    ]
    status = ServerStatus(", ".join(names), named[0].task, host=read_host(), grant=grant)
    status.message = "the models are loading"
    server = Server(status, front, members=members)
    await server.start()
    return await serve_while(server, _work(server, sessions, members, grant))


async def _work(server: Server, sessions: Sequence[ServeSession], members: Sequence[Server], grant: CoreGrant) -> None:
    for session, member in zip(sessions, members, strict=True):
        await session.load(member, grant)
    server.set_ready()
    fact("serving", f"{server.url}  ({len(members)} models on {grant.cores} cores)", style="bold")
    fact("", f"one of them at {server.url}/models/NAME/, all at /v1/models, /info and /metrics")
    for session, member in zip(sessions, members, strict=True):
        try:
            await session.improve(member, grant)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the fp32 plan goes on serving
            session.report_failure(member, error)


def settings_of_member(settings: Settings) -> Settings:
    """The settings of one of the models: the server itself checks tokens and has the sockets."""
    access = AccessSettings(cors_origins=settings.access.cors_origins)
    return settings.model_copy(update={"access": access, "http": HttpSettings()})


def read_priorities(given: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """The priority class of each model that has one. SettingError."""
    found: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if name not in names:
            close = closest(name, names, cutoff=0.6)
            raise SettingError(
                f"--priority {text}: no model is called {name!r}",
                field="--priority",
                remedy=f"Did you mean {close}?" if close else f"Name one of {', '.join(names)}",
            )
        try:
            found[name] = int(number)
        except ValueError:
            found[name] = -1
        if not 0 <= found[name] <= 1000:
            raise SettingError(
                f"--priority {text}: the class is a whole number from 0 to 1000",
                field="--priority",
                remedy=f"Write --priority {name}=1",
            )
    return found
