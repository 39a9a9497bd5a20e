/* Detects the instruction sets of this processor. */
#define _GNU_SOURCE
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "model.h"

int penstock_abi(void) { return PENSTOCK_ABI; }

#if defined(__x86_64__)
/* The processor has AMX tiles, and the kernel permits this process to use them. */
static int has_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bit_AMX_TILE) || !(d & bit_AMX_INT8) ||
        !(d & bit_AMX_BF16) || !__builtin_cpu_supports("avx512bf16"))
        return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}
#endif

int penstock_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return has_amx()                              ? PENSTOCK_AMX
               : __builtin_cpu_supports("avx512bf16") ? PENSTOCK_AVX512_BF16
                                                      : PENSTOCK_AVX512_VNNI;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return PENSTOCK_AVX2;
#endif
    return PENSTOCK_PLAIN;
}

int has_vbmi(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vbmi") != 0;
#else
    return 0;
#endif
}

const struct kernels *kernels_for(int isa) {
    if (isa > penstock_best_isa()) return NULL;
    switch (isa) {
#if defined(__x86_64__)
    case PENSTOCK_AMX: return &penstock_amx;
    case PENSTOCK_AVX512_BF16: return &penstock_avx512_bf16;
    case PENSTOCK_AVX512_VNNI: return &penstock_avx512_vnni;
    case PENSTOCK_AVX2: return &penstock_avx2;
#endif
    case PENSTOCK_PLAIN: return &penstock_plain;
    default: return NULL;
    }
}

const struct decoder_kernels *decoder_kernels_for(int isa) {
    if (isa > penstock_best_isa()) return NULL;
    switch (isa) {
#if defined(__x86_64__)
    case PENSTOCK_AMX: return &penstock_decoder_amx;
    case PENSTOCK_AVX512_BF16:
    case PENSTOCK_AVX512_VNNI: return &penstock_decoder_avx512_vnni;
    case PENSTOCK_AVX2: return &penstock_decoder_avx2;
#endif
    case PENSTOCK_PLAIN: return &penstock_decoder_plain;
    default: return NULL;
    }
}
