"""The recorder of executed files sees all threads, and only what runs while it records."""

import threading
from pathlib import Path

import pytest

from penstock.hardware import arithmetic_flags
from penstock.settings import hugging_face_token
from tests.docs import executed


def test_files_of_all_threads_are_recorded_while_recording() -> None:
    with executed.recorder() as one:
        hugging_face_token({})
        with one.record():
            thread = threading.Thread(target=arithmetic_flags, args=(["avx2"],))
            thread.start()
            thread.join()

    assert one.files == {"penstock/hardware.py"}
    assert one.lines() == len(Path(executed.ROOT / "penstock/hardware.py").read_text().splitlines())


def test_tests_and_libraries_are_not_counted(tmp_path: Path) -> None:
    with executed.recorder() as one, one.record():
        (tmp_path / "a").write_text("a")
        executed.documented.__name__.upper()

    assert one.files == set()


PAGE = """
<!-- path: short, at most 2, below penstock -->

1. `hardware.py` is one.
2. `cli/penstock_cli/main.py` is another one,
   in two lines.
"""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"penstock/hardware.py"}, r"the reverse: \['cli/penstock_cli/main.py'\]"),
        (
            {"penstock/hardware.py", "cli/penstock_cli/main.py", "penstock/tasks.py"},
            r"not in the list: \['penstock/tasks.py'\]",
        ),
    ],
)
def test_a_list_with_other_files_than_the_executed_ones_fails(
    files: set[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(executed, "PAGE", page)

    executed.compare("short", {"penstock/hardware.py", "cli/penstock_cli/main.py"})
    with pytest.raises(AssertionError, match=message):
        executed.compare("short", files)
