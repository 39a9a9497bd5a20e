"""The process of an optimisation job's pod, as a kubelet starts it, with a small model and a short capacity curve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from penstock.artefact_store import Digest, StoreUri
from penstock.errors import HostError, SettingError, SpecError, TextsChanged
from penstock.manifest import Manifest
from penstock.resources.job_summary import LIMIT_BYTES, Summary
from penstock.resources.optimized_model import texts_digest
from penstock_operator.facts.pod_data import PROGRESS_MAX_BYTES, read_json
from penstock_operator.facts.pods import JobProgress, JobReport
from penstock_optimizer.job.progress import ProgressEvent, Stage
from penstock_optimizer.pod import pod_job
from penstock_optimizer.pod.pod_job import JobEvents, JobVariables, read_endpoint, serve_progress
from penstock_runtime.host import read_host
from penstock_runtime.models.sources.transfer import FetchProgress as Transfer
from penstock_runtime.store import Published, open_store
from testbed.ports import some_free_ports
from tests.optimizer.end_to_end.small_model import HIDDEN, write_small_bert
from tests.runtime.models.folders import write_pickle
from tests.runtime.models.hub_server import running_hub
from tests.runtime.models.registry_server import auth_of, running_registry
from tests.runtime.models.s3_server import free_port
from tests.runtime.pod.pods import Pod

pytestmark = pytest.mark.slow

JOB = ("tests.shortened", "penstock_optimizer.pod")
# Enough time on any machine: the job ends by itself.
QUICK = {"engines": ["onnxruntime"], "precisions": ["fp32", "int8-dynamic"], "budgetSeconds": 400}
FAILED, TRY_AGAIN = 1, 75


def spec(model: Path | str, optimization: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "model": model if isinstance(model, str) else f"file://{model}",
        "task": "feature-extraction",
        "hardwareClass": "any",
        "cores": 1,
        "objective": {"latency": {"p95Milliseconds": 100}},
        "optimization": QUICK if optimization is None else optimization,
        "toolchain": {"image": "localhost/penstock-optimizer:0.1.0", "version": "0.1.0"},
        **fields,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only."""
    return write_small_bert(tmp_path_factory.mktemp("model"))


def job(work: Path, given: dict[str, Any], **variables: object) -> Pod:
    """A job's process; the spec is a file, as from a ConfigMap."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "spec.json").write_text(json.dumps(given))
    own = {"spec": work / "spec.json", "store_uri": f"file://{work / 'store'}", "work": work / "work"}
    return Pod(work, *JOB, **{**own, **variables})


def asked(port: int, path: str) -> Any:
    """The parsed answer, within the operator's bounds."""
    with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        return read_json(response.read(), max_bytes=PROGRESS_MAX_BYTES)


def summary(pod: Pod) -> Summary:
    """Its termination message, within the size limit."""
    text = pod.termination_log.read_bytes()
    assert len(text) <= LIMIT_BYTES
    return Summary.from_message(text.decode())


@pytest.fixture(scope="module")
def done(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pod, Path]]:
    """A job that succeeded, and its folder."""
    work = tmp_path_factory.mktemp("job")
    with job(work, spec(model)) as pod:
        assert pod.ended() == 0, pod.output
        yield pod, work


class TestSuccess:
    def test_the_result_is_in_the_store_and_in_the_summary(self, done: tuple[Pod, Path], tmp_path: Path) -> None:
        pod, work = done
        reported = summary(pod)
        assert reported.succeeded
        assert reported.artefact is not None
        assert reported.result is not None
        store = open_store(StoreUri.parse(f"file://{work / 'store'}"))
        manifest = Manifest.load(store.fetch(Digest.parse(reported.artefact.digest), tmp_path))

        assert reported.artefact.uri == f"file://{work / 'store'}/{reported.artefact.digest.removeprefix('sha256:')}"
        assert reported.result.plan.summary == manifest.chosen.plan.summary
        assert manifest.chosen.path in manifest.files
        assert "onnxruntime-int8-dynamic-plain" in {one.recipe.name for one in manifest.candidates}
        assert reported.result.cpu.isa is read_host().cpu.isa
        assert reported.result.pinned is read_host().usable_cores(1).pinned

    def test_a_model_of_a_private_registry_is_fetched_and_its_digest_is_in_the_summary(
        self, model: Path, tmp_path: Path
    ) -> None:
        files = {path.relative_to(model).as_posix(): path for path in model.rglob("*") if path.is_file()}
        with (
            running_registry(tmp_path / "registry", auth="token") as registry,
            pytest.MonkeyPatch.context() as here,
        ):
            here.setenv("PENSTOCK_REGISTRY_AUTH", auth_of(registry.address))
            layers = [
                ("application/vnd.cncf.model.weight.v1.raw", path.read_bytes(), {"org.cncf.model.filepath": name})
                for name, path in files.items()
            ]
            digest = registry.push("team/small", layers, config="application/vnd.cncf.model.config.v1+json")
            given = spec(f"oci://{registry.address}/team/small", {"mode": "Disabled"})
            with job(tmp_path / "job", given, registry_auth=auth_of(registry.address)) as pod:
                assert pod.ended() == 0, pod.output
                reported = summary(pod)
            with job(tmp_path / "other", given, registry_auth=auth_of("elsewhere")) as pod:
                assert pod.ended() == FAILED
                refused = summary(pod).failure
        assert reported.result is not None
        assert reported.result.model_resolved == f"oci://{registry.address}/team/small:latest@{digest}"
        assert refused is not None
        assert refused.reason == "ModelAccessDenied"

    def test_progress_comes_as_json_lines(self, done: tuple[Pod, Path]) -> None:
        pod, _ = done
        events = pod.events
        steps = [event for event in events if event["event"] == "progress"]

        assert {"download", "export", "candidates", "measure", "capacity", "done"} <= {step["stage"] for step in steps}
        assert all({"done", "of", "stage", "message"} <= step.keys() for step in steps)
        assert [step for step in steps if step["of"]][-1]["done"] == [step for step in steps if step["of"]][-1]["of"]
        assert events[-1]["event"] == "summary"
        assert events[-1]["summary"]["succeeded"]
        assert "Traceback" not in pod.output

    def test_the_baseline_is_published_first_and_can_be_served_by_a_pod(
        self, done: tuple[Pod, Path], tmp_path: Path
    ) -> None:
        pod, work = done
        order = [event["event"] for event in pod.events]
        baseline = next(event for event in pod.events if event["event"] == "baseline")
        first_candidate = next(i for i, event in enumerate(pod.events) if event.get("stage") == "candidates")

        assert order.index("baseline") < first_candidate
        reported = summary(pod)
        assert reported.baseline is not None
        assert reported.baseline.digest == baseline["digest"]
        for digest, plan in ((baseline["digest"], "onnxruntime-fp32"), (reported.artefact.digest, "onnxruntime")):  # type: ignore[union-attr]
            with Pod(
                tmp_path / digest[-8:],
                artefact=digest,
                store_uri=f"file://{work / 'store'}",
                task="feature-extraction",
                cores=1,
            ) as served:
                served.wait_for(f"serving {plan}")
                status, answer = served.ask("POST", "/predict", {"inputs": "I like you."})
                assert status == 200
                assert len(answer[0]) == HIDDEN

    def test_a_repeated_job_finds_the_artefact(self, done: tuple[Pod, Path], model: Path) -> None:
        pod, work = done
        with job(work, spec(model)) as again:
            assert again.ended() == 0, again.output
            found = summary(again)

        assert found.artefact == summary(pod).artefact
        assert any("found, made before" in event.get("message", "") for event in again.events)


def test_an_interrupted_job_reports_it_at_once_and_the_next_one_continues(model: Path, tmp_path: Path) -> None:
    given = spec(model, QUICK)
    with job(tmp_path, given) as pod:
        pod.wait_for('"event": "baseline"')
        pod.wait_for('"stage": "candidates", "message": "onnxruntime-fp32: reference')
        assert pod.end() == TRY_AGAIN
        reported = summary(pod)

        assert reported.failure is not None
        assert (reported.failure.reason, reported.failure.retryable) == ("Interrupted", True)
        assert reported.baseline is not None, "the published artefact counts"
        assert pod.events[-1]["event"] == "summary"
        assert "Traceback" not in pod.output
    (record,) = (tmp_path / "work").glob("*.work/candidates/onnxruntime-fp32.json")
    known = json.loads(record.read_text())["facts"]["build_seconds"]
    with job(tmp_path, given) as again:
        assert again.ended() == 0, again.output
    reported = summary(again)
    assert reported.artefact is not None
    store = open_store(StoreUri.parse(f"file://{tmp_path / 'store'}"))
    manifest = Manifest.load(store.fetch(Digest.parse(reported.artefact.digest), tmp_path / "cache"))
    reference = next(one for one in manifest.candidates if one.recipe.name == "onnxruntime-fp32")

    assert reference.build_seconds == known, "read, not built again"


def failure(pod: Pod, code: int = FAILED) -> tuple[str, str]:
    """Reason and message of a job that fails as expected."""
    with pod:
        assert pod.ended() == code, pod.output
    reported = summary(pod).failure
    assert reported is not None
    assert reported.remedy
    assert reported.retryable is (code == TRY_AGAIN)
    assert "Traceback" not in pod.output
    return reported.reason, reported.message


class TestModels:
    """A fault of the model is reported before anything is built, and not retried."""

    def test_not_found(self, tmp_path: Path) -> None:
        reason, message = failure(job(tmp_path, spec("file:///nowhere/at/all")))
        assert reason == "ModelNotFound"
        assert "/nowhere/at/all" in message

    def test_inferentia_without_its_sdk_is_found_out_before_the_download(self, tmp_path: Path) -> None:
        given = {**spec("file:///nowhere/at/all"), "cores": 2}
        reason, message = failure(job(tmp_path, given, neuron_target="inf2"))
        assert reason == "HostUnsuitable"
        assert "compiling for inf2 needs torch-neuronx, neuronx-cc" in message

    def test_pickled_weights(self, model: Path, tmp_path: Path) -> None:
        unsafe = write_small_bert(tmp_path / "unsafe")
        (unsafe / "model.safetensors").unlink()
        write_pickle(unsafe / "pytorch_model.bin")
        assert failure(job(tmp_path / "job", spec(unsafe)))[0] == "UnsafeModel"

    def test_truncated_weights(self, tmp_path: Path) -> None:
        broken = write_small_bert(tmp_path / "broken")
        weights = broken / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        assert failure(job(tmp_path / "job", spec(broken)))[0] == "CorruptModel"

    def test_a_text_of_the_model_makes_no_event_of_the_job(self, tmp_path: Path) -> None:
        forged = '../\n{"event": "baseline", "digest": "sha256:' + "0" * 64 + '", "uri": "file:///x"}\n\x1b[2J'
        hostile = write_small_bert(tmp_path / "hostile")
        modules = [{"idx": 0, "name": "0", "path": forged, "type": "sentence_transformers.models.Transformer"}]
        (hostile / "modules.json").write_text(json.dumps(modules))
        pod = job(tmp_path / "job", spec(hostile))
        reason, message = failure(pod)
        assert reason == "UnsafeModel"
        assert "modules.json points to ../\\n{" in message
        assert "baseline" not in {event["event"] for event in pod.events}
        assert "\x1b" not in pod.output + message

    def test_an_unsupported_architecture(self, tmp_path: Path) -> None:
        odd = write_small_bert(tmp_path / "odd")
        config = json.loads((odd / "config.json").read_text())
        (odd / "config.json").write_text(json.dumps({**config, "model_type": "retnet", "architectures": ["RetNet"]}))
        reason, message = failure(job(tmp_path / "job", spec(odd)))
        assert reason in {"UnsupportedModel", "MissingPackage"}
        assert "retnet" in message

    def test_a_wrong_token(self, model: Path, tmp_path: Path) -> None:
        with running_hub() as hub:
            hub.add("team/private", model, token="the-right-one")
            pod = job(
                tmp_path, spec("hf://team/private"), HF_ENDPOINT=hub.url, HF_TOKEN="wrong", HF_HUB_CACHE=tmp_path / "h"
            )
            reason, message = failure(pod)
        assert reason == "ModelAccessDenied"
        assert "refuses the token" in message

    def test_a_hub_that_does_not_answer_is_tried_again(self, tmp_path: Path) -> None:
        pod = job(
            tmp_path / "job",
            spec("hf://team/model"),
            HF_ENDPOINT=f"http://127.0.0.1:{free_port()}",
            HF_HUB_CACHE=tmp_path / "hub",
        )
        reason, message = failure(pod, TRY_AGAIN)
        assert reason == "ModelUnavailable"
        assert "does not deliver" in message


@pytest.mark.extended
def test_a_hub_that_hangs_times_out(tmp_path: Path) -> None:
    """It accepts connections and never answers: four times fifteen seconds, and the waits between."""
    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with job(tmp_path, spec("hf://team/model"), HF_ENDPOINT=url, HF_HUB_CACHE=tmp_path / "hub") as pod:
            assert pod.ended(240) == TRY_AGAIN
    reported = summary(pod).failure
    assert reported is not None
    assert reported.reason == "ModelUnavailable"


class TestMachineAndStore:
    """Faults of the machine and of the store."""

    def test_no_candidate_within_the_budget(self, model: Path, tmp_path: Path) -> None:
        strict = {**QUICK, "accuracy": {"minCosine": 1.0}, "whenNoCandidate": "Fail"}
        pod = job(tmp_path, spec(model, strict))
        reason, message = failure(pod)
        assert reason == "NoCandidateWithinBudget"
        assert "onnxruntime-int8-dynamic-plain" in message
        assert summary(pod).baseline is not None, "the fp32 artefact can still be served"

    def test_more_cores_than_there_are(self, model: Path, tmp_path: Path) -> None:
        reason, message = failure(job(tmp_path, spec(model, cores=200)))
        assert reason == "HostUnsuitable"
        assert "cores: 200 was asked for" in message

    def test_a_store_that_is_no_folder(self, model: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        assert failure(job(tmp_path, spec(model), store_uri=f"file://{tmp_path}/file/x"))[0] in {
            "StoreMisconfigured",
            "StoreUnavailable",
        }

    def test_a_store_with_a_wrong_secret(self, model: Path, tmp_path: Path) -> None:
        from tests.runtime.models.s3_server import running_s3

        (tmp_path / "s3" / "artefacts").mkdir(parents=True)
        with running_s3(tmp_path / "s3") as server:
            variables = {**server.environment(), "AWS_SECRET_ACCESS_KEY": "wrong"}
            pod = job(tmp_path / "job", spec(model), store_uri="s3://artefacts/x", **variables)
            assert failure(pod)[0] == "StoreAccessDenied"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
    @pytest.mark.parametrize("place", ["work", "store"])
    def test_a_full_disk(self, place: str, model: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="penstock-job-") as name:
            folder = Path(name) / place
            folder.mkdir()
            made = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
            )
            if made.returncode != 0:
                pytest.skip("nothing can be mounted here")
            try:
                reason, message = failure(job(Path(name), spec(model)), TRY_AGAIN)
            finally:
                subprocess.run(["umount", folder], check=True)
        assert reason == "OutOfDisk"
        assert str(folder) in message


class TestSettings:
    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({}, "PENSTOCK_SPEC is not set"),
            ({"spec": "/nowhere.json"}, r"PENSTOCK_SPEC: /nowhere\.json cannot be read"),
            ({"spec": "{}", "store_uri": "file:///x"}, "PENSTOCK_SPEC has 3 problems"),
        ],
    )
    def test_each_wrong_setting_is_an_error(self, variables: dict[str, str], words: str) -> None:
        environment = {f"PENSTOCK_{name.upper()}": value for name, value in variables.items()}
        with pytest.raises((SettingError, SpecError), match=words):
            read_endpoint(JobVariables.read(environment))

    def test_texts_of_a_config_map_come_from_a_file(self, tmp_path: Path) -> None:
        texts = tmp_path / "texts.txt"
        texts.write_text("first text\n\n  second\u2028text \n")
        digest = texts_digest(("first text", "second\u2028text"))
        workload = {"textsFrom": {"configMapName": "mine"}}
        given = json.dumps(spec("hf://a/b", workload=workload, textsDigest=digest))

        endpoint = read_endpoint(JobVariables.read({"PENSTOCK_SPEC": given, "PENSTOCK_TEXTS": str(texts)}))
        assert endpoint.spec.workload.texts == ("first text", "second\u2028text")
        with pytest.raises(SettingError, match="PENSTOCK_TEXTS is not set"):
            read_endpoint(JobVariables.read({"PENSTOCK_SPEC": given}))
        texts.write_text("first text\nanother one\n")
        with pytest.raises(TextsChanged, match="other texts than those of this optimisation"):
            read_endpoint(JobVariables.read({"PENSTOCK_SPEC": given, "PENSTOCK_TEXTS": str(texts)}))
        with pytest.raises(TextsChanged, match="is gone"):
            read_endpoint(JobVariables.read({"PENSTOCK_SPEC": given, "PENSTOCK_TEXTS": f"{texts}.gone"}))
        texts.write_text("\n")
        with pytest.raises(SettingError, match="holds no texts"):
            read_endpoint(JobVariables.read({"PENSTOCK_SPEC": given, "PENSTOCK_TEXTS": str(texts)}))

    def test_every_field_of_the_spec_reaches_the_job(self) -> None:
        given = spec("hf://a/b@v1", serving={"maxInputTokens": 64}, workload={"sequenceLengths": [8]})
        endpoint = read_endpoint(JobVariables.read({"PENSTOCK_SPEC": json.dumps(given)})).spec

        assert (endpoint.model, endpoint.cores, endpoint.serving.max_input_tokens) == ("hf://a/b@v1", 1, 64)
        assert endpoint.workload.sequence_lengths == (8,)
        assert endpoint.optimization.budget_seconds == 400


class TestLines:
    def test_progress_between_reports_repeats_the_last_step(self) -> None:
        written: list[dict[str, Any]] = []
        lines = JobEvents(lambda line: written.append(json.loads(line)))
        lines.stage("download", "looking")
        lines.progress(ProgressEvent(Stage.CANDIDATES, 3, 9, "a candidate", step=7, steps=23))
        lines.stage("publish", "uploading")

        assert [(line["done"], line["of"]) for line in written] == [(0, 0), (7, 23), (7, 23)]

    def test_each_event_is_one_line(self) -> None:
        written: list[bytes] = []
        lines = JobEvents(written.append)
        lines.stage("export", "a\nb\x9b\u2028\udc80")
        lines.published("baseline", Published(digest=Digest("0" * 64), uri="file:///x", bytes=1))

        assert all(line.isascii() and line.endswith(b"\n") and line[:-1].decode().isprintable() for line in written)

    def test_the_newest_state_is_served_and_read_by_the_operator(self) -> None:
        events = JobEvents(lambda _: None)
        server = serve_progress(events, "127.0.0.1", 0)
        port = server.server_address[1]
        try:
            first = asked(port, "/progress")
            events.progress(
                ProgressEvent(Stage.CANDIDATES, 3, 9, "a\nb\x9b\u2028\udc80" + "x" * 9000, step=7, steps=23)
            )
            long = JobReport.from_json(asked(port, "/progress"))
            events.published("baseline", Published(digest=Digest("0" * 64), uri="file:///x", bytes=1))
            events.stage("candidates", "another")
            events.published("artefact", Published(digest=Digest("1" * 64), uri="file:///y", bytes=1))
            second = asked(port, "/progress")
            with pytest.raises(HTTPError, match="404") as refused:
                asked(port, "/")
            refused.value.close()
        finally:
            server.shutdown()
            server.server_close()

        assert JobReport.from_json(first) == JobReport(JobProgress(0, 0))
        assert long.progress is not None
        assert (long.progress.summary, len(long.progress.message)) == ("7/23", 1000)
        baseline = ("sha256:" + "0" * 64, "file:///x", 1)
        assert JobReport.from_json(second) == JobReport(JobProgress(7, 23, "candidates", "another"), *baseline)

    def test_a_client_that_sends_nothing_does_not_keep_others_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pod_job, "REQUEST_SECONDS", 0.05)
        server = serve_progress(JobEvents(lambda _: None), "127.0.0.1", 0)
        port = server.server_address[1]
        try:
            with socket.create_connection(("127.0.0.1", port)):
                assert asked(port, "/progress")["done"] == 0
        finally:
            server.shutdown()
            server.server_close()

    def test_a_port_that_is_in_use_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(HostError, match=f"port {port} of the progress cannot be opened"):
                serve_progress(JobEvents(lambda _: None), "127.0.0.1", port)

    def test_bytes_are_reported_at_intervals_and_at_the_end(self) -> None:
        written: list[dict[str, Any]] = []
        moved = JobEvents(lambda line: written.append(json.loads(line))).transfer("download", "fetching")
        for done in range(0, 101, 10):
            moved(Transfer("hf://a/b", "model.safetensors", done * 10**6, 100 * 10**6))

        assert [line["message"] for line in written] == [
            "fetching model.safetensors: 0 of 100 MB",
            "fetching model.safetensors: 100 of 100 MB",
        ]


def test_an_interrupted_job_that_has_not_begun_reports_it_too(model: Path, tmp_path: Path) -> None:
    (port,) = some_free_ports(1)
    with job(tmp_path, spec(model), progress_port=port) as pod:
        pod.wait_for('"stage": "start"')
        assert asked(port, "/progress")["stage"] in {"start", "download", "export"}
        assert pod.end(signal.SIGINT) == TRY_AGAIN
    reported = summary(pod)
    assert reported.failure is not None
    assert "SIGINT" in reported.failure.message
