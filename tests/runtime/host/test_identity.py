"""The processor: identity and instruction set class, by machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from penstock.hardware import ARITHMETIC_FLAGS, CpuIdentity, Isa, arithmetic_flags
from penstock_runtime.host import read_host
from penstock_runtime.host.cpus import amx_permitted_here, identify, read_processors
from tests.runtime.host.trees import PROCESSORS, Machine, single_threaded

EXPECTED = {
    "zen2": (Isa.AVX2, "Zen 2", False, False),
    "zen3": (Isa.AVX2, "Zen 3", False, False),
    "zen4": (Isa.AVX512_BF16, "Zen 4", True, True),
    "skylake-sp": (Isa.AVX512, "Skylake-SP", False, False),
    "cascade-lake": (Isa.AVX512_VNNI, "Cascade Lake", True, False),
    "cooper-lake": (Isa.AVX512_BF16, "Cooper Lake", True, True),
    "ice-lake": (Isa.AVX512_VNNI, "Ice Lake", True, False),
    "sapphire-rapids": (Isa.AMX, "Sapphire Rapids", True, True),
    "alder-lake": (Isa.AVX_VNNI, "Alder Lake", True, False),
    "graviton2": (Isa.NEON_DOT, "Neoverse N1", True, False),
    "graviton3": (Isa.NEON_I8MM, "Neoverse V1", True, True),
    "cortex-a72": (Isa.NEON, "Cortex-A72", True, False),
    "nehalem": (Isa.OTHER, "", False, False),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_has_its_class_and_its_name(name: str, tmp_path: Path) -> None:
    host = read_host(Machine(single_threaded(2), processor=name).write(tmp_path), amx_permitted=True)
    cpu = host.cpu
    assert EXPECTED[name] == (cpu.isa, cpu.microarchitecture, cpu.isa.has_int8_dot, cpu.isa.has_bf16)
    assert (cpu.vendor, cpu.family, cpu.model, cpu.stepping) == PROCESSORS[name][:4]


def test_amx_counts_only_where_the_kernel_grants_the_tiles(tmp_path: Path) -> None:
    root = Machine(single_threaded(1), processor="sapphire-rapids").write(tmp_path)
    assert read_host(root, amx_permitted=False).cpu.isa is Isa.AVX512_BF16
    assert read_host(root, amx_permitted=True).cpu.isa is Isa.AMX


def test_this_kernel_answers_whether_the_tiles_are_granted() -> None:
    permitted = amx_permitted_here()
    flags = Path("/proc/cpuinfo").read_text().split()
    # A processor without AMX has no tiles to grant; one with it may still be denied them by the kernel.
    assert "amx_tile" in flags or not permitted


def test_flags_that_not_all_cores_have_do_not_count() -> None:
    text = "processor: 0\nflags: avx2 avx_vnni fma\n\nprocessor: 1\nflags: avx2 fma\n"
    cpu = identify(read_processors(text), amx_permitted=True)
    assert (cpu.isa, cpu.flags) == (Isa.AVX2, ("avx2", "fma"))


def test_avx512_of_knights_landing_is_not_the_class_that_engines_mean() -> None:
    assert Isa.from_flags({"avx2", "avx512f", "avx512er", "avx512pf"}) is Isa.AVX2


def test_no_cpuinfo_gives_an_unknown_processor_instead_of_an_error(tmp_path: Path) -> None:
    assert read_host(tmp_path, amx_permitted=True).cpu == CpuIdentity()


def test_arm_without_a_known_part_is_named_by_its_numbers() -> None:
    text = "processor: 0\nFeatures: asimd\nCPU implementer: 0x51\nCPU architecture: 8\nCPU part: 0xc01\n"
    assert identify(read_processors(text), amx_permitted=False).model_name == "Arm 0x51 part 0xc01"


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("zen3", "AMD EPYC 7763 64-Core Processor (Zen 3, AVX2, no VNNI)"),
        ("graviton3", "Neoverse V1 (NEON with int8 and bf16 matrix products)"),
        ("sapphire-rapids", "Intel(R) Xeon(R) Platinum 8488C (Sapphire Rapids, AMX)"),
    ],
)
def test_the_summary_is_one_line_for_people(name: str, summary: str, tmp_path: Path) -> None:
    host = read_host(Machine(single_threaded(1), processor=name).write(tmp_path), amx_permitted=True)
    assert host.cpu.summary == summary


def test_every_instruction_set_has_its_own_summary() -> None:
    summaries = {CpuIdentity(isa=isa).summary for isa in Isa}
    assert len(summaries) == len(Isa)


def test_a_plan_of_another_instruction_set_is_refused_and_of_the_same_accepted() -> None:
    zen3, milan = CpuIdentity(model_name="a", isa=Isa.AVX2), CpuIdentity(model_name="b", isa=Isa.AVX2)
    rapids = CpuIdentity(model_name="c", isa=Isa.AMX)
    assert zen3.objection(measured_on=milan) == ""
    assert rapids.objection(measured_on=zen3) == (
        "the plan was measured and judged on avx2 (a), this machine is amx (c)"
    )


def test_an_identity_is_the_same_after_json() -> None:
    cpu = CpuIdentity(vendor="AuthenticAMD", family=25, model=1, stepping=1, isa=Isa.AVX2, flags=("avx2",))
    assert CpuIdentity.model_validate_json(cpu.model_dump_json()) == cpu


def test_only_flags_of_arithmetic_are_kept_sorted() -> None:
    assert arithmetic_flags(["fma", "smep", "avx2", "fma"]) == ("avx2", "fma")
    assert arithmetic_flags(ARITHMETIC_FLAGS) == tuple(sorted(ARITHMETIC_FLAGS))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads this machine's x86 flags")
def test_this_machine_is_known() -> None:
    cpu = read_host().cpu
    assert cpu.vendor in {"GenuineIntel", "AuthenticAMD"}
    assert cpu.isa is not Isa.OTHER
    assert set(cpu.flags) <= set(Path("/proc/cpuinfo").read_text().split())
