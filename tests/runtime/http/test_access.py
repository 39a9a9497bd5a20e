"""Bearer tokens from files: names, changes while the server runs, and the access log."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.errors import SettingError
from penstock.tasks import TaskName
from penstock_runtime.app import server
from penstock_runtime.http.access import AccessTokens
from penstock_runtime.settings import Settings
from tests.runtime.http.feeding import feed
from tests.runtime.http.secret_files import publish
from tests.runtime.http.serving import Endpoint, Gate, make_model, post, read_answer, serving, until


def store(folder: Path | None = None, file: Path | None = None) -> AccessTokens:
    flags = {"auth_token_folder": folder, "auth_token_file": file}
    return AccessTokens(Settings.load({}, flags).access)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    publish(folder, {"alice": "key-a\n", "bob": "key-b"}, 1)
    return folder


@pytest.fixture
def endpoint(secret: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(server, "REFRESH_SECONDS", 0.05)
    gate = Gate()
    gate.open()
    with serving(gate, auth_token_folder=secret, access_log=True) as endpoint:
        yield endpoint


def status(endpoint: Endpoint, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"}
    return httpx.post(f"{endpoint.url}/predict", json={"inputs": "x"}, headers=headers, timeout=60).status_code


def test_each_file_of_the_folder_is_a_named_token(secret: Path) -> None:
    tokens = store(secret)

    found = [tokens.name_of(given) for given in (b"key-a", b"key-b", b"key-", b"", b"..data", b"alice")]

    assert found == ["alice", "bob", None, None, None, None]


def test_a_file_may_hold_a_new_and_an_old_token(tmp_path: Path) -> None:
    (tmp_path / "team one").write_text("new\n\nold\n")
    (tmp_path / "empty").write_text("\n")
    tokens = store(tmp_path)

    assert [tokens.name_of(given) for given in (b"new", b"old", b"")] == ["team_one", "team_one", None]


def test_every_token_is_compared_whichever_matches(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    original = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        assert len(one) == len(other)
        return original(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    tokens = store(secret)
    counts = []
    for given in (b"key-a", b"key-b", b"another one, which is longer"):
        compared = 0
        tokens.name_of(given)
        counts.append(compared)

    assert counts == [2, 2, 2]


def test_a_changed_secret_is_read_again_without_a_restart(endpoint: Endpoint, secret: Path) -> None:
    before = [status(endpoint, token) for token in ("key-a", "key-b", "key-c")]
    publish(secret, {"bob": "key-b2", "carol": "key-c"}, 2)
    until(lambda: status(endpoint, "key-c") == 200)
    after = [status(endpoint, token) for token in ("key-a", "key-b", "key-b2")]

    assert before == [200, 200, 401]
    assert after == [401, 401, 200]


def test_a_removed_token_is_refused_on_an_open_connection(endpoint: Endpoint, secret: Path) -> None:
    """The server remembers the head of a connection's last request: it must not remember that its token was right."""
    ask = post("/predict", b'{"inputs": "x"}', "authorization: Bearer key-a")
    with endpoint.connect() as client:
        found = []
        for _ in range(3):
            client.sendall(ask)
            found.append(read_answer(client)[9:12])
        publish(secret, {"bob": "key-b", "carol": "key-c"}, 2)
        until(lambda: status(endpoint, "key-c") == 200)
        client.sendall(ask)
        found.append(read_answer(client)[9:12])

    assert found == [b"200", b"200", b"200", b"401"]


def test_keys_that_are_rotated_under_load_fail_no_request_with_a_valid_key(endpoint: Endpoint, secret: Path) -> None:
    """`bob` stays; `alice` gets a new key, and her client uses it once both are accepted."""
    ends = threading.Event()
    replaced = threading.Event()
    statuses: dict[str, list[int]] = {"alice": [], "bob": []}

    def load(name: str, before: str, after: str) -> None:
        with httpx.Client(timeout=60) as client:
            for _ in itertools.takewhile(lambda _: not ends.is_set(), range(100_000)):
                token = after if replaced.is_set() else before
                headers = {"authorization": f"Bearer {token}"}
                answer = client.post(f"{endpoint.url}/predict", json={"inputs": "x"}, headers=headers)
                statuses[name].append(answer.status_code)

    def more_requests(count: int) -> None:
        goals = {name: len(found) + count for name, found in statuses.items()}
        until(lambda: all(len(statuses[name]) >= goal for name, goal in goals.items()))

    threads = [
        threading.Thread(target=load, args=arguments)
        for arguments in (("alice", "key-a", "key-a2"), ("bob", "key-b", "key-b"))
    ]
    for thread in threads:
        thread.start()
    more_requests(20)
    publish(secret, {"alice": "key-a", "alice-2": "key-a2", "bob": "key-b"}, 2)
    until(lambda: status(endpoint, "key-a2") == 200)
    replaced.set()
    # The request in progress may still have the old key.
    more_requests(2)
    publish(secret, {"alice-2": "key-a2", "bob": "key-b"}, 3)
    until(lambda: status(endpoint, "key-a") == 401)
    more_requests(20)
    ends.set()
    for thread in threads:
        thread.join(60)

    assert {one for found in statuses.values() for one in found} == {200}
    assert [status(endpoint, token) for token in ("key-a", "key-a2", "key-b")] == [401, 200, 200]


def test_an_emptied_secret_refuses_every_request(endpoint: Endpoint, secret: Path) -> None:
    publish(secret, {}, 2)
    until(lambda: status(endpoint, "key-a") == 401)

    assert status(endpoint, "other") == 401


def test_tokens_stay_accepted_while_the_folder_cannot_be_read(secret: Path) -> None:
    tokens = store(secret)
    secret.rename(secret.with_name("gone"))
    tokens.refresh()

    assert tokens.name_of(b"key-a") == "alice"
    assert tokens.version == 0


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    tokens = store(file=file)
    before = [tokens.name_of(given) for given in (b"one", b"two", b"three")]
    file.write_text("three\n")
    tokens.refresh()

    assert before == ["file-1", "file-2", None]
    assert [tokens.name_of(given) for given in (b"one", b"two", b"three")] == [None, None, "file"]


def test_an_empty_folder_is_no_open_door(tmp_path: Path) -> None:
    with serving(Gate(), auth_token_folder=tmp_path) as endpoint:
        assert status(endpoint, "any") == 401


def test_a_server_without_a_token_is_not_ready_until_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REFRESH_SECONDS", 0.05)
    with serving(Gate(), auth_token_folder=tmp_path, internal_port=0) as endpoint:
        internal = f"http://127.0.0.1:{endpoint.server.internal_port}"
        before, count = httpx.get(f"{internal}/readyz"), httpx.get(f"{internal}/info").json()["access"]
        (tmp_path / "alice").write_text("key-a")
        until(lambda: httpx.get(f"{internal}/readyz").status_code == 200)
        after = httpx.get(f"{internal}/info").json()["access"]
        alive = httpx.get(f"{internal}/healthz").status_code

    assert before.status_code == 503
    assert "no bearer token is known" in before.json()["error"]
    assert (count, after, alive) == ({"tokens": 0}, {"tokens": 1}, 200)


def test_a_folder_that_is_missing_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="PENSTOCK_AUTH_TOKEN_FOLDER") as caught:
        store(tmp_path / "missing")

    assert "Mount a Secret" in caught.value.remedy


def test_the_access_log_names_client_and_token(secret: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = Gate()
    gate.open()
    with serving(gate, auth_token_folder=secret, access_log=True) as endpoint:
        assert [status(endpoint, token) for token in ("key-a", "wrong")] == [200, 401]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("POST")]

    assert [line.split()[-2:] for line in lines] == [["127.0.0.1", "alice"], ["127.0.0.1", "-"]]
    assert "key-a" not in "".join(lines)


def test_openai_clients_bring_their_api_key(secret: Path, tmp_path: Path) -> None:
    task = TaskName.FEATURE_EXTRACTION
    with serving(make_model(tmp_path / "model", task), task, auth_token_folder=secret) as endpoint:
        with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="key-b", max_retries=0) as client:
            found = client.embeddings.create(model="emotion", input="i like you")
        with (
            openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="wrong", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.embeddings.create(model="emotion", input="i like you")

    assert len(found.data) == 1


def test_requests_that_were_read_ahead_have_their_own_tokens(secret: Path) -> None:
    good = post("/predict", b'"x"', "authorization: Bearer key-a")
    bad = post("/predict", b'"x"', "authorization: Bearer wrong")

    fed = asyncio.run(feed([good + bad, good], auth_token_folder=secret))

    assert [one.get("token") for one in fed.requests] == ["alice", "", "alice"]
    assert fed.written.count(b"HTTP/1.1 200") == 2
    assert fed.written.count(b"HTTP/1.1 401") == 1
