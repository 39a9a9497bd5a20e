"""Errors of the test bed, each with a remedy."""

from __future__ import annotations


class BedError(Exception):
    """`message`: the fault and its location. `remedy`: the next step."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        if not self.remedy:
            return self.message.rstrip()
        # Output of a program goes on separate lines.
        end = "" if self.message.endswith("\n") else ". "
        return f"{self.message}{end}{self.remedy[0].upper()}{self.remedy[1:]}"
