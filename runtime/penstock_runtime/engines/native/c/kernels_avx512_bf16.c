/* Kernels for AVX-512 with VNNI and bfloat16 (Cooper Lake, Zen 4), whose instruction multiplies 32 pairs. */
#if defined(__x86_64__)
#include "avx512.h"

#define TARGET16 __attribute__((target("avx512bf16")))
#define WHOLE16 0
#define DOT16 "vdpbf16ps"
#include "attention16.inc"
#include "product16.inc"

const struct kernels penstock_avx512_bf16 = {1, quantise, norm, linear8_vnni, linear32, attention16, pack_distances16, embed, rotate,
                                       root_mean_square_norm};
#endif
