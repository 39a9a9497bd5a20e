"""The pages in a real browser: they work for every task, log nothing, and send no requests to other hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.tasks import TaskName
from tests.runtime.http.browser import CHROMIUM, Browser, browser
from tests.runtime.http.serving import Endpoint, Gate, serving

EndpointOf = Callable[[TaskName], Endpoint]
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make system")
ANSWERED = "!document.querySelector('#times').hidden || document.querySelector('.error') !== null"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of this module."""
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def fresh(tab: Browser) -> Iterator[Browser]:
    """The browser, with an empty profile for each test."""
    tab.complaints.clear()
    tab.asked.clear()
    yield tab
    tab.open("about:blank")  # otherwise the page would continue to send requests to a server that has ended


def click_run(tab: Browser) -> None:
    tab.wait_for("document.querySelector('#fields textarea') !== null")
    tab.run("document.querySelector('button[type=submit]').click()")


@needs_chromium
@pytest.mark.parametrize(
    ("task", "shown"),
    [
        (TaskName.FEATURE_EXTRACTION, "16 numbers, length 1.000"),
        (TaskName.SENTENCE_SIMILARITY, "That is a happy dog"),
        (TaskName.TEXT_RANKING, "Cheese is made of milk."),
        (TaskName.TEXT_CLASSIFICATION, "joy"),
        (TaskName.TOKEN_CLASSIFICATION, "PER"),
        (TaskName.QUESTION_ANSWERING, "My name is Clara"),
        (TaskName.FILL_MASK, "paris is the some of france"),
        (TaskName.ZERO_SHOT_CLASSIFICATION, "not urgent"),
    ],
)
def test_the_playground_shows_an_answer_of_every_task(
    fresh: Browser, endpoint_of: EndpointOf, task: TaskName, shown: str
) -> None:
    endpoint = endpoint_of(task)
    fresh.open(endpoint.url)
    click_run(fresh)
    fresh.wait_for(ANSWERED)

    assert shown in fresh.run("document.querySelector('#answer').textContent")
    assert "0.500 ms" in fresh.run("document.querySelector('#times').textContent")
    assert fresh.complaints == []
    assert {urlsplit(url).netloc for url in fresh.asked} == {urlsplit(endpoint.url).netloc}


@needs_chromium
def test_the_playground_explains_an_error(fresh: Browser, endpoint_of: EndpointOf) -> None:
    fresh.open(endpoint_of(TaskName.FILL_MASK).url)
    fresh.wait_for("document.querySelector('#fields textarea') !== null")
    fresh.run("document.querySelector('#fields textarea').value = 'no mask here'")
    click_run(fresh)
    fresh.wait_for(ANSWERED)

    assert "mask" in fresh.run("document.querySelector('.error').textContent")


@needs_chromium
def test_a_guarded_endpoint_asks_for_the_token(fresh: Browser) -> None:
    gate = Gate()
    gate.open()
    with serving(gate, auth_token="secret") as endpoint:
        fresh.open(endpoint.url)
        fresh.wait_for("!document.querySelector('#token-row').hidden")
        fresh.run(
            "document.querySelector('#token').value = 'secret';"
            "document.querySelector('#token').dispatchEvent(new Event('change'))"
        )
        click_run(fresh)
        fresh.wait_for("!document.querySelector('#times').hidden")

        assert "Bearer …" in fresh.run("document.querySelector('#curl').textContent")


@needs_chromium
def test_the_reference_lists_every_route(fresh: Browser, endpoint_of: EndpointOf) -> None:
    endpoint = endpoint_of(TaskName.QUESTION_ANSWERING)
    paths = httpx.get(f"{endpoint.url}/openapi.json").json()["paths"]
    fresh.open(f"{endpoint.url}/docs")
    fresh.wait_for("document.querySelectorAll('section h3').length > 3")

    shown = fresh.run("[...document.querySelectorAll('h3 code')].map((one) => one.textContent)")
    assert set(shown) == set(paths)
    assert len(shown) == sum(len(operations) for operations in paths.values())
    assert "parameters.max_answer_len" in fresh.run("document.body.textContent")
    assert fresh.complaints == []
    assert {urlsplit(url).netloc for url in fresh.asked} == {urlsplit(endpoint.url).netloc}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_is_not_sent_twice(endpoint_of: EndpointOf, path: str) -> None:
    url = endpoint_of(TaskName.FEATURE_EXTRACTION).url + path
    first = httpx.get(url)
    again = httpx.get(url, headers={"if-none-match": first.headers["etag"]})

    assert first.status_code == 200
    assert first.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in first.headers["content-security-policy"]
    assert again.status_code == 304
    assert again.content == b""
