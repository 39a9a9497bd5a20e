"""Parts of the gateway without input and output: settings, configuration, slices, commands for HAProxy."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_gateway.config import PROBES, SCRIPT, configuration
from penstock_gateway.haproxy import ADDED, CHECK, DELETED, ServerState, ServerSync, commands, read_states
from penstock_gateway.settings import GatewayError, GatewaySettings, variable
from penstock_gateway.slices import REMOVED_SLICE_SECONDS, ReplicaAddress, SliceHistory, replicas
from testbed.haproxy import VERSIONS, folder_with

NEEDED = {
    "PENSTOCK_GATEWAY_ENDPOINT": "emotion",
    "PENSTOCK_GATEWAY_SERVICE": "emotion-pods",
    "PENSTOCK_GATEWAY_NAMESPACE": "default",
}


def test_defaults_are_promised() -> None:
    assert GatewaySettings.from_environment(NEEDED) == GatewaySettings(
        endpoint="emotion",
        service="emotion-pods",
        namespace="default",
        host="0.0.0.0",
        port=8080,
        status_port=8404,
        max_held=512,
        max_connections=2048,
        max_connections_per_client=512,
        hold_seconds=120,
        concurrency=64,
        answer_seconds=300,
        connection_age_seconds=60,
        drain_seconds=20,
        finish_seconds=300,
        keys_folder="",
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PENSTOCK_GATEWAY_SERVICE": None}, "PENSTOCK_GATEWAY_SERVICE is not set"),
        ({"PENSTOCK_GATEWAY_PORT": "http"}, "PENSTOCK_GATEWAY_PORT is 'http': it must be a whole number"),
        ({"PENSTOCK_GATEWAY_PORT": "70000"}, "PENSTOCK_GATEWAY_PORT is 70000: it must be within 0 and 65535"),
        ({"PENSTOCK_GATEWAY_CONCURRENCY": "0"}, "PENSTOCK_GATEWAY_CONCURRENCY is 0: it must be within 1 and"),
        ({"PENSTOCK_GATEWAY_ENDPOINT": "a'\n daemon"}, "it must be a name without spaces or quotes"),
        ({"PENSTOCK_GATEWAY_KEYS_FOLDER": "/keys with 'quotes"}, "it must be a name without spaces or quotes"),
        ({"PENSTOCK_GATEWAY_HOST": "a${x}"}, "it must be a name without spaces or quotes"),
    ],
)
def test_invalid_values_are_refused_by_name(changed: dict[str, str | None], message: str) -> None:
    environment = {key: value for key, value in {**NEEDED, **changed}.items() if value is not None}
    with pytest.raises(GatewayError, match=message.replace("(", r"\(")):
        GatewaySettings.from_environment(environment)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"max_held": 7}, "setenv HOLD_MOST 7"),
        ({"hold_seconds": 30}, "timeout queue 30s"),
        ({"hold_seconds": 30}, "timeout client 105s"),
        ({"answer_seconds": 40}, "timeout server 40s"),
        ({"connection_age_seconds": 100}, "tcp-request connection set-var(sess.age) rand(25000),add(75000)"),
        ({"finish_seconds": 9}, "hard-stop-after 9s"),
        ({"host": "::", "port": 81}, "bind :::81"),
        ({"status_port": 82}, "bind 0.0.0.0:82"),
        ({"max_connections": 1000}, "\n    maxconn 1320\n    nbthread 1"),
        ({"max_connections": 1000}, "bind 0.0.0.0:8080\n    maxconn 1000"),
        ({"max_connections_per_client": 9}, "reject if { sc_conn_cur(0) gt 9 }"),
        ({"concurrency": 40}, "nbsrv(replicas),mul(20)"),
        ({"concurrency": 40, "max_connections_per_client": 2048}, "# One client may use all places"),
        ({}, "reject if { sc_conn_rate(0) gt 10000 }"),
        ({}, "retry-on conn-failure empty-response 503"),
        ({}, "balance leastconn"),
        ({}, f"path {' '.join(PROBES)}"),
        # Without it the tokens of a stream came in pieces of 200 ms.
        ({}, "option http-no-delay"),
    ],
)
def test_each_setting_arrives_in_the_configuration(change: dict[str, Any], line: str) -> None:
    settings = GatewaySettings("emotion", "emotion-pods", "default", **change)

    assert line in configuration(settings, socket=Path("/tmp/h.sock"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"keys_folder": "/keys"},
        {"max_held": 0},
        {"host": "::"},
        {"endpoint": "a.b-c"},
        {"max_connections_per_client": 2048},
    ],
)
def test_haproxy_takes_the_configuration(tmp_path: Path, change: dict[str, Any], version: str) -> None:
    settings = GatewaySettings(**{"endpoint": "emotion", "service": "s", "namespace": "default", **change})
    path = tmp_path / "haproxy.cfg"
    path.write_text(configuration(settings, socket=tmp_path / "s"))
    haproxy = folder_with(version) / "haproxy"
    checked = subprocess.run([haproxy, "-c", "-f", str(path)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stderr


def slice_with(*endpoints: dict[str, Any], port: int | None = 8080) -> dict[str, Any]:
    return {"ports": [{"name": "http", "port": port}], "endpoints": list(endpoints)}


def endpoint(pod: str, host: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [host], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod}}


def test_slices_become_servers() -> None:
    found = replicas(
        [
            slice_with(endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False, terminating=True)),
            slice_with(endpoint("c", "fd00::3"), endpoint("b", "10.0.0.2", ready=True)),
            slice_with({"addresses": []}, {"addresses": ["10.0.0.9"]}),
            slice_with(endpoint("d", "10.0.0.4"), port=None),
            {"ports": None, "endpoints": None},
        ]
    )

    assert found == {
        "a_10.0.0.1": ReplicaAddress("a_10.0.0.1", "10.0.0.1", 8080, takes_requests=True),
        "b_10.0.0.2": ReplicaAddress("b_10.0.0.2", "10.0.0.2", 8080, takes_requests=True),
        "c_fd00::3": ReplicaAddress("c_fd00::3", "fd00::3", 8080, takes_requests=True),
        "address_10.0.0.9": ReplicaAddress("address_10.0.0.9", "10.0.0.9", 8080, takes_requests=True),
    }


def test_replicas_of_a_service_deleted_slice_by_slice_stay_known() -> None:
    first, second = slice_with(endpoint("a", "10.0.0.1")), slice_with(endpoint("b", "10.0.0.2"))
    known = SliceHistory()
    known.update({"1": first, "2": second}, 100.0)

    known.update({"2": second}, 100.2)
    assert {name: server.takes_requests for name, server in known.replicas().items()} == {
        "a_10.0.0.1": False,
        "b_10.0.0.2": True,
    }, "while other slices remain, a replica of a deleted slice takes no new requests"
    before = known.service_removed

    known.update({}, 100.4)
    assert (before, known.service_removed) == (False, True)
    assert not known.drop_old(100.4 + 10 * REMOVED_SLICE_SECONDS)
    assert [server.takes_requests for server in known.replicas().values()] == [True, True]


def test_a_deleted_slice_is_dropped_after_a_delay_if_others_remain() -> None:
    first, second = slice_with(endpoint("a", "10.0.0.1")), slice_with(endpoint("b", "10.0.0.2"))
    known = SliceHistory()
    known.update({"1": first, "2": second}, 100.0)
    known.update({"2": second}, 101.0)

    assert not known.drop_old(101.0 + REMOVED_SLICE_SECONDS / 2)
    assert known.drop_old(101.0 + REMOVED_SLICE_SECONDS)
    assert set(known.replicas()) == {"b_10.0.0.2"}

    known.update({}, 200.0)
    assert set(known.replicas()) == {"b_10.0.0.2"}


def test_a_pod_that_moved_to_another_slice_has_the_state_of_that_slice() -> None:
    known = SliceHistory()
    known.update({"1": slice_with(endpoint("a", "10.0.0.1"))}, 100.0)
    known.update({"2": slice_with(endpoint("a", "10.0.0.1"))}, 100.1)

    assert [server.takes_requests for server in known.replicas().values()] == [True]
    assert not SliceHistory().service_removed, "a new history waits for its first slice"


UP, ENDING = (
    ReplicaAddress("a", "10.0.0.1", 8080, takes_requests=True),
    ReplicaAddress("a", "10.0.0.1", 8080, takes_requests=False),
)
ADD = f"add server replicas/a 10.0.0.1:8080 maxconn 9 {CHECK}"


@pytest.mark.parametrize(
    ("wanted", "present", "expected"),
    [
        (UP, None, [ADD, "enable health replicas/a", "set server replicas/a state ready"]),
        (UP, ServerState.READY, []),
        (UP, ServerState.DRAIN, ["set server replicas/a state ready"]),
        (UP, ServerState.LEAVING, ["enable health replicas/a", "set server replicas/a state ready"]),
        (ENDING, None, []),
        (ENDING, ServerState.READY, ["set server replicas/a state drain"]),
        (ENDING, ServerState.DRAIN, []),
        (ENDING, ServerState.LEAVING, []),
        (None, ServerState.READY, ["set server replicas/a state maint", "del server replicas/a"]),
        (None, ServerState.DRAIN, ["set server replicas/a state maint", "del server replicas/a"]),
        (None, ServerState.LEAVING, ["del server replicas/a"]),
        (None, None, []),
    ],
)
def test_commands_bring_a_server_to_its_wanted_state(
    wanted: ReplicaAddress | None, present: ServerState | None, expected: list[str]
) -> None:
    found = commands({} if wanted is None else {"a": wanted}, {} if present is None else {"a": present}, concurrency=9)

    assert [change.text for change in found] == expected


class FakeHaproxy:
    """Executes commands, except when set to fail: then it gives no answer, whether it executed the command or not."""

    def __init__(self, failures: list[bool]) -> None:
        self.states: dict[str, ServerState] = {}
        self._failures = iter(failures)

    def tell(self, command: str) -> str:
        failing = next(self._failures, False)
        if failing and len(command) % 2:
            raise TimeoutError
        answer = self._obey(command)
        if failing:
            raise TimeoutError
        return answer

    def _obey(self, command: str) -> str:
        words = command.split()
        if words[:2] == ["show", "servers"]:
            bits = {ServerState.READY: 0, ServerState.DRAIN: 8, ServerState.LEAVING: 1}
            rows = "".join(f"3 replicas 1 {name} 10.0.0.1 2 {bits[state]}\n" for name, state in self.states.items())
            return f"1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state\n{rows}"
        name = words[2].partition("/")[2]
        if words[0] == "add":
            if name in self.states:
                return "Already exists a server with the same name in backend."
            self.states[name] = ServerState.LEAVING
            return ADDED
        if words[0] == "del":
            del self.states[name]
            return DELETED
        if words[0] == "set":
            self.states[name] = ServerState(words[4])
        return ""


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.booleans(), max_size=4), max_size=6),
    st.lists(st.booleans(), max_size=60),
)
def test_after_any_failures_haproxy_has_the_wanted_servers(wishes: list[dict[str, bool]], failures: list[bool]) -> None:
    haproxy = FakeHaproxy(failures)
    roster = ServerSync(haproxy.tell, concurrency=9)
    wanted: dict[str, ReplicaAddress] = {}
    for wish in wishes:
        wanted = {name: ReplicaAddress(name, "10.0.0.1", 8080, takes_requests=takes) for name, takes in wish.items()}
        with contextlib.suppress(TimeoutError):
            roster.set_replicas(wanted)
    for _ in range(len(failures) + 1):
        with contextlib.suppress(TimeoutError):
            roster.retry()
    roster.set_replicas(wanted)

    takers = {name for name, server in wanted.items() if server.takes_requests}
    assert {name for name, state in haproxy.states.items() if state is ServerState.READY} == takers
    assert haproxy.states.keys() <= wanted.keys()


def test_an_invalid_list_of_servers_is_an_error() -> None:
    with pytest.raises(ValueError, match="show servers state: 'Permission denied'"):
        read_states("Permission denied")


def test_variables_are_named_like_their_fields() -> None:
    assert variable("hold_seconds") == "PENSTOCK_GATEWAY_HOLD_SECONDS"


def test_the_document_names_every_variable_metric_and_default() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/gateway.md").read_text()
    script = SCRIPT.read_text()
    metrics = set(re.findall(r"penstock_gateway_\w+", script))

    assert metrics
    assert [name for name in sorted(metrics) if f"`{name}" not in page] == []
    row = {
        "max_held": "512",
        "max_connections": "2048",
        "max_connections_per_client": "512",
        "hold_seconds": "120",
        "concurrency": "64",
        "answer_seconds": "300",
        "connection_age_seconds": "60",
        "drain_seconds": "20",
        "finish_seconds": "300",
    }
    for field in fields(GatewaySettings):
        short = f"_{field.name.upper()}"
        lines = [line for line in page.splitlines() if f"{short}`" in line and line.startswith("| `PENSTOCK_GATEWAY")]
        assert len(lines) == 1, f"{short} is not in the table of variables"
        if field.name in row:
            assert row[field.name] in lines[0]


def test_every_error_that_haproxy_answers_a_request_with_is_in_the_runtimes_shape() -> None:
    text = configuration(GatewaySettings("emotion", "s", "default", keys_folder="/keys"), socket=Path("/tmp/s"))
    bodies = [json.loads(body) for body in re.findall(r"string '(\{.*?\})'", text)]

    assert len(bodies) == 13
    for body in bodies:
        assert body.keys() == {"error", "error_type", "remedy"}
        # A clause without a full stop, as in the runtime's errors.
        assert not body["error"].endswith(".")
