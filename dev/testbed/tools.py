"""The programs that are built from Go modules, each a module below this folder, and the key of each build.

Pure: `build` does the building.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).parent
KUBERNETES = "1.34.4"
"""Also in kube/go.mod (a test compares them). 1.35 drops cgroup v1 by default: stay until hosts have v2."""

_MAJOR, _MINOR, _ = KUBERNETES.split(".")


@dataclass(frozen=True)
class Tool:
    """One Go build."""

    name: str
    """The binary's name."""

    module: str = ""
    """The folder below `dev/testbed/` that holds go.mod and go.sum; empty: the binary's name."""

    package: str = "."
    """What to build: the folder's own main.go, or a command of a module that go.mod requires."""

    programs: tuple[str, ...] = ()
    """Further names for the binary (symbolic links): a multi-call binary acts by its name."""

    tags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    """Go variables that the linker sets, such as the version that a program reports."""

    cold_minutes: float = 1
    """How long a build from nothing takes on two cores, downloads included. For the message only."""

    @property
    def source(self) -> Path:
        """The folder of its Go module."""
        return SOURCES / (self.module or self.name)

    def flags(self) -> list[str]:
        """Arguments of `go build`: the same sources give the same binary wherever they lie."""
        settings = [f"-X={name}={value}" for name, value in self.variables.items()]
        tags = [f"-tags={','.join(self.tags)}"] if self.tags else []
        return ["-mod=readonly", "-trimpath", "-buildvcs=false", *tags, f"-ldflags={' '.join(['-s', '-w', *settings])}"]


def oldest_go(source: Path) -> str:
    """The oldest Go that builds the module in this folder, such as `1.25`: its go.mod has it."""
    line = next(one for one in (source / "go.mod").read_text(encoding="utf-8").splitlines() if one.startswith("go "))
    return ".".join(line.removeprefix("go ").split(".")[:2])


def _kubernetes_version() -> dict[str, str]:
    """The programs compare versions with each other, and an unstamped build calls itself `v0.0.0-master`."""
    stamp = {
        "gitVersion": f"v{KUBERNETES}",
        "gitMajor": _MAJOR,
        "gitMinor": _MINOR,
        "gitTreeState": "clean",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    return {f"{package}.{name}": value for package in packages for name, value in stamp.items()}


KUBE = Tool(
    name="kube",
    programs=(
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kube-proxy",
        "kubectl",
    ),
    tags=("providerless",),
    variables=_kubernetes_version(),
    cold_minutes=8,
)
PAUSE = Tool(name="pause", cold_minutes=0.2)
KWOK = Tool(
    name="kwok",
    package="sigs.k8s.io/kwok/cmd/kwok",
    variables={"sigs.k8s.io/kwok/pkg/consts.Version": "v0.7.0"},
    cold_minutes=3,
)
HELM = Tool(
    name="helm",
    package="helm.sh/helm/v3/cmd/helm",
    variables={
        "helm.sh/helm/v3/internal/version.version": "v3.19.2",
        # What `helm template` takes a cluster to be where there is none.
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": _MAJOR,
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": _MINOR,
    },
    cold_minutes=2.5,
)
COREDNS = Tool(name="coredns", package="github.com/coredns/coredns", cold_minutes=4)
PROMETHEUS = Tool(
    name="prometheus",
    package="github.com/prometheus/prometheus/cmd/prometheus",
    # Of all the ways to find targets only Kubernetes': the rest are the SDKs of a dozen clouds.
    tags=("netgo", "remove_all_sd", "enable_kubernetes_sd"),
    variables={"github.com/prometheus/common/version.Version": "3.12.0"},
    cold_minutes=5,
)
PROMTOOL = Tool(
    name="promtool",
    package="github.com/prometheus/prometheus/cmd/promtool",
    tags=PROMETHEUS.tags,
    variables=PROMETHEUS.variables,
    cold_minutes=1.5,
)
EXTERNAL_METRICS = Tool(name="external-metrics", cold_minutes=3)
PROMETHEUS_ADAPTER = Tool(
    name="prometheus-adapter", package="sigs.k8s.io/prometheus-adapter/cmd/adapter", cold_minutes=4
)
_KEDA_VERSION = {"github.com/kedacore/keda/v2/version.Version": "2.21.0"}
KEDA = Tool(
    name="keda-operator",
    module="keda",
    package="github.com/kedacore/keda/v2/cmd/operator",
    variables=_KEDA_VERSION,
    cold_minutes=11,
)
KEDA_ADAPTER = Tool(
    name="keda-adapter",
    module="keda",
    package="github.com/kedacore/keda/v2/cmd/adapter",
    variables=_KEDA_VERSION,
    cold_minutes=2,
)
ACTIONLINT = Tool(name="actionlint", package="github.com/rhysd/actionlint/cmd/actionlint", cold_minutes=0.5)

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        KUBE,
        PAUSE,
        KWOK,
        HELM,
        COREDNS,
        PROMETHEUS,
        PROMTOOL,
        EXTERNAL_METRICS,
        PROMETHEUS_ADAPTER,
        KEDA,
        KEDA_ADAPTER,
        ACTIONLINT,
    )
}
TESTED: tuple[Tool, ...] = (KUBE, PAUSE, KWOK, HELM, COREDNS, PROMETHEUS, PROMTOOL, EXTERNAL_METRICS, ACTIONLINT)
"""What `make test` uses, and builds beforehand; KEDA and prometheus-adapter are for the extended tests, which build
them when they come to them."""


def content_key(tool: Tool, *, go_version: str, platform: str) -> str:
    """16 hex digits over all that decides the binary: sources, pins, compiler, target, flags.

    `go_version` is the output of `go env GOVERSION`, `platform` its GOOS/GOARCH.
    """
    files = sorted(path for path in tool.source.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    parts = {
        "go": go_version,
        "platform": platform,
        "package": tool.package,
        "flags": tool.flags(),
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
