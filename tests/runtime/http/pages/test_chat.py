"""The chat page in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.generation.small_model import serving_generation, small_engine, small_generation_model
from tests.runtime.http.browser import CHROMIUM, Browser, browser
from tests.runtime.http.serving import until

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: make system")


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def write(tab: Browser, text: str) -> None:
    tab.run(f"document.querySelector('#text').value = {text!r}; document.querySelector('#send').click()")


def test_tokens_appear_as_they_come_and_the_stop_button_cancels(tab: Browser, tmp_path: Path) -> None:
    engine = small_engine()
    engine.gate = threading.Semaphore(0)
    with serving_generation(small_generation_model(tmp_path, engine)) as endpoint:
        tab.open(endpoint.url)
        tab.wait_for("document.querySelector('#name').textContent === 'smol'")
        tab.run("document.querySelector('#logprobs').checked = true; document.querySelector('#max_tokens').value = 400")
        write(tab, "Hello")
        tab.wait_for("document.querySelector('.figures').textContent.includes('waiting')")
        for shown in (1, 2, 3):
            engine.gate.release()
            tab.wait_for(f"document.querySelectorAll('.assistant span').length === {shown}")
        assert "%" in tab.run("document.querySelector('.assistant span').title")
        assert "first token" in tab.run("document.querySelector('.figures').textContent")
        tab.run("document.querySelector('#stop').click()")
        tab.wait_for("document.querySelector('.figures').textContent.includes('stopped')")
        engine.gate.release()
        until(lambda: endpoint.model.facts()["sequences"]["running"] == 0)
        assert endpoint.server.metrics.requests["/v1/chat/completions", 499] == 1
        tab.run("document.querySelector('#max_tokens').value = 4")
        write(tab, "Again")
        for _ in range(20):
            engine.gate.release()
        tab.wait_for("document.querySelectorAll('.figures').length === 2 && document.querySelector('#stop').hidden")
        assert "4 tokens" in tab.run("document.querySelectorAll('.figures')[1].textContent")
        assert not tab.complaints
        tab.open("about:blank")


def test_a_refusal_is_shown_and_the_message_stays(tab: Browser, tmp_path: Path) -> None:
    with serving_generation(small_generation_model(tmp_path, template=None)) as endpoint:
        tab.complaints.clear()
        tab.open(endpoint.url)
        write(tab, "Hello")
        tab.wait_for("document.querySelector('.error') !== null")
        assert "no chat template" in tab.run("document.querySelector('.error').textContent")
        assert tab.run("document.querySelector('#text').value") == "Hello"
        tab.open("about:blank")
