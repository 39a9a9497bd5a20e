"""The bearer tokens of a server: where they are read, which of them a request has, and what changes while it runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from penstock.errors import SettingError
from penstock.logs import log_event
from penstock_runtime.errors import Unauthorized
from penstock_runtime.settings import AccessSettings

logger = logging.getLogger("penstock.http")

API_KEY = b"x-api-key"
"""Where Anthropic's clients send their key."""
LONGEST_FILE = 65_536
"""Bytes of a file of tokens that are read."""
Signature = tuple[object, ...]


class AccessTokens:
    """The accepted tokens, with their names. `refresh` reads files again that have changed."""

    def __init__(self, access: AccessSettings) -> None:
        """SettingError when the file or the folder of the settings cannot be read."""
        self._access = access
        self.version = 0
        """Counts the changes: a head that was admitted before one is checked again."""
        # Hashes have one length: comparing tokens themselves would show the length of the right one.
        self._accepted: tuple[tuple[str, bytes], ...] = ()
        self._fixed = _named("token", access.given_tokens)
        self._of_file = _named("file", access.file_tokens)
        self._of_folder: tuple[tuple[str, bytes], ...] = ()
        if access.auth_token_folder is not None:
            try:
                self._of_folder = read_folder(access.auth_token_folder)
            except OSError as error:
                raise SettingError(
                    f"PENSTOCK_AUTH_TOKEN_FOLDER: {access.auth_token_folder} cannot be read ({error})",
                    field="PENSTOCK_AUTH_TOKEN_FOLDER",
                    remedy="Mount a Secret there, or leave the setting out",
                ) from error
        self._signature = self._present()
        self._accept()

    @property
    def count(self) -> int:
        """Number of accepted tokens."""
        return len(self._accepted)

    def name_in(self, headers: Mapping[bytes, bytes], *, takes_api_key: bool) -> str:
        """The name of the token in the headers of a request: in authorization or, without that, in x-api-key where
        `takes_api_key`. Unauthorized."""
        line = headers.get(b"authorization")
        if line is None and takes_api_key:
            given = headers.get(API_KEY, b"").strip()
        else:
            scheme, _, given = (line or b"").partition(b" ")
            given = given.strip() if scheme.lower() == b"bearer" else b""
        if not given:
            other = f" or {API_KEY.decode()}: <token>" if takes_api_key else ""
            raise Unauthorized(
                "this endpoint wants a token", remedy=f"Send the header authorization: Bearer <token>{other}"
            )
        name = self.name_of(given)
        if name is None:
            raise Unauthorized("this is not a token of this endpoint", remedy="Ask the endpoint's owner for one")
        return name

    def name_of(self, given: bytes) -> str | None:
        """The name of this token; None if it is not accepted. Takes the same time for every wrong token."""
        digest = hashlib.sha256(given).digest()
        found: str | None = None
        for name, accepted in self._accepted:
            if hmac.compare_digest(digest, accepted):
                found = name
        return found

    def refresh(self) -> None:
        """Read the file and the folder again if they have changed. What cannot be read stays as it was."""
        try:
            signature = self._present()
            if signature == self._signature:
                return
            file, folder = self._access.auth_token_file, self._access.auth_token_folder
            if file is not None and file.is_file() and (lines := _lines(file)):
                self._of_file = _named("file", lines)
            if folder is not None:
                self._of_folder = read_folder(folder)
        except OSError as error:
            logger.warning(
                "the tokens cannot be read again, and those read before stay accepted: %s",
                error,
                extra=log_event("TokensUnreadable", reason=error),
            )
            return
        self._signature = signature
        self._accept()
        self.version += 1
        names = ", ".join(name for name, _ in self._accepted)
        logger.info("the accepted tokens are now: %s", names or "none", extra=log_event("TokensChanged", object=names))

    def _accept(self) -> None:
        every = (*self._fixed, *self._of_file, *self._of_folder)
        self._accepted = tuple((name, hashlib.sha256(token).digest()) for name, token in every)
        if not self._accepted:
            logger.warning(
                "%s holds no token: every request that needs one is refused",
                self._access.auth_token_folder,
                extra=log_event("NoTokens", object=str(self._access.auth_token_folder)),
            )

    def _present(self) -> Signature:
        file, folder = self._access.auth_token_file, self._access.auth_token_folder
        found: list[object] = []
        if file is not None and file.is_file():
            found.append(_signature(file))
        if folder is not None:
            found += [(path.name, _signature(path)) for path in _files(folder)]
        return tuple(found)


def read_folder(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """Names and tokens of a folder: each file is a token, or several of one name, one a line. OSError."""
    return tuple((_log_field(path.name), token) for path in _files(folder) for token in _lines(path))


def _files(folder: Path) -> list[Path]:
    # The kubelet replaces all files of a Secret at once, by pointing the link `..data` to another folder: all are read
    # from the folder that it points to now.
    data = folder / "..data"
    present = data.resolve() if data.is_symlink() else folder
    return sorted(path for path in present.iterdir() if not path.name.startswith(".") and path.is_file())


def _lines(path: Path) -> list[bytes]:
    with path.open("rb") as opened:
        content = opened.read(LONGEST_FILE)
    return [line.strip() for line in content.splitlines() if line.strip()]


def _signature(path: Path) -> Signature:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _named(prefix: str, tokens: list[bytes]) -> tuple[tuple[str, bytes], ...]:
    return tuple((prefix if len(tokens) == 1 else f"{prefix}-{at}", token) for at, token in enumerate(tokens, start=1))


def _log_field(name: str) -> str:
    """For the access log, where spaces separate the fields."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
