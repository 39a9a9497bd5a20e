"""What the test bed cannot do, and what to do about it."""

from __future__ import annotations


class BedError(Exception):
    """`message`: what is wrong and where. `remedy`: what to do next."""

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
