"""Reads objects of a cluster, and creates them, through kubectl with the user's own configuration and rights."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError

Json = dict[str, Any]
SECONDS = 60.0
"""No call takes longer."""
LOG_LINE = re.compile(r"[IWEF]\d{4} ")
"""How the lines begin that kubectl's libraries log (klog), several for each error."""


@dataclass(frozen=True)
class ClusterReader:
    """kubectl in a namespace of a context."""

    namespace: str = ""
    """Empty: the namespace of the context."""
    context: str = ""
    """Empty: the current one."""

    def items(self, kind: str, *words: str) -> list[Json]:
        """The objects of a kind. PenstockError with kubectl's message when it fails."""
        found: list[Json] = json.loads(self.run("get", kind, *words, "--output=json"))["items"]
        return found

    def get(self, kind: str, name: str) -> Json | None:
        """One object; None when there is none."""
        text = self.run("get", kind, "--output=json", "--ignore-not-found", "--", name)
        value: Json | None = json.loads(text) if text.strip() else None
        return value

    def require_endpoint(self, name: str) -> Json:
        """A ModelEndpoint; PenstockError if there is none of this name."""
        found = self.get("modelendpoints.penstock.dev", name)
        if found is None:
            raise PenstockError(
                f"there is no ModelEndpoint {name} in this namespace",
                remedy="penstock status --all-namespaces lists them",
            )
        return found

    def command(self, *words: str) -> list[str]:
        """The command line of a call."""
        where = [f"--namespace={self.namespace}"] * bool(self.namespace)
        where += [f"--context={self.context}"] * bool(self.context)
        return ["kubectl", *where, *words]

    def run(self, *words: str, stdin: str | None = None) -> str:
        """The output of kubectl. PenstockError with its message when it fails."""
        try:
            run = subprocess.run(
                self.command(*words),
                capture_output=True,
                encoding="utf-8",
                check=False,
                timeout=SECONDS,
                input=stdin,
            )
        except FileNotFoundError:
            raise PenstockError("there is no kubectl here", remedy="Install kubectl and put it into the PATH") from None
        except subprocess.TimeoutExpired:
            raise PenstockError(
                f"kubectl gave no answer within {SECONDS:g} s", remedy="Check that the cluster can be reached"
            ) from None
        if run.returncode != 0:
            raise PenstockError(
                f"kubectl {' '.join(words[:2])}: {_message(run.stderr)}",
                remedy="Check the context and your rights: kubectl auth can-i list modelendpoints",
            )
        return run.stdout


def _message(errors: str) -> str:
    """The message of kubectl, without its log; the log if there is nothing else."""
    lines = errors.strip().splitlines()
    return "\n".join(line for line in lines if not LOG_LINE.match(line)) or errors.strip()


def condition(value: Json, kind: str) -> Json:
    """The condition of this type; empty when there is none."""
    conditions = (value.get("status") or {}).get("conditions") or []
    found: Json = next((one for one in conditions if one.get("type") == kind), {})
    return found
