"""Updates of conditions: the transition time changes only with the status."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import ValidationError

from penstock.resources.conditions import Condition, ConditionStatus, find_condition, timestamp, updated_conditions
from penstock.resources.status import EndpointStatus

EARLIER, NOW = "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z"


def condition(kind: str, status: str, at: str, reason: str = "Because") -> Condition:
    return Condition(type=kind, status=ConditionStatus(status), reason=reason, last_transition_time=at)


def test_a_condition_with_an_unchanged_status_keeps_its_time_and_takes_the_new_message() -> None:
    (updated,) = updated_conditions([condition("Ready", "False", EARLIER)], [condition("Ready", "False", NOW, "Other")])
    assert (updated.reason, updated.last_transition_time) == ("Other", EARLIER)


def test_a_condition_that_changes_has_the_time_of_the_change() -> None:
    (updated,) = updated_conditions([condition("Ready", "False", EARLIER)], [condition("Ready", "True", NOW)])
    assert updated == condition("Ready", "True", NOW)


def test_updated_conditions_keep_their_order_and_those_of_other_writers_remain() -> None:
    before = [condition("Theirs", "True", EARLIER), condition("Ready", "True", EARLIER)]
    updated = updated_conditions(before, [condition("Accepted", "True", NOW), condition("Ready", "True", NOW)])
    assert [one.type for one in updated] == ["Theirs", "Ready", "Accepted"]
    assert find_condition(updated, "Accepted") == condition("Accepted", "True", NOW)
    assert find_condition(updated, "Progressing") is None


def test_times_are_utc_in_whole_seconds() -> None:
    berlin = timezone(timedelta(hours=1))
    assert timestamp(datetime(2026, 11, 21, 12, 0, 0, 999, tzinfo=berlin)) == NOW
    assert timestamp(datetime(2026, 11, 21, 11, tzinfo=UTC)) == NOW


@pytest.mark.parametrize("reason", ["", "two words", "7", "Ends:", "a-b"])
def test_a_reason_is_one_word(reason: str) -> None:
    with pytest.raises(ValidationError):
        condition("Ready", "True", NOW, reason)


def test_a_status_is_written_without_unknown_fields() -> None:
    status = EndpointStatus(conditions=(condition("Ready", "True", NOW),), replicas=0, reason="Serving")
    written = status.to_object()
    assert written["replicas"] == 0
    assert written["conditions"][0]["lastTransitionTime"] == NOW
    assert not {"plan", "scaling", "readyReplicas"} & written.keys()
    assert EndpointStatus.model_validate(written) == status
