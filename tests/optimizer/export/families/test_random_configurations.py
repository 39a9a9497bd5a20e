"""For random sizes both flavours equal transformers in ONNX Runtime."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export
from penstock_optimizer.export.transformer import BY_NAME
from tests.examples import examples
from tests.optimizer.export.judge import assert_equals_torch, in_onnxruntime, rows
from tests.optimizer.export.models import DECODERS, HEADS, SPECIAL_TOKENS, make

LONGEST = 12


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, Head, dict[str, Any]]:
    """A family, a head and fields that transformers takes."""
    config_class = draw(st.sampled_from(sorted(HEADS)))
    heads, width = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    turned = config_class == "ModernBertConfig" or config_class in DECODERS
    width *= 2 if turned else 1  # its positions turn pairs of numbers
    hidden, layers, inner = heads * width, draw(st.integers(1, 3)), draw(st.integers(1, 40))
    activation = draw(st.sampled_from(sorted(BY_NAME)))
    fields: dict[str, Any] = {
        "vocab_size": 61,
        "max_position_embeddings": LONGEST + draw(st.integers(2, 9)),
        "num_labels": draw(st.integers(1, 5)),
    }
    if config_class == "DistilBertConfig":
        fields |= {"dim": hidden, "n_layers": layers, "n_heads": heads, "hidden_dim": inner, "activation": activation}
    else:
        fields |= {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "hidden_act": activation,
            "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-5, 1e-3])),
            "pad_token_id": 1,
            "type_vocab_size": draw(st.integers(2, 3)),
            "embedding_size": draw(st.integers(2, 20)),
            "tie_word_embeddings": draw(st.booleans()),
        }
    if config_class == "DebertaV2Config":
        fields |= {
            "relative_attention": draw(st.booleans()),
            "pos_att_type": draw(st.lists(st.sampled_from(["c2p", "p2c"]), unique=True)),
            "position_buckets": draw(st.sampled_from([-1, 4, 10])),
            "share_att_key": draw(st.booleans()),
            "norm_rel_ebd": draw(st.sampled_from(["none", "layer_norm"])),
            "position_biased_input": draw(st.booleans()),
            "conv_kernel_size": draw(st.sampled_from([0, 3])),
        }
    if config_class == "ModernBertConfig":
        fields |= {
            "hidden_activation": activation,
            "local_attention": draw(st.integers(1, 9)),
            "global_attn_every_n_layers": draw(st.integers(1, 3)),
            "classifier_pooling": draw(st.sampled_from(["cls", "mean"])),
            **{f"{part}_bias": draw(st.booleans()) for part in ("attention", "mlp", "norm", "classifier", "decoder")},
            **SPECIAL_TOKENS,
        }
    if config_class == "GPT2Config":
        fields |= {
            **SPECIAL_TOKENS,
            "activation_function": activation,
            "n_inner": inner,
            "layer_norm_epsilon": draw(st.sampled_from([1e-5, 1e-3])),
            "scale_attn_weights": draw(st.booleans()),
            "scale_attn_by_inverse_layer_idx": draw(st.booleans()),
        }
    elif config_class in DECODERS:
        fields |= {
            **SPECIAL_TOKENS,
            "hidden_activation": activation,
            "num_key_value_heads": draw(
                st.sampled_from([count for count in range(1, heads + 1) if heads % count == 0])
            ),
            "head_dim": 2 * draw(st.integers(1, 6)) if config_class not in {"LlamaConfig", "Qwen2Config"} else None,
            "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
            "use_sliding_window": draw(st.booleans()),
            "sliding_window": draw(st.integers(1, 9)),
            "max_window_layers": draw(st.integers(0, 2)),
            "sliding_window_pattern": draw(st.integers(1, 3)),
            "query_pre_attn_scalar": draw(st.integers(1, 9)),
            "attention_bias": draw(st.booleans()),
            "mlp_bias": draw(st.booleans()),
        }
    return config_class, draw(st.sampled_from(HEADS[config_class])), fields


@pytest.mark.parity
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    configurations(),
    st.sampled_from(Flavour),
    st.lists(st.integers(3, LONGEST), min_size=1, max_size=4),
    st.integers(0, 2**16),
)
def test_equals_transformers(
    configuration: tuple[str, Head, dict[str, Any]], flavour: Flavour, lengths: list[int], seed: int
) -> None:
    config_class, head, fields = configuration
    with tempfile.TemporaryDirectory() as name:
        made = make(Path(name) / "model", config_class, head, seed=seed, **fields)

        exported = export(made.folder, head, Path(name) / "out", flavour=flavour)

        batch = rows(*lengths, seed=seed)
        assert_equals_torch(exported, made, batch, close=1e-4, engines=(in_onnxruntime,))
        alone = {key: array[:1, : lengths[0]] for key, array in batch.items()}
        run = in_onnxruntime(exported.path, exported.io)
        together, single = run(batch), run(alone)
        for output in exported.io.outputs:
            one = single[output] if head is Head.MASKED_LM else single[output][0]
            many = together[output] if head is Head.MASKED_LM else together[output][0]
            np.testing.assert_allclose(many[: len(one)], one, rtol=0, atol=1e-4)
