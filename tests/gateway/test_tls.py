"""A gateway of an endpoint with a certificate: HTTPS from clients and to the replicas."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509

from tests.gateway.rig import Gateway, Replica, Rig
from tests.runtime.http.secret_files import CERTIFICATE, KEY, Authority, publish

FIRST, SECOND = 1001, 1002
"""Serial numbers of certificates."""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> Path:
    folder = tmp_path / "tls"
    publish(folder, authority.issue(FIRST), FIRST)
    return folder


def start(rig: Rig, secret: Path, name: str = "a") -> Replica:
    return rig.start(name, tls_certificate=secret / CERTIFICATE, tls_key=secret / KEY)


def ask(client: httpx.Client, gateway: Gateway, **headers: str) -> int:
    url = f"https://127.0.0.1:{gateway.port}/predict"
    return client.post(url, json={"inputs": "x"}, headers=headers).status_code


def client_of(authority: Authority) -> httpx.Client:
    return httpx.Client(verify=authority.client(), trust_env=False, timeout=60)


def serial(gateway: Gateway) -> int:
    pem = ssl.get_server_certificate(("127.0.0.1", gateway.port), timeout=60)
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def wait_for_serial(gateway: Gateway, wanted: int) -> None:
    deadline = time.monotonic() + 60
    while serial(gateway) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_held_request_is_answered_over_https_by_the_first_replica(
    rig: Rig, secret: Path, authority: Authority
) -> None:
    gateway = rig.gateway(tls_folder=secret)
    found: list[int] = []

    def held() -> None:
        with client_of(authority) as client:
            found.append(ask(client, gateway))

    thread = threading.Thread(target=held)
    thread.start()
    gateway.until("held_requests", 1)
    start(rig, secret)
    thread.join(60)

    assert found == [200]


def test_a_replaced_certificate_under_load_fails_no_request(rig: Rig, secret: Path, authority: Authority) -> None:
    gateway = rig.gateway(tls_folder=secret)
    start(rig, secret)
    ends = threading.Event()
    found: list[list[Any]] = [[], []]

    def load(answers: list[Any], headers: dict[str, str]) -> None:
        with client_of(authority) as client:
            for _ in itertools.takewhile(lambda _: not ends.is_set(), range(100_000)):
                try:
                    answers.append(ask(client, gateway, **headers))
                except httpx.HTTPError as error:
                    answers.append(error)

    def more_requests(count: int) -> None:
        deadline = time.monotonic() + 60
        goals = [len(answers) + count for answers in found]
        while any(len(answers) < goal for answers, goal in zip(found, goals, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    threads = [
        threading.Thread(target=load, args=(answers, headers))
        for answers, headers in zip(found, ({}, {"connection": "close"}), strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        more_requests(10)
        publish(secret, authority.issue(SECOND), SECOND)
        wait_for_serial(gateway, SECOND)
        more_requests(10)
    finally:
        ends.set()
        for thread in threads:
            thread.join(60)

    assert {answer for answers in found for answer in answers} == {200}


def test_a_key_of_another_certificate_leaves_the_one_before_in_use(
    rig: Rig, secret: Path, authority: Authority
) -> None:
    gateway = rig.gateway(tls_folder=secret)
    publish(secret, {**authority.issue(SECOND), KEY: authority.issue(3)[KEY]}, 2)
    gateway.until_logged("HAProxy refused the changed certificate")
    during = serial(gateway)
    publish(secret, authority.issue(SECOND), 3)
    wait_for_serial(gateway, SECOND)

    assert during == FIRST


def test_a_gateway_without_its_certificate_ends_with_a_remedy(rig: Rig, tmp_path: Path) -> None:
    gateway = rig.gateway(wait=False, tls_folder=tmp_path)
    gateway.process.wait(60)

    assert "kubectl create secret tls" in gateway.log.read_text()


def test_an_older_version_than_tls_1_2_is_refused(rig: Rig, secret: Path, authority: Authority) -> None:
    gateway = rig.gateway(tls_folder=secret)
    context = authority.client()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as plain,
        pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
