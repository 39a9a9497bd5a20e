"""Architectures without a builder are exported with torch, and accepted only if the graph equals the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers
from onnxruntime.transformers import optimizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from penstock.errors import CorruptModel, UnsupportedModel
from penstock.manifest import Axes
from penstock.tasks import Head
from penstock_optimizer.export import Flavour, export, torch_export
from penstock_optimizer.export.torch_export import export_with_torch
from penstock_runtime.models.folder import ModelFolder
from tests.optimizer.export.judge import assert_equals_torch, rows
from tests.optimizer.export.models import DEBERTA, SMALL, VOCABULARY, Made, make

pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    # transformers' DeBERTa does so when it is imported
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning"),
]

XLNET: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "n_layer": 1,
    "n_head": 3,
    "d_inner": 40,
    "num_labels": 3,
}
SHALLOW = {**DEBERTA, "num_hidden_layers": 1}
"""The builder takes it; its operators try torch's exporters."""
RELATIVE = {**SMALL, "position_embedding_type": "relative_key"}


@pytest.mark.parametrize(
    ("config_class", "fields", "head_and_flavour", "fused"),
    [
        ("DebertaV2Config", SHALLOW, (Head.SEQUENCE, Flavour.FUSED), {"Gelu"}),
        pytest.param("DebertaV2Config", SHALLOW, (Head.TOKEN, Flavour.PLAIN), set(), marks=pytest.mark.extended),
        ("BertConfig", RELATIVE, (Head.SPAN, Flavour.PLAIN), set()),
    ],
)
def test_equals_transformers(
    config_class: str, fields: dict[str, Any], head_and_flavour: tuple[Head, Flavour], fused: set[str], tmp_path: Path
) -> None:
    head, flavour = head_and_flavour
    made = make(tmp_path / "model", config_class, head, **fields)

    (tmp_path / "out").mkdir()
    exported = export_with_torch(made.folder, head, tmp_path / "out" / "model.onnx", flavour, "a reason")

    assert exported.how == "torch"
    assert exported.parameters == sum(parameter.numel() for parameter in made.model.parameters())
    assert set(exported.fused_nodes) - {"LayerNormalization"} == fused
    assert_equals_torch(exported, made, rows(13), rows(4, 17, 9), close=1e-4)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.onnx"]


T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "mish",  # which the builder does not have
}


@pytest.mark.parametrize("whole", [False, True])
def test_the_encoder_of_t5_is_taken_without_its_decoder(whole: bool, tmp_path: Path) -> None:
    """Of a folder with both, and of one with the encoder alone, as those of sentence-t5."""
    made = make(tmp_path / "model", "T5Config", Head.ENCODER, **T5)
    encoder = transformers.T5EncoderModel.from_pretrained(made.path, attn_implementation="eager").eval()
    if not whole:
        encoder.save_pretrained(made.path)
    judge = Made(made.path, encoder, Head.ENCODER)

    exported = export(made.folder, Head.ENCODER, tmp_path / "out")

    assert exported.how == "torch"
    assert_equals_torch(exported, judge, rows(13), rows(4, 17, 9), close=1e-4)


@pytest.fixture
def tracing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the first exporter fail, which also saves its time."""

    def fail(_answers: Any, _path: Path) -> None:
        raise RuntimeError("not today")

    monkeypatch.setitem(torch_export._EXPORTERS, "torch.export", fail)


@pytest.mark.usefixtures("tracing_only")
def test_the_second_exporter_is_used_where_the_first_fails(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **RELATIVE)

    assert_equals_torch(export(made.folder, Head.ENCODER, tmp_path / "out"), made, rows(4, 17, 9), close=1e-4)


@pytest.mark.usefixtures("tracing_only")
def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **RELATIVE)
    made.model.to(torch.bfloat16).save_pretrained(made.path)
    made.model.float()

    assert_equals_torch(export(made.folder, Head.ENCODER, tmp_path / "out"), made, rows(13), close=1e-4)


@pytest.mark.usefixtures("tracing_only")
@pytest.mark.parametrize(("given", "extra"), [(None, ("token_type_ids",)), (["input_ids", "attention_mask"], ())])
def test_token_types_without_an_embedding_are_inputs_if_the_tokenizer_gives_them(
    given: list[str] | None, extra: tuple[str, ...], tmp_path: Path
) -> None:
    """XLNet compares types and has no `type_vocab_size`."""
    made = make(tmp_path / "model", "XLNetConfig", Head.TOKEN, **XLNET)
    settings = made.path / "tokenizer_config.json"
    settings.write_text(json.dumps({"mask_token": "<mask>"} | ({"model_input_names": given} if given else {})))

    exported = export(made.folder, Head.TOKEN, tmp_path / "out", flavour=Flavour.PLAIN)

    assert exported.io.inputs == ("input_ids", "attention_mask", *extra)
    assert_equals_torch(exported, made, rows(13), rows(4, 17, 9), close=1e-4)


@pytest.mark.usefixtures("tracing_only")
def test_a_masked_language_model_answers_for_every_token(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.MASKED_LM, **RELATIVE)

    assert export(made.folder, Head.MASKED_LM, tmp_path / "out").io.outputs == {"logits": Axes.TOKENS}


def built(path: Path, seed: int) -> bytes:
    """A graph of BERT."""
    made = make(path / f"model-{seed}", "BertConfig", Head.ENCODER, seed=seed, **SMALL)
    return export(made.folder, Head.ENCODER, path / f"out-{seed}", flavour=Flavour.PLAIN).path.read_bytes()


def test_a_graph_with_other_answers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = built(tmp_path, seed=5)
    for name in list(torch_export._EXPORTERS):
        monkeypatch.setitem(torch_export._EXPORTERS, name, lambda _answers, path: path.write_bytes(wrong))
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **SMALL)
    path = tmp_path / "model.onnx"

    with pytest.raises(UnsupportedModel, match=r"torch.export: last_hidden_state .* is off by .*; tracing: "):
        torch_export.export_with_torch(made.folder, Head.ENCODER, path, Flavour.FUSED, "forced")
    assert not path.exists()


def test_fusion_that_changes_the_answers_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = built(tmp_path, seed=0), built(tmp_path, seed=5)

    class Fused:
        model = onnx.load_from_string(wrong)

        def save_model_to_file(self, path: str, **_options: Any) -> None:
            Path(path).write_bytes(wrong)

    monkeypatch.setitem(torch_export._EXPORTERS, "torch.export", lambda _answers, path: path.write_bytes(right))
    monkeypatch.setattr(optimizer, "optimize_model", lambda *_args, **_options: Fused())
    out = tmp_path / "out"
    out.mkdir()
    folder = ModelFolder.open(tmp_path / "model-0")

    torch_export.export_with_torch(folder, Head.ENCODER, out / "model.onnx", Flavour.FUSED, "forced")

    assert (out / "model.onnx").read_bytes() == right
    assert [file.name for file in out.iterdir()] == ["model.onnx"]


def test_a_model_that_does_not_run_on_plain_tokens_is_refused(tmp_path: Path) -> None:
    """Pegasus wants the tokens of its decoder, too."""
    sizes = {
        f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")
    }
    made = make(tmp_path / "model", "PegasusConfig", Head.ENCODER, vocab_size=VOCABULARY, d_model=24, **sizes)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedModel, match="does not run"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_a_head_that_sees_padding_is_refused_with_the_reason(tmp_path: Path) -> None:
    """XLNet's reads the last place of a row: it was trained with the padding in front."""
    made = make(tmp_path / "model", "XLNetConfig", Head.SEQUENCE, **XLNET)

    with pytest.raises(UnsupportedModel, match="another answer where padding follows it"):
        export(made.folder, Head.SEQUENCE, tmp_path / "out")


def test_a_head_that_takes_only_pairs_is_refused_with_the_reason(tmp_path: Path) -> None:
    """mBART's reads the last end token, and only where all rows of a batch have as many."""
    sizes = {
        f"{part}_{size}": 1 for part in ("encoder", "decoder") for size in ("layers", "attention_heads", "ffn_dim")
    }
    fields = {"d_model": 24, "vocab_size": VOCABULARY, "max_position_embeddings": 40, "num_labels": 3, **sizes}
    made = make(tmp_path / "model", "MBartConfig", Head.SEQUENCE, **fields)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_file(str(made.path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing("$A </s>", "$A </s> </s> $B </s>", [("</s>", 2)])
    tokenizer.save(str(made.path / "tokenizer.json"))

    with pytest.raises(UnsupportedModel, match=r"an encoder with a decoder \(mbart\).* texts cannot run") as caught:
        export(made.folder, Head.SEQUENCE, tmp_path / "out")
    assert "Use an encoder" in caught.value.remedy
    with pytest.raises(UnsupportedModel, match=r"batches of texts: ValueError: .* the same number of <eos> tokens"):
        export_with_torch(made.folder, Head.SEQUENCE, tmp_path / "model.onnx", Flavour.FUSED, "it is an mBART")


def test_a_model_without_weights_for_the_head_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **RELATIVE)

    with pytest.raises(UnsupportedModel, match="without a sequence-classification head"):
        export(made.folder, Head.SEQUENCE, tmp_path / "out")


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **RELATIVE)
    made.rewrite_config(vocab_size=62)

    with pytest.raises(CorruptModel, match=r"'embeddings.word_embeddings.weight' .*\[62, 24\]"):
        export(made.folder, Head.ENCODER, tmp_path / "out")


def test_an_architecture_unknown_to_transformers_is_refused(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **SMALL)
    made.rewrite_config(model_type="no-such-type", architectures=["NoSuchModel"])

    with pytest.raises(UnsupportedModel, match="no-such-type") as caught:
        export(made.folder, Head.ENCODER, tmp_path / "out")

    assert "add an ONNX export of it to the folder" in caught.value.remedy
    known = make(tmp_path / "known", "BertConfig", Head.ENCODER, **SMALL)
    export(known.folder, Head.ENCODER, tmp_path / "graph", flavour=Flavour.PLAIN).path.rename(made.path / "model.onnx")
    assert export(made.folder, Head.ENCODER, tmp_path / "out").how == "own-onnx"


def test_errors_of_transformers_for_a_configuration_are_reported(tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", Head.ENCODER, **RELATIVE)
    made.rewrite_config(hidden_size="24")

    with pytest.raises(UnsupportedModel, match=r"does not load it as AutoModel: [\s\S]*TypeError: ") as caught:
        export_with_torch(made.folder, Head.ENCODER, tmp_path / "model.onnx", Flavour.FUSED, "")

    assert "Use a model that transformers loads" in caught.value.remedy


@pytest.mark.parametrize("head", [Head.ENCODER, Head.SEQUENCE])
@pytest.mark.parametrize("model_type", ["xlnet", "gptj", "no-such-type"])
def test_a_configuration_that_names_two_architectures_is_an_error(model_type: str, head: Head, tmp_path: Path) -> None:
    made = make(tmp_path / "model", "BertConfig", head, **SMALL)
    made.rewrite_config(model_type=model_type)

    with pytest.raises(CorruptModel) as caught:
        export(made.folder, head, tmp_path / "out")

    assert f"config.json contradicts itself: model_type is {model_type}, and architectures names Bert" in str(
        caught.value
    )
    assert "which is of the model_type bert. Take config.json from the same revision" in str(caught.value)
    assert "or write model_type: bert where" in caught.value.remedy
    made.rewrite_config(model_type="bert")
    assert export(made.folder, head, tmp_path / "out").how == "builder"
