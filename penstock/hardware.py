"""CPUs as far as a plan depends on them: identity, and the instruction set class that a plan is valid for."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class Isa(StrEnum):
    """The instruction set class. A plan measured and judged on one is not valid on another:
    int8 saturates without VNNI, and engines switch to bf16 by themselves where AMX is."""

    AVX2 = "avx2"
    AVX_VNNI = "avx-vnni"
    """AVX2 with the VNNI instructions (client parts)."""
    AVX512 = "avx512"
    """AVX-512 without VNNI (Skylake-SP)."""
    AVX512_VNNI = "avx512-vnni"
    """Cascade Lake, Ice Lake, Zen 4 (whose bf16 is a flag of its own)."""
    AVX512_BF16 = "avx512-bf16"
    """AVX-512 with VNNI and bf16: Zen 4, Cooper Lake."""
    AMX = "amx"
    """Sapphire Rapids and later."""
    NEON = "neon"
    """64-bit Arm (Graviton)."""
    OTHER = "other"

    @property
    def has_int8_dot(self) -> bool:
        """True when 8-bit products accumulate in 32 bits, so that full-range int8 weights cannot saturate."""
        return self in {Isa.AVX_VNNI, Isa.AVX512_VNNI, Isa.AVX512_BF16, Isa.AMX, Isa.NEON}

    @property
    def has_bf16(self) -> bool:
        """True when bf16 products are native."""
        return self in {Isa.AVX512_BF16, Isa.AMX}


class CpuIdentity(BaseModel):
    """The processor as `/proc/cpuinfo` tells it."""

    model_config = ConfigDict(frozen=True)

    vendor: str = "unknown"
    family: int = 0
    model: int = 0
    model_name: str = "unknown"
    isa: Isa = Isa.OTHER
    flags: tuple[str, ...] = ()
    """Only the flags that matter to arithmetic, sorted."""
