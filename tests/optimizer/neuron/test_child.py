"""The process that compiles: it runs on an old Python, masks with finite numbers, and refuses what would go wrong."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock_optimizer.neuron import child as program
from penstock_optimizer.neuron.child import Child, CompilationRefused

pytestmark = pytest.mark.parity
QUIET_TORCH = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")


def test_it_is_python_3_9_and_imports_nothing_of_ours() -> None:
    tree = ast.parse(Path(program.__file__).read_text("utf-8"), feature_version=(3, 9))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert {name for name in imported if name.startswith("penstock")} == set()
    assert imported >= {"torch", "transformers", "torch_neuron", "torch_neuronx"}


@pytest.mark.parametrize(
    ("versions", "error"),
    [
        ({"torch-neuronx": "2.9.0.2.15.32035"}, ""),
        ({"torch-neuronx": "2.10.0.1"}, "torch-neuronx 2.10.0.1 does not support Inf2"),
        ({"torch-neuronx": "2.14.0.3"}, "torch-neuronx 2.14.0.3 does not support Inf2"),
        ({"torch-neuronx": ""}, "compiling for inf2 needs torch-neuronx"),
        ({"transformers": "5.0.0"}, "transformers 5.0.0 leaves the attention mask out of what is compiled"),
        ({"transformers": "4.58.1"}, "transformers 4.58.1 leaves the attention mask out of what is compiled"),
    ],
)
def test_packages_for_other_devices_are_refused(
    versions: dict[str, str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "_version", lambda name: versions.get(name, "1.0"))
    if not error:
        assert Child().versions("inf2")["torch-neuronx"] == versions["torch-neuronx"]
        return
    with pytest.raises(CompilationRefused, match=error) as refused:
        Child().versions("inf2")
    assert refused.value.kind == "HostError"
    assert refused.value.remedy


@pytest.fixture
def gradients() -> Any:
    """`Child.open` switches them off for its process."""
    before = torch.is_grad_enabled()
    yield
    torch.set_grad_enabled(before)


CONFIG = {
    "vocab_size": 61,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


@pytest.fixture
def masked_model(tmp_path: Path, gradients: None) -> tuple[Path, Any]:
    torch.manual_seed(3)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**CONFIG)).eval()
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model", model


def _opened(folder: Path, outputs: list[str], sparse: dict[str, bool] | None = None) -> Child:
    child = Child()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "simplefilter", lambda _: None)
        child.open(str(folder), "AutoModelForMaskedLM", ["input_ids", "attention_mask"], outputs, sparse)
    return child


def _answers(child: Child, folder: Path, arithmetic: str) -> Any:
    ids = np.arange(5, 21, dtype=np.int32).reshape(2, 8)
    mask = np.ones((2, 8), np.int32)
    mask[1, 5:] = 0
    np.savez(folder / "in.npz", **{"0": ids, "1": mask})  # type: ignore[arg-type]
    child.answers(str(folder / "in.npz"), str(folder / "out.npz"), arithmetic)
    with np.load(folder / "out.npz") as file:
        return ids, mask, file["0"]


def test_answers_are_the_models_and_rounding_changes_them_a_little(
    masked_model: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, model = masked_model
    child = _opened(folder, ["logits"])
    ids, mask, exact = _answers(child, tmp_path, "float32")
    expected = model(torch.from_numpy(ids).long(), torch.from_numpy(mask)).logits.numpy()
    np.testing.assert_allclose(exact[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(exact[1, :5], expected[1, :5], atol=1e-5)
    scale = float(np.abs(expected).max())
    for arithmetic in ("bf16-products", "bf16"):
        _, _, rounded = _answers(child, tmp_path, arithmetic)
        difference = float(np.abs(rounded[0] - exact[0]).max()) / scale
        assert 1e-5 < difference < 0.05, arithmetic


@pytest.mark.parametrize("sums", [False, True])
def test_sparse_weights_are_those_of_the_formula(masked_model: tuple[Path, Any], tmp_path: Path, sums: bool) -> None:
    folder, model = masked_model
    child = _opened(folder, ["weights"], {"sums": sums, "twice": False})
    ids, mask, weights = _answers(child, tmp_path, "float32")
    logits = model(torch.from_numpy(ids).long(), torch.from_numpy(mask)).logits.numpy()
    each = np.log1p(np.maximum(logits, 0)) * mask[..., None]
    expected = each.sum(axis=1) if sums else each.max(axis=1)
    np.testing.assert_allclose(weights, expected, atol=1e-4)


@QUIET_TORCH
def test_graphs_have_no_constant_that_is_infinite_in_16_bits(masked_model: tuple[Path, Any]) -> None:
    folder, _ = masked_model
    example = (torch.ones((1, 8), dtype=torch.int32), torch.ones((1, 8), dtype=torch.int32))
    wrapper = _opened(folder, ["logits"])._wrapper
    program._require_finite(torch.jit.trace(wrapper, example, check_trace=False))
    assert torch.finfo(torch.float32).min < -1e38  # only while the model runs

    class Infinite(torch.nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any, mask: Any) -> Any:
            return (ids * 1.0).masked_fill(mask == 0, float("-inf"))

    with pytest.raises(CompilationRefused, match="masks with -inf"):
        program._require_finite(torch.jit.trace(Infinite(), example, check_trace=False))


def test_the_example_has_padding_in_the_mask_alone() -> None:
    example = {name: program._example(name, 2, 8) for name in ("input_ids", "attention_mask", "token_type_ids")}

    assert example["attention_mask"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]
    assert all(bool((one == 1).all()) for name, one in example.items() if name != "attention_mask")
    # A lone row has some, too, and a lone token none.
    assert program._example("attention_mask", 1, 3).tolist() == [[1, 1, 0]]
    assert program._example("attention_mask", 1, 1).tolist() == [[1]]


def test_the_compiler_has_a_folder_of_its_own_and_its_log_is_kept_after_an_error(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = []

    def compile_in_vain() -> None:
        with program._compiler_folder() as folder:
            folders.append(Path(folder).resolve())
            Path("log-neuron-cc.txt").write_text("why it failed")
            assert Path.cwd() == folders[0]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        compile_in_vain()

    assert Path.cwd() == tmp_path
    assert not folders[0].exists()
    assert "why it failed" in capfd.readouterr().err
