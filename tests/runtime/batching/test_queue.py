from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.recipe import Batching
from penstock_runtime.batching.queue import RANK_SLOWDOWN, BatchPolicy, QueuedRow, RowQueue
from penstock_runtime.engines.grid import ShapeGrid
from penstock_runtime.rows import Row
from tests.examples import examples
from tests.runtime.batching.echo import EchoEngine, plan, row, rows

SINGLE = BatchPolicy(Batching.SINGLE, 1, 512, 0.0)
EQUAL = BatchPolicy(Batching.EQUAL_LENGTH, 8, 512, 0.0)
NEAR = BatchPolicy(Batching.PADDED, 8, 512, 0.15)
GRID = BatchPolicy(Batching.EQUAL_LENGTH, 8, 512, 0.0, ShapeGrid())
ROUTED = replace(NEAR, short=EQUAL, short_tokens=16)
DIVIDED = replace(NEAR, divided_from_tokens=64)
ALONE_WHEN_SHORT = replace(EQUAL, short=SINGLE, short_tokens=8)
BOTH_ON_GRIDS = replace(GRID, short=GRID, short_tokens=12)


def queue_of(policy: BatchPolicy, lengths: list[int]) -> RowQueue:
    """Single requests that arrived one after the other."""
    queue = RowQueue(policy)
    for at, length in enumerate(lengths):
        queue.push([row(length)], at, arrived=float(at), deadline=math.inf, tokens_per_second=1000.0)
    return queue


def owners(entries: list[QueuedRow]) -> list[Any]:
    return [entry.owner for entry in entries]


@pytest.mark.parametrize(
    ("policy", "lengths", "workers", "taken"),
    [
        pytest.param(SINGLE, [8, 8, 8], 1, [0], id="single rows run alone"),
        pytest.param(EQUAL, [8, 9, 8, 7, 8], 1, [0, 2, 4], id="only the same length joins"),
        pytest.param(EQUAL, [9, 8, 8, 8], 1, [0], id="the oldest row goes first, even alone"),
        pytest.param(EQUAL, [4] * 12, 1, list(range(8)), id="no more rows than the plan allows"),
        pytest.param(EQUAL, [200] * 5, 1, [0, 1], id="no more tokens than the plan allows"),
        pytest.param(EQUAL, [600, 600], 1, [0], id="a row over the token limit runs alone"),
        pytest.param(EQUAL, [8] * 4, 2, [0, 1], id="half of the work is left to the other worker"),
        pytest.param(EQUAL, [8] * 5, 2, [0, 1], id="a fair share is rounded down to whole rows"),
        pytest.param(EQUAL, [8] * 3, 4, [0], id="fewer rows than workers run alone"),
        pytest.param(EQUAL, [8, 8, 8, 8, 100, 100], 2, [0, 1, 2, 3], id="work of other lengths counts as the others'"),
        pytest.param(NEAR, [20, 21, 20, 19, 30], 1, [0, 2, 3, 1], id="near lengths join, the nearest first"),
        pytest.param(NEAR, [100, 10, 12], 1, [0], id="far lengths do not join"),
        pytest.param(NEAR, [10, 12], 1, [0, 1], id="a sixth longer is within fifteen percent of all"),
        pytest.param(NEAR, [10, 13], 1, [0, 1], id="three tokens of twenty-six are twelve percent"),
        pytest.param(NEAR, [10, 15], 1, [0], id="five tokens of thirty are too many"),
        pytest.param(GRID, [33, 40, 37, 41, 36], 1, [0, 1, 2, 4], id="what is padded to the same length joins"),
        pytest.param(GRID, [33, 40, 37], 1, [0, 1], id="on a grid rows run in powers of two"),
        pytest.param(GRID, [33], 1, [0], id="one is a power of two"),
        pytest.param(ROUTED, [16, 17, 16, 15], 1, [0, 2], id="short rows keep to their own plan and to themselves"),
        pytest.param(ROUTED, [17, 16, 18, 16], 1, [0, 2], id="no short row joins a near one of the other side"),
        pytest.param(ALONE_WHEN_SHORT, [8, 8, 9, 9], 1, [0], id="short rows run alone where they must"),
        pytest.param(ALONE_WHEN_SHORT, [9, 8, 9, 8], 1, [0, 2], id="and the others do not"),
        pytest.param(BOTH_ON_GRIDS, [12, 13, 11, 14], 1, [0, 2], id="one point of the grid on two sides is two places"),
    ],
)
def test_the_next_batch(policy: BatchPolicy, lengths: list[int], workers: int, taken: list[int]) -> None:
    queue = queue_of(policy, lengths)

    found = queue.take(streams=workers, now=100.0)

    assert owners(found.rows) == taken
    assert found.expired == []
    assert queue.rows == len(lengths) - len(taken)
    assert queue.tokens == sum(lengths) - sum(lengths[index] for index in taken)


@pytest.mark.parametrize(
    ("lengths", "workers", "batches"),
    [
        pytest.param([8] * 8, 2, [4, 4], id="two halves, not a half and a quarter"),
        pytest.param([8] * 8, 4, [2, 2, 2, 2], id="four quarters"),
        pytest.param([8] * 20, 2, [8, 8, 4], id="as far as the plan allows"),
        pytest.param([8] * 3, 2, [1, 1, 1], id="a share is rounded down to whole rows"),
        pytest.param([8, 40, 8, 40], 2, [2, 1, 1], id="shares are of tokens"),
    ],
)
def test_the_rows_of_one_request_are_shared_evenly(lengths: list[int], workers: int, batches: list[int]) -> None:
    queue = RowQueue(EQUAL)
    queue.push(rows(lengths), "one", arrived=0.0, deadline=math.inf, tokens_per_second=100.0)

    taken = [len(queue.take(streams=workers, now=0.0).rows) for _ in batches]

    assert taken == batches
    assert queue.rows == 0


@pytest.mark.parametrize(
    ("lengths", "workers", "idle", "batch", "divided"),
    [
        pytest.param([64, 64], 4, True, [0, 1], True, id="each would have one core of four"),
        pytest.param([70, 64], 4, True, [0, 1], True, id="near lengths may run together"),
        pytest.param([70, 64], 4, False, [0], False, id="another row has a core"),
        pytest.param([63, 63], 4, True, [0], False, id="too short to gain by it"),
        pytest.param([64, 64, 64], 4, True, [0], False, id="three use three of four"),
        pytest.param([64, 64, 64], 6, True, [0, 1, 2], True, id="and half of six"),
        pytest.param([64, 64], 2, True, [0], False, id="two use both of two"),
        pytest.param([64], 4, True, [0], False, id="one is no batch"),
        pytest.param([64, 64, 100], 8, True, [0], False, id="the third one would run meanwhile"),
        pytest.param([200, 200, 200], 8, True, [0], False, id="more tokens than the plan allows"),
    ],
)
def test_a_few_long_rows_get_all_cores_together_when_nothing_else_runs(
    lengths: list[int], workers: int, idle: bool, batch: list[int], divided: bool
) -> None:
    queue = queue_of(DIVIDED, lengths)

    taken = queue.take(streams=workers, now=100.0, idle=idle)

    assert owners(taken.rows) == batch
    assert taken.divided is divided
    rest = [owners(queue.take(streams=workers, now=100.0).rows) for _ in range(queue.rows)]
    assert sum(rest, batch) == list(range(len(lengths))), "rows that were not taken keep their order"


@pytest.mark.parametrize(
    ("engine_divides", "wide_from", "divides"), [(True, 64, True), (False, 64, False), (True, None, False)]
)
def test_a_few_long_rows_run_on_all_cores_if_the_engine_divides_batches_or_one_row_gains(
    engine_divides: bool, wide_from: int | None, divides: bool
) -> None:
    facts = EchoEngine(streams=4, divides_batches=engine_divides).facts
    policy = BatchPolicy.of(plan(Batching.PADDED, streams=4, wide_from=wide_from), facts)

    assert policy.divides(row(64), 2, 4) is divides
    assert policy.divides(row(256), 2, 4) is divides
    assert not policy.divides(row(63), 2, 4)
    assert not policy.divides(row(257), 2, 4), "more tokens than the plan allows"
    assert not policy.divides(row(64), 9, 18), "more rows than the plan allows"


def test_padding_is_limited_as_a_share_of_the_whole_batch() -> None:
    queue = queue_of(BatchPolicy(Batching.PADDED, 8, 512, 0.25), [20, 10, 10, 10])

    batches = [[entry.row.length for entry in queue.take(streams=1, now=0.0).rows] for _ in range(2)]

    assert batches == [[20, 10], [10, 10]], "20 and two of 10: a third of 60 tokens would be padding"


def test_single_rows_behind_a_large_request_are_shared_as_usual() -> None:
    queue = RowQueue(EQUAL)
    queue.push(rows([8] * 8), "large", arrived=0.0, deadline=math.inf, tokens_per_second=math.inf)
    for arrived in (1.0, 2.0, 3.0):
        queue.push([row(8)], arrived, arrived=arrived, deadline=math.inf, tokens_per_second=math.inf)

    taken = [owners(queue.take(streams=2, now=3.0).rows) for _ in range(4)]

    assert taken == [["large"] * 5, ["large"] * 3 + [1.0], [2.0], [3.0]]


def test_rows_that_did_not_fit_are_in_the_next_batches_in_order() -> None:
    queue = queue_of(EQUAL, [200] * 5)

    batches = [owners(queue.take(streams=1, now=0.0).rows) for _ in range(4)]

    assert batches == [[0, 1], [2, 3], [4], []]


def test_rows_left_out_by_a_power_of_two_keep_their_order() -> None:
    queue = queue_of(GRID, [8] * 7)

    batches = [owners(queue.take(streams=1, now=0.0).rows) for _ in range(4)]

    assert batches == [[0, 1, 2, 3], [4, 5], [6], []]


def test_a_large_request_lets_a_later_single_one_in_between() -> None:
    queue = RowQueue(SINGLE)
    queue.push(rows([10] * 100), "large", arrived=0.0, deadline=math.inf, tokens_per_second=100.0)
    queue.push([row(10)], "single", arrived=1.0, deadline=math.inf, tokens_per_second=100.0)

    order = [queue.take(streams=1, now=1.0).rows[0].owner for _ in range(101)]

    # At 100 tokens a second and paced at half of that, five rows of ten tokens rank before one second.
    assert order.index("single") == 1.0 * 100 / 10 / RANK_SLOWDOWN + 1
    assert order.count("large") == 100


def test_single_requests_do_not_starve_a_large_one() -> None:
    queue = RowQueue(SINGLE)
    queue.push(rows([10] * 10), "large", arrived=0.0, deadline=math.inf, tokens_per_second=100.0)
    order = []
    # Single requests alone would keep the server busy: each run takes 0.1 s, and one more arrives in that time.
    for turn in range(40):
        now = turn / 10
        queue.push([row(10)], "single", arrived=now, deadline=math.inf, tokens_per_second=100.0)
        order.append(queue.take(streams=1, now=now).rows[0].owner)

    assert order.count("large") == 10


def test_expired_rows_are_handed_back_and_not_run() -> None:
    queue = RowQueue(EQUAL)
    queue.push([row(8)], "late", arrived=0.0, deadline=1.0, tokens_per_second=100.0)
    queue.push([row(8)], "early", arrived=0.5, deadline=3.0, tokens_per_second=100.0)
    queue.push([row(8)], "late as well", arrived=0.6, deadline=1.5, tokens_per_second=100.0)

    first = queue.take(streams=1, now=2.0)
    second = queue.take(streams=1, now=2.0)

    assert (owners(first.rows), owners(first.expired)) == (["early"], ["late"])
    assert (owners(second.rows), owners(second.expired)) == ([], ["late as well"])
    assert (queue.rows, queue.tokens) == (0, 0)


def test_the_queue_has_the_deadlines_of_all_waiting_rows() -> None:
    queue = RowQueue(EQUAL)
    assert queue.next_deadline() == math.inf
    queue.push(rows([8, 9]), "a", arrived=0.0, deadline=5.0, tokens_per_second=100.0)
    queue.push([row(8)], "b", arrived=0.0, deadline=2.0, tokens_per_second=100.0)

    assert queue.next_deadline() == 2.0
    assert owners(queue.expire(2.5)) == ["b"]
    assert queue.next_deadline() == 5.0
    assert owners(queue.expire(2.5)) == []
    assert queue.rows == 2


def test_cancelled_rows_are_not_run_and_are_removed() -> None:
    queue = RowQueue(EQUAL)
    for _ in range(1000):
        for entry in queue.push(rows([8, 9]), "gone", arrived=0.0, deadline=math.inf, tokens_per_second=100.0):
            assert queue.discard(entry)
            assert not queue.discard(entry)

    assert (queue.rows, queue.tokens) == (0, 0)
    assert sum(map(len, queue._lanes[0].by_client.values())) < 100
    assert sum(len(heap) for heap in queue._by_bucket.values()) < 100
    assert queue.take(streams=1, now=0.0).rows == []


def test_a_busy_queue_does_not_grow() -> None:
    for policy in (SINGLE, EQUAL, NEAR):
        queue = queue_of(policy, [8] * 20)
        for at in range(5000):
            queue.push([row(5 + at % 9)], at, arrived=100.0 + at, deadline=math.inf, tokens_per_second=1.0)
            while queue.rows > 20:
                queue.take(streams=1, now=0.0)
        assert sum(map(len, queue._lanes[0].by_client.values())) < 200, policy
        assert sum(map(len, queue._by_bucket.values())) < 200, policy
        assert sum(len(heap) for heap in queue._by_bucket.values()) < 200, policy


@dataclass
class _Model:
    """A plain model of the queue that states its invariants."""

    waiting: list[QueuedRow] = field(default_factory=list)
    seen: list[QueuedRow] = field(default_factory=list)

    def leave(self, entry: QueuedRow) -> None:
        self.waiting.remove(entry)
        self.seen.append(entry)


one_side = st.builds(
    BatchPolicy,
    st.sampled_from(Batching),
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.05, 0.15, 0.3, 0.9]),
    st.sampled_from([None, ShapeGrid(), ShapeGrid(50)]),
    st.sampled_from([None, 1, 20]),
)
companies = st.builds(
    lambda long, short, tokens: replace(long, short=short, short_tokens=tokens),
    one_side,
    st.one_of(st.none(), one_side),
    st.integers(1, 40),
)
arrivals = st.tuples(
    st.just("push"), st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([0.5, 3.0, math.inf])
)
steps = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("take"), st.integers(1, 6), st.integers(0, 40), st.booleans()),
        st.tuples(st.just("discard"), st.integers(0)),
    ),
    max_size=60,
)


@settings(max_examples=examples(400), deadline=None)
@given(policy=companies, steps=steps)
def test_every_row_leaves_once_in_order_and_in_a_valid_batch(
    policy: BatchPolicy, steps: list[tuple[object, ...]]
) -> None:
    queue = RowQueue(policy)
    model = _Model()
    now = 0.0
    for step in steps:
        now += 0.25
        match step:
            case ("push", list(lengths), float(patience)):
                wanted = [Row([1] * length) for length in lengths]
                entries = queue.push(wanted, now, arrived=now, deadline=now + patience, tokens_per_second=50.0)
                assert [entry.row for entry in entries] == wanted
                model.waiting += entries
            case ("discard", int(choice)) if model.waiting:
                entry = model.waiting[choice % len(model.waiting)]
                assert queue.discard(entry)
                model.leave(entry)
            case ("take", int(workers), int(least), bool(idle)):
                _check_take(queue, model, workers, least, now, idle=idle)
        assert queue.rows == len(model.waiting)
        assert queue.tokens == sum(entry.row.length for entry in model.waiting)
    while model.waiting:
        _check_take(queue, model, 1, 0, now)
    assert len(set(map(id, model.seen))) == len(model.seen)


def _check_take(queue: RowQueue, model: _Model, workers: int, least: int, now: float, *, idle: bool = False) -> None:
    policy = queue.policy
    waiting = queue.tokens
    lowest = min((e.rank for e in model.waiting if e.deadline >= now), default=None)
    taken = queue.take(streams=workers, now=now, least=least, idle=idle)
    assert all(entry.deadline < now for entry in taken.expired)
    for entry in (*taken.expired, *taken.rows):
        model.leave(entry)
    if lowest is None:
        assert taken.rows == []
        return
    assert taken.rows[0].rank == lowest, "the row that has waited longest goes first"
    assert all(entry.deadline >= now for entry in taken.rows)
    assert len({queue.policy.bucket(entry)[1] for entry in taken.rows}) == 1, (
        "rows of the two graphs never share a batch"
    )
    policy = policy.for_tokens(taken.rows[0].row.length)
    lengths = [policy.length(entry.row) for entry in taken.rows]
    padded = max(lengths) * len(lengths)
    assert len(lengths) <= max(1, policy.max_rows)
    if len(lengths) > 1:
        assert policy.batching is not Batching.SINGLE
        assert padded <= policy.max_tokens
        share = max(least, -(-max(waiting, taken.rows[0].request_tokens) // workers))
        assert taken.divided or sum(entry.row.length for entry in taken.rows) <= share
        assert padded - sum(lengths) <= policy.max_padding_share * padded
        assert policy.batching is Batching.PADDED or len(set(lengths)) == 1
        assert policy.grid is None or len(lengths) in {1, 2, 4, 8}
    if taken.divided:
        assert idle
        assert policy.divided_from_tokens is not None
        assert policy.divided_from_tokens <= taken.rows[0].row.length
        assert 2 <= len(taken.rows) <= workers // 2
        assert queue.rows == 0, "no other row runs"
    for length in set(lengths):
        place = (False, queue.policy.bucket(taken.rows[0])[1], length)
        ranks = [entry.rank for entry in taken.rows if queue.policy.bucket(entry) == place]
        left = [e.rank for e in model.waiting if queue.policy.bucket(e) == place and e.deadline >= now]
        assert ranks == sorted(ranks)
        assert not left or max(ranks) <= min(left), "the oldest of a length go first"


def push(queue: RowQueue, client: str, lengths: list[int], arrived: float) -> None:
    queue.push(rows(lengths), client, arrived=arrived, deadline=math.inf, tokens_per_second=1000.0, client=client)


def test_a_new_client_does_not_wait_for_the_requests_of_others() -> None:
    queue = RowQueue(SINGLE)
    for at in range(20):
        push(queue, "heavy", [100, 100], float(at))
    for _ in range(5):
        queue.take(streams=1, now=100.0)
    push(queue, "light", [8], 100.0)

    found = [queue.take(streams=1, now=100.0).rows[0].owner for _ in range(2)]

    assert "light" in found


@settings(max_examples=examples(100))
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(1, 200),
)
def test_clients_that_always_wait_get_equal_tokens(first: list[int], second: list[int], batches: int) -> None:
    queue = RowQueue(SINGLE)
    served = {"a": 0, "b": 0}
    for number in range(batches):
        # However often one of them asks.
        for _ in range(3):
            push(queue, "a", first, float(number))
        push(queue, "b", second * (1 + 60 // sum(second)), float(number))
        taken = queue.take(streams=1, now=float(number)).rows[0]
        served[taken.owner] += taken.row.length

    assert abs(served["a"] - served["b"]) <= 60


@pytest.mark.parametrize(("others", "batch"), [(0, 8), (1, 2)])
def test_a_large_request_runs_in_brief_batches_while_there_are_other_clients(others: int, batch: int) -> None:
    queue = RowQueue(EQUAL)
    for _ in range(others):
        push(queue, "light", [50], 0.0)
        queue.take(streams=1, now=0.0)
    push(queue, "heavy", [8] * 20, 0.5)

    assert len(queue.take(streams=1, now=1.0, brief=20).rows) == batch
    # A second later no other has come.
    assert len(queue.take(streams=1, now=2.0, brief=20).rows) == 8


def test_batches_of_small_requests_are_as_brief() -> None:
    queue = RowQueue(EQUAL)
    for number in range(20):
        push(queue, f"client {number}", [8], 0.0)

    assert [len(queue.take(streams=1, now=0.6, brief=30).rows) for _ in range(3)] == [3, 3, 3]
