"""The progress reports of a download, and their intervals."""

from __future__ import annotations

from penstock_optimizer.job.progress import FIRST_SECONDS, DownloadReporter, ProgressEvent, Stage
from penstock_runtime.models.sources.transfer import FetchProgress as Transfer

MB = 10**6


class Watched:
    """A download on a fake clock."""

    def __init__(self, every_seconds: float) -> None:
        self.now = 0.0
        self.events: list[ProgressEvent] = []
        self._fetching = DownloadReporter(self.events.append, every_seconds=every_seconds, clock=lambda: self.now)

    def step(self, seconds: float, done: int, note: str = "") -> None:
        self.now = seconds
        self._fetching(Transfer("hf://a/b@main", "model.safetensors", done * MB, 0 if note else 90 * MB, note))

    @property
    def messages(self) -> list[str]:
        return [event.message for event in self.events]


def test_a_fast_download_is_not_reported() -> None:
    watched = Watched(10)
    watched.step(0, 0)
    watched.step(FIRST_SECONDS / 2, 90)

    assert watched.messages == []


def test_a_download_is_reported_at_intervals_and_at_its_end() -> None:
    watched = Watched(10)
    for second in range(30):
        watched.step(second, 3 * second)
    watched.step(30, 90)

    assert watched.messages == [f"fetching model.safetensors: {done} of 90 MB" for done in (6, 36, 66, 90)]
    assert {event.stage for event in watched.events} == {Stage.DOWNLOAD}
    assert [(event.done, event.total) for event in watched.events][-1] == (90 * MB, 90 * MB)


def test_a_terminal_has_a_shorter_interval() -> None:
    watched = Watched(0.5)
    for tenth in range(21):
        watched.step(tenth / 10, tenth)

    assert [event.done // MB for event in watched.events] == [5, 10, 15, 20]


def test_each_note_is_reported_at_once() -> None:
    watched = Watched(10)
    watched.step(0, 0, "the hub does not deliver: trying again in 2 s")
    watched.step(0.1, 0, "the hub does not deliver: using the cached revision")

    assert watched.messages == [event.facts["note"] for event in watched.events]
    assert len(watched.messages) == 2
