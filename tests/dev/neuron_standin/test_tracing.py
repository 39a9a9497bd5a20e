"""The stand-in records a model as torch-xla does: what Python code reads of a tensor is a constant of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.neuron_standin_env import StandIn, run_program

pytestmark = [pytest.mark.parity]

PROGRAM = """
import json
import torch
from neuron_standin.tracing import traced_program
from transformers import BertConfig, BertModel

torch.manual_seed(3)
config = BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=61)
config._attn_implementation = "eager"

class Wrapper(torch.nn.Module):
    def __init__(self, reads):
        super().__init__()
        self.model = BertModel(config, add_pooling_layer=False)
        self.reads = reads

    def forward(self, ids, mask):
        # As transformers 5 does it.
        given = None if self.reads and bool(mask.all()) else mask
        return (self.model(input_ids=ids, attention_mask=given, return_dict=False)[0],)

ids = torch.arange(5, 21, dtype=torch.int32).reshape(2, 8)
masks = {"whole": torch.ones((2, 8), dtype=torch.int32), "padded": torch.ones((2, 8), dtype=torch.int32)}
masks["padded"][:, 5:] = 0
found = {}
for reads in (True, False):
    wrapper = Wrapper(reads).eval()
    for example, mask in masks.items():
        program, _ = traced_program(wrapper, (ids, mask))
        with torch.no_grad():
            found[f"{'reads' if reads else 'computes'}, example {example}"] = [
                name for name, other in masks.items()
                if float((program(ids, other)[0] - wrapper(ids, other)[0]).abs().max()) > 1e-4
            ]
print(json.dumps(found))
"""


def test_a_mask_whose_values_are_read_is_a_constant(tmp_path: Path) -> None:
    found: Any = run_program(PROGRAM, StandIn.make(tmp_path, "inf2").environment())

    # The masks with which the compiled model is wrong.
    assert found == {
        "reads, example whole": ["padded"],
        "reads, example padded": [],
        "computes, example whole": [],
        "computes, example padded": [],
    }
