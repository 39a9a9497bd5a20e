"""The identity of a vector space: what must be equal for the vectors of two servers to be comparable.

Everything that changes the vector of a text is in it: weights, tokenizer, pooling and later modules, normalisation,
prompts, the limit of tokens, dimensions. Names, addresses, keys, nodes, plans and precision are not. An int8 artefact
and its fp32 reference have the same space; the accuracy guard judges how far their vectors differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

DIGITS = 16
SPACE_PATTERN = r"^vs1-[0-9a-f]{16}$"
"""Of an identifier."""
ARTEFACT_DIGITS = 12
"""Of an artefact's digest, next to the identifier of its space."""
HEADER = "x-vector-space"
ARTEFACT_HEADER = "x-artefact"
EXPECTED = "x-expect-vector-space"
"""The header of a request that is to be answered in this space only."""


class VectorSpace(BaseModel):
    """The space of an endpoint's vectors. The digests are sha256, hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str = Field(title="the weights")
    """Of the tensors that the graph uses, by name, as float32: not of their files."""
    tokenizer: str = Field(title="the tokenizer")
    """Of the tokenizer as it is used: vocabulary, normalisation, special tokens, lower-casing."""
    modules: str = Field(title="pooling and modules")
    """Of the pooling and the modules after it, with their weights."""
    pooling: str = Field(title="the pooling")
    """For people, such as `mean`; empty: none."""
    kind: str = Field(title="the kind of vectors")
    """`dense`, `sparse`, `multi_vector` (one for each token), or several."""
    normalised: bool = Field(title="normalisation")
    """Vectors have length 1 unless a request chooses otherwise."""
    dimensions: int | None = Field(title="the dimensions")
    """Values of a vector unless a request chooses otherwise; None: as many as the vocabulary has."""
    max_tokens: int = Field(title="the limit of tokens")
    """Texts are cut after it."""
    truncate_side: str = Field(title="the side that is cut")
    prompts: dict[str, str] = Field(title="the prompts")
    """Texts by name."""
    default_prompt: str = Field(title="the default prompt")

    @property
    def id(self) -> str:
        """`vs1-` and the first 16 digits of the sha256 of the fields as JSON with sorted keys and without spaces."""
        return f"vs1-{digest_of_json(self.model_dump(mode='json'))[:DIGITS]}"

    def differences(self, other: VectorSpace) -> tuple[str, ...]:
        """The fields that differ, as a person would name them, such as `the tokenizer`."""
        fields = type(self).model_fields
        return tuple(str(fields[name].title) for name in fields if getattr(self, name) != getattr(other, name))

    def served_with(self, prompts: Mapping[str, str], default_prompt: str, max_tokens: int) -> VectorSpace:
        """The space of an endpoint with these prompts and this limit."""
        changes = {"prompts": dict(prompts), "default_prompt": default_prompt, "max_tokens": max_tokens}
        return self.model_copy(update=changes)


def digest_of_json(value: Any) -> str:
    """sha256 (hexadecimal) of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
