"""A Kubernetes device plugin for tests: it advertises devices that do not exist, and hands out variables and mounts.

    python -m testbed.device_plugin CONFIGURATION.json

serves the device plugin API (v1beta1) until it is ended, on a socket in the kubelet's folder `plugins_registry`, where
the kubelet finds it. (`kubelet.sock` in /var/lib/kubelet/device-plugins has one path for all kubelets of a machine.)
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from testbed.errors import BedError

API = "v1beta1"
REGISTRATION = "pluginregistration"
VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"
FIELDS = {
    API: """
Empty:
DevicePluginOptions: bool pre_start_required 1, bool get_preferred_allocation_available 2
Device: string ID 1, string health 2
ListAndWatchResponse: Device* devices 1
ContainerAllocateRequest: string* devices_ids 1
AllocateRequest: ContainerAllocateRequest* container_requests 1
Mount: string container_path 1, string host_path 2, bool read_only 3
EnvsEntry: string key 1, string value 2
ContainerAllocateResponse: EnvsEntry* envs 1, Mount* mounts 2
AllocateResponse: ContainerAllocateResponse* container_responses 1
""",
    REGISTRATION: """
InfoRequest:
PluginInfo: string type 1, string name 2, string endpoint 3, string* supported_versions 4
RegistrationStatus: bool plugin_registered 1, string error 2
RegistrationStatusResponse:
""",
}
"""The messages in use, from `api.proto` of k8s.io/kubelet 0.34: type, name and number of each field. `*`: repeated. (A
map of strings has the form of repeated pairs.)"""


@dataclass(frozen=True)
class Configuration:
    """The advertised devices, and the variables and mounts of a container that gets one."""

    resource: str
    """Such as `aws.amazon.com/neuron`."""
    registry: str
    """`plugins_registry` of the kubelet."""
    devices: Mapping[str, tuple[int, ...]]
    """NeuronCores by the name of the device. A container gets them in NEURON_RT_VISIBLE_CORES."""
    environment: Mapping[str, str]
    mounts: tuple[tuple[str, str, bool], ...] = ()
    """Folder of the node, path in the container, and whether it is read-only."""

    @classmethod
    def read(cls, text: str) -> Configuration:
        """From JSON as `write` gives it."""
        value = json.loads(text)
        mounts = tuple((host, inside, bool(read_only)) for host, inside, read_only in value.pop("mounts"))
        devices = {name: tuple(cores) for name, cores in value.pop("devices").items()}
        return cls(**value, devices=devices, mounts=mounts)

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @property
    def socket(self) -> Path:
        """Where the kubelet connects to."""
        return Path(self.registry) / f"{self.resource.replace('/', '-')}.sock"

    def environment_of(self, names: list[str]) -> dict[str, str]:
        """The variables of a container with these devices."""
        cores = sorted(core for name in names for core in self.devices[name])
        return {**self.environment, VISIBLE_CORES: ",".join(map(str, cores))}


@cache
def message(package: str, name: str) -> Any:
    """The class of a message."""
    from google.protobuf import message_factory

    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{package}.{name}"))


@cache
def _pool() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool

    kinds = descriptor_pb2.FieldDescriptorProto
    pool = descriptor_pool.DescriptorPool()
    for package, text in FIELDS.items():
        file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
        for name, fields in re.findall(r"^(\w+):(.*)$", text, re.MULTILINE):
            made = file.message_type.add(name=name)
            for kind, repeated, field, number in re.findall(r"(\w+)(\*?) (\w+) (\d+)", fields):
                label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
                added = made.field.add(name=field, number=int(number), label=label)
                if kind[0].islower():
                    added.type = getattr(kinds, f"TYPE_{kind.upper()}")
                else:
                    added.type, added.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
        pool.Add(file)
    return pool


class DevicePlugin:
    """The calls of both services. A device counts as healthy until the process ends."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.ended = threading.Event()

    def info(self, _: Any) -> Any:
        """The kubelet's request to a socket in its registry."""
        return message(REGISTRATION, "PluginInfo")(
            type="DevicePlugin",
            name=self._configuration.resource,
            endpoint=str(self._configuration.socket),
            supported_versions=[API],
        )

    def registered(self, request: Any) -> Any:
        """The kubelet's answer, for the log."""
        print("registered" if request.plugin_registered else f"refused: {request.error}", flush=True)
        return message(REGISTRATION, "RegistrationStatusResponse")()

    def options(self, _: Any) -> Any:
        """Neither of the optional calls is served."""
        return message(API, "DevicePluginOptions")()

    def devices(self, _: Any) -> Iterator[Any]:
        """All devices, once; the stream stays open as long as they exist."""
        device = message(API, "Device")
        yield message(API, "ListAndWatchResponse")(
            devices=[device(ID=name, health="Healthy") for name in self._configuration.devices]
        )
        self.ended.wait()

    def allocate(self, request: Any) -> Any:
        """Variables and mounts of containers."""
        mount, entry = message(API, "Mount"), message(API, "EnvsEntry")
        answer = message(API, "AllocateResponse")()
        for container in request.container_requests:
            variables = self._configuration.environment_of(list(container.devices_ids))
            answer.container_responses.add(
                envs=[entry(key=key, value=value) for key, value in variables.items()],
                mounts=[
                    mount(host_path=host, container_path=inside, read_only=read_only)
                    for host, inside, read_only in self._configuration.mounts
                ],
            )
        return answer


def serve(configuration: Configuration) -> None:
    """Serve until SIGTERM."""
    import grpc

    plugin = DevicePlugin(configuration)

    def unary(call: Callable[[Any], Any], package: str, request: str) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            lambda given, _: call(given), message(package, request).FromString, lambda made: made.SerializeToString()
        )

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                f"{REGISTRATION}.Registration",
                {
                    "GetInfo": unary(plugin.info, REGISTRATION, "InfoRequest"),
                    "NotifyRegistrationStatus": unary(plugin.registered, REGISTRATION, "RegistrationStatus"),
                },
            ),
            grpc.method_handlers_generic_handler(
                f"{API}.DevicePlugin",
                {
                    "GetDevicePluginOptions": unary(plugin.options, API, "Empty"),
                    "Allocate": unary(plugin.allocate, API, "AllocateRequest"),
                    "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                        lambda given, _: plugin.devices(given),
                        message(API, "Empty").FromString,
                        lambda made: made.SerializeToString(),
                    ),
                },
            ),
        )
    )
    configuration.socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{configuration.socket}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: plugin.ended.set())
    server.start()
    plugin.ended.wait()
    server.stop(1).wait()
    configuration.socket.unlink(missing_ok=True)


@contextmanager
def running_device_plugin(configuration: Configuration, folder: Path) -> Iterator[None]:
    """A process that serves it. `folder`: for its configuration and log. BedError if it ends before the block does."""
    given, log = folder / "device-plugin.json", folder / "device-plugin.log"
    given.write_text(configuration.write(), encoding="utf-8")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "testbed.device_plugin", str(given)],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
        if process.poll() is not None:
            raise BedError(f"the device plugin has ended: {log.read_text(errors='replace')[-2000:]}")
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    serve(Configuration.read(Path(sys.argv[1]).read_text(encoding="utf-8")))
