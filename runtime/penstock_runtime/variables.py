"""What a process in a pod is told: environment variables that are no settings of the server, documented as these are.

Each field of a `Variables` is one: `cores` is PENSTOCK_CORES. docs/settings.md is made from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from penstock.settings import Setting, SettingsGroup, load
from penstock_runtime.settings import PREFIX, refuse_near_misses

OF_THE_COMMAND = (f"{PREFIX}STORE", f"{PREFIX}MODELS", f"{PREFIX}PVC_ROOT", f"{PREFIX}STATE")
"""Variables of the `penstock` command that an image may set for it."""


class Variables(SettingsGroup):
    """Frozen: read once, at start. An empty variable counts as one that is not set, as a manifest's template leaves
    it."""

    @classmethod
    def described(cls) -> tuple[Setting, ...]:
        """Each of them, in order."""
        return tuple(Setting.of(name, field, group="", prefix=PREFIX) for name, field in cls.model_fields.items())

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of the environment variables, and those of the command beside them."""
        return (*(setting.variable for setting in cls.described()), *OF_THE_COMMAND)

    @classmethod
    def read(cls, environment: Mapping[str, str], *, others: Iterable[str] = ()) -> Self:
        """From the environment; SettingError names the variable, its value and what to write instead. `others`:
        variables that something else reads."""
        refuse_near_misses(environment, [*cls.names(), *others])
        described = cls.described()
        given = [
            (setting, setting.variable, text)
            for setting in described
            if (text := environment.get(setting.variable, "").strip())
        ]
        return load(cls, described, given, {}, document="docs/settings.md")
