"""The process that loads, runs and compiles a model: the only module that imports torch for Inferentia, or its SDK.

A separate program, started as `PYTHON child.py`: the SDK for Inf1 needs Python 3.10, which Penstock does not run on.
So this file imports nothing of Penstock, and runs on Python 3.9.

It answers the calls of `penstock_optimizer.candidate.isolation.Worker`: one JSON object a line on standard input,
`{"method": ..., "arguments": {...}}`, one answer a line on standard output: `{"value": ...}` or `{"error": ...,
"remedy": ..., "kind": ...}`. Arrays go through files of NumPy.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

MASKED = -1e4
"""Added to attention scores of padding. Libraries add the lowest float32, which is no number in 16 bits."""
LARGEST = 1e30
"""A larger constant in a graph is meant as infinity."""
LEAST_ON_DEVICE = 0.8
"""Inf1: least share of the operations that must be compiled. Only embeddings and the shape of the mask stay out."""
LAST_INF2 = (2, 9)
"""Last release of torch-neuronx for Inf2: later packages of this name are another product, for Trn2 and Trn3."""
LAST_TRANSFORMERS = (4, 57)
"""Later releases leave a mask out of the recorded graph: their Python code reads its values, and computes without it
where they are all 1."""
LONGEST_ERROR = 400
LOG = "log-neuron-cc.txt"
LOG_CHARACTERS = 4000
PRODUCTS = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "__matmul__")


class CompilationRefused(Exception):
    """An error for users; `kind` is the name of the PenstockError to raise."""

    def __init__(self, message: str, remedy: str, kind: str) -> None:
        super().__init__(message)
        self.remedy, self.kind = remedy, kind


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


class Child:
    """Receives the calls. `open` comes before `answers` and `trace`."""

    def __init__(self) -> None:
        self._wrapper: Any = None
        self._rounded: Any = None

    def versions(self, target: str) -> dict[str, str]:
        """Versions of torch, transformers, the SDK's package for torch and its compiler."""
        names = ("torch-neuronx", "neuronx-cc") if target == "inf2" else ("torch-neuron", "neuron-cc")
        found = {name: _version(name) for name in (*names, "torch", "transformers")}
        release = tuple(int(part) for part in found.get("torch-neuronx", "").split(".")[:2] if part)
        if release > LAST_INF2:
            raise CompilationRefused(
                f"torch-neuronx {found['torch-neuronx']} does not support Inf2: from 2.10 on the package of this "
                "name is for Trn2 and Trn3 only",
                "Install torch-neuronx==2.9.0.2.15.32035 and neuronx-cc==2.26.6360.0 (Neuron SDK 2.31.1)",
                "HostError",
            )
        release = tuple(int(part) for part in found["transformers"].split(".")[:2] if part)
        if release > LAST_TRANSFORMERS:
            raise CompilationRefused(
                f"transformers {found['transformers']} leaves the attention mask out of what is compiled: padding "
                "would change the answers",
                "Install transformers==4.57.* (Inf1: 4.19.*) for the interpreter that compiles",
                "HostError",
            )
        missing = [name for name, version in found.items() if not version]
        if missing:
            raise CompilationRefused(
                f"compiling for {target} needs {', '.join(missing)}, not installed for {sys.executable}",
                "Use the image optimizer-neuron (Inf1: optimizer-neuron-legacy), or set PENSTOCK_NEURON_PYTHON to an "
                "interpreter that has the Neuron SDK",
                "HostError",
            )
        return found

    def open(
        self, folder: str, model_class: str, inputs: list[str], outputs: list[str], sparse: dict[str, bool] | None
    ) -> dict[str, int]:
        """Load the model with transformers; `sparse`: how logits become weights, for sparse vectors."""
        import torch
        import transformers

        torch.set_grad_enabled(False)
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"local_files_only": True, "output_loading_info": True}
        if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 36):
            options["attn_implementation"] = "eager"  # plain operators
        model, report = getattr(transformers, model_class).from_pretrained(folder, **options)
        absent = [name for name in report["missing_keys"] if "pooler" not in name]
        if absent:
            raise CompilationRefused(f"{folder} has no tensor {absent[0]!r}", "Fetch the model again", "CorruptModel")
        self._wrapper = _wrapper(model.float().eval(), inputs, outputs, sparse)
        embedded = [one for one in model.modules() if isinstance(one, torch.nn.Embedding)]
        counted = {id(weight): weight.numel() for one in embedded for weight in one.parameters()}
        weights = sum(weight.numel() for weight in model.parameters())
        return {"weights": weights, "embedding_weights": sum(counted.values())}

    def answers(self, inputs: str, outputs: str, arithmetic: str) -> None:
        """Run one batch on the CPU, with the arithmetic that the compiled model is expected to have.

        `inputs`: a file with int32 arrays in order (`0`, `1`, ...); `outputs`: the file for float32 arrays. `float32`;
        `bf16-products`: operands of matrix products are rounded to bfloat16; `bf16`: everything is bfloat16.
        """
        import numpy as np
        import torch

        with np.load(inputs) as file:
            tensors = [torch.from_numpy(file[str(index)]) for index in range(len(file.files))]
        if arithmetic == "bf16":
            if self._rounded is None:
                self._rounded = copy.deepcopy(self._wrapper).to(torch.bfloat16)
            found = self._rounded(*tensors)
        elif arithmetic == "bf16-products":
            with _rounded_products():
                found = self._wrapper(*tensors)
        else:
            found = self._wrapper(*tensors)
        np.savez(outputs, **{str(index): tensor.float().numpy() for index, tensor in enumerate(found)})

    def trace(self, target: str, flags: list[str], batch: int, tokens: int, file: str) -> dict[str, Any]:
        """Compile for one shape, and write the TorchScript module to `file`. Returns `seconds`, and the `share` of
        operations that were compiled."""
        import torch

        begin = time.monotonic()
        example = tuple(_example(name, batch, tokens) for name in self._wrapper.inputs)
        plain = torch.jit.trace(self._wrapper, example, check_trace=False)
        _require_finite(plain)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with _compiler_folder() as folder:
                compiled = (_trace_inf2 if target == "inf2" else _trace_inf1)(self._wrapper, example, flags, folder)
        operations, on_host = _operations(plain.inlined_graph), _operations(compiled.inlined_graph)
        if "neuron::forward" not in str(compiled.inlined_graph):
            # The package for Inf1 then only warns.
            reasons = [str(one.message) for one in warned if "falling back" in str(one.message)]
            raise CompilationRefused(
                f"the compiler left the whole model on the CPU: {' '.join(' '.join(reasons).split())}",
                "See the log of the compiler",
                "UnsupportedModel",
            )
        share = 1 - on_host / max(operations, 1)
        if share < LEAST_ON_DEVICE:
            raise CompilationRefused(
                f"only {share:.0%} of the operations were compiled, and the rest would run on the CPU",
                "See the log of the compiler",
                "UnsupportedModel",
            )
        compiled.save(f"{file}.new")
        Path(f"{file}.new").replace(file)
        return {"seconds": time.monotonic() - begin, "share": share}


def _wrapper(model: Any, inputs: list[str], outputs: list[str], sparse: dict[str, bool] | None) -> Any:
    import torch

    class Wrapper(torch.nn.Module):  # type: ignore[misc] # torch is optional and has no types here
        """Takes int32 tensors by position, gives a tuple of float tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.inputs = inputs

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            named = dict(zip(self.inputs, tensors))  # noqa: B905 - Python 3.9
            with _finite_masks():
                answer = self.model(**named)
            if sparse is not None:
                return (_sparse_weights(answer["logits"], named["attention_mask"], **sparse),)
            return tuple(answer[name] for name in outputs)

    return Wrapper().eval()


def _sparse_weights(logits: Any, mask: Any, sums: bool, twice: bool) -> Any:
    """As `SparsePooling` has it: [batch, tokens, vocabulary] -> [batch, vocabulary]."""
    import torch

    each = torch.log1p(torch.relu(logits * mask.unsqueeze(-1).to(logits.dtype)))
    if twice:
        each = torch.log1p(each)
    return each.sum(dim=1) if sums else each.amax(dim=1)


class _FiniteInfo:
    """`torch.finfo` with another lowest number, which libraries mask attention scores with."""

    min = MASKED

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def _finite_masks() -> Any:
    import torch

    real = torch.finfo
    torch.finfo = lambda *kind: _FiniteInfo(real(*kind))
    try:
        yield
    finally:
        torch.finfo = real


def _rounded_products() -> Any:
    """Operands of matrix products are rounded to bfloat16, and products are summed in float32, as matrix units do."""
    import torch
    from torch.overrides import TorchFunctionMode

    def rounded(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(torch.bfloat16).float() if is_float else value

    class Rounding(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in PRODUCTS:
                # The bias of `linear` is no operand, nor is the first argument of `addmm` and `baddbmm`.
                operands = slice(1, 3) if name in ("addmm", "baddbmm") else slice(0, None if name == "einsum" else 2)
                args = list(args)
                args[operands] = [rounded(value) for value in args[operands]]
            return func(*args, **(kwargs or {}))

    return Rounding()


def _require_finite(program: Any) -> None:
    """Refuse a graph with constants that are meant as infinity: they are no numbers in 16 bits, and make NaN."""
    import torch

    graph = program.inlined_graph  # its nodes end with it
    for node in graph.findAllNodes("prim::Constant", True):
        value = node.output().toIValue()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            value = float(value.abs().max())
        if isinstance(value, float) and not abs(value) <= LARGEST:
            raise CompilationRefused(
                f"the model's code masks with {value:g}, which is no number in 16 bits",
                "Use a model whose library masks with torch.finfo(...).min",
                "UnsupportedModel",
            )


def _operations(graph: Any) -> int:
    """Operators of torch in a graph."""
    return sum(node.kind().startswith("aten::") for node in graph.nodes())


def _example(name: str, batch: int, tokens: int) -> Any:
    """An input to record the graph with. The last row has padding, as rows of a served batch have."""
    import torch

    example = torch.ones((batch, tokens), dtype=torch.int32)
    if name == "attention_mask" and tokens > 1:
        example[-1, tokens - tokens // 2 :] = 0
    return example


@contextlib.contextmanager
def _compiler_folder() -> Any:
    """A folder for the files of the compiler, which is the current one meanwhile: compilers write their logs into it,
    and that of a job is not writable. After an error, the end of the logs goes to this process's log."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="penstock-neuron-cc-") as folder:
        os.chdir(folder)
        try:
            yield folder
        except BaseException:
            for log in sorted(Path(folder).rglob("log-neuron-cc*.txt")):
                print(log.read_text("utf-8", "replace")[-LOG_CHARACTERS:], file=sys.stderr)
            raise
        finally:
            os.chdir(before)


def _trace_inf2(wrapper: Any, example: Any, flags: list[str], folder: str) -> Any:
    import torch_neuronx

    # The folder of the compiler has gigabytes, and its log goes into the current one unless it is named.
    arguments = [*flags, "--logfile", f"{folder}/{LOG}"]
    return torch_neuronx.trace(
        wrapper, example, compiler_args=arguments, compiler_workdir=f"{folder}/work", cpu_backend=True
    )


def _trace_inf1(wrapper: Any, example: Any, flags: list[str], folder: str) -> Any:
    import torch_neuron

    return torch_neuron.trace(wrapper, example, compiler_args=flags, compiler_workdir=f"{folder}/work")


def _answer(child: Child, line: bytes) -> dict[str, Any]:
    call = json.loads(line)
    try:
        return {"value": getattr(child, call["method"])(**call["arguments"])}
    except CompilationRefused as error:
        return {"error": str(error), "remedy": error.remedy, "kind": error.kind}
    except Exception as error:  # whatever torch, transformers or the SDK raise is the answer
        traceback.print_exc()
        text = " ".join(str(error).split())[:LONGEST_ERROR]  # torch adds the frames of its C++ code
        return {"error": f"{type(error).__name__}: {text}", "remedy": "", "kind": ""}


def main() -> None:
    """Answer calls until the input ends."""
    # Python puts the folder of a program first, and the modules here are no top-level ones.
    del sys.path[0]
    # Standard output belongs to the protocol; what libraries and compilers print goes to the log.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    child = Child()
    for line in sys.stdin.buffer:
        output.write(json.dumps(_answer(child, line)).encode() + b"\n")


if __name__ == "__main__":
    main()
