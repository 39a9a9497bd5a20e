"""Files of a mounted Secret, and certificates for them."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

CERTIFICATE, KEY = "tls.crt", "tls.key"
"""As in a Secret of the type kubernetes.io/tls."""


def publish(folder: Path, content: Mapping[str, str], number: int) -> None:
    """Write a Secret as the kubelet does: files in a new folder, and a link that is replaced at once."""
    folder.mkdir(exist_ok=True)
    data = folder / f"..{number}"
    data.mkdir()
    for name, text in content.items():
        (data / name).write_text(text)
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path("..data") / name)
    draft = folder / "..data_tmp"
    draft.symlink_to(data.name)
    draft.replace(folder / "..data")
    for link in folder.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink()


@dataclass
class Authority:
    """A certificate authority that issues certificates for 127.0.0.1."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def issue(self, serial: int, *, password: str = "") -> dict[str, str]:
        """Certificate and key in PEM, by the name of the file."""
        key = ec.generate_private_key(ec.SECP256R1())
        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password:
            encryption = serialization.BestAvailableEncryption(password.encode())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption_algorithm=encryption
        )
        return {CERTIFICATE: self._signed(key.public_key(), "127.0.0.1", serial), KEY: private.decode()}

    def client(self) -> ssl.SSLContext:
        """Of a client that trusts this authority only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self._signed(self.key.public_key(), "the authority", 1))
        return context

    def _signed(self, public: ec.EllipticCurvePublicKey, name: str, serial: int) -> str:
        now = dt.datetime.now(dt.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        own = public == self.key.public_key()
        built = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the authority")]))
            .public_key(public)
            .serial_number(serial)
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=own, path_length=None), critical=True)
        )
        if not own:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            built = built.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return built.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
