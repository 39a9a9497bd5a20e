"""What containerd, the pods' network and the kubelet of a node read: pure functions from the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.layout import HOST_ADDRESS, Node, core_list

PAUSE_IMAGE = "localhost/penstock-testbed-pause:1"
CNI_PLUGINS = Path("/usr/lib/cni")
CLUSTER_DOMAIN = "cluster.local"


def containerd(node: Node, *, snapshotter: str) -> str:
    """containerd.toml, version 2 (containerd 1.6 and 1.7).

    `snapshotter`: overlayfs, or native where the state lies on an overlay itself (inside a container).
    """
    folder = node.folder
    return f"""\
version = 2
root = "{folder}/containerd"
state = "{folder}/state"
[grpc]
  address = "{node.socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Root without CAP_SYS_RESOURCE (a container, some virtual machines) may not lower a score below its own.
  restrict_oom_score_adj = true
  # Below our folder, so that they go with it.
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "runc"
        SystemdCgroup = false
"""


def pod_network(node: Node) -> dict[str, Any]:
    """The CNI configuration: a bridge of the node's own; the machine routes between bridges."""
    return {
        "cniVersion": "1.0.0",
        "name": node.network,
        "plugins": [
            {
                "type": "bridge",
                "bridge": node.bridge,
                "isGateway": True,
                # Addresses stay as they are, within the machine; what may leave it is `services.egress`'s business.
                "ipMasq": False,
                # A pod may reach itself through its Service.
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(node.folder / "addresses"),
                    "ranges": [[{"subnet": node.pod_network}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def kubelet(node: Node, *, client_authority: Path) -> dict[str, Any]:
    """The KubeletConfiguration: static CPU manager, and nothing outside the node's folder."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "port": node.kubelet_port,
        "healthzBindAddress": node.address,
        "healthzPort": 10248,
        "readOnlyPort": 0,
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cpuManagerPolicy": "static",
        "cpuManagerReconcilePeriod": "1s",
        "reservedSystemCPUs": core_list(node.reserved),
        "clusterDNS": [HOST_ADDRESS],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(node.folder / "pod-logs"),
        "volumePluginDir": str(node.folder / "volume-plugins"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(client_authority)},
        },
        "authorization": {"mode": "Webhook"},
        # A test machine's disk is never as empty as a node's should be; images are put there by hand and must stay. No
        # shares: of a large shared disk, a hundredth is gigabytes.
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "200Mi",
            "nodefs.inodesFree": "10000",
            "imagefs.available": "200Mi",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "makeIPTablesUtilChains": False,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "maxPods": 100,
        "shutdownGracePeriod": "0s",
    }


def kubelet_arguments(node: Node, *, kubeconfig: Path) -> list[str]:
    """The kubelet's command line."""
    return [
        "kubelet",
        f"--config={node.folder / 'kubelet.yaml'}",
        f"--kubeconfig={kubeconfig}",
        f"--root-dir={node.folder / 'kubelet'}",
        f"--cert-dir={node.folder / 'kubelet-pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
        "-v=2",
    ]
