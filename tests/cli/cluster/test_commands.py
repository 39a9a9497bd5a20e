"""`penstock status` and `penstock why`: what they show of objects, and errors of kubectl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock_cli.cluster.status import rows, summary
from penstock_cli.cluster.why import EndpointFacts, explain
from tests.cli.endpoints import invoke


def endpoint(name: str, ready: str, reason: str, *others: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    conditions = [
        {"type": kind, "status": state, "reason": why, "message": f"Message of {why}."}
        for kind, state, why in (("Ready", ready, reason), *others)
    ]
    return {
        "metadata": {"name": name, "namespace": "a", "generation": 1},
        "status": {"reason": reason, "observedGeneration": 1, "conditions": conditions, **status},
    }


def test_endpoints_that_are_not_ready_come_first_and_are_counted_by_reason() -> None:
    table = rows(
        [
            endpoint("good", "True", "Serving", replicas=2, readyReplicas=1, p95="9 ms", plan={"summary": "int8"}),
            endpoint("slow", "False", "Optimizing 7/23"),
            {"metadata": {"name": "new", "namespace": "b"}},
        ]
    )

    assert [row[1] for row in table] == ["slow", "new", "good"]
    assert table[2] == ("a", "good", "True", "Serving", "1/2", "int8", "9 ms", "")
    assert table[1][2:4] == ("Unknown", "New")
    assert summary(table) == "1 of 3 endpoints are ready, 1 Optimizing, 1 New."


def test_a_broken_endpoint_is_explained_with_its_optimisation_pods_and_warnings() -> None:
    value = endpoint(
        "e",
        "False",
        "CrashLooping",
        ("Accepted", "True", "Valid"),
        ("Optimized", "False", "Optimizing"),
        ("Available", "False", "CrashLooping"),
        ("Progressing", "False", "Settled"),
    )
    model = {
        "metadata": {"name": "om"},
        "status": {"job": "om-1", "conditions": [{"type": "Ready", "status": "False", "reason": "Optimizing"}]},
    }
    container = {
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
        "restartCount": 4,
    }
    pods = [
        {"metadata": {"name": "bad"}, "status": {"phase": "Running", "containerStatuses": [container]}},
        {"metadata": {"name": "good"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}},
        {
            "metadata": {"name": "pending"},
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "message": "0/3 nodes"}]},
        },
    ]
    events = [
        {"type": "Warning", "reason": "Second", "message": "b", "lastTimestamp": "2026-11-27T00:00:02Z"},
        {"type": "Warning", "reason": "First", "message": "a", "lastTimestamp": "2026-11-27T00:00:01Z"},
        {"type": "Normal", "reason": "Normal", "message": "c"},
    ]
    found = list(explain(EndpointFacts(value, model, pods, events)))

    assert found == [
        ("endpoint", "a/e"),
        ("ready", "False: CrashLooping. Message of CrashLooping."),
        ("Optimized", "Optimizing. Message of Optimizing."),
        ("optimised", "om: Optimizing.  Its log: kubectl logs job/om-1"),
        ("pod", "bad: Running, CrashLoopBackOff, it ended with code 137 (OOMKilled), 4 restarts"),
        ("pod", "pending: Pending, 0/3 nodes"),
        ("event", "First. a"),
        ("event", "Second. b"),
        ("reference", "docs/reference/conditions.md explains the reason CrashLooping"),
    ]


def test_an_endpoint_that_the_operator_has_not_seen_points_to_the_operator() -> None:
    new = {"metadata": {"name": "e", "namespace": "a"}}
    older = endpoint("e", "True", "Serving", observedGeneration=0)

    assert "Does it run" in list(explain(EndpointFacts(new)))[1][1]
    assert ("outdated" in dict(explain(EndpointFacts(older)))) is True


KUBECTL = """#!/bin/sh
case "$*" in
  *forbidden*) echo 'Error from server (Forbidden): no' >&2; exit 1;;
  *unreachable*)
    echo 'E1127 09:30:10.012148   16152 memcache.go:265] "Unhandled Error" err="connection refused"' >&2
    echo 'The connection to the server localhost:8080 was refused' >&2
    exit 1;;
  *ignore-not-found*"-- e") echo '{"metadata": {"name": "e", "namespace": "a"}}';;
  *ignore-not-found*) ;;
  *) echo '{"items": []}';;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path) -> dict[str, str]:
    """The environment of a command that finds this kubectl."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:/bin:/usr/bin"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("why", "absent"), "there is no ModelEndpoint absent"),
        (("status", "absent"), "there is no ModelEndpoint absent"),
        (("status", "--namespace", "forbidden"), "kubectl get modelendpoints.penstock.dev: Error from server"),
        # Without the lines of kubectl's log.
        (("status", "--namespace", "unreachable"), "kubectl get modelendpoints.penstock.dev: The connection to the"),
    ],
)
def test_errors_of_kubectl_are_shown_with_what_to_do(
    words: tuple[str, ...], message: str, kubectl: dict[str, str]
) -> None:
    run = invoke(*words, environment=kubectl)

    assert run.exit_code == 1
    assert message in run.output


def test_the_status_counts_the_endpoints_that_are_ready(kubectl: dict[str, str]) -> None:
    assert "0 of 0 endpoints are ready." in invoke("status", environment=kubectl).output
    assert "0 of 1 endpoints are ready, 1 New." in invoke("status", "e", environment=kubectl).output
    both = invoke("status", "e", "--all-namespaces", environment=kubectl)
    assert both.exit_code == 2
    assert "leave --all-namespaces out" in both.output


def test_texts_of_objects_reach_the_terminal_as_text(tmp_path: Path) -> None:
    hostile = endpoint("a", "False", "\x1b[2JGone [link=http://x]here[/link]")
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps({'items': [hostile]})}\nEND\n")
    program.chmod(0o755)
    output = invoke("status", environment={"PATH": f"{tmp_path}:/bin:/usr/bin", "FORCE_COLOR": "1"}).output

    assert "[2J" not in output.replace("\\x1b[2J", "")
    assert "]8;" not in output
    assert "[link=http://x]here[/link]" in output


def test_without_kubectl_the_error_names_it(tmp_path: Path) -> None:
    run = invoke("status", environment={"PATH": str(tmp_path)})

    assert run.exit_code == 1
    assert "there is no kubectl here" in run.output
