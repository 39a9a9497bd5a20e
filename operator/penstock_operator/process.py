"""The life cycle of an operator process: wait for the lease, lead and reconcile, and end on a signal or when the
lease is lost."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_network
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from penstock.errors import SettingError
from penstock.logs import log_event
from penstock_operator.cluster.api import ClusterPort
from penstock_operator.cluster.informer import Informer
from penstock_operator.cluster.kubernetes import NO_RETRIES, KubernetesPort, load_configuration
from penstock_operator.collectors import CacheCollector, ScalingCollector
from penstock_operator.control import handlers
from penstock_operator.control.cache import MANAGED_SELECTOR, ClusterCache
from penstock_operator.control.controller import Controller
from penstock_operator.control.garbage_collection import StoreCollection
from penstock_operator.control.pod_reports import JobProgressReader, PodInfoReader, TextsReader
from penstock_operator.facts.names import GATEWAY_STATUS_PORT, INTERNAL_PORT
from penstock_operator.health import HealthChecks, serve
from penstock_operator.leader.election import Election
from penstock_operator.leader.lease import Leadership, LeaseTimes
from penstock_operator.metrics import REGISTRY
from penstock_operator.scaling.canaries import CanaryLoop
from penstock_operator.scaling.loop import Autoscaler, ScalingIntervals
from penstock_operator.scaling.read.gateways import parse_gateway_metrics
from penstock_operator.scaling.read.prometheus import OwnPrometheus, PrometheusClient
from penstock_operator.scaling.read.scrape import PodScraper
from penstock_operator.settings import LoadSettings, Settings
from penstock_operator.supervision import supervised

ENDING_SECONDS = 8.0
"""Time for tasks to end. A task that takes longer is abandoned: it may not write any more."""
SYNC_HINT_SECONDS = 10.0

logger = logging.getLogger(__name__)


async def run(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT: returns 0. Returns 1 when a task ends that should not, for example because the
    lease is lost."""
    # Imported modules stay in memory: scanning them again costs the garbage collector a tenth of a second each time.
    gc.collect()
    gc.freeze()
    configuration = await load_configuration(settings.cluster.kubeconfig)
    stop = asyncio.Event()
    _stop_on_signals(stop)
    health = HealthChecks(limit_seconds=settings.server.silence_limit_seconds)
    async with AsyncExitStack() as stack:
        try:
            server = await serve(health, REGISTRY, host=settings.server.host, port=settings.server.port)
        except OSError as error:
            raise SettingError(
                f"cannot listen on {settings.server.host}:{settings.server.port}: {error}",
                field="PENSTOCK_OPERATOR_PORT",
                remedy="Choose another port, or 0 for a free one",
            ) from error
        stack.push_async_callback(server.cleanup)
        identity = settings.new_identity()
        election = await stack.enter_async_context(
            Election(
                lambda: _leadership(settings, identity=identity), hung_seconds=settings.server.silence_limit_seconds
            )
        )
        health.add_ages(lambda: {"lease": election.silence_seconds})
        health.set_readiness(
            lambda: "" if election.looked else "has not read the lease yet: is the API server reachable?"
        )
        if not await _before(stop, election.acquire()):
            return 0
        hold = asyncio.create_task(election.hold(), name="the lease")
        try:
            return await _lead(
                configuration, settings, election=election, identity=identity, health=health, stop=stop, hold=hold
            )
        finally:
            hold.cancel()
            await asyncio.wait({hold})


@asynccontextmanager
async def _leadership(settings: Settings, *, identity: str) -> AsyncIterator[Leadership]:
    """Opened in the thread of the election."""
    times = LeaseTimes(
        settings.leader.lease_duration_seconds,
        settings.leader.lease_deadline_seconds,
        settings.leader.lease_interval_seconds,
    )
    # A separate configuration and connections, without retries: a renewal must not queue behind thousands of applies.
    configuration = await load_configuration(settings.cluster.kubeconfig)
    async with KubernetesPort(configuration, timeout_seconds=times.deadline_seconds, retries=NO_RETRIES) as port:
        yield Leadership(
            port, namespace=settings.operator_namespace, name=settings.leader.lease_name, identity=identity, times=times
        )


async def _lead(
    configuration: Configuration,
    settings: Settings,
    *,
    election: Election,
    identity: str,
    health: HealthChecks,
    stop: asyncio.Event,
    hold: asyncio.Task[None],
) -> int:
    async with KubernetesPort(
        configuration, timeout_seconds=settings.cluster.api_timeout_seconds, may_write=lambda: election.held
    ) as port:
        cache = ClusterCache(settings.plan_settings())
        namespaces = settings.cluster.namespaces
        controller = Controller(
            port, cache, identity=identity, namespaces=namespaces, resync_seconds=settings.work.resync_seconds
        )
        pod_info = PodInfoReader(
            cache, timeout_seconds=settings.work.probe_timeout_seconds, concurrency=settings.work.probe_concurrency
        )
        autoscaler = make_autoscaler(port, cache, settings.scaling)
        canaries = make_canary_loop(cache, settings.scaling)
        progress = JobProgressReader(
            cache,
            interval_seconds=settings.work.progress_seconds,
            timeout_seconds=settings.work.probe_timeout_seconds,
            concurrency=settings.work.probe_concurrency,
        )
        texts = TextsReader(port, cache, interval_seconds=settings.work.texts_seconds)
        collector = StoreCollection(port, cache, caches_current=lambda: health.live().ok)
        collecting = bool(settings.store.store_collect_seconds)
        informers = make_informers(port, cache, namespaces, settings.operator_namespace if collecting else "")
        health.add_ages(lambda: {informer.name: informer.silence_seconds for informer in informers})
        health.add_ages(lambda: {"work": controller.progress.age_seconds, "autoscaler": autoscaler.age_seconds})
        health.set_readiness(lambda: _missing(informers) or _not_begun(controller))
        cache_metrics = CacheCollector(cache, health.ages)
        REGISTRY.register(cache_metrics)
        scaling_metrics = ScalingCollector(autoscaler.decisions)
        REGISTRY.register(scaling_metrics)
        tasks = {hold, asyncio.create_task(stop.wait(), name="a signal")}
        tasks.update(_supervised(f"the watch of {informer.name}", informer.run) for informer in informers)
        stop_kopf = asyncio.Event()
        try:
            synced = asyncio.create_task(_synced(informers), name="the first lists")
            done, _ = await asyncio.wait({*tasks, synced}, return_when=asyncio.FIRST_COMPLETED)
            if synced not in done:
                synced.cancel()
                return _ended(done, stop)
            # The workers handle the errors of each reconcile. Another one could leave a key of the queue locked, so it
            # ends the process.
            tasks.add(asyncio.create_task(controller.work(settings.work.workers), name="the workers"))
            for name, work in (
                ("the resync", controller.resync.run),
                ("the reads of /info", pod_info.run),
                ("the reads of the progress of jobs", progress.run),
                ("the reads of text ConfigMaps", texts.run),
                ("the garbage collection of the store", collector.run),
                ("the autoscaler", autoscaler.run),
                ("the judging of canaries", canaries.run),
            ):
                tasks.add(_supervised(name, work))
            # Kopf starts last: when it ends it cancels every task that was started after it.
            watch = run_kopf(configuration, settings, controller, cache, stop=stop, stop_kopf=stop_kopf)
            tasks.add(asyncio.create_task(watch, name="Kopf"))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return _ended(done, stop)
        finally:
            REGISTRY.unregister(cache_metrics)
            REGISTRY.unregister(scaling_metrics)
            stop_kopf.set()
            for task in tasks - {hold}:
                if task.get_name() != "Kopf":
                    task.cancel()
            _, left = await asyncio.wait(tasks - {hold}, timeout=ENDING_SECONDS)
            for task in left:
                logger.warning(
                    "%s did not end within %g s",
                    task.get_name(),
                    ENDING_SECONDS,
                    extra=log_event("TaskNotEnded", object=task.get_name()),
                )
                task.cancel()


def make_autoscaler(
    port: ClusterPort,
    cache: ClusterCache,
    settings: LoadSettings,
    *,
    pod_port: int = INTERNAL_PORT,
    gateway_port: int = GATEWAY_STATUS_PORT,
) -> Autoscaler:
    """The autoscaler with these settings."""
    return Autoscaler(
        port,
        cache,
        scraper=PodScraper(
            timeout_seconds=settings.scrape_timeout_seconds, concurrency=settings.scrape_concurrency, port=pod_port
        ),
        gateways=PodScraper(
            timeout_seconds=settings.scrape_timeout_seconds,
            concurrency=settings.scrape_concurrency,
            port=gateway_port,
            reader=parse_gateway_metrics,
        ),
        gateway_port=gateway_port,
        prometheus=PrometheusClient(
            timeout_seconds=settings.prometheus_timeout_seconds,
            concurrency=settings.prometheus_concurrency,
            networks=tuple(map(ip_network, settings.prometheus_networks)),
        ),
        intervals=ScalingIntervals(
            tick=settings.scaling_interval_seconds, prometheus=settings.prometheus_interval_seconds
        ),
        default=OwnPrometheus(
            settings.prometheus_url, token_file=settings.prometheus_token_file, ca_file=settings.prometheus_ca_file
        ),
    )


def make_canary_loop(cache: ClusterCache, settings: LoadSettings) -> CanaryLoop:
    """The loop that judges canaries, with these settings."""
    scraper = PodScraper(
        timeout_seconds=settings.scrape_timeout_seconds, concurrency=settings.scrape_concurrency, port=INTERNAL_PORT
    )
    return CanaryLoop(cache, scraper, interval_seconds=settings.scaling_interval_seconds)


def make_informers(
    port: ClusterPort, cache: ClusterCache, namespaces: tuple[str, ...], collection: str = ""
) -> tuple[Informer[Any], ...]:
    """A watch for each kind and namespace. Penstock's own kinds are not among them: Kopf watches them. `collection`:
    the namespace of the jobs that collect garbage in the artefact store."""
    optional = {cache.scaled_objects, cache.http_routes}
    made = (
        Informer(port, store, namespace=namespace, labels=MANAGED_SELECTOR, optional=store in optional)
        for store in cache.made
        for namespace in namespaces or ("",)
    )
    found = (Informer(port, cache.nodes), Informer(port, cache.namespaces), *made)
    if not namespaces or collection in {"", *namespaces}:
        return found
    return (*found, Informer(port, cache.jobs, namespace=collection, labels=MANAGED_SELECTOR))


async def run_kopf(
    configuration: Configuration,
    settings: Settings,
    controller: Controller,
    cache: ClusterCache,
    *,
    stop: asyncio.Event,
    stop_kopf: asyncio.Event,
) -> None:
    """Run Kopf until `stop_kopf`. It ends without an error only then; an earlier end is a failure."""
    namespaces = settings.cluster.namespaces
    existing = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=handlers.registry(
            (cache.classes, cache.models, cache.endpoints),
            start=controller.begin,
            relisted=controller.resync.relisted,
            login=lambda: handlers.connection_info(configuration),
        ),
        settings=handlers.settings(api_timeout_seconds=settings.cluster.api_timeout_seconds),
        standalone=True,
        clusterwide=not namespaces,
        namespaces=list(namespaces),
        stop_flag=stop_kopf,
    )
    # Kopf has installed its own handlers.
    _stop_on_signals(stop)
    await kopf.run_tasks(tasks, ignored=existing)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _supervised(name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    return asyncio.create_task(supervised(name, run), name=name)


async def _synced(informers: tuple[Informer[Any], ...]) -> None:
    while missing := _missing(informers):
        waits = [asyncio.create_task(informer.synced.wait()) for informer in informers]
        try:
            _, pending = await asyncio.wait(waits, timeout=SYNC_HINT_SECONDS)
        finally:
            for wait in waits:
                wait.cancel()
        if pending:
            logger.warning(
                "%s; are the CRDs installed (crds/), and the RBAC rules?", missing, extra=log_event("FirstListsPending")
            )


def _missing(informers: tuple[Informer[Any], ...]) -> str:
    names = [informer.name for informer in informers if not informer.synced.is_set()]
    return f"waiting for the first list of {', '.join(names)}" if names else ""


def _not_begun(controller: Controller) -> str:
    return "" if controller.begun.is_set() else "waiting for the first list of ModelEndpoints"


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work ended before the stop."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        await _cancelled(task, stopped)


async def _cancelled(*tasks: Awaitable[Any]) -> None:
    for task in tasks:
        if isinstance(task, asyncio.Task):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ended(done: set[asyncio.Task[Any]], stop: asyncio.Event) -> int:
    """The exit status, by the task that ended first."""
    for task in done:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error(
                "%s ended: %s",
                task.get_name(),
                error,
                exc_info=error,
                extra=log_event("TaskFailed", object=task.get_name(), reason=error),
            )
            return 1
    if stop.is_set():
        logger.info("ending after a signal", extra=log_event("OperatorStopping", reason="Signal"))
        return 0
    names = " and ".join(sorted(task.get_name() for task in done))
    logger.error("%s ended", names, extra=log_event("TaskEnded", object=names))
    return 1
