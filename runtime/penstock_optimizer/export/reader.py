"""A model's configuration and weights, asked for by the names that transformers gives them."""

from __future__ import annotations

from typing import Any

from penstock.errors import CorruptModel
from penstock_optimizer.export.activations import BY_NAME, THROUGH_TORCH
from penstock_optimizer.export.encoder import Activation, Dense, Norm
from penstock_optimizer.export.weights import Weights
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float


class NotBuildable(Exception):
    """The builder does not know this model: the message has the reason. The export through torch may still work."""


class Reader:
    """Reads one model; every error names the file and the field or tensor."""

    def __init__(self, folder: ModelFolder, base: str, anchor: str) -> None:
        """`base` is transformers' `base_model_prefix`, such as `bert`; `anchor` a tensor that every model has.

        Names of the encoder's tensors start with `bert.` in a model with a head, with nothing in one without,
        and with something else again where the whole was saved as a part of another.
        """
        self.folder = folder
        self.config = folder.config
        self.weights = Weights(folder)
        prefixes = sorted(name.removesuffix(anchor) for name in self.weights if f".{name}".endswith(f".{anchor}"))
        known = [prefix for prefix in (f"{base}.", "") if prefix in prefixes]
        if not known and len(prefixes) > 1:
            raise NotBuildable(f"its weights hold several encoders ({', '.join(prefixes)})")
        self.body = (known or prefixes or [""])[0]
        """Prefix of the names of the encoder's tensors."""
        self.top = self.body.removesuffix(f"{base}.") if self.body.endswith(f"{base}.") else ""
        """Prefix of the names of the head's tensors."""

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._bad(key, value, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number of config.json."""
        value = self.config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self._bad(key, value, "a positive number")
        return float(value)

    def activation(self, key: str, default: str) -> Activation:
        """An activation of config.json; NotBuildable for those that only the general way has."""
        value = self.config.get(key, default)
        if not isinstance(value, str):
            raise self._bad(key, value, "the name of an activation")
        if value in BY_NAME:
            return BY_NAME[value]
        # A graph of the model's own may hold what transformers has no name for.
        if value in THROUGH_TORCH or self.folder.onnx is not None:
            raise NotBuildable(f"its {key} is {value}")
        raise self._bad(key, value, "the name of an activation that transformers has")

    def heads(self, key: str, default: int, width_key: str, width: int) -> int:
        """The number of attention heads, which share the width evenly."""
        heads = self.integer(key, default)
        if width % heads and self.folder.onnx is not None:
            raise NotBuildable(f"its {heads} attention heads do not divide its width of {width}")
        if width % heads:
            raise self._bad(key, heads, f"a number that divides the {width_key} of {width}")
        return heads

    def table(self, name: str, rows: int, width: int) -> Float:
        """An embedding of the encoder."""
        return self.weights.take(f"{self.body}{name}.weight", (rows, width))

    def dense(self, name: str, width_in: int, width_out: int) -> Dense:
        """A linear layer of the encoder."""
        return self._dense(f"{self.body}{name}", width_in, width_out)

    def norm(self, name: str, width: int, epsilon: float) -> Norm:
        """A normalisation of the encoder."""
        return self._norm(f"{self.body}{name}", width, epsilon)

    def head_dense(self, name: str, width_in: int, width_out: int) -> Dense:
        """A linear layer of the head."""
        return self._dense(f"{self.top}{name}", width_in, width_out)

    def head_norm(self, name: str, width: int, epsilon: float) -> Norm:
        """A normalisation of the head."""
        return self._norm(f"{self.top}{name}", width, epsilon)

    def head_vector(self, names: tuple[str, ...], length: int) -> Float:
        """A vector of the head, under the first of these names that the weights have."""
        present = [name for name in names if f"{self.top}{name}" in self.weights]
        return self.weights.take(f"{self.top}{(present or names)[0]}", (length,))

    def head_table(self, name: str, rows: int, width: int) -> Float:
        """A matrix of the head."""
        return self.weights.take(f"{self.top}{name}.weight", (rows, width))

    def _dense(self, name: str, width_in: int, width_out: int) -> Dense:
        return Dense(
            self.weights.take(f"{name}.weight", (width_out, width_in)), self.weights.take(f"{name}.bias", (width_out,))
        )

    def _norm(self, name: str, width: int, epsilon: float) -> Norm:
        return Norm(self.weights.take(f"{name}.weight", (width,)), self.weights.take(f"{name}.bias", (width,)), epsilon)

    def _bad(self, key: str, value: Any, wanted: str) -> CorruptModel:
        return CorruptModel(
            f"{self.folder.path / 'config.json'}: {key} is {value!r}",
            remedy=f"Make it {wanted}, as it was in the model's own config.json",
        )
