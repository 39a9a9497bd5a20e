"""`hf://` through the real huggingface_hub library, against a small server that speaks the hub's API."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.errors import (
    CorruptModel,
    HostError,
    ModelAccessDenied,
    ModelNotFound,
    ModelUnavailable,
    PenstockError,
    UnsafeModel,
    UnsupportedModel,
)
from penstock.resources.core import ModelSource
from penstock.resources.endpoint import ModelEndpoint
from penstock.resources.files.reading import from_yaml
from penstock_optimizer.job.job import config_check
from penstock_runtime.models.folder import ModelFolder
from penstock_runtime.models.sources import hub as hub_module
from penstock_runtime.models.sources.fetch import fetch_model
from penstock_runtime.models.sources.hub import SnapshotRecords, hub_error
from penstock_runtime.models.sources.transfer import FetchProgress
from penstock_runtime.remote import Retries
from penstock_runtime.rows import Pooling
from tests.runtime.models.folders import (
    bare_folder,
    model_folder,
    sentence_folder,
    sharded_folder,
    write_onnx,
    write_pickle,
)
from tests.runtime.models.gguf_files import write_gguf
from tests.runtime.models.hub_server import Hub, running_hub

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

ENDPOINT = """
apiVersion: penstock.dev/v1alpha1
kind: ModelEndpoint
metadata: {name: chat}
spec: {model: 'hf://org/model@main', task: text-generation, cores: 1}
"""
SOURCE = ModelSource.parse("hf://org/model")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


class Waits:
    """Records the waiting times instead of sleeping."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.retries = Retries(attempts=3, first_wait_seconds=1, sleep=self.seconds.append)


@pytest.fixture
def waits() -> Waits:
    return Waits()


def fetch(
    cache: Path, waits: Waits, source: ModelSource = SOURCE, *, token: str | None = None, graph: bool = False
) -> ModelFolder:
    return fetch_model(source, cache=cache, token=token, graph=graph, retries=waits.retries)


def test_the_files_of_a_model_and_its_modules_are_fetched_and_no_others(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    original = sentence_folder(tmp_path / "original", {"pooling_mode": "cls"}, "Normalize")
    write_pickle(original / "pytorch_model.bin")
    write_onnx(original / "onnx" / "model.onnx")
    (original / "README.md").write_text("hello")
    (original / "modeling_model.py").write_text("raise SystemExit")
    hub.add("org/model", original)
    folder = fetch(tmp_path / "cache", waits)
    assert (folder.pooling, folder.normalize) == (Pooling.CLS, True)
    assert sorted(hub.fetched()) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modules.json",
        "tokenizer.json",
    ]
    (original / "onnx" / "model.onnx").unlink()
    assert folder.digest() == ModelFolder.open(original).digest()
    assert folder.path.name == hub.repositories["org/model"].commit
    assert waits.seconds == []


def test_shards_come_with_their_index(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    hub.add("org/model", sharded_folder(tmp_path / "original"))
    assert set(fetch(tmp_path / "cache", waits).tensors) == {"a.weight", "b.bias"}


def test_a_graph_is_fetched_if_requested_or_without_other_weights(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    write_onnx(bare_folder(tmp_path / "only") / "onnx" / "model.onnx")
    hub.add("org/only", tmp_path / "only")
    assert fetch(tmp_path / "cache", waits, ModelSource.parse("hf://org/only")).onnx is not None
    write_onnx(model_folder(tmp_path / "both") / "model.onnx")
    hub.add("org/both", tmp_path / "both")
    both = ModelSource.parse("hf://org/both")
    assert fetch(tmp_path / "cache", waits, both).onnx is None
    folder = fetch(tmp_path / "cache", waits, both, graph=True)
    assert folder.onnx is not None
    assert folder.safetensors


def test_pickles_are_refused_before_anything_is_fetched(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    write_pickle(bare_folder(tmp_path / "original") / "pytorch_model.bin")
    hub.add("org/model", tmp_path / "original")
    with pytest.raises(UnsafeModel, match=r"^hf://org/model@main holds pytorch_model\.bin, which is a pickle"):
        fetch(tmp_path / "cache", waits)
    assert hub.fetched() == []


def test_code_of_the_models_own_is_refused_before_the_weights_are_fetched(
    hub: Hub, tmp_path: Path, waits: Waits
) -> None:
    hub.add("org/model", model_folder(tmp_path / "original", auto_map={"AutoModel": "m.M"}))
    with pytest.raises(UnsafeModel, match="code of the model's own"):
        fetch(tmp_path / "cache", waits)
    assert hub.fetched() == ["config.json"]


def test_a_family_that_is_not_served_is_refused_before_the_weights_are_fetched(
    hub: Hub, tmp_path: Path, waits: Waits
) -> None:
    hub.add("org/model", model_folder(tmp_path / "original", model_type="mamba"))
    spec = from_yaml(ModelEndpoint, ENDPOINT).spec
    with pytest.raises(UnsupportedModel, match=r"^hf://org/model@main is of the type mamba, which text-generation"):
        fetch_model(SOURCE, cache=tmp_path / "cache", retries=waits.retries, check=config_check(spec))
    assert hub.fetched() == ["config.json"]


def test_code_of_the_models_own_with_a_graph_fetches_the_graph(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    write_onnx(model_folder(tmp_path / "original", auto_map={"AutoModel": "m.M"}) / "onnx" / "model.onnx")
    hub.add("org/model", tmp_path / "original")
    folder = fetch(tmp_path / "cache", waits)
    assert folder.onnx is not None
    assert folder.safetensors == ()


def test_a_second_fetch_of_a_branch_makes_one_request_and_downloads_nothing(
    hub: Hub, tmp_path: Path, waits: Waits
) -> None:
    hub.add("org/model", model_folder(tmp_path / "original"))
    first = fetch(tmp_path / "cache", waits)
    hub.requests.clear()
    assert fetch(tmp_path / "cache", waits).path == first.path
    assert [path for _, path, _ in hub.requests] == ["/api/models/org/model/revision/main"]


def test_a_folder_that_was_filled_elsewhere_may_be_read_only(hub: Hub, tmp_path: Path) -> None:
    """In a separate mount namespace: permissions do not restrict root, which the tests may run as."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root here")
    hub.add("org/model", model_folder(tmp_path / "original"))
    program = (
        "import sys; from pathlib import Path; from penstock.resources.core import ModelSource\n"
        "from penstock_runtime.models.sources.fetch import fetch_model\n"
        "print(fetch_model(ModelSource.parse('hf://org/model'), cache=Path(sys.argv[1])).path)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "models")]
    environment = {**os.environ, "HF_ENDPOINT": hub.url}
    filled = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout

    mounted = f'mount --bind "{tmp_path}/models" "{tmp_path}/models" && mount -o remount,bind,ro "$0" && exec "$@"'
    again = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, str(tmp_path / "models"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert again.returncode == 0, again.stderr
    assert again.stdout == filled


def test_a_pinned_commit_that_is_cached_needs_no_request(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    repository = hub.add("org/model", model_folder(tmp_path / "original"))
    pinned = ModelSource.parse(f"hf://org/model@{repository.commit}")
    first = fetch(tmp_path / "cache", waits, pinned)
    hub.requests.clear()
    assert fetch(tmp_path / "cache", waits, pinned).path == first.path
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["", "@0123456789abcdef0123456789abcdef01234567"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_damaged_copy_is_fetched_again(hub: Hub, tmp_path: Path, waits: Waits, revision: str, left: float) -> None:
    repository = hub.add("org/model", model_folder(tmp_path / "original"))
    assert repository.commit == "0123456789abcdef0123456789abcdef01234567"
    source = ModelSource.parse(f"hf://org/model{revision}")
    weights = fetch(tmp_path / "cache", waits, source).path / "model.safetensors"
    whole = weights.read_bytes()
    os.truncate(weights, int(len(whole) * left))
    seen: list[FetchProgress] = []

    again = fetch_model(source, cache=tmp_path / "cache", on_progress=seen.append, retries=waits.retries)

    assert (again.path / "model.safetensors").read_bytes() == whole
    assert [one.note for one in seen if one.note] == [
        f"the copy of model.safetensors in {weights.parent} is damaged: fetching it again"
    ]
    hub.requests.clear()
    fetch(tmp_path / "cache", waits, source)
    assert not any("safetensors" in path for _, path, _ in hub.requests)


def test_a_branch_with_a_new_commit_is_fetched_again(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    hub.add("org/model", model_folder(tmp_path / "original"))
    first = fetch(tmp_path / "cache", waits)
    hub.add("org/model", model_folder(tmp_path / "original", num_labels=3), commit="f" * 40)
    second = fetch(tmp_path / "cache", waits)
    assert second.num_labels == 3
    assert second.path != first.path


def test_progress_counts_up_to_the_whole(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    hub.add("org/model", model_folder(tmp_path / "original"))
    seen: list[FetchProgress] = []
    fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=seen.append, retries=waits.retries)
    assert [step.bytes_done for step in seen] == sorted(step.bytes_done for step in seen)
    assert seen[-1].bytes_done == seen[-1].bytes_total > 0
    assert {step.file for step in seen} == {"config.json", "tokenizer.json", "model.safetensors"}


def test_the_progress_of_a_file_is_reported_during_its_download(
    hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    monkeypatch.setattr(hub_module, "POLL_SECONDS", 0.01)
    original = model_folder(tmp_path / "original")
    (original / "vocab.txt").write_bytes(b"0123456789abcdef" * 6400)
    hub.add("org/model", original)
    hub.pause_after = 60_000
    seen: list[FetchProgress] = []

    def report(step: FetchProgress) -> None:
        seen.append(step)
        if step.file == "vocab.txt" and seen[0].bytes_total > step.bytes_done > begun("vocab.txt"):
            hub.go_on.set()

    def begun(file: str) -> int:
        return next(step.bytes_done for step in seen if step.file == file)

    fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=report, retries=waits.retries)
    assert hub.go_on.is_set(), "no progress was reported before the file was complete"
    arrived = {step.bytes_done - begun("vocab.txt") for step in seen if step.file == "vocab.txt"}
    assert arrived & set(range(1, 60_001)), arrived
    assert [step.bytes_done for step in seen] == sorted(step.bytes_done for step in seen)


def test_a_retry_is_reported_with_its_reason(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    hub.add("org/model", model_folder(tmp_path / "original"))
    hub.failures = [502, 429]
    seen: list[FetchProgress] = []
    fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=seen.append, retries=waits.retries)
    first, second = [step.note for step in seen if step.note]
    assert re.search(r"does not deliver \(HTTP 502\): trying again in 1 s$", first)
    assert second.endswith("(HTTP 429): trying again in 7 s")


class TestTokens:
    def test_the_right_one_opens_a_private_repository(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), token="hf_right")
        assert fetch(tmp_path / "cache", waits, token="hf_right").model_type == "bert"

    def test_one_from_the_environment_is_taken(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), token="hf_right")
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert fetch(tmp_path / "cache", waits).model_type == "bert"

    def test_a_wrong_one_is_refused_without_a_second_try(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), token="hf_right")
        with pytest.raises(ModelAccessDenied, match="the hub refuses the token") as caught:
            fetch(tmp_path / "cache", waits, token="hf_wrong")
        assert "hf_wrong" not in str(caught.value)
        assert len(hub.requests) == 1
        assert not caught.value.temporary

    def test_a_wrong_one_from_the_environment_is_reported_as_such(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), token="hf_right")
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(ModelAccessDenied, match="the hub refuses the token"):
            fetch(tmp_path / "cache", waits)

    def test_the_remedy_without_a_token_mentions_the_name(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        with pytest.raises(ModelAccessDenied, match="wants a token, or there is no such repository"):
            fetch(tmp_path / "cache", waits)

    def test_the_remedy_for_a_gated_model_is_to_accept_its_conditions(
        self, hub: Hub, tmp_path: Path, waits: Waits
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), token="hf_right", gated=True)
        with pytest.raises(ModelAccessDenied, match=r"is gated.*Accept its conditions"):
            fetch(tmp_path / "cache", waits)


class TestNotFound:
    def test_a_repository(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        with pytest.raises(ModelNotFound, match="there is no such repository"):
            fetch(tmp_path / "cache", waits, token="hf_any")

    def test_a_revision(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        with pytest.raises(ModelNotFound, match="hf://org/model@v9: the repository has no such revision"):
            fetch(tmp_path / "cache", waits, ModelSource.parse("hf://org/model@v9"))

    def test_a_config(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        (model_folder(tmp_path / "original") / "config.json").unlink()
        hub.add("org/model", tmp_path / "original")
        with pytest.raises(CorruptModel, match=r"has no config\.json"):
            fetch(tmp_path / "cache", waits)

    def test_a_name_that_the_hub_does_not_allow(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        with pytest.raises(ModelNotFound, match="Write hf://organisation/name"):
            fetch(tmp_path / "cache", waits, ModelSource.parse("hf://org/mo--del"))


class TestFailures:
    def test_of_the_server_pass_with_growing_waits(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        hub.failures = [502, 504]
        assert fetch(tmp_path / "cache", waits).model_type == "bert"
        first, second = waits.seconds
        assert 0.5 <= first <= 1 <= second <= 2

    def test_the_wait_that_the_server_asks_for_is_kept(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        hub.failures = [429]
        fetch(tmp_path / "cache", waits)
        assert waits.seconds == [7]

    def test_that_stay_are_temporary_errors(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.failures = [502] * 3
        with pytest.raises(ModelUnavailable, match=r"does not deliver \(HTTP 502\)") as caught:
            fetch(tmp_path / "cache", waits)
        assert caught.value.temporary
        assert len(waits.seconds) == 2

    def test_a_download_that_breaks_off_goes_on_where_it_ended(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            constants, "DOWNLOAD_CHUNK_SIZE", 10_000
        )  # the default of 10 MB is the most that the library downloads again
        original = model_folder(tmp_path / "original")
        (original / "vocab.txt").write_bytes(b"0123456789abcdef" * 6400)
        hub.add("org/model", original)
        hub.cut_after = 60_000
        folder = fetch(tmp_path / "cache", waits)
        assert (folder.path / "vocab.txt").read_bytes() == (original / "vocab.txt").read_bytes()
        resumed = [headers["Range"] for method, path, headers in hub.requests if "vocab" in path and "Range" in headers]
        assert any(span.startswith("bytes=60000-") for span in resumed)

    def test_no_hub_at_all_is_temporary_and_names_the_address(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(ModelUnavailable, match=r"the hub at http://127\.0\.0\.1:1 does not deliver .*refused"):
            fetch(tmp_path / "cache", waits)

    def test_an_odd_status_is_passed_on(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        hub.failures = [418]
        with pytest.raises(PenstockError, match="answered with HTTP 418"):
            fetch(tmp_path / "cache", waits)
        assert waits.seconds == []

    @pytest.mark.parametrize(
        "error",
        [
            OSError(28, "No space left on device"),
            PermissionError(13, "Permission denied", "/models/hub"),
            PermissionError(13, "Permission denied"),
            FileNotFoundError(2, "No such file or directory", "/models/hub"),
            OSError(30, "Read-only file system"),
        ],
    )
    def test_errors_of_the_local_disk_are_not_hub_errors(self, error: OSError) -> None:
        assert hub_error(error, SOURCE, has_token=False) is None

    @pytest.mark.parametrize(
        "error", [ConnectionResetError(104, "Connection reset"), TimeoutError("timed out"), OSError("no CA bundle")]
    )
    def test_network_errors_are_temporary(self, error: OSError) -> None:
        assert isinstance(hub_error(error, SOURCE, has_token=False), ModelUnavailable)

    def test_a_programming_error_is_not_translated(self) -> None:
        assert hub_error(TypeError("x"), SOURCE, has_token=False) is None


class TestFolders:
    """A folder that cannot be written, even by root: in /proc, or below a file."""

    @pytest.mark.parametrize("folder", ["/proc/models", "/dev/null/models"])
    def test_an_unusable_models_folder_is_named_and_not_retried(
        self, folder: str, hub: Hub, tmp_path: Path, waits: Waits
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        with pytest.raises(HostError, match=f"^the models folder {folder}.* cannot be .*--models or PENSTOCK_MODELS"):
            fetch(Path(folder), waits)
        assert waits.seconds == []

    @pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
    def test_the_error_of_a_users_own_hub_cache_names_its_variable(
        self, variable: str, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        monkeypatch.setenv(variable, "/proc/x")
        with pytest.raises(HostError, match=rf"the models folder /proc/x.* cannot be .*{variable}$"):
            fetch(tmp_path / "cache", waits)
        assert waits.seconds == []

    def test_records_are_kept_with_a_users_own_hub_cache(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "mine"))
        with pytest.raises(HostError, match=r"the models folder /proc/models cannot be .*--models"):
            fetch(Path("/proc/models"), waits)

    def test_a_home_that_cannot_hold_a_token(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/dev/null/.cache/huggingface/token")
        with pytest.raises(HostError, match=r"/dev/null/\S*token, where .* \(Not a directory\)\. Set HF_HOME"):
            fetch(tmp_path / "cache", waits)
        monkeypatch.setenv("HF_TOKEN", "hf_any")
        assert fetch(tmp_path / "cache", waits).model_type == "bert"


class TestRecords:
    def test_processes_that_share_the_folder_do_not_take_each_others_unfinished_files(self, tmp_path: Path) -> None:
        # Threads share a process id, as the first processes of two containers do.
        records = SnapshotRecords(tmp_path)
        snapshot = tmp_path / "snapshot"
        snapshot.mkdir()
        (snapshot / "config.json").write_text("{}")

        def fetched(_: int) -> Path | None:
            records.remember("abc", snapshot, ["config.json"])
            records.point("main", "abc")
            assert records.commit_of("main") == "abc"
            return records.whole("abc")

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(fetched, range(1000))) == {snapshot}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["abc.json", "main.commit", "snapshot"]


class TestOffline:
    def test_a_whole_copy_serves_when_the_hub_is_gone(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        first = fetch(tmp_path / "cache", waits)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        seen: list[FetchProgress] = []
        again = fetch_model(SOURCE, cache=tmp_path / "cache", on_progress=seen.append, retries=waits.retries)
        assert again.path == first.path
        assert "using the cached revision 0123456789ab" in seen[-1].note

    def test_an_incomplete_copy_does_not_serve_without_the_hub(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The library alone would return such a snapshot, for example without its pooling."""
        hub.add("org/model", sentence_folder(tmp_path / "original", {}))
        folder = fetch(tmp_path / "cache", waits)
        (folder.path / "1_Pooling" / "config.json").unlink()
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(ModelUnavailable):
            fetch(tmp_path / "cache", waits)

    def test_a_copy_without_the_graph_is_not_one_with_it(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        fetch(tmp_path / "cache", waits)
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        with pytest.raises(ModelUnavailable):
            fetch(tmp_path / "cache", waits, graph=True)

    def test_the_librarys_own_switch_is_obeyed(self, hub: Hub, tmp_path: Path) -> None:
        """In a process of its own: the library reads the variable once."""
        hub.add("org/model", model_folder(tmp_path / "original"))
        program = (
            "from pathlib import Path\n"
            "from penstock.resources.core import ModelSource\n"
            "from penstock_runtime.models.sources.fetch import fetch_model\n"
            f"fetch_model(ModelSource.parse('hf://org/model'), cache=Path({str(tmp_path)!r}), on_progress=print)\n"
        )
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        child = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert child.returncode == 1
        assert "hf://org/model@main is not in the cache, and HF_HUB_OFFLINE is set" in child.stderr
        assert child.stdout == ""
        assert hub.requests == []

    @pytest.mark.parametrize("damage", ["", "[]", '{"folder": 3}', '{"folder": "/nowhere", "sizes": {"a": 1}}'])
    def test_a_damaged_record_of_the_cache_is_no_record(
        self, damage: str, hub: Hub, tmp_path: Path, waits: Waits
    ) -> None:
        repository = hub.add("org/model", model_folder(tmp_path / "original"))
        pinned = ModelSource.parse(f"hf://org/model@{repository.commit}")
        fetch(tmp_path / "cache", waits, pinned)
        (record,) = (tmp_path / "cache" / "hub-complete").rglob("*.json")
        assert json.loads(record.read_text())["sizes"]
        record.write_text(damage)
        assert fetch(tmp_path / "cache", waits, pinned).model_type == "bert"

    def test_a_deleted_cache_is_filled_again(self, hub: Hub, tmp_path: Path, waits: Waits) -> None:
        repository = hub.add("org/model", model_folder(tmp_path / "original"))
        pinned = ModelSource.parse(f"hf://org/model@{repository.commit}")
        fetch(tmp_path / "cache", waits, pinned)
        shutil.rmtree(tmp_path / "cache" / "hub")
        assert fetch(tmp_path / "cache", waits, pinned).model_type == "bert"

    @pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
    def test_the_users_own_hub_cache_is_shared(
        self, variable: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"))
        monkeypatch.setenv(variable, str(tmp_path / "mine"))
        folder = fetch(tmp_path / "cache", Waits())
        below = tmp_path / "mine" / ("hub" if variable == "HF_HOME" else "")
        assert folder.path.is_relative_to(below / "models--org--model")


def test_one_gguf_file_of_a_repository_is_fetched_alone_and_kept(hub: Hub, tmp_path: Path, waits: Waits) -> None:
    original = tmp_path / "original"
    original.mkdir()
    write_gguf(original / "model.Q8_0.gguf", kind="Q8_0")
    write_gguf(original / "model.Q4_1.gguf")
    (original / "README.md").write_text("about")
    hub.add("org/model", original)
    source = ModelSource.parse("hf://org/model/model.Q8_0.gguf")

    folder = fetch(tmp_path / "cache", waits, source)

    assert folder.model_type == "llama"
    assert hub.fetched() == ["model.Q8_0.gguf"]
    assert (source.repository, source.file) == ("org/model", "model.Q8_0.gguf")
    hub.failures.extend([503] * 10)
    assert fetch(tmp_path / "cache", waits, source).path == folder.path
    hub.failures.clear()
    with pytest.raises(ModelNotFound, match=r"has no file model.Q2_K.gguf") as caught:
        fetch(tmp_path / "cache", waits, ModelSource.parse("hf://org/model/model.Q2_K.gguf"))
    assert caught.value.remedy == "It has model.Q4_1.gguf, model.Q8_0.gguf"


class TestLimits:
    """What a hub lists and sends decides neither how much is written, nor what is left of the process's limits."""

    def test_a_model_over_the_limit_is_refused_before_its_weights_are_fetched(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), listed={"model.safetensors": 10**12})
        monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", str(10**9))
        with pytest.raises(UnsupportedModel, match=r"have 1,000,\d{3},\d{3},\d{3} bytes; the limit is 1,000,000,000"):
            fetch(tmp_path / "cache", waits)
        assert hub.fetched() == ["config.json"]

    # The library leaves the connection open when its file cannot grow: it is collected here, where that is no error.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
    @pytest.mark.parametrize("listed", [None, 0], ids=["a size is listed", "no size is listed"])
    def test_an_endless_file_ends_at_the_limit(
        self, hub: Hub, tmp_path: Path, waits: Waits, monkeypatch: pytest.MonkeyPatch, listed: int | None
    ) -> None:
        repository = hub.add("org/model", model_folder(tmp_path / "original"), endless="model.safetensors")
        if listed is not None:
            repository.listed["model.safetensors"] = listed
        limit = 4 * 2**20
        monkeypatch.setenv("PENSTOCK_MODEL_MAX_BYTES", str(limit))
        monkeypatch.setattr(hub_module, "_LEAST_FILE", limit)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        with pytest.raises(CorruptModel, match=r"model\.safetensors has more than the 4,194,304 bytes"):
            fetch(tmp_path / "cache", waits)
        gc.collect()
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
        assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) < 2 * limit

    def test_a_file_that_is_not_the_size_that_was_listed_is_not_used(
        self, hub: Hub, tmp_path: Path, waits: Waits
    ) -> None:
        hub.add("org/model", model_folder(tmp_path / "original"), listed={"model.safetensors": 1000})
        with pytest.raises(CorruptModel, match="more than the 1,000 bytes"):
            fetch(tmp_path / "cache", waits)
