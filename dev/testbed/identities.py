"""Who is who in a test cluster: one authority, a certificate for each program and user, and their kubeconfigs.

Pure: PEM bytes in and out. Kubernetes reads a client certificate's common name as the user and its organisations as
the groups. Keys are elliptic (P-256): eight certificates take milliseconds.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = timedelta(days=365)
CLOCK_SKEW = timedelta(hours=1)


@dataclass(frozen=True)
class Identity:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True)
class KeyPair:
    """What service-account tokens are signed with and checked by, PEM."""

    private: bytes
    public: bytes


@dataclass(frozen=True)
class Authority(Identity):
    """The one authority that all of a cluster's programs trust."""

    @classmethod
    def create(cls) -> Authority:
        """A new one, which signs its own certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("penstock-testbed", ())
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))

    def client(self, user: str, *groups: str) -> Identity:
        """A certificate that makes its bearer `user`, a member of `groups`."""
        return self._issue(_name(user, groups), (ExtendedKeyUsageOID.CLIENT_AUTH,), ())

    def server(self, user: str, hosts: Sequence[str]) -> Identity:
        """A certificate of a server that is reached by any of `hosts` (names or addresses)."""
        return self._issue(_name(user, ()), (ExtendedKeyUsageOID.SERVER_AUTH,), hosts)

    def peer(self, user: str, hosts: Sequence[str]) -> Identity:
        """The same, of a server that shows its certificate to other servers as well."""
        purposes = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
        return self._issue(_name(user, ()), purposes, hosts)

    def _issue(self, subject: x509.Name, purposes: Sequence[x509.ObjectIdentifier], hosts: Sequence[str]) -> Identity:
        issuer = x509.load_pem_x509_certificate(self.certificate)
        signer = serialization.load_pem_private_key(self.key, password=None)
        if not isinstance(signer, ec.EllipticCurvePrivateKey):
            raise TypeError(f"the authority's key is no elliptic one: {type(signer).__name__}")
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(subject, issuer.subject, key.public_key())
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(list(purposes)), critical=False)
            # RFC 5280 requires both key identifiers, and Python holds to it from 3.13 on.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        certificate = builder.sign(signer, hashes.SHA256())
        return Identity(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def key_pair() -> KeyPair:
    """A new key for signing service-account tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return KeyPair(_pem(key), public)


def kubeconfig(server: str, authority: bytes, user: str, identity: Identity) -> dict[str, Any]:
    """A client's configuration with everything in it, so that one file can be handed on.

    `server` is a URL, `authority` the PEM of the authority's certificate.
    """
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "testbed",
        "clusters": [
            {"name": "testbed", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}
        ],
        "users": [
            {
                "name": user,
                "user": {
                    "client-certificate-data": _base64(identity.certificate),
                    "client-key-data": _base64(identity.key),
                },
            }
        ],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user, "namespace": "default"}}],
    }


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _name(user: str, groups: Sequence[str]) -> x509.Name:
    organisations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organisations, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    # PKCS#8: the older form is not read by every program here.
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
