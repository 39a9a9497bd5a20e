"""A store holds the newest version of each object, in whatever order events arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.cluster.api import POD
from penstock_operator.cluster.store import DELETIONS, ObjectKey, Store, StoreChange


def pod(name: str, version: int, *, uid: str = "u", node: str = "n", phase: str = "Running", **more: Any) -> Any:
    metadata = {"namespace": "a", "name": name, "resourceVersion": str(version), "uid": uid, **more}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase}}


def by_node(value: Any) -> Iterator[tuple[str, str]]:
    yield ("node", value["spec"]["nodeName"])


def make() -> tuple[Store[str], list[StoreChange[str]]]:
    store: Store[str] = Store(POD, lambda value: str(value["status"]["phase"]), index=by_node)
    changes: list[StoreChange[str]] = []
    store.listen(changes.append)
    return store, changes


def test_a_new_object_calls_the_listener_and_is_found_by_name_and_index() -> None:
    store, changes = make()

    assert store.put(pod("x", 1))

    assert [change.key for change in changes] == [ObjectKey("a", "x")]
    assert store.facts(ObjectKey("a", "x")) == "Running"
    assert [key for key, _ in store.of(("node", "n"))] == [ObjectKey("a", "x")]


def test_an_event_that_changes_no_fact_calls_no_listener() -> None:
    store, changes = make()
    store.put(pod("y", 3, generation=7))
    changes.clear()

    assert not store.put(pod("y", 4, generation=7))

    assert changes == []
    entry = store.get(ObjectKey("a", "y"))
    assert entry is not None
    assert entry.version == 4


def test_without_a_generation_every_version_counts_as_an_edit() -> None:
    store, changes = make()
    store.put(pod("x", 1))
    changes.clear()

    assert store.put(pod("x", 2))

    assert [(change.old is not None, change.new is not None) for change in changes] == [(True, True)]


@pytest.mark.parametrize(
    "metadata",
    [{"labels": {"a": "2"}, "ownerReferences": [{"uid": "o"}]}, {"labels": {"a": "1"}}],
    ids=["another label", "no owner"],
)
def test_a_change_of_labels_or_owners_calls_the_listener_although_the_generation_is_the_same(
    metadata: dict[str, Any],
) -> None:
    store, changes = make()
    store.put(pod("x", 1, generation=1, labels={"a": "1"}, ownerReferences=[{"uid": "o"}]))
    changes.clear()

    assert store.put(pod("x", 2, generation=1, **metadata))
    assert not store.put(pod("x", 3, generation=1, **metadata))
    assert len(changes) == 1


def test_an_older_version_is_ignored() -> None:
    store, _ = make()
    store.put(pod("x", 5, phase="Running"))

    assert not store.put(pod("x", 4, phase="Pending"))

    assert store.facts(ObjectKey("a", "x")) == "Running"


def test_an_object_made_again_under_its_name_is_a_change() -> None:
    store, changes = make()
    store.put(pod("x", 1, uid="first", generation=1))
    changes.clear()

    assert store.put(pod("x", 2, uid="second", generation=1))

    assert [(change.old and change.old.uid, change.new and change.new.uid) for change in changes] == [
        ("first", "second")
    ]


def test_the_deletion_of_a_predecessor_does_not_remove_its_successor() -> None:
    store, _ = make()
    store.put(pod("x", 9, uid="second"))

    assert not store.remove(ObjectKey("a", "x"), version=5)

    assert store.facts(ObjectKey("a", "x")) == "Running"


def test_an_answer_from_before_a_deletion_does_not_bring_the_object_back() -> None:
    store, _ = make()
    key = ObjectKey("a", "x")
    store.put(pod("x", 5))
    store.remove(key, version=9)

    # The answer to an apply, on another connection than the event.
    assert not store.put(pod("x", 8))
    assert store.get(key) is None
    assert store.put(pod("x", 10, uid="second"))


def test_deletions_are_not_remembered_for_ever() -> None:
    store, _ = make()
    for number in range(2 * DELETIONS):
        store.put(pod(f"x{number}", 1))
        store.remove(ObjectKey("a", f"x{number}"), version=2)

    assert len(store._deleted) == DELETIONS
    assert not store.put(pod(f"x{2 * DELETIONS - 1}", 1))


def test_an_object_whose_index_changes_is_found_under_the_new_index_only() -> None:
    store, changes = make()
    store.put(pod("x", 1, node="n"))
    store.put(pod("x", 2, node="m"))

    assert store.of(("node", "n")) == []
    assert [key.name for key, _ in store.of(("node", "m"))] == ["x"]
    assert changes[-1].indexes == {("node", "n"), ("node", "m")}


def test_objects_missing_from_a_list_are_removed_unless_they_are_newer() -> None:
    store, changes = make()
    store.put(pod("stays", 1))
    store.put(pod("missed", 2))
    store.put(pod("newer", 30))
    changes.clear()

    assert store.retain({ObjectKey("a", "stays")}, version=10) == 1

    assert sorted(key.name for key in store) == ["newer", "stays"]
    assert [change.key.name for change in changes if change.new is None] == ["missed"]


def test_a_list_of_one_namespace_does_not_affect_others() -> None:
    store, _ = make()
    store.put(pod("x", 1))

    assert store.retain(set(), version=10, namespace="b") == 0


@pytest.mark.parametrize("missing", [{}, {"namespace": None}])
def test_cluster_scoped_objects_are_stored(missing: dict[str, Any]) -> None:
    store, _ = make()
    value = pod("x", 1)
    del value["metadata"]["namespace"]
    value["metadata"].update(missing)

    store.put(value)

    assert store.facts(ObjectKey("", "x")) == "Running"


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.integers(1, 40), st.sampled_from("nm"), st.sampled_from(["a", "b"])),
        max_size=30,
    )
)
def test_in_any_order_the_newest_version_is_known_and_the_index_agrees(
    news: list[tuple[str, int, str, str]],
) -> None:
    store, _ = make()
    newest: dict[str, tuple[int, str, str]] = {}
    for name, version, node, phase in news:
        store.put(pod(name, version, node=node, phase=phase))
        if version > newest.get(name, (0, "", ""))[0]:
            newest[name] = (version, node, phase)

    assert {key.name: store.facts(key) for key in store} == {name: seen[2] for name, seen in newest.items()}
    for node in "nm":
        expected = sorted(name for name, seen in newest.items() if seen[1] == node)
        assert [key.name for key, _ in store.of(("node", node))] == expected
