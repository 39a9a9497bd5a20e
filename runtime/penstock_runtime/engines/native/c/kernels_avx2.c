/* Kernels for AVX2, without 8-bit dot products: bytes are widened to 16 bits, whose sums of pairs are exact. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "prefetch.h"
#include "kernels.h"
#include "native.h"

typedef __m256 V;
#define LANES 8
#define QUERIES 4
static inline V v_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void v_store(float *p, V v) { _mm256_storeu_ps(p, v); }
static inline V v_set(float x) { return _mm256_set1_ps(x); }
static inline V v_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
static inline V v_max(V a, V b) { return _mm256_max_ps(a, b); }
static inline V v_min(V a, V b) { return _mm256_min_ps(a, b); }
static inline float v_sum(V v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline float v_highest(V v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_shuffle_ps(half, half, 1)));
}
static inline V v_shorts(const int16_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)p)));
}
static inline void v_store_bytes(uint8_t *p, V shifted) {
    __m256i low = _mm256_and_si256(_mm256_castps_si256(shifted), _mm256_set1_epi32(255));
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
#define HAS_HALVES
static inline V v_halves(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline void v_store_halves(uint16_t *p, V x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#include "float_kernels.inc"

#define LINES 4
#define HALF (PANEL / 2)

/* Up to LINES lines x half a panel: eight sums; the last line is repeated if there are fewer. */
static void block(const struct linear8 *layer, const uint8_t *stored, int line, int lines, int column,
                  struct prefetch *ahead, int32_t *target) {
    const char *soon = ahead->at;
    const int soon_lines = prefetch_lines(ahead);
    size_t inputs = (size_t)layer->inputs;
    const int8_t *w = layer->packed + (size_t)(column / PANEL) * PANEL * inputs + (size_t)(column % PANEL) * 4;
    const uint8_t *x[LINES];
    __m256i sums[LINES][2];
    for (int m = 0; m < LINES; m++) {
        x[m] = stored + (size_t)(line + (m < lines ? m : lines - 1)) * inputs;
        sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    }
    for (size_t k = 0; k < inputs; k += 4, w += PANEL * 4) {
        __m256i even[2], odd[2];
        soon = prefetch(soon, soon_lines);
        for (int v = 0; v < 2; v++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(w + v * 32));
            even[v] = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8);
            odd[v] = _mm256_srai_epi16(both, 8);
        }
        for (int m = 0; m < LINES; m++) {
            int32_t four;
            memcpy(&four, x[m] + k, 4);
            __m256i a = _mm256_set1_epi32(four);
            __m256i a_even = _mm256_and_si256(a, _mm256_set1_epi16(255)), a_odd = _mm256_srli_epi16(a, 8);
            for (int v = 0; v < 2; v++) {
                __m256i pairs = _mm256_add_epi32(_mm256_madd_epi16(a_even, even[v]), _mm256_madd_epi16(a_odd, odd[v]));
                sums[m][v] = _mm256_add_epi32(sums[m][v], pairs);
            }
        }
    }
    ahead->at = soon;
    for (int m = 0; m < lines; m++)
        for (int v = 0; v < 2; v++) _mm256_storeu_si256((__m256i *)(target + m * HALF + v * 8), sums[m][v]);
}

static void linear8(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                    const float *residual, int first, int last, int from, int to, float *target) {
    _Alignas(32) int32_t sums[LINES * HALF];
    int chunks = (last - first + LINES - 1) / LINES;
    for (int panel = from; panel < to; panel++) {
        struct prefetch ahead = prefetch_of(layer, panel + 1, 1, 2 * chunks);
        for (int column = panel * PANEL; column < (panel + 1) * PANEL; column += HALF)
            for (int line = first; line < last; line += LINES) {
                int lines = last - line < LINES ? last - line : LINES;
                block(layer, stored, line, lines, column, &ahead, sums);
                finish(layer, sums, grids, residual, line, lines, column, HALF, target);
            }
    }
}

#include "decoder_kernels.inc"

static void linear4(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                    int last, int from, int to, int8_t *room, float *target) {
    widen_and_multiply(linear8, layer, stored, grids, residual, last, from, to, room, target);
}

const struct decoder_kernels penstock_decoder_avx2 = {QUERIES, 0, quantise_pairs, root_norm, norm, linear8,
                                                      linear4, widen, attend, narrow, rotate};
const struct kernels penstock_avx2 = {0, quantise, norm, linear8, linear32, attention, pack_distances, embed, rotate,
                                       root_mean_square_norm};
#endif
