"""Which Prometheus servers the operator may query for an endpoint. Pure; the addresses that a host resolves to are
checked when the connection is made (`scaling/read/prometheus.py`).

Users who may create ModelEndpoints choose the URL, and the operator connects from its network. Without
an allow-list they could make it send requests to any server that it reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from penstock.resources.fields.text_fields import PROMETHEUS_URL_PATTERN
from penstock_operator.endpoint.pods.network import METADATA_ADDRESSES
from penstock_operator.facts.installation import PlanSettings

DEFAULT_PORTS = {"http": 80, "https": 443}
HOST_PATTERN = re.compile(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:([0-9]{1,5}|\*))?")
"""`prometheus.monitoring.svc`, `*.monitoring.svc`, each with or without a port, or with `:*` for every port."""
OPEN_PORTS = frozenset({80, 443, 9090, 9091, 9443})
"""Ports of an allowed host without one: of the schemes, of Prometheus (9090), and of OpenShift's (9091) and of proxies
before it (9443)."""
NAT64 = IPv6Network("64:ff9b::/96")
POD_IDENTITY = IPv6Address("fd00:ec2::23")
"""AWS's service of credentials for the account of a pod, here of the operator's own. Its IPv4 address is link-local."""

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network


@dataclass(frozen=True)
class _Place:
    """Where a URL leads."""

    host: str
    port: int


def url_problem(url: str, settings: PlanSettings) -> str:
    """Why an endpoint may not name this URL, as a clause with a remedy; empty: it may."""
    place = _place(url)
    if place is None:
        return (
            f"{url[:80]!r} is not the address of a Prometheus: write http or https, a host, a port and a path, without "
            "user, query and fragment"
        )
    own = _place(settings.prometheus_url)
    if place == own or any(_matches(place, pattern) for pattern in settings.prometheus_hosts):
        return ""
    return (
        f"the operator does not query port {place.port} of the host {place.host}: name one that its setting "
        "prometheus_hosts allows (in the chart prometheus.allowedHosts), or leave scaling.metrics.prometheus.url out"
    )


def _place(url: str) -> _Place | None:
    if not re.fullmatch(PROMETHEUS_URL_PATTERN, url):
        return None
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORTS[parts.scheme]
    except ValueError:  # a port above 65535
        return None
    return _Place(parts.hostname or "", port)


def _matches(place: _Place, pattern: str) -> bool:
    host, _, port = pattern.lower().partition(":")
    if port != "*" and place.port not in ({int(port)} if port else OPEN_PORTS):
        return False
    return place.host.endswith(host[1:]) if host.startswith("*.") else place.host == host


def address_allowed(text: str, networks: tuple[IpNetwork, ...]) -> bool:
    """Whether the operator may connect to this address for an endpoint: not one of its own pod or node, nor one of a
    cloud's metadata service. `networks`: allowed in any case."""
    address = _embedded(ip_address(text.partition("%")[0]))
    if any(address in network for network in networks):
        return True
    return not (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address.is_reserved
        or address in METADATA_ADDRESSES
        or address == POD_IDENTITY
        # Teredo: two IPv4 addresses inside.
        or (isinstance(address, IPv6Address) and address.teredo is not None)
    )


def _embedded(address: IpAddress) -> IpAddress:
    """The IPv4 address inside an IPv6 address that has one; another address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address
