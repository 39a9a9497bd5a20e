"""The engine with the stand-in for the Neuron SDK: a real child process, real files, no device."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ArtefactError, DeviceUnavailable, MissingPackage, PenstockError
from penstock.manifest import Axes
from penstock.neuron_artefact import CompiledModel
from penstock_runtime.engines.base import Engine, HasDevice, Threads
from penstock_runtime.engines.load import load_engine
from penstock_runtime.engines.neuron import NeuronEngine
from penstock_runtime.engines.neuron.engine import check_packages
from penstock_runtime.engines.neuron.fence import write_fence
from penstock_runtime.errors import InferenceFailed
from penstock_runtime.rows import Row, collate
from tests.runtime.engines.neuron.small import (
    MASK,
    RECIPE,
    InNumpy,
    Standin,
    changed_copy,
    install_standin,
    io_of,
    of_inf1,
)

SECONDS = 60


@contextmanager
def loaded(path: Path, kind: str = "vectors", copies: int = 2) -> Iterator[NeuronEngine]:
    engine = load_engine(path, io_of(kind), RECIPE, Threads(copies, 1))
    assert isinstance(engine, NeuronEngine)
    try:
        yield engine
    finally:
        engine.close()


def assert_same(engine: Engine, kind: str, rows: Sequence[Row]) -> None:
    """Equal answers for a batch of these rows, over the real tokens of each."""
    batch = collate(rows)
    found, expected = engine.run(batch), InNumpy(kind).run(batch)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        given = found[name]
        assert given.dtype == np.float32
        assert given.shape == wanted.shape
        real = batch.attention_mask == 1 if io_of(kind).outputs[name] is Axes.TOKENS else ...
        np.testing.assert_allclose(given[real], wanted[real], rtol=1e-4, atol=1e-5)


ROWS = [
    Row([2, 7, 8, 9, 3]),
    Row([2, 11, 3], [0, 1, 1]),
    Row([2, *[12] * 30, 3]),
    Row([2, MASK, 3]),
    Row([2, *[5] * 60]),
]


def test_batches_of_any_size_and_length_give_the_models_answers(on_host: Standin, compiled: dict[str, Path]) -> None:
    with loaded(compiled["vectors"]) as engine:
        for rows in (ROWS[:1], ROWS[:2], ROWS[1:3], ROWS[:4] * 2, ROWS, [ROWS[4]]):
            assert_same(engine, "vectors", rows)
        state = engine.device()
        with pytest.raises(InferenceFailed, match="65 tokens are more than the 64 that the model was compiled for"):
            engine.run(collate([Row([1] * 65)]))

    assert isinstance(engine, HasDevice)
    assert engine.facts.threads == Threads(2, 1)
    assert engine.facts.in_flight == 4
    assert (state.cores, state.copies, state.cores_in_service) == (2, 2, 2)
    assert state.padded_tokens > state.real_tokens > 0
    assert state.runs >= 8
    assert state.errors == {}
    assert 0 <= state.facts["largest_relative_error"] < 0.001
    assert state.facts["notes"] == ["not yet run on a device"]


def test_runs_of_several_threads_at_once_do_not_mix_their_answers(on_host: Standin, compiled: dict[str, Path]) -> None:
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            for length in range(1, 20):
                assert_same(engine, "masks", [Row([2, MASK, number + 5, *[6] * length]), Row([number + 5, MASK, MASK])])
        except BaseException as error:
            failures.append(error)

    with loaded(compiled["masks"], "masks") as engine:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)

    assert failures == []


def test_a_core_that_fails_is_taken_out_of_service_and_its_run_is_repeated_on_another(
    on_host: Standin, compiled: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[PenstockError] = []
    with loaded(compiled["vectors"]) as engine:
        engine.when_lost(lost.append)
        on_host.describe(faults={"hardware_error_cores": [0]})
        for _ in range(3):
            assert_same(engine, "vectors", ROWS[:2])
        state = engine.device()
        assert lost == []
        on_host.describe(faults={"hardware_error_cores": [0], "execution_timeout_cores": [1]})
        with pytest.raises(InferenceFailed, match="no NeuronCore is left in service"):
            engine.run(collate(ROWS[:1]))
        later: list[PenstockError] = []
        engine.when_lost(later.append)

    assert state.cores_in_service == 1
    assert list(state.out_of_service) == [0]
    assert "status=1202" in state.out_of_service[0]
    assert state.errors == {"hardware": 1}
    assert engine.device().errors == {"hardware": 1, "timed-out": 1}
    assert [type(error) for error in lost + later] == [DeviceUnavailable] * 2
    assert lost[0].temporary
    events = [record.__dict__.get("event") for record in caplog.records]
    assert events.count("NeuronCoreFailed") == 2


@pytest.mark.parametrize(
    ("cores_per_copy", "broken", "failed", "left"), [(1, [0, 1, 2, 4], {0, 1, 2}, 5), (4, [3], {0}, 4)]
)
def test_on_inf1_copies_have_cores_of_their_own_one_after_the_other(
    on_inf1: Standin,
    compiled_inf1: dict[tuple[str, int], Path],
    *,
    cores_per_copy: int,
    broken: list[int],
    failed: set[int],
    left: int,
) -> None:
    copies = 8 // cores_per_copy
    engine = load_engine(
        compiled_inf1["vectors", cores_per_copy], io_of("vectors"), RECIPE, Threads(copies, cores_per_copy)
    )
    assert isinstance(engine, NeuronEngine)
    try:
        assert_same(engine, "vectors", ROWS)
        before = engine.device()
        on_inf1.describe(chips=2, faults={"hardware_error_cores": broken})
        # The first copy in service takes a run that is alone, and the next one after a failure.
        assert_same(engine, "vectors", ROWS[:1])
        after = engine.device()
    finally:
        engine.close()

    assert before.facts["notes"] == ["not yet run on a device", "AWS no longer supports Inf1"]
    assert (before.cores, before.copies, before.cores_in_service) == (8, copies, 8)
    assert 0 <= before.facts["largest_relative_error"] < 0.001
    # A pipeline of four cores has four runs in progress, so that its stages are busy.
    assert engine.facts.in_flight == copies * (2 if cores_per_copy == 1 else 4)
    assert set(after.out_of_service) == failed
    assert after.cores_in_service == left


def test_inf1_takes_as_many_free_cores_as_whole_copies_need(
    on_inf1: Standin, compiled_inf1: dict[tuple[str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, io = compiled_inf1["vectors", 4], io_of("vectors")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    engine = load_engine(path, io, RECIPE, Threads(2, 4))
    engine.close()
    assert engine.facts.threads == Threads(1, 4)

    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-2")
    with pytest.raises(DeviceUnavailable, match="compiled for 4 NeuronCores, and 3 are granted"):
        load_engine(path, io, RECIPE, Threads(2, 4))


def test_when_the_child_is_killed_no_copy_is_left_and_waiting_runs_fail(
    on_host: Standin, compiled: dict[str, Path]
) -> None:
    lost = threading.Event()
    reasons: list[PenstockError] = []

    def note(error: PenstockError) -> None:
        reasons.append(error)
        lost.set()

    with loaded(compiled["vectors"]) as engine:
        engine.when_lost(note)
        os.kill(engine.pid, signal.SIGKILL)

        assert lost.wait(SECONDS)
        with pytest.raises(InferenceFailed, match="was ended by SIGKILL"):
            engine.run(collate(ROWS[:1]))

    assert len(reasons) == 1
    assert engine.device().cores_in_service == 0


def test_the_start_waits_until_another_process_has_released_the_cores(
    on_host: Standin, compiled: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.__dict__.get("event") == "NeuronCoresTaken":
                on_host.describe()

    logger = logging.getLogger("penstock.neuron")
    release = Release()
    logger.addHandler(release)
    on_host.describe(faults={"busy_cores": [1]})
    try:
        with loaded(compiled["vectors"]) as engine:
            assert_same(engine, "vectors", ROWS[:1])
    finally:
        logger.removeHandler(release)

    messages = [r.getMessage() for r in caplog.records if r.__dict__.get("event") == "NeuronCoresTaken"]
    assert len(messages) == 1
    assert "NeuronCore(s) not available" in messages[0]


def test_cores_that_stay_taken_are_an_error_that_may_pass(
    on_host: Standin, compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NEURON_START_SECONDS", "0")
    on_host.describe(faults={"busy_cores": [0]})

    with pytest.raises(DeviceUnavailable, match="the NeuronCores are taken by another process") as raised:
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))

    assert raised.value.temporary


def test_a_copy_with_wrong_answers_stops_the_start(on_host: Standin, compiled: dict[str, Path]) -> None:
    on_host.describe(faults={"wrong_answers": 0.1})

    with pytest.raises(ArtefactError, match=r"differ from fp32 by 0\.\d+ on this device, and 0\.001 is allowed"):
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))


@pytest.mark.parametrize(
    ("package", "version", "kind", "words"),
    [
        ("torch-neuronx", "2.10.0.1.0", MissingPackage, "releases from 2.10 on are another product"),
        ("torch-neuronx", "2.9.0.2.99.1", ArtefactError, "was compiled with torch-neuronx 2.9.0.2.15.32035"),
        ("torch-neuronx", "2.9.0.2.15.32035", None, ""),
        ("torch-neuronx", "", MissingPackage, "torch-neuronx is not installed for python"),
        ("torch-neuron", "1.13.1.2.11.13.0", None, ""),
        ("torch-neuron", "1.13.1.2.9.6.0", ArtefactError, "was compiled with torch-neuron 1.13.1.2.11.13.0"),
        ("torch-neuron", "", MissingPackage, "torch-neuron is not installed for python"),
    ],
)
def test_other_releases_of_the_package_are_refused_by_name(
    compiled: dict[str, Path], package: str, version: str, kind: type[PenstockError] | None, words: str
) -> None:
    model = CompiledModel.load(compiled["vectors"])
    if package == "torch-neuron":
        model = CompiledModel.model_validate({**model.model_dump(), **of_inf1(4)})
    installed = {package: version} if version else {}
    if kind is None:
        check_packages(model, installed, Path("python"))
        return
    with pytest.raises(kind, match=words) as raised:
        check_packages(model, installed, Path("python"))

    image = "runtime-neuron-legacy" if package == "torch-neuron" else "runtime-neuron"
    assert image in raised.value.remedy or "optimizer image" in raised.value.remedy


def test_a_refused_package_is_not_imported(
    on_host: Standin, compiled: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = install_standin(tmp_path, versions={"torch-neuronx": "2.13.1"})
    (other.path / "torch_neuronx.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(other.path))

    with pytest.raises(MissingPackage, match=r"torch-neuronx 2\.13\.1 is installed"):
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))

    assert not (tmp_path / "imported").exists()


def test_without_the_package_or_the_interpreter_the_image_is_named(
    compiled: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingPackage, match="torch-neuronx is not installed for") as raised:
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))
    assert "runtime-neuron" in raised.value.remedy

    monkeypatch.setenv("PENSTOCK_NEURON_PYTHON", str(tmp_path / "python"))
    with pytest.raises(MissingPackage, match="cannot be started"):
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outputs": ("logits",)}, "but is described with"),
        ({"fence": {"file": "other.npz", "max_relative_error": 0.1}}, "other.npz is missing"),
        ({"fence": None}, r"is not what this version reads \(fence"),
        ({"cores_per_model": 4}, "the model was compiled for 4 NeuronCores, and 2 are granted"),
        ({"buckets": ()}, "is not what this version reads"),
    ],
)
def test_an_artefact_that_does_not_fit_is_refused_before_a_child_is_started(
    compiled: dict[str, Path], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = changed_copy(compiled["vectors"], tmp_path / "copy", "vectors", **changes)

    with pytest.raises(PenstockError, match=words):
        load_engine(path, io_of("vectors"), RECIPE, Threads(2, 1))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Row([2, MASK, *[5] * 38])], "have 40 tokens, too many to compare b1-t32.pt"),
        ([Row([2, 5, 3])], "has no answers"),
    ],
)
def test_a_model_that_cannot_be_compared_with_fp32_in_every_shape_is_refused(
    compiled: dict[str, Path], tmp_path: Path, rows: list[Row], words: str
) -> None:
    path = changed_copy(compiled["masks"], tmp_path / "copy", "masks")
    batch = collate(rows)
    write_fence(path.with_name("fence.npz"), batch, InNumpy("masks").run(batch))

    with pytest.raises(ArtefactError, match=words):
        load_engine(path, io_of("masks"), RECIPE, Threads(2, 1))


def test_another_target_than_that_of_the_pod_is_refused(
    compiled: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NEURON_TARGET", "inf1")

    with pytest.raises(ArtefactError, match="was compiled for inf2, and PENSTOCK_NEURON_TARGET is inf1"):
        load_engine(compiled["vectors"], io_of("vectors"), RECIPE, Threads(2, 1))
