"""Bulk work with a small model: forms, refused rows, resumed and refused work, another attempt, a check of the bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

import penstock
from penstock.errors import HostError, PenstockError
from penstock.tasks import TaskName
from penstock_bulk import corpus
from penstock_bulk.corpus import totals
from penstock_bulk.plans import BulkPlan, Options, PlanMismatch, make_plan, require_apart, require_plan, require_same
from penstock_bulk.storage import open_folder
from tests.bulk.corpora import contents, letters, load, planned, rows, texts, write_lines, write_parquet
from tests.runtime.models.gguf_files import write_gguf

pytestmark = pytest.mark.slow

ROWS = rows(150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[penstock.Model]:
    with load(folder) as loaded:
        yield loaded


def read(output: Path, form: str) -> list[dict[str, Any]]:
    """All rows, by the readers that users have."""
    if form == "jsonl":
        return [json.loads(line) for path in sorted(output.glob("part-*")) for line in path.read_bytes().splitlines()]
    found: list[dict[str, Any]] = dataset.dataset(str(output), format=form).to_table().to_pylist()
    return found


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("write", [write_parquet, write_lines])
def test_each_form_has_the_columns_and_the_bits_of_the_model(
    form: str, dtype: str, write: Callable[[Path, Any], Path], model: penstock.Model, tmp_path: Path
) -> None:
    source = write(tmp_path / f"in/a.{'parquet' if write is write_parquet else 'jsonl'}", ROWS)

    _, _, work = planned(source, tmp_path / "out", model, form=form, dtype=dtype)
    done = work.run()

    assert (done.complete, done.rows, done.dead, done.shards) == (True, 150, 0, 4)
    found = read(tmp_path / "out", form)
    assert [{name: one[name] for name in ("id", "text", "lang")} for one in found] == ROWS
    vectors = np.array([one["vector"] for one in found], dtype=dtype)
    expected = model.embed([one["text"] for one in ROWS]).astype(dtype)
    assert vectors.tobytes() == expected.tobytes()
    assert work.verify(50).different == ()


def test_parquet_has_a_fixed_size_and_states_the_space(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    _, _, work = planned(source, tmp_path / "out", model, keep=("id",), column="v", parameters={"dimensions": 8})
    work.run()

    schema = parquet.read_schema(next((tmp_path / "out").glob("part-*")))

    assert schema.names == ["id", "v"]
    assert schema.field("v").type == pa.list_(pa.float32(), 8)
    assert json.loads(schema.metadata[b"penstock"])["space"] == model.identity.space
    manifest = json.loads((tmp_path / "out/_manifest.json").read_text())
    assert manifest["identity"]["space"] == model.identity.space
    assert (manifest["rows"], manifest["dead"], len(manifest["parts"])) == (150, 0, 4)


BAD: list[tuple[Any, str, str]] = [
    ({"id": 1, "text": None}, "validation", "it must be a text, not null"),
    ({"id": 1, "text": 7}, "validation", "it must be a text"),
    ({"id": 1, "text": ["a"]}, "validation", "text"),
    ({"id": 1, "text": ""}, "validation", ""),
    ({"id": 1}, "validation", "not null"),
    ({"id": 1, "text": "bird " * 100}, "validation", "tokens; this model takes"),
    ({"id": 1, "text": "a" * (2**21 + 1)}, "too_large", "2,097,153 characters"),
    (b"{broken", "json", "the line is no JSON"),
    (b"[1]", "json", "no JSON object"),
    (b'{"id": 1, "text": "\\ud800"}', "json", "surrogate"),
]


def test_refused_rows_are_dead_letters_and_the_others_are_as_before(model: penstock.Model, tmp_path: Path) -> None:
    short = [{**one, "text": " ".join(one["text"].split()[:4])} for one in ROWS]
    some: list[Any] = list(short)
    bad = {position * 9 + 3: one for position, one in enumerate(BAD)}
    for position, (row, _, _) in bad.items():
        some[position] = row
    source = write_lines(tmp_path / "in/a.jsonl", some)

    _, _, work = planned(source, tmp_path / "out", model, parameters={"truncate": False})
    done = work.run()

    found = letters(tmp_path / "out")
    assert done.rows + done.dead == 150
    assert [one["row"] for one in found] == sorted(bad)
    for one in found:
        _, code, message = bad[one["row"]]
        assert (one["code"], one["file"]) == (code, "a.jsonl")
        assert message in one["message"]
    live = read(tmp_path / "out", "parquet")
    good = [short[position] for position in range(150) if position not in bad]
    assert [one["text"] for one in live] == [one["text"] for one in good]
    vectors = np.array([one["vector"] for one in live], dtype=np.float32)
    assert vectors.tobytes() == model.embed([one["text"] for one in good]).tobytes()
    assert work.verify(150).different == ()


def test_rows_that_were_corrected_have_a_result_after_another_attempt(model: penstock.Model, tmp_path: Path) -> None:
    some: list[Any] = list(ROWS)
    some[5], some[77], some[78] = {"id": "r5", "text": None}, b"{broken", {"id": "r78", "text": ""}
    source = write_lines(tmp_path / "in/a.jsonl", some)
    planned(source, tmp_path / "out", model)[2].run()
    before = contents(tmp_path / "out")
    plan = require_plan(open_folder(str(tmp_path / "out")))

    unchanged = work_of(plan, tmp_path / "out", model)
    assert unchanged.retry()[0] == 0
    some[5], some[77] = ROWS[5], ROWS[77]
    write_lines(source, some)
    recovered, now = work_of(plan, tmp_path / "out", model).retry()

    assert (recovered, now.rows, now.dead, now.complete) == (2, 149, 1, True)
    after = contents(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} == {"_manifest.json"}
    again = [one for name in sorted(after) if "retry" in name and name.startswith("part") for one in [name]]
    assert len(again) == 2
    ids = [one["id"] for one in read(tmp_path / "out", "parquet")]
    assert sorted(ids) == sorted(one["id"] for one in ROWS if one["id"] != "r78")
    assert work_of(plan, tmp_path / "out", model).verify(150).different == ()
    some[78] = ROWS[78]
    write_lines(source, some)
    assert work_of(plan, tmp_path / "out", model).retry()[1].dead == 0
    write_lines(source, some[:-1])
    with pytest.raises(PenstockError, match="other rows in number"):
        work_of(plan, tmp_path / "out", model).retry()


def work_of(plan: BulkPlan, output: Path, model: penstock.Model) -> corpus.BulkWork:
    return corpus.BulkWork(plan, open_folder(str(output)), model)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float16"}, "dtype is float32 there, and float16 now"),
    ({"keep": ("id",)}, r"keep is null there, and \[\"id\"\] now"),
    ({"shard_rows": 41}, "shard_rows is 40 there, and 41 now"),
    ({"parameters": {"normalize": False}}, "parameters is"),
    ({"form": "jsonl"}, "form is parquet there, and jsonl now"),
]


@pytest.mark.parametrize(("options", "message"), CHANGES)
def test_other_options_are_refused_with_both_values(
    options: dict[str, Any], message: str, model: penstock.Model, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    before, output, _ = planned(source, tmp_path / "out", model)
    now, _, _ = planned(source, tmp_path / "out", model, **options)

    with pytest.raises(PlanMismatch, match=message):
        require_same(before, now, output)
    require_same(before, planned(source, tmp_path / "out", model)[0], output)


def test_another_model_and_changed_files_are_refused(model: penstock.Model, folder: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in/a.jsonl", ROWS)
    before, output, _ = planned(source.parent, tmp_path / "out", model)

    with (
        load(folder / "other") as other,
        pytest.raises(PlanMismatch, match=f"artefact is {before.identity['artefact']} there, and [0-9a-f]{{64}} now"),
    ):
        require_same(before, planned(source.parent, tmp_path / "out", other)[0], output)
    os.utime(source, (1, 1))
    with pytest.raises(
        PlanMismatch, match=r"a.jsonl is \d+ bytes, version \d+ there, and \d+ bytes, version 1000000000"
    ):
        require_same(before, planned(source.parent, tmp_path / "out", model)[0], output)
    write_lines(tmp_path / "in/b.jsonl", ROWS)
    with pytest.raises(PlanMismatch, match=r"b\.jsonl is absent there"):
        require_same(before, planned(source.parent, tmp_path / "out", model)[0], output)


def test_complete_work_is_not_done_again_and_a_lost_part_is(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    plan, _, work = planned(source, tmp_path / "out", model)
    work.run()
    before = contents(tmp_path / "out")
    seen: list[corpus.Progress] = []

    planned(source, tmp_path / "out", model)[2].run(seen.append)
    assert seen == []
    (tmp_path / "out" / plan.part(2)).unlink()
    (tmp_path / "out/_SUCCESS").unlink()
    assert totals(open_folder(str(tmp_path / "out"))).shards == 3
    planned(source, tmp_path / "out", model)[2].run(seen.append)

    assert (seen[0].of, seen[-1].rows, seen[-1].computed) == (150, 150, 40)
    assert contents(tmp_path / "out") == before


def test_the_plan_of_an_output_is_used_without_counting_rows_again(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    before, _, _ = planned(source, tmp_path / "out", model)

    def count(_done: int, _of: int) -> None:
        pytest.fail("the input was read")

    asked = Options(task="embed", shard_rows=40)
    assert make_plan(str(source), model, asked, count, before) == before


def test_windows_of_any_size_give_the_same_results(
    model: penstock.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "a.jsonl", rows(600))
    seen: list[corpus.Progress] = []
    done = planned(source, tmp_path / "whole", model, shard_rows=600)[2].run(seen.append)
    # One window, of which each request is shown.
    assert len(seen) >= 5
    assert [one.rows for one in seen] == sorted(one.rows for one in seen)
    assert (seen[-1].rows, seen[-1].computed, seen[-1].tokens) == (600, 600, done.tokens)
    monkeypatch.setattr(corpus, "WINDOW_BYTES", 1)
    planned(source, tmp_path / "small", model, shard_rows=600)[2].run()

    values = [json.loads((tmp_path / name / "_state/00000000.json").read_text()) for name in ("whole", "small")]
    assert values[0]["values"] == values[1]["values"]
    assert values[0]["tokens"] == values[1]["tokens"]


def test_damage_is_found(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    plan, _, work = planned(source, tmp_path / "out", model)
    work.run()
    part = tmp_path / "out" / plan.part(1)
    table = parquet.read_table(part)
    # One bit of a value, written as if it had been computed.
    values = table.column("vector").combine_chunks().flatten().to_numpy().copy()
    values.view(np.uint32)[0] ^= 1
    vector = pa.FixedSizeListArray.from_arrays(pa.array(values), 32)
    changed = table.set_column(table.schema.get_field_index("vector"), table.schema.field("vector"), vector)
    parquet.write_table(changed, part)

    found = work.verify(150).different

    assert found[0] == f"{part.name}: its bytes have changed since it was written"
    assert found[1:] == (f"{part.name}: row 0 (of a.jsonl, row 40) has other bits",)


def test_texts_are_classified_with_the_labels_of_the_model(folder: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    with load(folder, TaskName.TEXT_CLASSIFICATION) as model:
        _, _, work = planned(source, tmp_path / "out", model, task="classify", form="jsonl", parameters={"top_k": 2})
        work.run()
        expected = model.classify([one["text"] for one in ROWS], top_k=2)
        assert work.verify(150).different == ()

    assert [one["labels"] for one in read(tmp_path / "out", "jsonl")] == expected


def test_documents_are_ranked_and_a_row_with_a_bad_one_is_a_dead_letter(folder: Path, tmp_path: Path) -> None:
    some: list[Any] = [{"query": "bird", "documents": texts(3 + number % 5, seed=number)} for number in range(30)]
    some[4]["documents"], some[5]["documents"], some[6]["query"] = ["a", ""], [], None
    some[7]["documents"] = "one text"
    source = write_lines(tmp_path / "a.jsonl", some)
    with load(folder, TaskName.TEXT_RANKING) as model:
        _, _, work = planned(
            source, tmp_path / "out", model, task="rerank", inputs=("query", "documents"), top=2, form="jsonl"
        )
        done = work.run()
        scores = {row: model.rerank("bird", some[row]["documents"]) for row in (0, 29)}
        assert work.verify(30).different == ()

    assert (done.rows, done.dead) == (27, 3)
    assert [one["row"] for one in letters(tmp_path / "out")] == [4, 5, 6]
    found = read(tmp_path / "out", "jsonl")
    assert found[4]["ranking"][0]["index"] == 0
    for at, row in ((0, 0), (-1, 29)):
        best = np.argsort(-scores[row], kind="stable")[:2]
        assert [one["index"] for one in found[at]["ranking"]] == best.tolist()
        assert [np.float32(one["score"]) for one in found[at]["ranking"]] == list(scores[row][best])


def test_an_estimate_counts_all_rows_and_writes_nothing(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    _, _, work = planned(source, tmp_path / "out", model)

    found = work.estimate()

    assert (found.rows, found.shards, found.sampled, found.dead) == (150, 4, 150, 0)
    assert not (tmp_path / "out").exists()
    planned(source, tmp_path / "out", model)[2].run()
    assert found.tokens == totals(open_folder(str(tmp_path / "out"))).tokens
    assert found.seconds > 0


def test_one_process_works_on_a_folder_and_leftovers_are_removed(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    _, output, work = planned(source, tmp_path / "out", model)
    (tmp_path / "out/_unfinished").mkdir(parents=True)
    (tmp_path / "out/_unfinished/part").write_bytes(b"half")

    with output.working(), pytest.raises(HostError, match="another process is working on"):
        work.run()
    work.run()

    assert not (tmp_path / "out/_unfinished").exists()


def test_an_output_in_its_input_and_one_that_cannot_be_written_are_refused(
    model: penstock.Model, tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in/a.jsonl", ROWS)

    for place in ("in", "in/out"):
        with pytest.raises(PenstockError, match="is in the input"):
            require_apart(str(tmp_path / "in"), open_folder(str(tmp_path / place)))
    require_apart(str(tmp_path / "in"), open_folder(str(tmp_path / "in-out")))
    with pytest.raises(HostError, match=f"the output {source}/out cannot be "):
        planned(source, source / "out", model)[2].run()
    with pytest.raises(PenstockError, match="no output"):
        totals(open_folder(str(tmp_path / "in")))
    with pytest.raises(PenstockError, match="no access to ftp://"):
        open_folder("ftp://host/a")


def test_a_column_with_the_name_of_the_result_is_refused(model: penstock.Model, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "a", "vector": 1}])

    with pytest.raises(PenstockError, match="the input has a column vector"):
        planned(source, tmp_path / "out", model)
    planned(source, tmp_path / "out", model, column="embedding")


def test_prompts_are_continued_and_a_prompt_that_is_too_long_is_a_dead_letter(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    prompts: list[Any] = [{"prompt": " ".join(text.split()[:5])} for text in texts(12)]
    prompts[3]["prompt"], prompts[5]["prompt"] = "bird " * 5000, None
    source = write_lines(tmp_path / "a.jsonl", prompts)
    folders: dict[str, Any] = {"store": tmp_path / "store", "models": tmp_path / "models"}
    with penstock.load((tmp_path / "model.gguf").as_uri(), task="text-generation", plan="fp32", **folders) as model:
        _, _, work = planned(
            source, tmp_path / "out", model, task="generate", shard_rows=5, parameters={"max_new_tokens": 6}
        )
        done = work.run()
        good = [row for row in range(12) if row not in {3, 5}]
        expected = model.generate([prompts[row]["prompt"] for row in good], max_tokens=6)
        assert work.verify(12).different == ()

    assert (done.rows, done.dead, done.complete) == (10, 2, True)
    assert [(one["row"], one["code"]) for one in letters(tmp_path / "out")] == [
        (3, "context_length_exceeded"),
        (5, "validation"),
    ]
    assert [one["generated"] for one in read(tmp_path / "out", "parquet")] == expected
    assert all(expected)


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("count", [0, 3])
def test_an_input_without_rows_or_without_a_good_one_is_complete(
    count: int, form: str, model: penstock.Model, tmp_path: Path
) -> None:
    source = tmp_path / "in/a.parquet"
    source.parent.mkdir()
    parquet.write_table(pa.table({"text": pa.array([None] * count, pa.string())}), source)

    _, _, work = planned(source, tmp_path / "out", model, form=form)
    assert (work.estimate().rows, work.estimate().dead) == (count, float(count > 0))
    done = work.run()

    assert (done.rows, done.dead, done.complete) == (0, count, True)
    assert len(letters(tmp_path / "out")) == count
    assert work.verify(10).rows == 0
    assert work.retry()[0] == 0
    if count and form != "jsonl":
        table = dataset.dataset(str(tmp_path / "out"), format=form).to_table()
        assert (len(table), table.schema.names) == (0, ["text", "vector"])
