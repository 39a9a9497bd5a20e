"""Who owns `spec.replicas` of a Deployment, by its managedFields."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_operator.plan.pod_facts import Object


def writers(managed: Iterable[Object]) -> set[str]:
    """The field managers that own it."""
    return {str(entry.get("manager")) for entry in managed if _owns(entry)}


def left_behind(managed: Iterable[Object]) -> tuple[int, ...]:
    """The entries, by their place, of whoever has scaled: an HPA, `kubectl scale`.

    An apply of the very number that somebody has scaled to makes two owners of it, although one is long gone. Such an
    entry is about nothing but the number, and can be struck before the number becomes another's.
    """
    return tuple(place for place, entry in enumerate(managed) if entry.get("subresource") == "scale" and _owns(entry))


def _owns(entry: Object) -> bool:
    return "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
