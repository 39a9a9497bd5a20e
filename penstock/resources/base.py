"""Base classes of the resources of `penstock.dev/v1alpha1`: field names, strictness, reading and writing of values.

Field names are camelCase in files and snake_case in Python. Unknown fields are errors, so that a typo does not leave a
default in place.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

from penstock.errors import SpecError
from penstock.resources.fields.cel import VALIDATIONS
from penstock.resources.fields.rules import LABEL_RULE, ObjectName, Rule
from penstock.resources.files.problems import BrokenRules, spec_error
from penstock.resources.files.yaml_documents import plain

GROUP = "penstock.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CLUSTER: dict[str, Any] = {"x-cluster-only": True}
"""Marks a field that a local run ignores."""
NO_SCHEMA_DEFAULT: dict[str, Any] = {"x-no-schema-default": True}
"""Marks a field of a later release than 0.1.0. The API server does not fill in its default: after a rollback, the
operator of 0.1.0 refuses fields that it does not know."""


class Spec(BaseModel):
    """A part of a spec: frozen, camelCase in files, no unknown fields, no NaN or infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    """Conditions on the fields of one object."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = [rule.message_for(self) for rule in self.RULES if not rule.holds(self)]
        if broken:
            raise BrokenRules(broken)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the CEL of the rules."""
        found = handler.resolve_ref_schema(handler(schema))
        if cls.RULES:
            found[VALIDATIONS] = [rule.validation() for rule in cls.RULES]
        return found

    def to_object(self) -> dict[str, Any]:
        """JSON values for the API server, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Facts(BaseModel):
    """A part of a status or a report: frozen, camelCase in files. Fields of a newer version are ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False
    )

    def to_object(self) -> dict[str, Any]:
        """JSON values for the API server, without fields that are None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class AnyMetadata(BaseModel):
    """The parts of the Kubernetes object metadata that Penstock reads."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: ObjectName
    namespace: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Metadata(AnyMetadata):
    """The metadata of a resource that a Service is named after, or that a field names."""

    name: Annotated[str, LABEL_RULE]
    """A DNS label."""


class Resource(BaseModel):
    """A resource, read from a file or from the API server."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)
    KIND: ClassVar[str]

    @classmethod
    def from_object(cls, value: dict[str, Any], *, origin: str = "", stored: bool = False) -> Self:
        """Read one resource from parsed YAML or JSON; SpecError lists every problem: the field, the value and what to
        write instead.

        As strict as the API server, so that what runs here is accepted there: no text for numbers, no snake_case.
        `stored`: it comes from the API server, which has removed unknown fields: a field that is unknown
        here is of a later release, and is ignored.
        """
        origin = origin or f"the {cls.KIND}"
        try:
            content = json.dumps(value if stored else plain(value, origin))
        except ValueError as error:  # whole numbers of thousands of digits
            raise SpecError(f"{origin}: {error}", remedy="Write numbers of a sensible size") from error
        try:
            return cls.model_validate_json(
                content, strict=True, extra="ignore" if stored else None, by_alias=True, by_name=False
            )
        except ValidationError as error:
            raise spec_error(error, cls, origin) from error
