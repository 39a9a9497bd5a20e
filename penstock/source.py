"""Where a model comes from, as one URL: parsed here, fetched by `penstock_runtime.models`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import SpecError


class Scheme(StrEnum):
    """The kinds of sources."""

    HF = "hf"
    """`hf://repository@revision` of the Hugging Face hub; the revision defaults to `main`."""
    S3 = "s3"
    GS = "gs"
    AZ = "az"
    PVC = "pvc"
    """`pvc://claim/path`: a volume of the cluster."""
    FILE = "file"
    """`file:///absolute/path`: local serving and tests."""
    PKG = "pkg"
    """`pkg://import_name/folder`: a folder inside an installed Python package."""


_SHAPE = {
    Scheme.HF: (re.compile(r"[\w.-]+(/[\w.-]+)?"), "hf://organisation/name@revision"),
    Scheme.S3: (re.compile(r"[\w.-]+(/.+)?"), "s3://bucket/path"),
    Scheme.GS: (re.compile(r"[\w.-]+(/.+)?"), "gs://bucket/path"),
    Scheme.AZ: (re.compile(r"[\w.-]+(/.+)?"), "az://container/path"),
    Scheme.PVC: (re.compile(r"[a-z0-9][-a-z0-9.]*(/.+)?"), "pvc://claim/path"),
    Scheme.FILE: (re.compile(r"/.*"), "file:///absolute/path"),
    Scheme.PKG: (re.compile(r"[A-Za-z_]\w*(\.\w+)*(/.+)?"), "pkg://import_name/folder"),
}


@dataclass(frozen=True)
class ModelSource:
    """A parsed source."""

    scheme: Scheme
    location: str
    """What stands behind `://`, without the revision."""
    revision: str | None = None
    """`hf://` only."""

    @classmethod
    def parse(cls, text: str) -> ModelSource:
        """Parse a source URL; SpecError says which forms there are."""
        scheme_text, separator, rest = text.partition("://")
        known = ", ".join(shape for _, shape in _SHAPE.values())
        try:
            scheme = Scheme(scheme_text)
        except ValueError:
            scheme = None
        if scheme is None or not separator:
            hint = (
                f"Did you mean hf://{text}?"
                if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", text)
                else f"Known forms: {known}"
            )
            raise SpecError(f"spec.model: {text!r} is not a model source", field="spec.model", remedy=hint)
        revision: str | None = None
        if scheme is Scheme.HF:
            rest, _, revision_text = rest.partition("@")
            revision = revision_text or "main"
        pattern, shape = _SHAPE[scheme]
        if not pattern.fullmatch(rest) or ".." in rest.split("/"):
            raise SpecError(
                f"spec.model: {text!r} is not of the form {shape}",
                field="spec.model",
                remedy=f"Write {shape}",
            )
        return cls(scheme, rest, revision)

    def __str__(self) -> str:
        tail = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme.value}://{self.location}{tail}"
