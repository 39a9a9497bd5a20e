"""Who decides how many replicas: ours, and rivals written from their own documents and sources.

Each policy has one knob that trades replicas for late requests (a target, or headroom); comparisons sweep it.
"""

from penstock_simulator.policies.base import Limits, Policy, View
from penstock_simulator.policies.catalogue import POLICIES, PolicyKind, make_policy

__all__ = ["POLICIES", "Limits", "Policy", "PolicyKind", "View", "make_policy"]
