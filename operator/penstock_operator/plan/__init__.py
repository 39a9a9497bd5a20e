"""The pure part of the operator: what was observed in, what is desired and said out.

    Observed --plan()--> Plan(apply, delete, status, optimized_status, events, requeue_seconds)

Nothing here reads the cluster, the clock or the environment, and nothing here imports kopf or kubernetes.
"""

from penstock_operator.plan.actions import Event, Plan, StatusWrite
from penstock_operator.plan.observed import Observed, Ref
from penstock_operator.plan.settings import PlanSettings, StoreVolume

__all__ = ["Event", "Observed", "Plan", "PlanSettings", "Ref", "StatusWrite", "StoreVolume"]
