"""Reads decoders: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 3 (text) and GPT-2, under the names of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.errors import UnsupportedModel
from penstock_optimizer.export.encoder import BY_NAME, Activation, Dense
from penstock_optimizer.export.reader import NotBuildable, Reader, Tensors
from penstock_optimizer.export.rotary import LLAMA3_SETTINGS, llama3_frequencies
from penstock_optimizer.generation.decoder import Decoder, DecoderLayer, Normalisation, Rope
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import Float

LONGEST_CONTEXT = 131_072
"""Tokens; limits what config.json may promise."""


def read_decoder(folder: ModelFolder) -> Decoder:
    """The decoder of a model folder; weights are memory-mapped where they are float32.

    UnsupportedModel for other families and for variants that are not computed here, with the list of the families;
    CorruptModel names the file and the field or tensor.
    """
    read = FAMILIES.get(folder.model_type)
    if read is None:
        raise UnsupportedModel(
            f"{folder.path} is of the type {folder.model_type or 'unknown'}, which text-generation does not serve",
            remedy=f"Use a model of one of the types {', '.join(sorted(FAMILIES))}",
        )
    try:
        return read(folder)
    except NotBuildable as error:
        raise UnsupportedModel(
            f"{folder.path} cannot be served for text-generation: {error}",
            remedy="Use another model of this family (docs/reference/models.md#text-generation)",
        ) from error


def _read_llama(folder: ModelFolder) -> Decoder:
    """Llama and what has its names: Mistral, Qwen2, Qwen3, Phi-3, Gemma 3."""
    model_type = folder.model_type
    reader = Reader(folder, "model", "embed_tokens.weight")
    hidden = reader.integer("hidden_size")
    heads = reader.integer("num_attention_heads")
    key_heads = reader.integer("num_key_value_heads", heads)
    gemma = model_type == "gemma3_text"
    head_size = _head_size(reader, hidden, heads, default=256 if gemma else None)
    if heads % key_heads:
        raise reader.invalid("num_key_value_heads", key_heads, f"a number that divides the {heads} attention heads")
    epsilon = reader.number("rms_norm_eps", 1e-6)
    inner = reader.integer("intermediate_size")
    windows = _windows(reader)
    ropes, context = _ropes(reader, head_size)
    scale = 1 / math.sqrt(reader.number("query_pre_attn_scalar", 256) if gemma else head_size)
    names = _GEMMA_NORMS if gemma else _NORMS
    widths = (hidden, heads * head_size, key_heads * head_size)
    added = 1.0 if gemma else 0.0

    def norm(tensors: Tensors, name: str, width: int) -> Normalisation:
        weight = tensors.vector((f"{name}.weight",), width)
        return Normalisation(weight + np.float32(added) if added else weight, None, epsilon)

    layers = []
    for index, window in enumerate(windows):
        layer = Tensors(reader.weights, f"{reader.body.prefix}layers.{index}.")
        query, key, value, output = _attention_products(reader, layer, widths)
        gate, up = _gated(layer, model_type, hidden, inner, bias=reader.flag("mlp_bias", default=False))
        named = {field: norm(layer, name, hidden) for field, name in names.items()}
        if model_type in {"qwen3", "gemma3_text"}:
            named["query_norm"] = norm(layer, "self_attn.q_norm", head_size)
            named["key_norm"] = norm(layer, "self_attn.k_norm", head_size)
        down = layer.dense("mlp.down_proj", inner, hidden, bias=reader.flag("mlp_bias", default=False))
        rope = ropes[window is not None]
        layers.append(
            DecoderLayer(query, key, value, output, up, down, gate, rope=rope, scale=scale, window=window, **named)
        )
    vocabulary = reader.integer("vocab_size")
    # The factor of Gemma's embeddings has the precision in which the weights are stored; in fp32 it is this.
    embedding_scale = float(np.float32(math.sqrt(hidden))) if gemma else 1.0
    if reader.config.get("final_logit_softcapping") or reader.config.get("attn_logit_softcapping"):
        raise NotBuildable("it limits its logits (softcapping)")
    return Decoder(
        embeddings=reader.body.table("embed_tokens", vocabulary, hidden),
        embedding_scale=embedding_scale,
        positions=None,
        layers=tuple(layers),
        activation=_activation(reader, "gelu_pytorch_tanh" if gemma else "silu", key="hidden_activation"),
        final_norm=norm(reader.body, "norm", hidden),
        head=_head(reader, vocabulary, hidden, tied_by_default=gemma),
        heads=heads,
        key_heads=key_heads,
        head_size=head_size,
        context=context,
    )


_NORMS = {"attention_norm": "input_layernorm", "network_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "network_norm": "pre_feedforward_layernorm",
    "expanded_norm": "post_feedforward_layernorm",
}


def _head_size(reader: Reader, hidden: int, heads: int, *, default: int | None) -> int:
    if reader.config.get("head_dim") is not None or default is not None:
        return reader.integer("head_dim", default)
    if hidden % heads:
        raise reader.invalid("num_attention_heads", heads, f"a number that divides the hidden_size of {hidden}")
    return hidden // heads


def _attention_products(
    reader: Reader, layer: Tensors, widths: tuple[int, int, int]
) -> tuple[Dense, Dense, Dense, Dense]:
    """Queries, keys, values and output. Phi-3 stores the first three as one matrix."""
    hidden, queries, keys = widths
    model_type = reader.folder.model_type
    biased = reader.flag("attention_bias", default=model_type == "qwen2")
    # Qwen2 always has biases of queries, keys and values, and never one of the output.
    inner, outer = (True, False) if model_type == "qwen2" else (biased, biased)
    output = layer.dense("self_attn.o_proj", queries, hidden, bias=outer and model_type != "phi3")
    if model_type == "phi3":
        joined = layer.table("self_attn.qkv_proj", queries + 2 * keys, hidden)
        parts = np.split(joined, [queries, queries + keys])
        return Dense(parts[0], None), Dense(parts[1], None), Dense(parts[2], None), output
    query = layer.dense("self_attn.q_proj", hidden, queries, bias=inner)
    key = layer.dense("self_attn.k_proj", hidden, keys, bias=inner)
    return query, key, layer.dense("self_attn.v_proj", hidden, keys, bias=inner), output


def _gated(layer: Tensors, model_type: str, hidden: int, inner: int, *, bias: bool) -> tuple[Dense, Dense]:
    """Gate and up. Phi-3 stores them as one matrix."""
    if model_type == "phi3":
        gate, up = np.split(layer.table("mlp.gate_up_proj", 2 * inner, hidden), 2)
        return Dense(gate, None), Dense(up, None)
    gate_product = layer.dense("mlp.gate_proj", hidden, inner, bias=bias)
    return gate_product, layer.dense("mlp.up_proj", hidden, inner, bias=bias)


def _head(reader: Reader, vocabulary: int, hidden: int, *, tied_by_default: bool) -> Dense | None:
    tied = reader.flag("tie_word_embeddings", default=tied_by_default)
    if tied or (tied_by_default and "lm_head.weight" not in reader.weights):
        return None
    return Tensors(reader.weights, "").dense("lm_head", hidden, vocabulary, bias=False)


def _activation(reader: Reader, default: str, *, key: str) -> Activation:
    """`hidden_activation` (Gemma) or `hidden_act`."""
    name = reader.config.get(key) or reader.config.get("hidden_act") or default
    if not isinstance(name, str) or name not in BY_NAME:
        raise NotBuildable(f"its activation is {name!r}")
    return BY_NAME[name]


def _windows(reader: Reader) -> list[int | None]:
    """Each layer's window."""
    config, layers = reader.config, reader.integer("num_hidden_layers")
    size = config.get("sliding_window")
    if size is None:
        return [None] * layers
    window = reader.integer("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise reader.invalid("layer_types", kinds, f"a list with an entry for each of the {layers} layers")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    match reader.folder.model_type:
        case "qwen2" | "qwen3":
            first = reader.integer("max_window_layers", layers, least=0)
            uses = reader.flag("use_sliding_window", default=False)
            return [window if uses and index >= first else None for index in range(layers)]
        case "gemma3_text":
            pattern = reader.integer("sliding_window_pattern", 6)
            return [window if (index + 1) % pattern else None for index in range(layers)]
        case "mistral" | "phi3":
            return [window] * layers
        case _:
            return [None] * layers


def _ropes(reader: Reader, head_size: int) -> tuple[dict[bool, Rope], int]:
    """The rotary positions of layers without (False) and with a window (True), and the longest context.

    transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`.
    """
    config = reader.config
    context = min(reader.integer("max_position_embeddings", 2048), LONGEST_CONTEXT)
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and "full_attention" in parameters:
        whole, local = parameters["full_attention"], parameters.get("sliding_attention") or parameters["full_attention"]
    else:
        theta = reader.number("rope_theta", 1_000_000.0 if reader.folder.model_type == "gemma3_text" else 10_000.0)
        whole = local = {"rope_theta": theta, **(parameters or config.get("rope_scaling") or {})}
        if reader.folder.model_type == "gemma3_text":
            local = {"rope_theta": reader.number("rope_local_base_freq", 10_000.0)}
    rope, limit = _rope(reader, whole, head_size, context)
    return {False: rope, True: _rope(reader, local, head_size, context)[0]}, limit


def _rope(reader: Reader, settings: Mapping[str, Any], head_size: int, context: int) -> tuple[Rope, int]:
    share = settings.get("partial_rotary_factor", reader.config.get("partial_rotary_factor") or 1.0)
    turned = int(head_size * float(share))
    theta = float(settings.get("rope_theta", reader.config.get("rope_theta") or 10_000.0))
    # In float32, in the order of transformers, so that large positions give the same angles.
    exponents = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    plain = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    kind = settings.get("rope_type", settings.get("type", "default"))
    match kind:
        case "default":
            return Rope(plain), context
        case "linear":
            return Rope(plain / np.float32(_setting(reader, settings, "factor"))), context
        case "llama3":
            return Rope(
                llama3_frequencies(plain, *(_setting(reader, settings, key) for key in LLAMA3_SETTINGS))
            ), context
        case "longrope" | "su":
            return _long_rope(reader, plain, settings, context)
        case _:
            raise NotBuildable(f"its rotary positions are scaled by {kind!r}")


def _setting(reader: Reader, settings: Mapping[str, Any], key: str) -> float:
    """A positive number of the scaling; CorruptModel if it is anything else."""
    value = settings.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise reader.invalid(f"rope_scaling has the {key} {value!r}; rope_scaling", settings, "complete")
    return float(value)


def _long_rope(reader: Reader, plain: Float, settings: Mapping[str, Any], context: int) -> tuple[Rope, int]:
    """LongRoPE within the original context, where its short factors apply. Beyond that, transformers changes the
    frequencies of a sequence while it grows, which a cache of rotated keys cannot follow."""
    promised, key = reader.integer("max_position_embeddings", 2048), "original_max_position_embeddings"
    stated = {**settings, key: settings.get(key) or reader.config.get(key)}
    if stated[key] is None:
        original, growth = promised, _setting(reader, {"factor": 1.0, **settings}, "factor")
    else:
        original = int(_setting(reader, stated, key))
        growth = promised / max(original, 1)
    factors = np.asarray(settings.get("short_factor"), np.float32)
    if factors.shape != plain.shape:
        raise reader.invalid("short_factor", settings.get("short_factor"), f"a list of {len(plain)} numbers")
    if settings.get("attention_factor") is not None:
        magnitude = _setting(reader, settings, "attention_factor")
    else:
        magnitude = math.sqrt(1 + math.log(growth) / math.log(max(original, 2))) if growth > 1 else 1.0
    return Rope((plain / factors).astype(np.float32), magnitude), min(max(original, 1), context)


def _read_gpt2(folder: ModelFolder) -> Decoder:
    reader = Reader(folder, "transformer", "wte.weight")
    hidden, heads = reader.integer("n_embd"), reader.integer("n_head")
    inner = reader.integer("n_inner", 4 * hidden) if reader.config.get("n_inner") else 4 * hidden
    if hidden % heads:
        raise reader.invalid("n_head", heads, f"a number that divides n_embd, which is {hidden}")
    epsilon = reader.number("layer_norm_epsilon", 1e-5)
    size, context = hidden // heads, reader.integer("n_positions")
    base = 1 / math.sqrt(size) if reader.flag("scale_attn_weights", default=True) else 1.0
    by_layer = reader.flag("scale_attn_by_inverse_layer_idx", default=False)

    def norm(tensors: Tensors, name: str) -> Normalisation:
        return Normalisation(
            tensors.vector((f"{name}.weight",), hidden), tensors.vector((f"{name}.bias",), hidden), epsilon
        )

    layers = []
    for index in range(reader.integer("n_layer")):
        layer = Tensors(reader.weights, f"{reader.body.prefix}h.{index}.")
        joined = _transposed(layer, "attn.c_attn", hidden, 3 * hidden)
        assert joined.bias is not None  # noqa: S101 - `_transposed` always reads one
        query, key, value = (
            Dense(np.ascontiguousarray(weight), bias)
            for weight, bias in zip(np.split(joined.weight, 3), np.split(joined.bias, 3), strict=True)
        )
        layers.append(
            DecoderLayer(
                query,
                key,
                value,
                _transposed(layer, "attn.c_proj", hidden, hidden),
                _transposed(layer, "mlp.c_fc", hidden, inner),
                _transposed(layer, "mlp.c_proj", inner, hidden),
                gate=None,
                attention_norm=norm(layer, "ln_1"),
                network_norm=norm(layer, "ln_2"),
                scale=base / (index + 1) if by_layer else base,
            )
        )
    vocabulary = reader.integer("vocab_size")
    return Decoder(
        embeddings=reader.body.table("wte", vocabulary, hidden),
        embedding_scale=1.0,
        positions=reader.body.table("wpe", context, hidden),
        layers=tuple(layers),
        activation=_activation(reader, "gelu_new", key="activation_function"),
        final_norm=norm(reader.body, "ln_f"),
        head=_head(reader, vocabulary, hidden, tied_by_default=True)
        if not reader.flag("tie_word_embeddings", default=True)
        else None,
        heads=heads,
        key_heads=heads,
        head_size=size,
        context=context,
    )


def _transposed(layer: Tensors, name: str, width_in: int, width_out: int) -> Dense:
    """A linear layer that GPT-2 stores as [in, out]."""
    weight = layer.table(name, width_in, width_out)
    return Dense(np.ascontiguousarray(weight.T), layer.vector((f"{name}.bias",), width_out))


FAMILIES: Mapping[str, Callable[[ModelFolder], Decoder]] = {
    "gpt2": _read_gpt2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text"), _read_llama),
}
"""`model_type` of config.json, and the function that reads it."""
