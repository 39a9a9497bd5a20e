"""Arguments and keys of the control plane's programs."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from testbed.identities import Authority, kubeconfig
from testbed.layout import HOST_ADDRESS
from testbed.ports import free_ports, some_free_ports
from testbed.programs import Ports, Settings, api_hosts, arguments

FOLDER = Path("/var/tmp/bed")


def test_extra_arguments_come_last_so_that_they_win() -> None:
    settings = Settings(FOLDER, extra={"kube-apiserver": ("--authorization-mode=AlwaysAllow",)})

    assert arguments(settings)["kube-apiserver"][-1] == "--authorization-mode=AlwaysAllow"


def test_extra_arguments_of_no_program_are_refused() -> None:
    with pytest.raises(ValueError, match="no program of a control plane: kubelet; there are etcd, kube-apiserver"):
        arguments(Settings(FOLDER, extra={"kubelet": ()}))


def test_every_program_listens_at_its_configured_port() -> None:
    ports = Ports(etcd=1, etcd_peer=2, api=3, controller_manager=4, scheduler=5)

    by_program = arguments(Settings(FOLDER, ports=ports))

    assert "--listen-client-urls=http://127.0.0.1:1" in by_program["etcd"]
    assert "--listen-peer-urls=http://127.0.0.1:2" in by_program["etcd"]
    assert "--secure-port=3" in by_program["kube-apiserver"]
    assert "--etcd-servers=http://127.0.0.1:1" in by_program["kube-apiserver"]
    assert "--secure-port=4" in by_program["kube-controller-manager"]
    assert "--secure-port=5" in by_program["kube-scheduler"]


@pytest.mark.parametrize(("address", "reconciler"), [("127.0.0.1", "none"), (HOST_ADDRESS, "lease")])
def test_loopback_is_no_endpoint_of_the_api_servers_service(address: str, reconciler: str) -> None:
    assert f"--endpoint-reconciler-type={reconciler}" in arguments(Settings(FOLDER, address=address))["kube-apiserver"]


def test_everything_is_written_below_the_folder() -> None:
    lines = [argument for line in arguments(Settings(FOLDER)).values() for argument in line]
    paths = [argument.partition("=")[2] for argument in lines if argument.partition("=")[2].startswith("/")]

    assert paths
    assert all(Path(path).is_relative_to(FOLDER) for path in paths)


def test_server_certificate_names_every_way_to_the_api_server() -> None:
    hosts = api_hosts(Settings(FOLDER, address=HOST_ADDRESS))
    certificate = x509.load_pem_x509_certificate(Authority.create().server("kube-apiserver", hosts).certificate)

    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    assert {str(address) for address in names.get_values_for_type(x509.IPAddress)} == {
        "10.99.0.1",
        "127.0.0.1",
        "10.96.0.1",
    }
    assert "kubernetes.default.svc" in names.get_values_for_type(x509.DNSName)


def test_client_certificate_carries_user_and_groups() -> None:
    authority = Authority.create()
    certificate = x509.load_pem_x509_certificate(authority.client("ann", "one", "two").certificate)

    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.certificate))
    subject = certificate.subject
    assert [name.value for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["ann"]
    assert [name.value for name in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["one", "two"]


def test_kubeconfig_has_everything_in_it() -> None:
    authority = Authority.create()
    identity = authority.client("ann")

    configuration = kubeconfig("https://127.0.0.1:1", authority.certificate, "ann", identity)

    (user,) = configuration["users"]
    assert base64.b64decode(user["user"]["client-key-data"]) == identity.key
    assert configuration["contexts"][0]["context"]["user"] == "ann"


def test_free_ports_are_different_ones() -> None:
    found = some_free_ports(50)

    assert len(set(found)) == 50
    assert len({*vars(free_ports()).values()}) == 5
