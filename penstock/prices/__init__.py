"""Prices of nodes by hardware class and instance type.

The shipped lists are YAML files in this package, one for each cloud: dated, with their source. A file of the same form
replaces them. `penstock plan` compares by them, and where a class has no price the operator computes the cost of its
endpoints by them.
"""

from __future__ import annotations

from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import SettingError

CLOUDS = ("aws", "gcp", "azure")
"""Names of the shipped lists."""


def currency_sign(currency: str) -> str:
    """The sign before an amount: `$` for USD, else the code and a space, such as `EUR `."""
    return "$" if currency == "USD" else f"{currency} "


class InstancePrice(BaseModel):
    """One instance type."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    per_hour: float = Field(alias="perHour", ge=0)
    """The price of the whole node for an hour, on demand."""
    spot_per_hour: float | None = Field(default=None, alias="spotPerHour", ge=0)
    """The same of a node that the cloud may take back; None: not known."""
    reserved_per_hour: float | None = Field(default=None, alias="reservedPerHour", ge=0)
    """The same with a commitment (reserved instances, savings plans, committed use); None: not known."""
    cpus: int = Field(ge=1)
    """Logical CPUs, as Kubernetes counts them."""
    memory_gib: float = Field(default=0.0, alias="memoryGiB", ge=0)
    """0: not known, and it limits nothing."""
    devices: int = Field(default=0, ge=0)
    """Inferentia devices. A GPU node has one GPU unless this number is given."""


class PriceList(BaseModel):
    """Prices of one region on one day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: date
    region: str = Field(default="", max_length=64)
    currency: str = Field(default="USD", min_length=3, max_length=3)
    source: Annotated[str, Field(max_length=1024)] = ""
    classes: dict[str, dict[str, InstancePrice]]
    """Hardware class -> instance type -> price. Names that begin with `gpu-` are GPU nodes."""

    @property
    def summary(self) -> str:
        """One line: currency, region, date."""
        return f"{self.currency}, {f'{self.region}, ' if self.region else ''}prices of {self.date.isoformat()}"


def read_prices(text: str, *, name: str) -> PriceList:
    """The prices in a YAML text; SettingError that names the field in `name` (a path or option)."""
    try:
        return PriceList.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise SettingError(f"{name} is not YAML: {problem}", field=name, remedy="Correct the file") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise SettingError(
            f"{name} is not a list of prices ({where}: {first['msg']})",
            field=name,
            remedy="Write date, and classes: {CLASS: {INSTANCE: {perHour: 0.17, cpus: 4}}}, as in the shipped list "
            "(docs/reference/prices.md)",
        ) from error


def load_prices(path: Path) -> PriceList:
    """The prices in a file; SettingError when it cannot be read or is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"{path} cannot be read ({error})", field="--prices", remedy="Give a readable YAML file"
        ) from error
    return read_prices(text, name=str(path))


@cache
def shipped_prices(cloud: str = CLOUDS[0]) -> PriceList:
    """The list of a cloud of `CLOUDS`."""
    name = f"{cloud}.yaml"
    return read_prices(resources.files("penstock.prices").joinpath(name).read_text(encoding="utf-8"), name=name)


def instance_price(instance_type: str) -> tuple[PriceList, InstancePrice] | None:
    """The on-demand price of an instance type of any cloud, and its list; None for one that no list has."""
    for cloud in CLOUDS:
        prices = shipped_prices(cloud)
        for nodes in prices.classes.values():
            if instance_type in nodes:
                return prices, nodes[instance_type]
    return None
