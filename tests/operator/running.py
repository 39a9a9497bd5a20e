"""An operator within the test process: everything except Kopf, the lease and the signals, on a real API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from penstock_operator.cluster.api import ClusterPort, Json, ListPage, ResourceKind, WatchEvent
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.kubernetes import KubernetesPort, load_configuration
from penstock_operator.control.cache import ClusterCache
from penstock_operator.control.controller import Controller
from penstock_operator.process import make_informers
from penstock_operator.settings import Settings

QUIET_LOOKS = 12
LOOK_SECONDS = 0.05
"""The operator is idle when the queue was empty and no event arrived in more than `QUIET_LOOKS` looks. Events arrive
within some ten milliseconds. Looks are counted, not seconds: seconds also pass while the machine pauses and events
wait."""


class Killed(BaseException):
    """The process was killed. A BaseException, so that no error handler catches it."""


class Tripwire(ClusterPort):
    """A port that counts writes and, at one of them, kills: before it is sent, or before its answer is seen."""

    def __init__(self, port: ClusterPort, *, at: int = 0, sent: bool = False) -> None:
        self._port = port
        self._at = at
        self._sent = sent
        self.writes: list[str] = []

    async def _write(self, what: str, act: Callable[[], Any]) -> Any:
        if self._at and len(self.writes) >= self._at:
            raise Killed  # the other tasks of a killed process write nothing either
        self.writes.append(what)
        if len(self.writes) == self._at and not self._sent:
            raise Killed
        result = await act()
        if len(self.writes) == self._at:
            raise Killed
        return result

    async def apply(self, value: Json, *, subresource: str = "") -> Json:
        what = f"apply {value['kind']}{'/' if subresource else ''}{subresource}"
        result: Json = await self._write(what, lambda: self._port.apply(value, subresource=subresource))
        return result

    async def create(self, value: Json) -> Json:
        what = f"create {value['kind']} {value.get('reason', '')}"
        result: Json = await self._write(what, lambda: self._port.create(value))
        return result

    async def replace(self, value: Json) -> Json:
        result: Json = await self._write(f"replace {value['kind']}", lambda: self._port.replace(value))
        return result

    async def remove_owners(self, kind: ResourceKind, value: Json, entries: Sequence[int]) -> Json:
        act = lambda: self._port.remove_owners(kind, value, entries)  # noqa: E731 - one of six of its kind
        result: Json = await self._write(f"disown {kind}", act)
        return result

    async def scale(self, kind: ResourceKind, name: str, namespace: str, replicas: int, *, uid: str) -> Json:
        act = lambda: self._port.scale(kind, name, namespace, replicas, uid=uid)  # noqa: E731 - one of six of its kind
        result: Json = await self._write(f"scale {kind}", act)
        return result

    async def delete(self, kind: ResourceKind, name: str, namespace: str = "", *, uid: str = "") -> bool:
        act = lambda: self._port.delete(kind, name, namespace, uid=uid)  # noqa: E731 - one of five of its kind
        return bool(await self._write(f"delete {kind}", act))

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> Json | None:
        return await self._port.get(kind, name, namespace)

    def pages(self, kind: ResourceKind, namespace: str = "", *, labels: str = "") -> AsyncIterator[ListPage]:
        return self._port.pages(kind, namespace, labels=labels)

    def watch(
        self, kind: ResourceKind, namespace: str = "", *, labels: str = "", resource_version: str
    ) -> AsyncIterator[WatchEvent]:
        return self._port.watch(kind, namespace, labels=labels, resource_version=resource_version)


async def become_true(condition: Callable[[], bool], task: asyncio.Future[None] | None = None) -> None:
    """Wait for it, while the task goes on."""
    deadline = time.monotonic() + 60
    while not condition():
        assert task is None or not task.done(), "the task has ended"
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Running:
    """One process of the operator."""

    def __init__(self, cache: ClusterCache, controller: Controller, tasks: set[asyncio.Task[Any]]) -> None:
        self.cache = cache
        self.controller = controller
        self._tasks = tasks
        self._quiet_looks = 0
        self._last: tuple[object, ...] = ()
        for store in cache.stores.values():
            store.listen(partial(self._note, store.kind))
        cache.listen_reports(self._note)

    def _note(self, *what: object) -> None:
        self._quiet_looks = 0
        self._last = (*self._last[-4:], what)

    async def rest(self, *, within: float = 180.0) -> bool:
        """Wait until it is idle; False if it was killed meanwhile."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        self._note()
        while True:
            done, _ = await asyncio.wait(self._tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if _is_killed(error):
                    return False
                raise AssertionError("a task ended") from error
            self._quiet_looks = 0 if self.controller.queue.busy else self._quiet_looks + 1
            if self._quiet_looks > QUIET_LOOKS:
                return True
            assert loop.time() - begin < within, (
                f"not idle: busy {self.controller.queue.busy}, last events {self._last}"
            )


def _is_killed(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_is_killed(one) for one in error.exceptions)
    return isinstance(error, Killed)


@asynccontextmanager
async def running(
    kubeconfig: Path,
    *namespaces: str,
    wrap: Callable[[ClusterPort], ClusterPort] = lambda port: port,
    settings: Settings | None = None,
) -> AsyncIterator[Running]:
    """Start an operator with empty caches, and end it as a kill does: without a clean-up."""
    # No kubelet runs the jobs of these tests: with a limit, the first one would keep the others waiting.
    chosen = settings or Settings.load(
        {f"PENSTOCK_OPERATOR_MAX_CONCURRENT_{what}": "100" for what in ("OPTIMIZATIONS", "ROLLOUTS")}
    )
    configuration = await load_configuration(str(kubeconfig))
    async with KubernetesPort(configuration) as real:
        port = wrap(real)
        cache = ClusterCache(chosen.plan_settings())
        controller = Controller(port, cache, identity="test", namespaces=namespaces)
        informers = (
            *make_informers(port, cache, namespaces),
            Informer(port, cache.classes),
            *(Informer(port, cache.models, namespace=namespace) for namespace in namespaces),
            *(Informer(port, cache.endpoints, namespace=namespace) for namespace in namespaces),
        )
        tasks: set[asyncio.Task[Any]] = {asyncio.create_task(informer.run()) for informer in informers}
        try:
            async with asyncio.timeout(120):
                for informer in informers:
                    await informer.synced.wait()
            await controller.begin()
            tasks.add(asyncio.create_task(controller.work(4)))
            yield Running(cache, controller, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
