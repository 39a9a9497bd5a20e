"""The source of a model, and what it is optimised for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pydantic import Field

from penstock.errors import SpecError
from penstock.resources.base import Spec
from penstock.resources.files.problems import meant_source


class Scheme(StrEnum):
    """The kinds of model sources."""

    HF = "hf"
    """`hf://repository@revision` of the Hugging Face hub, or one GGUF file of it as `hf://repository/file.gguf`; the
    revision defaults to `main`."""
    S3 = "s3"
    GS = "gs"
    AZ = "az"
    OCI = "oci"
    """`oci://registry/repository:tag@sha256:digest`: an image or artefact of a container registry; the tag defaults to
    `latest`, and a digest counts before a tag."""
    PVC = "pvc"
    """`pvc://claim/path`: a volume of the cluster."""
    FILE = "file"
    """`file:///absolute/path`: local serving and tests."""
    PKG = "pkg"
    """`pkg://import_name/folder`: a folder inside an installed Python package."""


_SHAPE = {
    Scheme.HF: (r"[\w.-]+(/[\w.-]+(/([\w.-]+/)*[\w.-]+\.gguf)?)?", "hf://organisation/name@revision"),
    Scheme.S3: (r"[\w.-]+(/.+)?", "s3://bucket/path"),
    Scheme.GS: (r"[\w.-]+(/.+)?", "gs://bucket/path"),
    Scheme.AZ: (r"[\w.-]+(/.+)?", "az://container/path"),
    Scheme.OCI: (
        r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:[0-9]{1,5})?|localhost|[A-Za-z0-9-]+:[0-9]{1,5})(/[a-z0-9]+([._-]+[a-z0-9]+)*)+",
        "oci://registry/repository:tag",
    ),
    Scheme.PVC: (r"[a-z0-9][-a-z0-9.]*(/.+)?", "pvc://claim/path"),
    Scheme.FILE: (r"/.*", "file:///absolute/path"),
    Scheme.PKG: (r"[A-Za-z_]\w*(\.\w+)*(/.+)?", "pkg://import_name/folder"),
}
_VERSION = {
    Scheme.HF: r"(@\w[\w./-]*)?",
    Scheme.OCI: r"(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
}
"""What may follow the location."""
SOURCE_FORMS = ", ".join(shape for _, shape in _SHAPE.values())
"""The forms, for messages."""
SOURCE_PATTERN = "|".join(
    f"{scheme.value}://{pattern}{_VERSION.get(scheme, '')}" for scheme, (pattern, _) in _SHAPE.items()
)
"""The check for the API server, in RE2 (where `\\w` is ASCII)."""
NO_WAY_UP_CEL = (
    r"!self.matches('://([^/]*/)*\\.\\.(/|$)') && !self.matches('^hf://([^/@]*/)?\\.\\.@') "
    r"&& !self.matches('^hf://[^@]*@.*\\.\\.')"
)
"""CEL on `self`: no part of the path is `..`, and no revision holds it."""
_REVISION = re.compile(r"[\w][\w./-]*", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """A parsed source."""

    scheme: Scheme
    location: str
    """The part after `://`, without the revision and without a trailing slash."""
    revision: str | None = None
    """`hf://`: the branch, tag or commit. `oci://`: the tag, the digest, or both as `tag@sha256:...`."""

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Parse a source URL; the remedy of the SpecError is a valid form."""
        scheme_text, separator, rest = text.partition("://")
        try:
            scheme = Scheme(scheme_text) if separator else None
        except ValueError:
            scheme = None
        if scheme is None:
            raise SpecError(
                f"spec.model: {text!r} is not a model source",
                field="spec.model",
                remedy=meant_source(text, Scheme) or f"Known forms: {SOURCE_FORMS}",
            )
        pattern, shape = _SHAPE[scheme]
        revision: str | None = None
        invalid = ".." in rest.split("/")
        if scheme is Scheme.HF:
            rest, at, revision_text = rest.partition("@")
            revision = revision_text if at else "main"
            invalid = invalid or not _is_revision(revision)
        elif scheme is Scheme.OCI:
            path, at, digest = rest.partition("@")
            folder, slash, name = path.rpartition("/")
            name, colon, tag = name.partition(":")
            invalid = re.fullmatch(_VERSION[scheme], f"{colon}{tag}{at}{digest}", re.ASCII) is None
            rest, revision = f"{folder}{slash}{name}", "@".join(filter(None, (tag, digest))) or "latest"
        whole = re.fullmatch(pattern, rest, re.ASCII if scheme is not Scheme.FILE else 0)
        if whole is None or invalid:
            raise SpecError(
                f"spec.model: {text!r} is not of the form {shape}",
                field="spec.model",
                remedy=_mend(scheme, rest, shape),
            )
        return cls(scheme, rest.rstrip("/") or "/", revision)

    @property
    def repository(self) -> str:
        """Of `hf://`: the repository on the hub, without the file."""
        return "/".join(self.location.split("/")[:2])

    @property
    def file(self) -> str:
        """Of `hf://`: the one file of the repository that is the model; empty: all of it."""
        return "/".join(self.location.split("/")[2:])

    @property
    def digest(self) -> str:
        """Of `oci://`: the digest that is written in it, `sha256:...`; empty without one."""
        digest = (self.revision or "").rpartition("@")[2]
        return digest if digest.startswith("sha256:") else ""

    def __str__(self) -> str:
        is_tag = self.scheme is Scheme.OCI and self.revision != self.digest
        tail = f"{':' if is_tag else '@'}{self.revision}" if self.revision else ""
        return f"{self.scheme.value}://{self.location}{tail}"


def _is_revision(text: str) -> bool:
    return _REVISION.fullmatch(text) is not None and ".." not in text


def _mend(scheme: Scheme, rest: str, shape: str) -> str:
    if scheme is Scheme.FILE and rest and not rest.startswith("/"):
        return f"Write the absolute path behind file://, such as file:///{rest}"
    return f"Write {shape}"


class Latency(Spec):
    """An objective on the latency."""

    p95_milliseconds: float = Field(
        gt=0, le=600_000, description="95 % of the requests are answered within this, milliseconds."
    )


class Throughput(Spec):
    """An objective on the request rate."""

    requests_per_second: float = Field(
        gt=0, le=1_000_000, description="Requests per second that one replica should serve."
    )


class TokenTime(Spec):
    """An objective on a time of text generation."""

    p95_milliseconds: float = Field(gt=0, le=600_000, description="95 % of these times are within this, milliseconds.")


class Objective(Spec):
    """What to optimise for. Latency and throughput: the highest rate within the latency. Neither: best latency first,
    then throughput. Text generation has objectives on tokens, too."""

    latency: Latency | None = None
    throughput: Throughput | None = None
    time_to_first_token: TokenTime | None = Field(
        default=None, description="Text generation: from the arrival of a request to its first token."
    )
    time_per_output_token: TokenTime | None = Field(
        default=None, description="Text generation: between two tokens of an answer."
    )
    tokens_per_second: float | None = Field(
        default=None,
        gt=0,
        le=10_000_000,
        description="Text generation: output tokens per second that one replica should serve, all answers together.",
    )

    @property
    def first_token_milliseconds(self) -> float | None:
        """The limit of p95 of the time to the first token."""
        return None if self.time_to_first_token is None else self.time_to_first_token.p95_milliseconds

    @property
    def next_token_milliseconds(self) -> float | None:
        """The limit of p95 of the time between two tokens."""
        return None if self.time_per_output_token is None else self.time_per_output_token.p95_milliseconds

    @property
    def is_for_tokens(self) -> bool:
        """Whether it has an objective that text generation alone has."""
        stated = (self.time_to_first_token, self.time_per_output_token, self.tokens_per_second)
        return any(one is not None for one in stated)
