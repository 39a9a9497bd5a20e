"""Are the answers right? Each server's vectors against plain transformers in fp32, one by one and all at once:
a server that mixes up or pads away its callers' texts is fast for nothing."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from benchmarks.peers.servers import Shape, Vector
from penstock_optimizer.guard.judge import MEAN_COSINE, MIN_COSINE, P1_COSINE
from penstock_optimizer.load.generator import quantile

AT_ONCE = 16
TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Cosines:
    """Compared with the reference's vectors."""

    mean: float
    p1: float
    """One text in a hundred has a lower one."""
    minimum: float

    @classmethod
    def of(cls, vectors: Sequence[Vector], reference: Sequence[Vector]) -> Cosines:
        """Of as many vectors as the reference has."""
        found = sorted(cosine(one, other) for one, other in zip(vectors, reference, strict=True))
        return cls(mean=sum(found) / len(found), p1=quantile(found, 0.01), minimum=found[0])

    @property
    def right(self) -> bool:
        """Within the budget that the guard holds our own recipes to."""
        return self.mean >= MEAN_COSINE and self.p1 >= P1_COSINE and self.minimum >= MIN_COSINE


@dataclass(frozen=True)
class Agreement:
    """The answers of a server."""

    alone: Cosines | None
    """Texts sent one by one; None when it did not answer."""
    together: Cosines | None
    """The same texts sent 16 at a time."""
    moved: float
    """The lowest cosine of a text's two answers, alone and in a batch: 1 when other texts change nothing."""
    error: str = ""
    """Why there are no answers."""

    @property
    def right(self) -> bool:
        """The accuracy budget holds, alone and in a batch."""
        return bool(self.alone and self.alone.right and self.together and self.together.right)


def ask(url: str, shape: Shape, texts: Sequence[str], *, at_once: int) -> list[Vector]:
    """The vectors of the texts. OSError, ValueError or KeyError when a server does not answer as it should."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda text: _ask_one(url, shape, text), texts))


def _ask_one(url: str, shape: Shape, text: str) -> Vector:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)
    try:
        body = json.dumps(shape.body(text))
        connection.request("POST", shape.path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {content[:200].decode(errors='replace')}")
        return shape.vector(json.loads(content))
    finally:
        connection.close()


def agreement(url: str, shape: Shape, texts: Sequence[str], reference: Sequence[Vector]) -> Agreement:
    """Send all texts to a server, twice, and compare the answers."""
    try:
        alone = ask(url, shape, texts, at_once=1)
        together = ask(url, shape, texts, at_once=AT_ONCE)
    except (OSError, ValueError, KeyError, IndexError, TypeError, http.client.HTTPException) as error:
        return Agreement(None, None, 0.0, error=f"{type(error).__name__}: {error}"[:200])
    return Agreement(
        alone=Cosines.of(alone, reference),
        together=Cosines.of(together, reference),
        moved=min(map(cosine, alone, together)),
    )


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of two vectors of one length; ValueError when they differ in length."""
    product = sum(a * b for a, b in zip(one, other, strict=True))
    norms = sum(a * a for a in one) ** 0.5 * sum(b * b for b in other) ** 0.5
    return product / norms if norms else 0.0
