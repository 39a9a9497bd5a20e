"""CPU identity, the instruction set class that a plan is valid for, and the generations of AWS Inferentia.

The runtime reads `/proc/cpuinfo` into a CpuIdentity (`penstock_runtime.host`); the operator compares identities and
promises of hardware classes. Pure values, no files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Isa(StrEnum):
    """The instruction set class. A plan measured and judged on one is not valid on another:
    int8 saturates without VNNI, and engines switch to bf16 on their own on processors with AMX."""

    AVX2 = "avx2"
    AVX_VNNI = "avx-vnni"
    """AVX2 with the VNNI instructions (client parts)."""
    AVX512 = "avx512"
    """AVX-512 without VNNI (Skylake-SP)."""
    AVX512_VNNI = "avx512-vnni"
    """Cascade Lake, Ice Lake."""
    AVX512_BF16 = "avx512-bf16"
    """AVX-512 with VNNI and bf16: Zen 4, Cooper Lake."""
    AMX = "amx"
    """Sapphire Rapids and later, where the kernel lets processes use the tiles."""
    NEON = "neon"
    """64-bit Arm."""
    NEON_DOT = "neon-dot"
    """64-bit Arm with the 8-bit dot product: Graviton 2."""
    NEON_I8MM = "neon-i8mm"
    """64-bit Arm with 8-bit and bf16 matrix products: Graviton 3 and later."""
    OTHER = "other"

    @property
    def has_int8_dot(self) -> bool:
        """True when 8-bit products accumulate in 32 bits, so that full-range int8 weights cannot saturate."""
        return self not in {Isa.AVX2, Isa.AVX512, Isa.OTHER}

    @property
    def has_bf16(self) -> bool:
        """True when bf16 products are native."""
        return self in {Isa.AVX512_BF16, Isa.AMX, Isa.NEON_I8MM}

    @classmethod
    def from_flags(cls, flags: Collection[str], *, amx_permitted: bool = True) -> Isa:
        """The best class that these flags of `/proc/cpuinfo` allow.

        `amx_permitted`: whether the kernel grants the tile registers, which the flags do not show.
        """
        has = set(flags)
        for isa, wanted in _WANTED.items():
            if wanted <= has and (isa is not Isa.AMX or amx_permitted):
                return isa
        return cls.OTHER


_AVX512_CORE = frozenset({"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
"""The flags that engines require for AVX-512, as Skylake-SP has them."""
_WANTED = {
    Isa.AMX: _AVX512_CORE | {"avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"},
    Isa.AVX512_BF16: _AVX512_CORE | {"avx512_vnni", "avx512_bf16"},
    Isa.AVX512_VNNI: _AVX512_CORE | {"avx512_vnni"},
    Isa.AVX512: _AVX512_CORE,
    Isa.AVX_VNNI: frozenset({"avx2", "avx_vnni"}),
    Isa.AVX2: frozenset({"avx2"}),
    Isa.NEON_I8MM: frozenset({"asimd", "asimddp", "i8mm", "bf16"}),
    Isa.NEON_DOT: frozenset({"asimd", "asimddp"}),
    Isa.NEON: frozenset({"asimd"}),
}
"""Flags by class, best first."""

ARITHMETIC_FLAGS = frozenset({
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_vnni_int16", "avx_ne_convert",
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx512_vp2intersect",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex", "avx10",
    "asimd", "asimdhp", "asimddp", "fphp", "i8mm", "bf16", "sve", "sve2", "svei8mm", "svebf16", "sme", "sme2",
})  # fmt: skip
"""The flags that an identity keeps."""

_INTEL = {
    60: "Haswell", 63: "Haswell", 69: "Haswell", 70: "Haswell",
    61: "Broadwell", 71: "Broadwell", 79: "Broadwell", 86: "Broadwell",
    78: "Skylake", 94: "Skylake", 142: "Kaby Lake", 158: "Kaby Lake",
    106: "Ice Lake", 108: "Ice Lake", 125: "Ice Lake", 126: "Ice Lake", 140: "Tiger Lake", 141: "Tiger Lake",
    151: "Alder Lake", 154: "Alder Lake", 183: "Raptor Lake", 186: "Raptor Lake", 191: "Raptor Lake",
    170: "Meteor Lake", 172: "Meteor Lake", 189: "Lunar Lake", 198: "Arrow Lake", 197: "Arrow Lake",
    143: "Sapphire Rapids", 207: "Emerald Rapids", 173: "Granite Rapids", 174: "Granite Rapids",
    175: "Sierra Forest",
}  # fmt: skip
"""Models of family 6. Model 85 has several names, by stepping."""
_AMD = (
    (23, 0x00, 0x2F, "Zen"),
    (23, 0x30, 0xFF, "Zen 2"),
    (25, 0x00, 0x0F, "Zen 3"),
    (25, 0x10, 0x1F, "Zen 4"),
    (25, 0x20, 0x5F, "Zen 3"),
    (25, 0x60, 0xAF, "Zen 4"),
    (26, 0x00, 0xFF, "Zen 5"),
)
"""Family, first and last model, name."""
_ARM = {
    ("0x41", 0xD08): "Cortex-A72",
    ("0x41", 0xD0B): "Cortex-A76",
    ("0x41", 0xD0C): "Neoverse N1",
    ("0x41", 0xD40): "Neoverse V1",
    ("0x41", 0xD49): "Neoverse N2",
    ("0x41", 0xD4F): "Neoverse V2",
    ("0x41", 0xD83): "Neoverse V3",
    ("0xc0", 0xAC3): "Ampere-1",
    ("0xc0", 0xAC4): "Ampere-1a",
}
"""Implementer and part."""


class CpuIdentity(BaseModel):
    """The processor as described by `/proc/cpuinfo`."""

    model_config = ConfigDict(frozen=True)

    vendor: str = "unknown"
    """`GenuineIntel`, `AuthenticAMD`; on Arm the implementer, such as `0x41`."""
    family: int = 0
    """On Arm the architecture version."""
    model: int = 0
    """On Arm the part number."""
    stepping: int = 0
    """On Arm the revision."""
    model_name: str = "unknown"
    isa: Isa = Isa.OTHER
    flags: tuple[str, ...] = ()
    """The flags in `ARITHMETIC_FLAGS` that every core has, sorted."""

    @property
    def microarchitecture(self) -> str:
        """Such as `Ice Lake` or `Zen 3`; empty for one that is not in the table here."""
        if self.vendor == "GenuineIntel" and self.family == 6:
            if self.model == 85:
                return "Skylake-SP" if self.stepping < 5 else "Cascade Lake" if self.stepping < 10 else "Cooper Lake"
            return _INTEL.get(self.model, "")
        if self.vendor == "AuthenticAMD":
            matches = (name for family, low, high, name in _AMD if family == self.family and low <= self.model <= high)
            return next(matches, "")
        return _ARM.get((self.vendor, self.model), "")

    @property
    def summary(self) -> str:
        """One line for people, such as `AMD EPYC 7763 (Zen 3, AVX2, no VNNI)`."""
        facts = [self.microarchitecture] if self.microarchitecture not in self.model_name else []
        facts.append(_ISA_DESCRIPTIONS[self.isa])
        return f"{self.model_name} ({', '.join(fact for fact in facts if fact)})"

    def objection(self, measured_on: CpuIdentity) -> str:
        """Why a plan that was measured on another processor may not be served on this one; empty when it may.

        The class has to be the same, not just as good: numerics differ by class (bf16 by itself with AMX, saturation
        without VNNI), and so do speeds. Another model of the same class serves, though its speed was not measured.
        """
        if self.isa is measured_on.isa:
            return ""
        return (
            f"the plan was measured and judged on {measured_on.isa.value} ({measured_on.model_name}), "
            f"this machine is {self.isa.value} ({self.model_name})"
        )


_ISA_DESCRIPTIONS = {
    Isa.AMX: "AMX",
    Isa.AVX512_BF16: "AVX-512 with VNNI and bf16",
    Isa.AVX512_VNNI: "AVX-512 with VNNI",
    Isa.AVX512: "AVX-512, no VNNI",
    Isa.AVX_VNNI: "AVX2 with VNNI",
    Isa.AVX2: "AVX2, no VNNI",
    Isa.NEON_I8MM: "NEON with int8 and bf16 matrix products",
    Isa.NEON_DOT: "NEON with int8 dot product",
    Isa.NEON: "NEON",
    Isa.OTHER: "no vector instructions that we use",
}


NOT_RUN = "not yet run on a device"
"""The sentence in every output about Neuron: no figure of ours was measured on a device."""
INF1_UNSUPPORTED = "AWS no longer supports Inf1"


class NeuronGeneration(StrEnum):
    """Generations of AWS Inferentia; the values are names of hardware classes."""

    INF1 = "inf1"
    INF2 = "inf2"

    @property
    def cores_per_device(self) -> int:
        """NeuronCores of one device."""
        return 4 if self is NeuronGeneration.INF1 else 2


def arithmetic_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """The flags that an identity keeps, sorted."""
    return tuple(sorted(ARITHMETIC_FLAGS.intersection(flags)))
