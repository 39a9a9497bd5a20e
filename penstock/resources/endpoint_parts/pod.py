"""Settings of an endpoint's pods. No containers and no resources: the pods stay Guaranteed, with exclusive cores."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from penstock.resources.base import Spec
from penstock.resources.fields.rules import ObjectName, Rule
from penstock.resources.fields.text_fields import LabelKey, LabelValue, Memory
from penstock.resources.hardware_class import Toleration

RESERVED_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by")
"""Labels that the operator sets, as it does all below `penstock.dev/`."""
RESERVED_PREFIX = "penstock.dev/"


class WhenUnsatisfiable(StrEnum):
    """What the scheduler does when pods cannot be spread."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class TopologySpread(Spec):
    """A topology spread constraint, as in a pod; the operator adds the selector."""

    topology_key: LabelKey = Field(description="The node label to spread over, such as topology.kubernetes.io/zone.")
    max_skew: int = Field(default=1, ge=1, le=100, description="Largest difference between two domains, in pods.")
    when_unsatisfiable: WhenUnsatisfiable = Field(
        default=WhenUnsatisfiable.SCHEDULE_ANYWAY,
        description="`DoNotSchedule` leaves a pod pending rather than uneven; `ScheduleAnyway` prefers to spread.",
    )


class LocalReference(Spec):
    """An object of the same namespace."""

    name: ObjectName = Field(description="Its name.")


def _free_labels(labels: dict[str, str]) -> bool:
    return not any(key in RESERVED_LABELS or key.startswith(RESERVED_PREFIX) for key in labels)


class Pod(Spec):
    """Labels, memory and placement of the pods, in addition to the hardware class."""

    memory: Memory | None = Field(
        default=None, description="Memory of one pod, requested and limited, such as 2Gi. None: from the model's size."
    )
    labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=32, description="Further labels of the pods."
    )
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict, max_length=32, description="Annotations of the pods."
    )
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict,
        max_length=16,
        description="Labels that nodes must have, in addition to the hardware class's.",
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=16, description="Taints that the pods tolerate, in addition to the hardware class's."
    )
    service_account_name: ObjectName | None = Field(
        default=None,
        description="The service account of the pods, such as one with a cloud role for the artefact store. "
        "None: the namespace's default, without a token.",
    )
    priority_class_name: ObjectName | None = Field(default=None, description="The priority class of the pods.")
    topology_spread_constraints: tuple[TopologySpread, ...] = Field(
        default=(), max_length=4, description="How replicas are spread. Empty: over nodes, where that is possible."
    )
    image_pull_secrets: tuple[LocalReference, ...] = Field(
        default=(), max_length=8, description="Secrets of this namespace to pull images with."
    )

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.labels) || self.labels.all(key, !key.startsWith('penstock.dev/') && !(key in "
            f"{list(RESERVED_LABELS)}))",
            lambda it: _free_labels(it.labels),
            "labels below penstock.dev/, app.kubernetes.io/name, instance and managed-by are the operator's: "
            "choose another key",
            field_path=".labels",
        ),
    )
