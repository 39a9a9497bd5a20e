"""What the test bed cannot do, and what to do about it."""

from __future__ import annotations


class BedError(Exception):
    """`message` says what is wrong and where, `remedy` what to do next."""

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}. {self.remedy}" if self.remedy else self.message
