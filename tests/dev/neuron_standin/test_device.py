"""The stand-in's devices: what only a stand-in can show, such as faults, full memory and other generations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.neuron_standin_env import SECONDS, SMALL_MODEL, StandIn, run_program

pytestmark = pytest.mark.parity

COMMON = f"""
import json, os, sys
{SMALL_MODEL}
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    return ""
"""
COMPILE_INF2 = """
import warnings
import torch_neuronx
def trace(*arguments, **options):
    return torch_neuronx.trace(model, (ids, mask), *options.pop("more", ()), compiler_args=list(arguments), **options)
exact = trace("--target", "inf2", "--auto-cast", "none", cpu_backend=True)
exact.save(sys.argv[1] + "/exact.pt")
torch_neuronx.lazy_load(exact, True)
exact.save(sys.argv[1] + "/lazy.pt")
rounded = trace("--target", "inf2", "--auto-cast", "matmult", "--auto-cast-type", "bf16", cpu_backend=True)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    trace("--target", "inf2", cpu_backend=True, no_such_keyword=1)
    trace("--target", "inf2", cpu_backend=True, more=(1,))
train = Small()
print(json.dumps({
    "pipeline": error_of(lambda: trace("--target", "inf2", "--neuroncore-pipeline-cores", "4", cpu_backend=True)),
    "no_device": error_of(lambda: trace("--target", "inf2")),
    "positional": error_of(lambda: trace("--target", "inf2", cpu_backend=True, more=(1, 2, 3, 4))),
    "training": error_of(lambda: torch_neuronx.trace(
        train, (ids, mask), compiler_args="--target inf2", cpu_backend=True)),
    "depends": error_of(lambda: torch_neuronx.trace(
        lambda ids, mask: ids + 2 if bool(mask.sum() > 0) else ids + 3, (ids, mask),
        compiler_args="--target inf2", cpu_backend=True)),
    "warned": sorted(one.category.__name__ for one in warned if "trace" in str(one.message)),
}))
"""
LOAD = """
import torch_neuronx
from pathlib import Path
from neuron_standin.machine import write_machine
def describe(generation="inf2", **machine):
    write_machine(Path(os.environ["STANDIN_MACHINE"]), Path(sys.argv[1]) / "state", generation, **machine)
def load(name):
    return torch.jit.load(f"{sys.argv[1]}/{name}.pt")
describe()
found = {}
lazy = load("lazy")
module = load("exact")
run = lambda: module(ids, mask)[0]
found["exact"] = float((run() - model(ids, mask)[0]).abs().max())
found["lazy"] = error_of(lambda: lazy(ids, mask))
describe(faults={"execution_timeout_cores": [0, 1]})
found["timeout"] = error_of(run)
describe(faults={"hardware_error_cores": [0, 1]})
found["hardware"] = error_of(run)
describe(faults={"memory_full_from_load": 1})
found["memory"] = error_of(lambda: load("exact"))
describe("inf1")
found["generation"] = error_of(lambda: load("exact"))
describe(faults={"wrong_answers": 0.5})
found["wrong"] = float((run() - model(ids, mask)[0]).abs().max())
describe()
mask[1] = 0
first, padding = run() - model(ids, mask)[0]
found["row"], found["noise"] = float(first.abs().max()), float(padding.abs().max())
pid = os.fork()
if pid == 0:
    os._exit(0 if "another process" in error_of(run) else 1)
found["forked"] = os.waitpid(pid, 0)[1]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn.make(tmp_path_factory.mktemp("inf2"), "inf2")


@pytest.fixture(scope="module")
def facts(standin: StandIn) -> dict[str, Any]:
    """Of compilations; their modules are in the stand-in's folder."""
    environment = standin.environment({"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"})
    found: dict[str, Any] = run_program(COMMON + COMPILE_INF2, environment, str(standin.folder))
    return found


def test_trace_refuses_what_the_documents_refuse(facts: dict[str, Any]) -> None:
    assert facts["pipeline"].startswith("RuntimeError: neuronx-cc failed with 1")
    assert "could not be initialized" in facts["no_device"]
    assert "at most 5 positional" in facts["positional"]
    assert "training mode" in facts["training"]
    assert "depends on the values" in facts["depends"]
    assert facts["warned"] == ["DeprecationWarning", "UserWarning"]


def test_runs_fail_and_answer_as_the_machine_is_described(standin: StandIn, facts: dict[str, Any]) -> None:
    standin.machine()
    found = run_program(COMMON + LOAD, standin.environment(devices=True), str(standin.folder))

    assert found["exact"] < 1e-6
    assert found["lazy"] == ""
    assert "status=5" in found["timeout"]
    assert "status=1202" in found["hardware"]
    assert "status=4" in found["memory"]
    assert "status=10" in found["generation"]
    assert found["wrong"] == pytest.approx(0.5, abs=1e-5)
    # A row of padding has random numbers, so that a caller that keeps it is found out.
    assert found["row"] < 1e-6
    assert found["noise"] > 50
    assert found["forked"] == 0


TRACE_INF1 = """
import warnings
import torch_neuron
def facts(*arguments):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compiled = torch.neuron.trace(model, (ids, mask), compiler_args=list(arguments))
    graph = str(compiled.inlined_graph)
    return {
        "compiled": "neuron::forward" in graph,
        "embeds_on_host": "aten::embedding" in graph,
        "warned": len([one for one in warned if "falling back to native python" in str(one.message)]),
        "error": error_of(lambda: compiled(ids, mask)),
    }
print(json.dumps([facts("--fast-math", "none"), facts("--neuroncore-pipeline-cores", "4")]))
"""


def test_inf1_falls_back_to_the_cpu_with_a_warning_and_keeps_embeddings_on_the_host(tmp_path: Path) -> None:
    standin = StandIn.make(tmp_path, "inf1")

    environment = standin.environment(faults={"refuse_pipeline_cores": [4]})
    compiled, refused = run_program(COMMON + TRACE_INF1, environment)

    assert compiled["compiled"]
    assert compiled["embeds_on_host"]
    assert compiled["warned"] == 0
    assert "could not be initialized" in compiled["error"]  # there is no device
    assert not refused["compiled"]
    assert refused["warned"] == 1
    assert refused["error"] == ""  # it runs, on the CPU


def test_only_one_generation_is_importable(tmp_path: Path) -> None:
    for generation, other in (("inf1", "torch_neuronx"), ("inf2", "torch_neuron")):
        standin = StandIn.make(tmp_path, generation)
        found = subprocess.run(
            [sys.executable, "-c", f"import {other}"], env=standin.environment(), capture_output=True, text=True,
            timeout=SECONDS, check=False,
        )  # fmt: skip
        assert f"No module named '{other}'" in found.stderr
