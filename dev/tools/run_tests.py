"""Runs the tests of `make test` in two phases, both even if the first fails, and prints the result of each part.

The first phase runs what needs no cluster with nodes, in several processes. In the second, the tests on such a cluster
run one at a time, because its nodes own the machine's cores, and before them those that wait for a process of low
priority. Both wait for half of their time. Tests that only compute run at the same time with idle priority
(SCHED_IDLE): they get no processor time that anything else wants. Those that never look at a clock begin with the first
phase, where they may get little for minutes; those with time limits begin with the second.

At the end, the failed tests of up to MAX_REPEATED files of a part run once more, alone. If they pass, the run is
unstable, which is an error, too (docs/decisions/test-bed.md). A test that is skipped for a reason that is not listed is
an error. tests/exceptions.toml has both lists.

    python dev/tools/run_tests.py WORKERS
    python dev/tools/run_tests.py --each-file-alone WORKERS     each file in its own process
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FULL_CLUSTER_TESTS = ("tests/endtoend_cluster", "tests/dev/testbed")
PURE_TESTS = (
    "tests/bench/test_bodies.py",
    "tests/golden",
    "tests/operator/decide",
    "tests/simulator",
    "tests/planner",
    "tests/report",
    "tests/optimizer/export",
    "tests/optimizer/quantise",
    "tests/runtime/models/test_parity.py",
    "tests/runtime/tasks",
    "tests/runtime/tokens",
)
"""They compute, and neither they nor what they call look at a clock."""
LIMITED_TESTS = (
    "tests/bench/test_baseline.py",
    "tests/charts/test_rendering.py",
    "tests/contracts/test_extras.py",
    "tests/dev/neuron_standin/test_compiler.py",
    "tests/dev/neuron_standin/test_device.py",
    "tests/neuron",
    "tests/optimizer/guard",
    "tests/optimizer/targets/test_neuron.py",
    "tests/optimizer/neuron",
    "tests/optimizer/pod",
    "tests/optimizer/end_to_end/test_broken_servers.py",
    "tests/optimizer/end_to_end/test_newer_families.py",
    "tests/optimizer/end_to_end/test_optimise.py",
    "tests/optimizer/end_to_end/test_sparse_vectors.py",
    "tests/runtime/engines",
    "tests/runtime/generation",
    "tests/runtime/serving",
)
"""They compute as well, with a time budget or with processes that have to answer in time."""
COMPUTING_TESTS = (*PURE_TESTS, *LIMITED_TESTS)
"""Among them all files that import PyTorch or transformers: each process of the first phase would take seconds and a
gigabyte for these while it collects tests."""

LOW_PRIORITY_TESTS = ("tests/endtoend/test_endings.py", "tests/endtoend/test_takeover.py")
"""They wait for the optimisation of `penstock serve`, which leaves the processor to everything else (`nice`): next to
the processes of the first phase, seconds of it take many minutes."""

MAX_REPEATED = 4
"""Files with failed tests. A fixture of a file that fails once fails each of its tests."""

CONTRACTS = "tests/contracts/"
"""Never repeated: they depend on no other process, and some look at all tests of their run."""

EXCEPTIONS = Path("tests/exceptions.toml")
FAILED, UNSTABLE = 1, 2
"""Exit statuses."""

# The folders that tests fill take some gigabytes: the folders of failed tests are enough.
PYTEST = (
    sys.executable,
    "-m",
    "pytest",
    "-o",
    "tmp_path_retention_policy=failed",
    "--durations=25",
    "--durations-min=5",
)
# A file stays in one process, for its fixtures; files start in the order of tests/conftest.py.
# A process that dies ends the run: pytest-xdist starts another, and may then wait for ever.
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")


@dataclass(frozen=True)
class Exceptions:
    """Exceptions with which a run still passes: `unstable` are tests that may pass at the second try only, and each of
    `skips` is a pattern of the reason and the files and folders where a skip may have it."""

    unstable: tuple[str, ...] = ()
    skips: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, file: Path) -> Exceptions:
        """Of the repository."""
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        skips = tuple((one["reason"], tuple(one["files"])) for one in found.get("skip", ()))
        return cls(tuple(one["test"] for one in found.get("unstable", ())), skips)

    def is_unstable(self, test: str) -> bool:
        """Whether it, or the test without its parameters, is listed."""
        return test in self.unstable or test.partition("[")[0] in self.unstable

    def allows_skip(self, test: str, reason: str) -> bool:
        """Whether one of the files or folders is the beginning of the test's name, and the reason fits."""
        return any(re.search(pattern, reason) and test.startswith(files) for pattern, files in self.skips)


class Part:
    """One run of pytest. Its output goes to this process's, at once or, for one in the background, when it is shown."""

    def __init__(
        self, name: str, cache: Path, *arguments: str, prefix: tuple[str, ...] = (), background: bool = False
    ) -> None:
        self.name = name
        self.status = -1
        self.repeated: list[str] = []
        """Tests that failed at first and passed when they ran again, alone."""
        self.skipped: list[tuple[str, str]] = []
        """Test or file, and the reason."""
        self.seconds = 0.0
        self._started = time.monotonic()
        # A file, not a pipe: it is read at the end only, and a full pipe would stop the tests.
        self._output = tempfile.TemporaryFile() if background else None  # noqa: SIM115 - open until it is shown
        self._cache = cache / "v"
        self._pytest = (*PYTEST, "-o", f"cache_dir={cache}", *arguments)
        print(f"make test: {name}", flush=True)
        self._process = subprocess.Popen(
            [*prefix, *self._pytest], stdout=self._output, stderr=self._output and subprocess.STDOUT
        )

    def finish(self) -> None:
        """Wait for the end, and show the output of a run in the background."""
        self.status = self._process.wait()
        self.seconds = time.monotonic() - self._started
        record = self._cache / "penstock" / "skipped"
        self.skipped = [(test, reason) for test, reason in json.loads(record.read_text())] if record.exists() else []
        if self._output is not None:
            print(f"make test: output of {self.name}", flush=True)
            self._output.seek(0)
            shutil.copyfileobj(self._output, sys.stdout.buffer)
            sys.stdout.flush()
            self._output.close()

    def repeat_failed_tests(self) -> None:
        """Run them again, alone, if they are few."""
        record = self._cache / "cache" / "lastfailed"
        failed = sorted(json.loads(record.read_text())) if self.status == 1 and record.exists() else []
        files = {test.partition("::")[0] for test in failed}
        if not 0 < len(files) <= MAX_REPEATED or any(file.startswith(CONTRACTS) for file in files):
            return
        print(f"make test: {len(failed)} failed in {self.name}, once more", *failed, sep="\n  ", flush=True)
        self.status = subprocess.call([*self._pytest, "--last-failed", "-n", "0"])
        if self.status == 0:
            self.repeated = failed

    def stop(self) -> None:
        """End it if it is still running."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()

    @property
    def result(self) -> str:
        """`passed` or `FAILED`, its name, its duration, and what passed only when it ran again."""
        result = "passed" if self.status == 0 else f"FAILED (exit status {self.status})"
        repeated = [f"\n  failed at first, passed alone: {test}" for test in self.repeated]
        return f"{result}: {self.name}, {self.seconds / 60:.1f} minutes{''.join(repeated)}"


def main(workers: str) -> int:
    """Run everything; the exit status: FAILED if any part failed or skipped too much, else UNSTABLE if tests passed at
    the second try only."""
    exceptions = Exceptions.read(EXCEPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        parts = run_parts(workers, Path(folder))
        for part in parts:
            part.repeat_failed_tests()
    print("", *(part.result for part in parts), sep="\n")
    skipped = [one for part in parts for one in part.skipped]
    for reason, count in Counter(reason for _, reason in skipped).most_common():
        print(f"skipped: {count}, {reason}")
    status, sentence = verdict(parts, exceptions)
    print(f"make test: {sentence}", flush=True)
    return status


def verdict(parts: tuple[Part, ...], exceptions: Exceptions) -> tuple[int, str]:
    """The exit status, and its meaning."""
    failed = [part.name for part in parts if part.status != 0]
    unlisted = [one for part in parts for one in part.skipped if not exceptions.allows_skip(*one)]
    unstable = [test for part in parts for test in part.repeated if not exceptions.is_unstable(test)]
    if failed:
        return FAILED, f"FAILED in {', '.join(failed)}"
    if unlisted:
        lines = "".join(f"\n  {test}: {reason}" for test, reason in unlisted)
        return FAILED, f"FAILED, skipped for a reason that {EXCEPTIONS} does not have:{lines}"
    if unstable:
        return UNSTABLE, f"UNSTABLE, passed at the second try only, and not in {EXCEPTIONS}: {', '.join(unstable)}"
    return 0, "passed"


def each_file_alone(workers: str) -> int:
    """Run each file without a cluster in a new process: a file that depends on another one fails."""
    folders = tuple(map(Path, FULL_CLUSTER_TESTS))
    files = [file for file in sorted(Path("tests").rglob("test_*.py")) if not any(map(file.is_relative_to, folders))]
    arguments = ("-q", "-p", "no:cacheprovider", "-m", "not extended and not full_cluster")

    def run(file: Path) -> tuple[Path, int, str]:
        done = subprocess.run([*PYTEST, *arguments, str(file)], capture_output=True, text=True, check=False)
        return file, done.returncode, done.stdout + done.stderr

    failed = []
    with ThreadPoolExecutor(int(workers)) as pool:
        for file, status, output in pool.map(run, files):
            # 5: no test is selected.
            if status not in {0, 5}:
                failed.append(str(file))
                print(output, flush=True)
    print(f"each file alone: FAILED in {', '.join(failed)}" if failed else f"each of {len(files)} files alone: passed")
    return FAILED if failed else 0


def run_parts(workers: str, caches: Path) -> tuple[Part, ...]:
    """Run the parts. `caches`: an empty folder."""
    background: list[Part] = []

    def start(name: str, tests: tuple[str, ...], *options: str) -> None:
        words = ("-m", "not extended", "-n", str(os.cpu_count()), *BY_FILE, *options, *tests)
        background.append(Part(name, caches / name, *words, prefix=("chrt", "--idle", "0"), background=True))

    try:
        # pytest's limit for a test is one for a process that gets processor time.
        start("pure tests", PURE_TESTS, "-o", "timeout=3600")
        parallel = Part(
            "parallel tests",
            caches / "parallel",
            *("-m", "not extended and not full_cluster", "-n", workers, *BY_FILE),
            *(f"--ignore={path}" for path in (*COMPUTING_TESTS, *LOW_PRIORITY_TESTS)),
        )
        parallel.finish()
        start("computing tests", LIMITED_TESTS)
        low_priority = Part("low-priority tests", caches / "low-priority", "-m", "not extended", *LOW_PRIORITY_TESTS)
        low_priority.finish()
        clusters = Part(
            "cluster tests",
            caches / "clusters",
            *("-m", "not extended and full_cluster"),
            *FULL_CLUSTER_TESTS,
        )
        clusters.finish()
        for part in background:
            part.finish()
    finally:
        for part in background:
            part.stop()
    return parallel, low_priority, clusters, *background


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    sys.exit(each_file_alone(sys.argv[2]) if sys.argv[1] == "--each-file-alone" else main(sys.argv[1]))
