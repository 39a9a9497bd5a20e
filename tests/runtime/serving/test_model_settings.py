"""The table of settings in docs/reference/models.md: each row has a test that shows its effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock_runtime.serving.model_settings import SETTINGS, ModelSetting, Treatment, ignored_settings

ROOT = Path(__file__).parents[3]
FOLDER, SPECIALS = "tests/runtime/models/test_folder.py", "tests/runtime/tokens/test_specials.py"
TOKENIZER, PARITY = "tests/runtime/tokens/test_tokenizer.py", "tests/runtime/models/test_parity.py"
GENERATOR = "tests/runtime/serving/test_generator.py"
RANKING = "tests/runtime/tasks/classification/test_text_ranking.py::test_the_models_files_decide_the_function_of_scores"
LENGTHS = f"{PARITY}::test_lengths_are_those_that_sentence_transformers_cuts_to"
TESTS = {
    ("config.json", "id2label"): f"{PARITY}::test_labels_and_problem_type_are_those_of_transformers",
    ("config.json", "problem_type"): "tests/runtime/tasks/classification/test_text_classification.py"
    "::test_the_function_is_chosen_by_the_kind_of_problem",
    ("config.json", "sentence_transformers"): RANKING,
    ("config.json", "max_position_embeddings"): f"{PARITY}::test_the_longest_sequence_runs_and_one_token_more_does_not",
    ("config.json", "eos_token_id"): f"{GENERATOR}::test_an_end_token_is_read_where_transformers_reads_it",
    ("config.json", "auto_map"): f"{FOLDER}::test_code_of_the_models_own_is_refused",
    ("config.json", "task_specific_params"): f"{GENERATOR}::test_defaults_are_found_where_transformers_finds_them",
    ("generation_config.json", "eos_token_id"): f"{GENERATOR}::test_an_end_token_is_read_where_transformers_reads_it",
    ("generation_config.json", "do_sample"): f"{GENERATOR}::test_the_defaults_of_the_models_files_apply",
    ("generation_config.json", "stop_strings"): f"{GENERATOR}::test_an_answer_ends_as_the_models_files_say",
    ("tokenizer_config.json", "chat_template"): "tests/runtime/generation/test_templates.py"
    "::test_templates_are_found_where_transformers_finds_them",
    (
        "tokenizer_config.json",
        "bos_token",
    ): f"{SPECIALS}::test_tokens_are_those_of_transformers_for_any_settings_in_the_files",
    (
        "tokenizer_config.json",
        "add_bos_token",
    ): f"{SPECIALS}::test_classes_of_decoders_add_the_first_and_last_token_that_they_state",
    ("tokenizer_config.json", "do_lower_case"): f"{TOKENIZER}::test_case_is_as_tokenizer_config_has_it",
    ("tokenizer_config.json", "model_max_length"): f"{FOLDER}::test_is_the_lowest_limit_that_holds",
    ("tokenizer_config.json", "clean_up_tokenization_spaces"): f"{TOKENIZER}::test_decoding_is_that_of_transformers",
    (
        "modules.json",
        "Pooling",
    ): f"{PARITY}::test_files_written_by_sentence_transformers_are_read_with_the_same_meaning",
    ("modules.json", "type"): f"{FOLDER}::test_a_module_that_is_not_served_is_named",
    ("sentence_bert_config.json", "max_seq_length"): LENGTHS,
    ("sentence_bert_config.json", "processing_kwargs"): f"{FOLDER}::test_a_setting_that_makes_other_tokens_is_named",
    ("sentence_bert_config.json", "config_kwargs"): f"{FOLDER}::test_a_setting_that_makes_other_tokens_is_named",
    ("config_sentence_transformers.json", "prompts"): f"{FOLDER}::test_prompts_and_lower_case_are_read",
    ("config_sentence_transformers.json", "truncate_dim"): "tests/runtime/tasks/embeddings/test_feature_extraction.py"
    "::test_vectors_are_truncated_if_the_models_files_state_it",
    ("config_sentence_transformers.json", "activation_fn"): RANKING,
}
"""The test of each row that is read or refused, by its file and first setting."""
IGNORED = [one for one in SETTINGS if one.treatment is Treatment.IGNORED]


def test_each_row_has_a_test() -> None:
    rows = {(one.file, one.fields[0]) for one in SETTINGS if one.treatment is not Treatment.IGNORED}
    assert set(TESTS) == rows
    for test in TESTS.values():
        file, name = test.split("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test


@pytest.mark.parametrize("setting", IGNORED, ids=lambda one: f"{one.file}-{one.fields[0]}")
def test_an_ignored_setting_is_named_if_it_would_change_an_answer(setting: ModelSetting, tmp_path: Path) -> None:
    (field,) = setting.fields
    assert ignored_settings(tmp_path, generates=True) == ()
    for value in (None, [], {}, *setting.harmless):
        (tmp_path / setting.file).write_text(json.dumps({field: value}))
        assert ignored_settings(tmp_path, generates=True) == ()
    value = {"use_cache": 7} if field.startswith("model_") else 7
    (tmp_path / setting.file).write_text(json.dumps({field: value}))
    (sentence,) = ignored_settings(tmp_path, generates=True)
    assert sentence.startswith(f"{setting.file} has {field}, which is ignored")


def test_settings_that_are_followed_or_change_no_answer_are_not_named(tmp_path: Path) -> None:
    followed = {"default_task": "separation", "torch_dtype": "float16", "trust_remote_code": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"model_args": followed}))
    # Only generated texts ignore it.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": True}))
    assert ignored_settings(tmp_path) == ()
