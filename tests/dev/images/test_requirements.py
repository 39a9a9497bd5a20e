"""What an image installs comes from the extras of pyproject.toml."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from images.inside.requirements import requirements
from images.target import ROOT

PROJECT: dict[str, Any] = {
    "name": "penstock",
    "dependencies": ["click>=8", "PyYAML>=6"],
    "optional-dependencies": {
        "runtime": ["numpy>=2", "tritonclient[http]>=2.50"],
        "optimizer": ["penstock[runtime]", "onnx>=1"],
        "torch": ["torch>=2", "transformers>=4"],
        "all": ["Penstock[optimizer, torch]", "penstock[all]"],
    },
}


@pytest.mark.parametrize(
    ("extras", "without", "expected"),
    [
        ([], [], ["PyYAML>=6", "click>=8"]),
        (["runtime"], [], ["PyYAML>=6", "click>=8", "numpy>=2", "tritonclient[http]>=2.50"]),
        (["optimizer"], [], ["PyYAML>=6", "click>=8", "numpy>=2", "onnx>=1", "tritonclient[http]>=2.50"]),
        (["torch"], ["Torch"], ["PyYAML>=6", "click>=8", "transformers>=4"]),
        (["runtime"], ["pyyaml", "tritonclient"], ["click>=8", "numpy>=2"]),
        (
            ["all"],
            [],
            [
                "PyYAML>=6",
                "click>=8",
                "numpy>=2",
                "onnx>=1",
                "torch>=2",
                "transformers>=4",
                "tritonclient[http]>=2.50",
            ],
        ),
    ],
)
def test_extras_become_requirements(extras: list[str], without: list[str], expected: list[str]) -> None:
    assert requirements(PROJECT, extras, without) == expected


def test_neither_the_runtime_nor_the_default_optimiser_requires_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    for extras in (["runtime", "stores"], ["optimizer", "stores"], ["operator"]):
        asked = requirements(project, extras)
        assert [one for one in asked if one.startswith(("torch", "transformers"))] == []
