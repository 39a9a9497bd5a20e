"""Settings of a process: flags, environment variables, help texts and documentation from one definition.

A group of settings is a frozen model, and all settings of a process are a model of groups:

    class HttpSettings(SettingsGroup):
        port: int = setting(8080, "Port to listen on.", ge=0)

    class Settings(SettingsGroup):
        http: HttpSettings = HttpSettings()

    SETTINGS = described(Settings, "PENSTOCK_")
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from penstock.errors import SettingError


class SettingsGroup(BaseModel):
    """A group of settings. Frozen: settings are read once, at start. No `nan` and `inf`, which pass every bound."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


_LONGEST_SHOWN = 120
"""Characters of a wrong value in an error."""
All = TypeVar("All", bound=SettingsGroup)


def setting(default: Any, description: str, *, unit: str = "", **constraints: Any) -> Any:
    """A field of a group: its default, its meaning, its unit, and pydantic's constraints."""
    return Field(default, description=description, json_schema_extra={"unit": unit}, **constraints)


@dataclass(frozen=True)
class Setting:
    """One setting with its description."""

    name: str
    group: str
    annotation: Any
    default: Any
    unit: str
    description: str
    prefix: str
    """Prefix of the environment variables of its process, such as `PENSTOCK_`."""

    @classmethod
    def of(cls, name: str, field: FieldInfo, *, group: str, prefix: str) -> Setting:
        """A field made with `setting`."""
        extra = field.json_schema_extra
        unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
        return cls(name, group, field.annotation, field.default, unit, field.description or "", prefix)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return self.prefix + self.name.upper()

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def has_default(self) -> bool:
        """False for a setting that must be given."""
        return self.default is not PydanticUndefined

    @property
    def is_list(self) -> bool:
        """True for comma-separated values."""
        return get_origin(self.annotation) is tuple

    @property
    def is_secret(self) -> bool:
        """True when no message may show its value."""
        return SecretStr in get_args(self.annotation)

    @property
    def empty_is_none(self) -> bool:
        """True when an empty text means "not set". Not for secrets: an empty one must not disable access control."""
        members = get_args(self.annotation)
        return type(None) in members and not {SecretStr, Path}.intersection(members)

    def parse(self, text: str) -> Any:
        r"""The text of a variable as input of pydantic: lists split at commas, empty as None if `empty_is_none`.

        A comma that belongs to an entry is written `\,`.
        """
        if self.is_list:
            parts = (part.replace("\\,", ",").strip() for part in re.split(r"(?<!\\),", text))
            return tuple(part for part in parts if part)
        if self.empty_is_none and not text.strip():
            return None
        return text


def hugging_face_token(environment: Mapping[str, str]) -> str | None:
    """The token in HF_TOKEN; None when it is unset or empty, so that a stored login is used."""
    return environment.get("HF_TOKEN", "").strip() or None


def described(settings: type[SettingsGroup], prefix: str) -> tuple[Setting, ...]:
    """Every setting of a model of groups, in their order."""
    found: list[Setting] = []
    for group, group_field in settings.model_fields.items():
        model = group_field.annotation
        assert isinstance(model, type)  # noqa: S101 - narrows for mypy: every field of such a model is a SettingsGroup
        assert issubclass(model, SettingsGroup)  # noqa: S101
        found += (Setting.of(name, field, group=group, prefix=prefix) for name, field in model.model_fields.items())
    return tuple(found)


def load(
    settings: type[All],
    known: Iterable[Setting],
    variables: Iterable[tuple[Setting, str, str]],
    flags: Mapping[str, Any],
    *,
    document: str,
) -> All:
    """Settings from flags (by name; None is "not given") over environment variables over defaults.

    `settings` is a group of groups, or one group whose settings have the group "". `variables`: setting, name of the
    variable, its text. `document` lists the settings.
    SettingError names the variable or flag, the value and what to write instead.
    """
    by_name = {one.name: one for one in known}
    values: dict[str, dict[str, Any]] = {one.group: {} for one in by_name.values()}
    origin: dict[str, str] = {}
    for one, variable, text in variables:
        values[one.group][one.name] = one.parse(text)
        origin[one.name] = variable
    for name, value in flags.items():
        if value is not None:
            one = by_name[name]
            values[one.group][name] = one.parse(value) if isinstance(value, str) else value
            origin[name] = one.flag
    try:
        return settings.model_validate(values.get("", values))
    except ValidationError as error:
        raise _error(error, origin, by_name, document) from error


def _error(
    error: ValidationError, origin: Mapping[str, str], by_name: Mapping[str, Setting], document: str
) -> SettingError:
    first = error.errors()[0]
    name = next((str(part) for part in reversed(first["loc"]) if part in by_name), "")
    message = first["msg"].removeprefix("Value error, ")
    if name not in by_name:
        return SettingError(_as_given(message, origin, by_name.values()), remedy=f"{document} lists the settings")
    one = by_name[name]
    inner = [str(part) for part in first["loc"][first["loc"].index(name) + 1 :]]
    key = ".".join([origin.get(name, one.variable), *inner])
    if first["type"] == "extra_forbidden":
        message = "there is no such field"
    given = "(hidden)" if one.is_secret else repr(first["input"])[:_LONGEST_SHOWN]
    unit = f" in {one.unit}" if one.unit else ""
    return SettingError(
        f"{key} is {given}: {message[0].lower()}{message[1:]}",
        field=key,
        remedy=_remedy(one, unit) if one.has_default else f"{document} describes it",
    )


def _remedy(one: Setting, unit: str) -> str:
    unset = one.default is None or one.default == ()
    return f"Give a value{unit} that fits{', or leave it out' if unset else f'; the default is {one.default!r}'}"


def _as_given(message: str, origin: Mapping[str, str], known: Iterable[Setting]) -> str:
    """The message of a rule between settings, which names variables, with the flags instead where flags were given."""
    if not any(key.startswith("--") for key in origin.values()):
        return message
    keys = {one.variable: origin.get(one.name, one.flag) for one in known}
    return re.sub(r"\b[A-Z][A-Z0-9_]+\b", lambda found: keys.get(found[0], found[0]), message)
