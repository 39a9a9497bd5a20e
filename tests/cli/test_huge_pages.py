"""Large pages for the weights."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock_cli.main import POLICY, TUNABLE, VARIABLE, environment_with_huge_pages

MADVISE = "always [madvise] never"


@pytest.mark.parametrize(
    ("environment", "policy", "tunables"),
    [
        ({}, MADVISE, "glibc.malloc.hugetlb=1"),
        ({VARIABLE: "glibc.malloc.arena_max=2"}, MADVISE, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ({VARIABLE: "glibc.malloc.hugetlb=0"}, MADVISE, None),
        ({VARIABLE: "glibc.malloc.hugetlb=1"}, MADVISE, None),
        ({}, "[always] madvise never", None),
        ({}, "always madvise [never]", None),
    ],
)
def test_the_tunable_is_added_only_where_it_has_an_effect(
    environment: dict[str, str], policy: str, tunables: str | None
) -> None:
    found = environment_with_huge_pages(environment, policy)

    assert (None if found is None else found[VARIABLE]) == tunables


def test_starting_again_keeps_process_and_arguments() -> None:
    if not POLICY.exists() or "[madvise]" not in POLICY.read_text(encoding="ascii"):
        pytest.skip("this kernel's large pages are not by request")
    program = (
        "import os, sys; from penstock_cli.main import restart_with_huge_pages; "
        "print(os.getpid(), sys.argv[1:], flush=True); restart_with_huge_pages(); print(os.environ[sys.argv[2]])"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program, "a b", VARIABLE], capture_output=True, text=True, check=True, env=environment
    )

    first, second, tunables = done.stdout.splitlines()
    assert first == second
    assert tunables == f"{TUNABLE}=1"
