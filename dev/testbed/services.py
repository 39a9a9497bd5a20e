"""What makes Services and names work, once for the whole machine: kube-proxy, CoreDNS, and the way out. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.layout import HOST_ADDRESS, HOST_NETWORK
from testbed.node_files import CLUSTER_DOMAIN
from testbed.programs import LOOPBACK, POD_NETWORK, SERVICE_NETWORK

EGRESS_TABLE = "penstock_testbed"
PROXY_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))
"""nftables tables that kube-proxy makes: family and name."""


def proxy(node: str, *, kubeconfig: Path, health_port: int, metrics_port: int) -> dict[str, Any]:
    """The KubeProxyConfiguration. All nodes share the machine's network, so that one of them proxies for all."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "hostnameOverride": node,
        "clusterCIDR": POD_NETWORK,
        "bindAddress": HOST_ADDRESS,
        "healthzBindAddress": f"{LOOPBACK}:{health_port}",
        "metricsBindAddress": f"{LOOPBACK}:{metrics_port}",
        "nodePortAddresses": [HOST_NETWORK],
        # The machine's own limits stay as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def corefile(*, kubeconfig: Path, ready_port: int, forward: bool) -> str:
    """CoreDNS's configuration: the cluster's names, and other names only if the cluster may reach them.

    Without `forward` every other name does not exist: nothing leaves the machine.
    """
    others = "forward . /etc/resolv.conf" if forward else "template ANY ANY {\n    rcode NXDOMAIN\n  }"
    return f"""\
{CLUSTER_DOMAIN}:53 in-addr.arpa:53 {{
  bind {HOST_ADDRESS}
  errors
  ready {LOOPBACK}:{ready_port}
  kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{
    kubeconfig {kubeconfig}
    pods insecure
    ttl 5
  }}
  cache 5
}}
.:53 {{
  bind {HOST_ADDRESS}
  errors
  {others}
}}
"""


def egress() -> str:
    """The nftables script that lets pods out, under the machine's address."""
    inside = f"{POD_NETWORK}, {SERVICE_NETWORK}, {HOST_NETWORK}"
    return f"""\
table ip {EGRESS_TABLE} {{
  chain postrouting {{
    type nat hook postrouting priority srcnat;
    ip saddr {POD_NETWORK} ip daddr != {{ {inside} }} masquerade
  }}
}}
"""
