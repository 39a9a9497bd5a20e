"""Text to token ids: the `tokenizers` library against the table of words before it, for tokenizers like BERT's.

    taskset -c 2 python -m benchmarks.splitting [--seconds 10]

Everyday words with the tokenizer of all-MiniLM-L6-v2, interleaved. "After a sweep": each time 64 MB are read before, as
a model's weights are, so that little of either is left in the caches of the core. Microseconds for a text, medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import click
import numpy as np
from tokenizers import Tokenizer as Backend

from benchmarks.models import minilm
from penstock_optimizer.load.workload import TextMaker
from penstock_runtime.host import read_host
from penstock_runtime.tokens.words import WordTable

SWEPT_BYTES = 64 << 20
TEXTS = 64


@click.command(help=__doc__)
@click.option("--tokens", "lengths", multiple=True, default=(8, 32, 128), show_default=True, type=int)
@click.option("--seconds", default=10.0, show_default=True, help="Of each length.")
def main(*, lengths: Sequence[int], seconds: float) -> None:
    """Measure."""
    backend = Backend.from_file(str(minilm() / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    table = WordTable.of(backend)
    assert table is not None
    ways: dict[str, Callable[[str], object]] = {
        "library": lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids,
        "table": table.ids,
    }
    swept = np.zeros(SWEPT_BYTES // 8)
    cpu = read_host().cpu
    click.echo(f"{cpu.model_name} ({cpu.isa.value})")
    for tokens in lengths:
        maker = TextMaker(backend)
        texts = [maker.text(tokens) for _ in range(TEXTS)]
        for sweep in (False, True):
            taken: dict[str, list[float]] = {name: [] for name in ways}
            end, number = perf_counter() + seconds / 2, 0
            while perf_counter() < end:
                for name, way in ways.items():
                    if sweep:
                        swept.sum()
                    begin = perf_counter()
                    way(texts[number % TEXTS])
                    taken[name].append((perf_counter() - begin) * 1e6)
                number += 1
            figures = ", ".join(f"{name} {median(times):.0f}" for name, times in taken.items())
            click.echo(f"{tokens} tokens{', after a sweep' if sweep else ''}: {figures} microseconds")


if __name__ == "__main__":
    main()
