"""Which URLs and addresses the operator queries for an endpoint."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SettingError
from penstock_operator.endpoint.prometheus_urls import address_allowed, url_problem
from penstock_operator.settings import Settings
from tests.operator.endpoint.kube import SETTINGS

ALLOWING = replace(
    SETTINGS,
    prometheus_url="https://own.monitoring.svc:9091/select/prometheus",
    prometheus_hosts=("*.metrics.svc", "thanos.example:10902", "10.0.0.7"),
)


@pytest.mark.parametrize(
    "url",
    [
        "https://own.monitoring.svc:9091",
        "http://a.metrics.svc",
        "http://A.b.Metrics.svc:9090/prefix",
        "http://thanos.example:10902/",
        "http://10.0.0.7:9090",
    ],
)
def test_the_operators_own_server_and_hosts_of_the_setting_are_allowed(url: str) -> None:
    assert url_problem(url, ALLOWING) == ""


@pytest.mark.parametrize(
    "url",
    [
        "https://own.monitoring.svc",
        "http://metrics.svc",
        "http://evilmetrics.svc",
        "http://a.metrics.svc.example",
        "http://thanos.example:10903",
        "http://10.0.0.70",
        "http://a.metrics.svc:22/x",
        "http://10.0.0.7:10250",
        "http://169.254.169.254",
    ],
)
def test_another_host_or_port_is_refused_with_the_setting(url: str) -> None:
    assert "that its setting prometheus_hosts allows" in url_problem(url, ALLOWING)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.metrics.svc/admin/delete?all=1&x=",
        "http://a.metrics.svc/admin#",
        "http://user:password@a.metrics.svc",
        "http://a.metrics.svc@other",
        "http://other\\@a.metrics.svc",
        "http://a.metrics.svc/%0d%0a",
        "http://a.metrics.svc\n",
        "http://a.metrics.svc:99999",
        "file://a.metrics.svc/etc/passwd",
        "ftp://a.metrics.svc",
        "http://",
        "",
    ],
)
def test_other_forms_than_scheme_host_port_and_path_are_refused(url: str) -> None:
    assert "is not the address of a Prometheus" in url_problem(url, ALLOWING)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_that_is_allowed_leads_to_an_allowed_host(before: str, after: str) -> None:
    for url in (f"http://{before}a.metrics.svc{after}", f"http://a.metrics.svc{before}{after}", before + after):
        if url_problem(url, ALLOWING) == "":
            parts = urlsplit(url)
            assert (parts.hostname or "").endswith(".metrics.svc")
            assert (parts.query, parts.fragment, parts.username, parts.password) == ("", "", None, None)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "0.0.0.0",
        "169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "224.0.0.1",
        "::",
        "::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "fd00:ec2::23",
        "2001:0:a9fe:a9fe::",
        "::ffff:169.254.169.254",
        "::ffff:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
    ],
)
def test_addresses_of_the_node_and_of_metadata_services_are_refused(address: str) -> None:
    assert not address_allowed(address, ())


@pytest.mark.parametrize("address", ["10.96.0.10", "192.168.1.1", "100.64.0.7", "8.8.8.8", "fd12::1", "2001:db8::1"])
def test_other_addresses_of_the_cluster_and_of_the_internet_are_allowed(address: str) -> None:
    assert address_allowed(address, ())


def test_a_network_of_the_setting_is_allowed() -> None:
    assert address_allowed("::ffff:127.0.0.1", (ip_network("127.0.0.0/8"),))
    assert not address_allowed("169.254.169.254", (ip_network("127.0.0.0/8"),))


@pytest.mark.parametrize(
    ("name", "text"),
    [("PROMETHEUS_HOSTS", "http://x"), ("PROMETHEUS_HOSTS", "*"), ("PROMETHEUS_NETWORKS", "127.0.0.1/8/9")],
)
def test_settings_that_are_no_hosts_or_networks_are_refused(name: str, text: str) -> None:
    with pytest.raises(SettingError):
        Settings.load({f"PENSTOCK_OPERATOR_{name}": text})
