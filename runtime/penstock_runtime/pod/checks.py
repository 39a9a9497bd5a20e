"""What a serving pod makes of its machine: is it the kind that the plan is for, are the cores its own? Pure."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import OtherInstructionSet
from penstock.manifest import Manifest
from penstock.recipe import Precision
from penstock_runtime.host import CoreGrant, Host


def isa_finding(manifest: Manifest, host: Host, *, allowed: bool) -> str:
    """What to know about the processor; empty when it is of the kind that the plan was measured on.

    OtherInstructionSet unless `allowed`. The fp32 graph that is served until something is measured runs on any.
    """
    objection = host.cpu.objection(manifest.cpu)
    if not objection:
        return ""
    unmeasured = manifest.chosen.plan.recipe.precision is Precision.FP32 and not manifest.capacity.points
    if unmeasured:
        return f"The fp32 graph was made on {manifest.cpu.isa.value} and runs on {host.cpu.isa.value}, which it may"
    if allowed:
        return f"{objection[:1].upper()}{objection[1:]}: neither its answers nor its speed were checked here"
    raise OtherInstructionSet(
        objection,
        remedy="Narrow the hardware class to nodes of one kind, so that the plan is made where it is served; "
        "PENSTOCK_ALLOW_OTHER_ISA=true serves it unchecked",
    )


def with_count(grant: CoreGrant, host: Host, threads_per_core: int | None) -> CoreGrant:
    """The grant, with a finding (and not pinned) when the process has not exactly the CPUs that a pod of so many cores
    asks for."""
    own = (len(core.cpus) for core in host.cores if set(core.cpus).intersection(grant.cpus))
    threads = threads_per_core or max(own, default=1)
    wanted, found = grant.cores * threads, len(host.allowed)
    if found == wanted:
        return grant
    finding = (
        f"this process may run on {found} CPUs, and {grant.cores} cores x {threads} threads are {wanted}: "
        "the CPUs are not given exclusively, or threads per core are another number here"
    )
    return replace(grant, pinned=False, findings=(*grant.findings, finding))
