"""What Penstock expects of torch-neuronx on Inf2, by its documents: runs on the stand-in, and unchanged on a device.

On an inf2.xlarge with the Neuron SDK in the interpreter that runs pytest:

    STANDIN=0 python -m pytest tests/neuron/test_device_contract.py

Not yet run on a device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.neuron_standin_env import SECONDS, SMALL_MODEL, StandIn, run_program

pytestmark = [pytest.mark.parity]
ON_DEVICE = os.environ.get("STANDIN") == "0"

COMMON = f"""
import json, sys, threading
{SMALL_MODEL}
def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]

def difference(compiled, ids=ids):
    with torch.no_grad():
        expected = model(ids, mask)[0]
        return float((compiled(ids, mask)[0] - expected).norm() / expected.norm())
"""
COMPILE = """
import torch_neuronx
flags = ["--target", "inf2", "--model-type", "transformer", "--auto-cast", "matmult", "--auto-cast-type", "bf16",
         "--optlevel", "2"]
def trace(*arguments):
    return torch_neuronx.trace(model, (ids, mask), compiler_args=list(arguments), cpu_backend=True)
compiled = trace(*flags)
compiled.save(sys.argv[1])
print(json.dumps({
    "is_script": isinstance(compiled, torch.jit.ScriptModule),
    "has_operator": "neuron::" in str(compiled.inlined_graph),
    "unknown_flag": error_of(lambda: trace(*flags, "--no-such-flag")),
    "no_target": error_of(lambda: trace("--optlevel", "2")),
}))
"""
RUN = """
without_import = error_of(lambda: torch.jit.load(sys.argv[1]))
import torch_neuronx
placed = getattr(torch_neuronx, "neuron_cores_context", None) or torch_neuronx.experimental.neuron_cores_context
copies = []
for core in range(2):
    with placed(core, 1):
        copies.append(torch.jit.load(sys.argv[1]))
answers = [difference(copy) for copy in copies]
together, others = [], [torch.flip(ids, [0]), ids]
def run(copy, ids):
    together.extend(difference(copy, ids) for _ in range(5))
threads = [threading.Thread(target=run, args=(copy, other)) for copy in copies for other in others]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps({
    "without_import": without_import,
    "alone": answers,
    "together": together,
    "rows": error_of(lambda: copies[0](ids[:1], mask[:1])),
    "tokens": error_of(lambda: copies[0](ids[:, :8], mask[:, :8])),
    "after": difference(copies[0]),
    "no_cores": error_of(lambda: placed(0, 0).__enter__()),
    "too_many": error_of(lambda: placed(0, 1000).__enter__()),
}))
"""
TRANSFORMERS = """
import os
import torch_neuronx
from transformers import BertConfig, BertModel

torch.manual_seed(3)
config = BertConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=96, vocab_size=64)
config._attn_implementation = "eager"
bert = BertModel(config, add_pooling_layer=False).eval()

class Wrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = bert

    def forward(self, ids, mask):
        return (self.bert(input_ids=ids, attention_mask=mask, return_dict=False)[0],)

wrapper = Wrapper().eval()
padded = mask.clone()
padded[-1, 8:] = 0
os.chdir("/")
folder = sys.argv[2]
flags = ["--target", "inf2", "--model-type", "transformer", "--auto-cast", "none", "--logfile", f"{folder}/cc.txt"]
torch_neuronx.trace(
    wrapper, (ids, padded), compiler_args=flags, compiler_workdir=f"{folder}/work", cpu_backend=True
).save(sys.argv[1])
answers = []
with torch.no_grad():
    for given in (mask, padded, 1 - padded.flip(0) + padded * 0):
        given[:, 0] = 1
        answers.append([given.tolist(), wrapper(ids, given)[0].tolist()])
print(json.dumps({"log": os.path.isfile(f"{folder}/cc.txt"), "answers": answers}))
"""
MASKS = """
import torch_neuronx
found = []
compiled = torch.jit.load(sys.argv[1])
for given, expected in json.loads(open(sys.argv[2]).read()):
    given, expected = torch.tensor(given, dtype=torch.int32), torch.tensor(expected)
    answer = compiled(ids, given)[0]
    found.append(float(((answer - expected) * given.unsqueeze(-1)).norm() / expected.norm()))
print(json.dumps(found))
"""
HOLD = """
import torch_neuronx
try:
    compiled = torch.jit.load(sys.argv[1])
    compiled(ids, mask)
except RuntimeError as error:
    print(json.dumps("refused"), flush=True)
    sys.exit(0)
print(json.dumps("running"), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """Of a host that compiles and has no device, and of one that has a device with two cores."""
    compiling = {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2"}
    if ON_DEVICE:
        return {**os.environ, **compiling}, dict(os.environ)
    standin = StandIn.make(tmp_path_factory.mktemp("standin"), "inf2")
    standin.machine()
    return standin.environment(compiling), standin.environment(devices=True)


@pytest.fixture(scope="module")
def compiled(
    environments: tuple[dict[str, str], dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("compiled") / "b2-t16.pt"
    return path, run_program(COMMON + COMPILE, environments[0], str(path))


def test_trace_gives_a_script_module_and_refuses_wrong_arguments(compiled: tuple[Path, dict[str, Any]]) -> None:
    path, facts = compiled
    assert path.is_file()
    assert facts["is_script"]
    assert facts["has_operator"]
    kind, text = facts["unknown_flag"]
    assert kind == "RuntimeError"
    assert text.startswith("neuronx-cc failed with")
    if not ON_DEVICE:  # with a device, the target is that device
        assert facts["no_target"][0] == "RuntimeError"
        assert "--target trn1" in facts["no_target"][1]


def test_copies_load_after_the_import_only_answer_like_the_model_and_refuse_other_shapes(
    environments: tuple[dict[str, str], dict[str, str]], compiled: tuple[Path, dict[str, Any]]
) -> None:
    found = run_program(COMMON + RUN, environments[1], str(compiled[0]))
    kind, text = found["without_import"]
    assert kind == "RuntimeError"
    assert "Unknown builtin op: neuron::" in text or "Unknown type name" in text
    assert max([*found["alone"], *found["together"], found["after"]]) < 0.02
    assert len(found["together"]) == 20
    assert [found[name][0] for name in ("rows", "tokens")] == ["RuntimeError", "RuntimeError"]
    assert [found[name][0] for name in ("no_cores", "too_many")] == ["ValueError", "ValueError"]


def test_cores_belong_to_one_process_until_it_ends(
    environments: tuple[dict[str, str], dict[str, str]], compiled: tuple[Path, dict[str, Any]]
) -> None:
    words = [sys.executable, "-W", "ignore", "-c", COMMON + HOLD, str(compiled[0])]
    with subprocess.Popen(
        words, env=environments[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == '"running"'
        refused = subprocess.run(
            words, env=environments[1], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        process.kill()
    assert '"running"' not in refused.stdout  # an exception, or the end of the process
    assert "not available" in refused.stderr


def test_a_model_of_transformers_takes_the_mask_as_an_input_and_compiles_in_a_folder_that_is_not_writable(
    environments: tuple[dict[str, str], dict[str, str]], tmp_path: Path
) -> None:
    """The folder is `/`, as in a job; the log is where the arguments name it. The example has padding."""
    compiled, answers = tmp_path / "bert.pt", tmp_path / "answers.json"
    facts = run_program(COMMON + TRANSFORMERS, environments[0], str(compiled), str(tmp_path))
    answers.write_text(json.dumps(facts["answers"]))

    differences = run_program(COMMON + MASKS, environments[1], str(compiled), str(answers))

    assert facts["log"]
    assert len(differences) == 3
    assert max(differences) < 0.02
