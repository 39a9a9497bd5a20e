/* The float kernels with vectors of 512 bits, for the AVX-512 and AMX files. */
#ifndef PENSTOCK_AVX512_H
#define PENSTOCK_AVX512_H

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "native.h"

/* Distance of the prefetch of weights into the first-level cache, in bytes: 2,048 to 8,192 make no difference. */
#define AHEAD 4096

typedef __m512 V;
#define LANES 16
#define QUERIES 8
static inline V v_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void v_store(float *p, V v) { _mm512_storeu_ps(p, v); }
static inline V v_set(float x) { return _mm512_set1_ps(x); }
static inline V v_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
static inline V v_max(V a, V b) { return _mm512_max_ps(a, b); }
static inline V v_min(V a, V b) { return _mm512_min_ps(a, b); }
static inline float v_sum(V v) { return _mm512_reduce_add_ps(v); }
static inline float v_highest(V v) { return _mm512_reduce_max_ps(v); }
static inline V v_signed_max(V a, V b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline V v_unsigned_max(V a, V b) {
    return _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline int32_t v_highest_signed(V v) { return _mm512_reduce_max_epi32(_mm512_castps_si512(v)); }
static inline V v_shorts(const int16_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)));
}
static inline void v_store_bytes(uint8_t *p, V shifted) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted)));
}
#define HAS_HALVES
static inline V v_halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
static inline void v_store_halves(uint16_t *p, V x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#define STORES_FOUR
static inline void v_store_four(uint8_t *p, const V *shifted) {
    const __m512i none = _mm512_castps_si512(v_set(ROUNDER));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i n[4];
    for (int k = 0; k < 4; k++) n[k] = _mm512_sub_epi32(_mm512_castps_si512(shifted[k]), none);
    __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(n[0], n[1]), _mm512_packus_epi32(n[2], n[3]));
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
}
#define HAS_WIDEN
/* Of each of 16 outputs two words. */
struct levels {
    __m512i step, step16, start16; /* 16: times 16 */
};

static inline __m512i twice(__m512i words) { return _mm512_or_si512(words, _mm512_slli_epi32(words, 16)); }

/* Of half a panel, from the starts and steps of a record. */
static inline struct levels levels_of(const uint8_t *numbers, int half) {
    __m256i starts = _mm256_loadu_si256((const __m256i *)(numbers + 32 * half));
    __m128i steps = _mm_loadu_si128((const __m128i *)(numbers + 2 * PANEL + 16 * half));
    __m512i step = twice(_mm512_cvtepu8_epi32(steps)), start = twice(_mm512_cvtepu16_epi32(starts));
    return (struct levels){step, _mm512_slli_epi16(step, 4), _mm512_slli_epi16(start, 4)};
}

/* The weights of 64 bytes of numbers, in their lower and in their upper bits. Words are computed times 16, so that the 8 bits
of a weight are the upper byte. */
static inline void widened_lines(__m512i both, struct levels levels, __m512i *lower, __m512i *upper) {
    const __m512i low = _mm512_set1_epi16(15), second = _mm512_set1_epi16(15 << 4), byte = _mm512_set1_epi16(255);
    __m512i words[4] = {
        _mm512_mullo_epi16(_mm512_and_si512(both, low), levels.step16),
        _mm512_mullo_epi16(_mm512_and_si512(both, second), levels.step),
        _mm512_mullo_epi16(_mm512_and_si512(_mm512_srli_epi16(both, 8), low), levels.step16),
        _mm512_mullo_epi16(_mm512_srli_epi16(both, 12), levels.step16),
    };
    for (int i = 0; i < 4; i++) words[i] = _mm512_add_epi16(words[i], levels.start16);
    *lower = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words[0], 8), words[2], byte, 0xe4);
    *upper = _mm512_ternarylogic_epi32(_mm512_srli_epi16(words[1], 8), words[3], byte, 0xe4);
}

static inline void widen(const uint8_t *records, size_t count, int8_t *target) {
    for (; count; count--, records += record_bytes(4), target += GROUP * PANEL) {
        const uint8_t *numbers = records + GROUP * PANEL / 2;
        const struct levels levels[2] = {levels_of(numbers, 0), levels_of(numbers, 1)};
        for (int pair = 0; pair < GROUP / 8; pair++)
            for (int v = 0; v < 2; v++) {
                const uint8_t *at = records + pair * PANEL * 4 + v * 64;
                int8_t *to = target + 2 * pair * PANEL * 4 + v * 64;
                __m512i both = _mm512_loadu_si512(at);
                _mm_prefetch((const char *)at + AHEAD / 2, _MM_HINT_T0);
                __m512i lower, upper;
                widened_lines(both, levels[v], &lower, &upper);
                _mm512_storeu_si512(to, lower);
                _mm512_storeu_si512(to + PANEL * 4, upper);
            }
    }
}
#include "float_kernels.inc"

#define UNROLL _Pragma("GCC unroll 16")

/* The 8-bit product of kernels_avx512.c. */
void linear8_vnni(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                  const float *residual, int first, int last, int from, int to, float *target);

/* The product of kernels_avx512.c with weights of 4 bits. */
void linear4_vnni(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                  int last, int from, int to, int8_t *room, float *target);

#endif
