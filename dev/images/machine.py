"""This machine's settings for reaching packages: mirrors, indexes, proxies, certificates.

All of it goes into one folder, which the build mounts while a command runs (`FROM scratch AS machine` in the
Dockerfile). It must never come into an image: it may hold names of hosts and passwords. So the folder is private,
temporary, and the tests look for it in everything that was built.
"""

from __future__ import annotations

import configparser
import io
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MIRROR = "http://deb.debian.org/debian"
SECURITY_MIRROR = "http://deb.debian.org/debian-security"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
SUITE = "trixie"

MOUNT = "/mnt"
"""Where the build sees the folder."""

PIP_VARIABLES = {
    "PIP_INDEX_URL": "index-url",
    "PIP_EXTRA_INDEX_URL": "extra-index-url",
    "PIP_TRUSTED_HOST": "trusted-host",
    "PIP_DEFAULT_TIMEOUT": "timeout",
    "PIP_RETRIES": "retries",
    "PIP_PROXY": "proxy",
    "PIP_CERT": "cert",
}
"""pip's variables that say how packages are reached -> the option of pip.conf."""

PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Predefined build arguments: a builder keeps them out of the image and of its history."""


@dataclass(frozen=True)
class Machine:
    """How this machine reaches packages.

    apt: lines of an apt.conf, `Acquire::` only; pip: options of pip.conf's [global] section; certificates: a bundle
    that pip and apt shall trust, or None; proxies: variable -> value; mirror, security_mirror: of Debian.
    """

    apt: tuple[str, ...] = ()
    pip: Mapping[str, str] | None = None
    certificates: Path | None = None
    proxies: Mapping[str, str] | None = None
    mirror: str = MIRROR
    security_mirror: str = SECURITY_MIRROR

    def sources(self) -> str:
        """Debian's sources by this machine's mirrors, in deb822 form."""
        return debian_sources(self.mirror, self.security_mirror)

    def apt_configuration(self) -> str:
        """An apt.conf for the build: this machine's way to the mirrors, and its sources instead of the image's."""
        lines = [
            f'Dir::Etc::sourcelist "{MOUNT}/debian.sources";',
            'Dir::Etc::sourceparts "/dev/null";',
            *self.apt,
        ]
        if self.certificates is not None:
            lines.append(f'Acquire::https::CAInfo "{MOUNT}/ca.crt";')
        return "\n".join(lines) + "\n"

    def pip_configuration(self) -> str:
        """A pip.conf for the build."""
        options = dict(self.pip or {})
        if self.certificates is not None:
            options["cert"] = f"{MOUNT}/ca.crt"
        parser = configparser.RawConfigParser()
        parser["global"] = options
        text = io.StringIO()
        parser.write(text)
        return text.getvalue()

    def write(self, folder: Path) -> None:
        """Write the folder that the build mounts."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "apt.conf").write_text(self.apt_configuration())
        (folder / "debian.sources").write_text(self.sources())
        (folder / "pip.conf").write_text(self.pip_configuration())
        if self.certificates is not None:
            shutil.copyfile(self.certificates, folder / "ca.crt")


def debian_sources(mirror: str = MIRROR, security_mirror: str = SECURITY_MIRROR) -> str:
    """Debian's sources in deb822 form."""
    return (
        f"Types: deb\nURIs: {mirror}\nSuites: {SUITE} {SUITE}-updates\nComponents: main\nSigned-By: {KEYRING}\n\n"
        f"Types: deb\nURIs: {security_mirror}\nSuites: {SUITE}-security\nComponents: main\nSigned-By: {KEYRING}\n"
    )


def apt_acquire() -> tuple[str, ...]:
    """The `Acquire::` settings of this machine's apt that say how to reach a mirror; none where there is no apt."""
    if shutil.which("apt-config") is None:
        return ()
    dump = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
    wanted = ("Acquire::http", "Acquire::https", "Acquire::Check-", "Acquire::Retries", "Acquire::ForceIPv")
    # Certificates are named by paths of this machine; ours replace them.
    return tuple(
        line for line in dump.splitlines() if line.startswith(wanted) and "::CAInfo" not in line and '""' not in line
    )


def pip_options(environment: Mapping[str, str], home: Path) -> dict[str, str]:
    """The [global] options of this machine's pip, files first, then variables, as pip itself reads them."""
    options: dict[str, str] = {}
    named = environment.get("PIP_CONFIG_FILE")
    files = [Path("/etc/pip.conf"), home / ".pip/pip.conf", home / ".config/pip/pip.conf"]
    for file in [*files, *([Path(named)] if named else [])]:
        parser = configparser.RawConfigParser()
        if file.is_file():
            parser.read(file)
        if parser.has_section("global"):
            options.update({k: v for k, v in parser.items("global") if k in PIP_VARIABLES.values()})
    for variable, option in PIP_VARIABLES.items():
        if environment.get(variable):
            options[option] = environment[variable]
    if "index-url" not in options and environment.get("UV_DEFAULT_INDEX"):
        options["index-url"] = environment["UV_DEFAULT_INDEX"]
    return options


def read_machine(environment: Mapping[str, str], home: Path) -> Machine:
    """Find out how this machine reaches packages.

    DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR name other mirrors of Debian than deb.debian.org.
    """
    options = pip_options(environment, home)
    bundle = options.pop("cert", None) or environment.get("SSL_CERT_FILE") or environment.get("REQUESTS_CA_BUNDLE")
    certificates = Path(bundle) if bundle and Path(bundle).is_file() else None
    return Machine(
        apt=apt_acquire(),
        pip=options,
        certificates=certificates,
        proxies={name: environment[name] for name in PROXY_VARIABLES if environment.get(name)},
        mirror=environment.get("DEBIAN_MIRROR", MIRROR),
        security_mirror=environment.get("DEBIAN_SECURITY_MIRROR", SECURITY_MIRROR),
    )
