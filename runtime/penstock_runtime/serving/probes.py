"""Probe texts: their vectors are recorded when a plan is chosen, and computed again before a replica answers requests.

A replica with other vectors has another processor, library, tokenizer or weights than the machine that optimised. One
text for each cause that is known to change some vectors only; random texts would miss a rare one.
"""

from __future__ import annotations

import hashlib

import numpy as np

from penstock.errors import ArtefactError
from penstock.manifest import PROBES_FILE
from penstock_runtime.errors import InvalidInput
from penstock_runtime.rows import Float, run_rows
from penstock_runtime.serving.loaded_model import LoadedModel
from penstock_runtime.tasks.embeddings.feature_extraction import FeatureExtraction

PROBES = (
    "a",
    "The School of Music",
    "the school of music",
    "THE SCHOOL OF MUSIC",
    "caf\u00e9 na\u00efve \u00fcber",
    "cafe\u0301 nai\u0308ve u\u0308ber",
    "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd\u3067\u3059\u3002",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\U0001f600 \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea",
    "3.14159 2,718 1e-9 0x1f 2026-11-28",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    "  blanks before, within   and after  ",
    "a tab\tand a\nline break",
    "...!?;:---",
    "don't can't won't it's",
    "Donaudampfschifffahrtsgesellschaftskapit\u00e4n",
    "How do birds fly?",
    "How do birds fly so high?",
    "Vectors of the same space can be compared, and vectors of two spaces cannot. " * 3,
)
LEAST_DIFFERENCE = 1e-3
"""Of 1 - cosine: libraries and processors that add in another order stay far below it."""
FACTOR = 1.5
"""Times the largest difference that the accuracy guard has seen between the plan and fp32."""


def texts_digest() -> str:
    """sha256 of the texts, hexadecimal: vectors of other texts cannot be compared."""
    return hashlib.sha256("\0".join(PROBES).encode()).hexdigest()


def allowed_difference(lowest_cosine: float | None) -> float:
    """The largest 1 - cosine that a replica may have. `lowest_cosine`: between plan and fp32, by the guard."""
    return max(LEAST_DIFFERENCE, FACTOR * (1 - (1.0 if lowest_cosine is None else lowest_cosine)))


def probe_vectors(model: LoadedModel) -> Float | None:
    """float32 [probes, width], each of length 1; NaN for a text that the limit cuts or the vocabulary cannot write.
    None for a model without one dense vector for each text. Errors of the engine as of its `run`."""
    task = model.task
    if type(task) is not FeatureExtraction:
        return None
    found: dict[int, Float] = {}
    for number, text in enumerate(PROBES):
        try:
            prepared = task.prepare(task.plain_request(text))
        except InvalidInput:  # a vocabulary without an unknown token
            continue
        if not prepared.truncated:
            ran = run_rows(model.engine.run, model.io, prepared.rows)
            reduced = [task.reduce(row, outputs) for row, outputs in zip(prepared.rows, ran, strict=True)]
            found[number] = task.assemble(prepared, reduced)[0]
    if not found:
        return None
    vectors: Float = np.full((len(PROBES), next(iter(found.values())).size), np.nan, np.float32)
    for number, vector in found.items():
        vectors[number] = vector
    return vectors


def check_probes(model: LoadedModel) -> None:
    """ArtefactError if a probe's vector differs from the recorded one by more than the manifest allows. Nothing is
    compared where none was recorded, or other texts were."""
    facts = None if model.manifest is None else model.manifest.probes
    if facts is None or model.probes is None or facts.texts != texts_digest():
        return
    found, recorded = probe_vectors(model), model.probes
    if found is None:
        return
    if recorded.shape != found.shape:
        raise ArtefactError(
            f"the artefact's {PROBES_FILE} has vectors of shape {list(recorded.shape)}, and this replica gives "
            f"{list(found.shape)}",
            remedy="Run penstock optimize again",
        )
    # A text with NaN on either side was not computed there.
    differences = np.nan_to_num(1 - np.sum(recorded * found, axis=1), nan=0.0)
    worst = int(differences.argmax())
    most = facts.largest_difference
    if differences[worst] > most:
        raise ArtefactError(
            f"this replica's vectors are not those of the artefact: {int((differences > most).sum())} of {len(PROBES)} "
            f"probe texts differ. Of {PROBES[worst][:40]!r} the cosine to the recorded vector is "
            f"{1 - differences[worst]:.4f}, and at least {1 - most:.4f} is expected",
            remedy="Something here computes otherwise than the machine that optimised: compare processor and versions "
            "of libraries with the manifest's cpu and toolchain, or run penstock optimize again here",
        )
