"""Local sources, read in place: packages that are never imported, files, claims; and retries."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CorruptModel, MissingPackage, ModelNotFound, ModelUnavailable, UnsafeModel, UnsupportedModel
from penstock.resources.core import ModelSource
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.transfer import choose_files
from penstock_runtime.remote import Retries
from tests.runtime.models.folders import model_folder


def fetch(url: str, cache: Path) -> ModelFolder:
    return fetch_model(ModelSource.parse(url), cache=cache)


def test_a_file_source_is_read_where_it_lies(tmp_path: Path) -> None:
    original = model_folder(tmp_path / "model")
    folder = fetch(f"file://{original}", tmp_path / "cache")
    assert folder.path == original
    assert not (tmp_path / "cache").exists()


def test_a_file_source_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="is not there"):
        fetch(f"file://{tmp_path}/missing", tmp_path / "cache")


class TestPackages:
    @pytest.fixture(autouse=True)
    def _packages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Packages that would end the test run if they were imported."""
        model_folder(tmp_path / "site" / "trap_model" / "inner" / "weights")
        for folder in ("trap_model", "trap_model/inner"):
            (tmp_path / "site" / folder / "__init__.py").write_text("raise SystemExit('imported')")
        (tmp_path / "site" / "trap_module.py").write_text("raise SystemExit('imported')")
        model_folder(tmp_path / "site" / "bare_space" / "weights")
        monkeypatch.syspath_prepend(tmp_path / "site")

    @pytest.mark.parametrize("url", ["pkg://trap_model/inner/weights", "pkg://trap_model.inner/weights"])
    def test_are_not_imported(self, url: str, tmp_path: Path) -> None:
        assert fetch(url, tmp_path / "cache").path == tmp_path / "site" / "trap_model" / "inner" / "weights"
        assert "trap_model" not in sys.modules

    def test_need_no_init_file(self, tmp_path: Path) -> None:
        assert fetch("pkg://bare_space/weights", tmp_path / "cache").model_type == "bert"

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("pkg://not_installed_here/model", "Run pip install not-installed-here"),
            ("pkg://trap_model/nothing", "the package trap_model has no folder nothing"),
            ("pkg://trap_module", "trap_module is no package with files"),
            ("pkg://__main__/model", "there is no package __main__ here|has no folder model"),
        ],
    )
    def test_that_do_not_have_it_are_an_error(self, url: str, words: str, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=words):
            fetch(url, tmp_path / "cache")

    def test_that_hold_no_model_are_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(CorruptModel, match=r"has no config\.json"):
            fetch("pkg://trap_model", tmp_path / "cache")


class TestClaims:
    def test_are_found_below_the_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model_folder(tmp_path / "models" / "team" / "minilm")
        monkeypatch.setenv("PENSTOCK_PVC_ROOT", str(tmp_path))
        assert fetch("pvc://models/team/minilm", tmp_path / "cache").model_type == "bert"

    def test_that_are_not_mounted_say_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PENSTOCK_PVC_ROOT", raising=False)
        with pytest.raises(ModelNotFound, match=r"models is not mounted at /var/run/penstock/claims/models.*set PENST"):
            fetch("pvc://models/x", tmp_path / "cache")

    def test_cannot_be_left_by_a_link(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model_folder(tmp_path / "other" / "model")
        (tmp_path / "root" / "claim").mkdir(parents=True)
        (tmp_path / "root" / "claim" / "model").symlink_to(tmp_path / "other" / "model")
        monkeypatch.setenv("PENSTOCK_PVC_ROOT", str(tmp_path / "root"))
        with pytest.raises(UnsafeModel, match="leads out of the claim"):
            fetch("pvc://claim/model", tmp_path / "cache")


class TestMountedFolders:
    """A `file://` source on a cluster: its allowed folder is mounted at another place."""

    @pytest.fixture(autouse=True)
    def _mounted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mounted").mkdir()
        monkeypatch.setenv("PENSTOCK_FILE_PREFIX", "/srv/models")
        monkeypatch.setenv("PENSTOCK_FILE_ROOT", str(tmp_path / "mounted"))

    @pytest.mark.parametrize("url", ["file:///srv/models/team/minilm", "file:////srv//models/./team/minilm/"])
    def test_are_found_at_the_place_of_the_mount(self, url: str, tmp_path: Path) -> None:
        model_folder(tmp_path / "mounted" / "team" / "minilm")
        assert fetch(url, tmp_path / "cache").path == tmp_path / "mounted" / "team" / "minilm"

    def test_do_not_give_access_to_other_folders(self, tmp_path: Path) -> None:
        other = model_folder(tmp_path / "other")
        with pytest.raises(ModelNotFound, match=r"is not below /srv/models, which is mounted here"):
            fetch(f"file://{other}", tmp_path / "cache")

    def test_cannot_be_left_by_a_link(self, tmp_path: Path) -> None:
        model_folder(tmp_path / "other")
        (tmp_path / "mounted" / "minilm").symlink_to(tmp_path / "other")
        with pytest.raises(UnsafeModel, match=r"leads out of /srv/models by a link"):
            fetch("file:///srv/models/minilm", tmp_path / "cache")


def test_the_hub_without_its_package_names_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match="Run pip install huggingface-hub"):
        fetch("hf://org/model", tmp_path / "cache")


class TestRetries:
    @given(st.integers(1, 8), st.floats(0, 10), st.floats(0, 40))
    def test_waits_grow_and_stay_within_bounds(self, attempts: int, first: float, longest: float) -> None:
        waits: list[float] = []
        retries = Retries(attempts, first, longest, waits.append)

        def fail() -> None:
            raise ModelUnavailable("down")

        with pytest.raises(ModelUnavailable):
            retries.run(fail)
        assert len(waits) == attempts - 1
        assert all(0 <= wait <= longest for wait in waits)
        assert all(later >= wait / 2 for wait, later in pairwise(waits))

    def test_a_permanent_error_is_not_tried_again(self) -> None:
        calls: list[int] = []

        def fail() -> None:
            calls.append(1)
            raise ModelNotFound("no")

        with pytest.raises(ModelNotFound):
            Retries(sleep=lambda _: None).run(fail)
        assert calls == [1]

    def test_a_source_that_asks_for_an_hour_is_not_waited_for(self) -> None:
        waits: list[float] = []

        def fail() -> None:
            raise ModelUnavailable("busy", retry_after_seconds=3600)

        with pytest.raises(ModelUnavailable):
            Retries(attempts=2, longest_wait_seconds=30, sleep=waits.append).run(fail)
        assert waits == [30]


NAMES = st.sampled_from([
    "config.json", "tokenizer.json", "vocab.txt", "modules.json", "1_Pooling/config.json", "model.safetensors",
    "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "model.onnx", "model.onnx_data", "onnx/model.onnx", "onnx/model.onnx.data", "onnx/model_int8.onnx",
    "pytorch_model.bin", "optimizer.pt", "modeling.py", "README.md", ".gitattributes", "a/b/config.json",
    "../config.json", "1_Pooling/../../x/config.json", "run.sh", "tf_model.h5",
])  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
def test_the_only_onnx_file_is_fetched_with_its_weights_under_any_name(graph: bool) -> None:
    names = ["config.json", "onnx/model_optimized.onnx", "onnx/model_optimized.onnx_data", "onnx/other.onnx_data"]

    assert choose_files("hf://a/b", names, graph=graph) == names[:3]


def test_several_onnx_files_without_the_usual_name_are_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"several ONNX files and no safetensors: onnx/a\.onnx, onnx/b\.onnx"):
        choose_files("hf://a/b", ["config.json", "onnx/b.onnx", "onnx/a.onnx"], graph=False)


@given(st.sets(NAMES), st.booleans())
def test_chosen_files_are_no_code_and_lie_within_the_folder(names: set[str], graph: bool) -> None:
    try:
        chosen = choose_files("hf://a/b", names, graph=graph)
    except (UnsafeModel, CorruptModel):
        assert not names & {"model.safetensors", "model.safetensors.index.json", "model.onnx", "onnx/model.onnx"}
        return
    assert set(chosen) <= names
    assert len(chosen) == len(set(chosen))
    assert not [name for name in chosen if name.endswith((".bin", ".pt", ".py", ".sh", ".h5")) or ".." in name]
    assert any(name.endswith((".safetensors", ".onnx")) or "index" in name for name in chosen)
