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
static inline V v_signed_max(V a, V b) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
static inline V v_unsigned_max(V a, V b) {
    return _mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
static inline int32_t v_highest_signed(V v) {
    __m256i bits = _mm256_castps_si256(v);
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
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

/* ---- Decoders: activations of 16 bits are multiplied as they are ---- */

#include "decoder_kernels.inc"

#define UNROLL _Pragma("GCC unroll 16")
#define AHEAD 2048       /* bytes; of the prefetch of weights of 4 bits */
#define MOST_WIDENED (8 * LINES) /* stored lines for which weights of 4 bits are widened in registers, again for each block */
#define EXACT_INPUTS 512 /* whose products of 16 bits with 8 bits have a sum of 32 bits */

/* Numbers 0, 2, 1 and 3 of each four, as whole numbers of 16 bits, at `upper`. */
static void quantise_words(const float *source, int width, uint8_t *upper, uint8_t *lower, size_t step,
                           struct row_grid *grid) {
    (void)lower, (void)step;
    const __m256i order = _mm256_set1_epi64x(0x0d0c050409080100);
    float most = largest_magnitude(source, width);
    const V inverse = pairs_inverse(most), none = v_set(ROUNDER);
    for (int i = 0; i < width; i += LANES) {
        __m256i words = _mm256_shuffle_epi8(_mm256_castps_si256(v_fma(v_load(source + i), inverse, none)), order);
        __m128i eight = _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        _mm_storeu_si128((__m128i *)(upper + 2 * i), eight);
    }
    *grid = pairs_grid(most);
}

/* Adds the products of four inputs with the weights of a panel: `even` of inputs 0 and 2, `odd` of inputs 1 and 3. */
static inline __attribute__((always_inline)) void add_four(const int lines, const int16_t *x, size_t inputs,
                                                           const __m256i *even, const __m256i *odd, __m256i (*sums)[4]) {
    UNROLL for (int m = 0; m < lines; m++) {
        int32_t pairs[2];
        memcpy(pairs, x + (size_t)m * inputs, sizeof pairs);
        __m256i a_even = _mm256_set1_epi32(pairs[0]), a_odd = _mm256_set1_epi32(pairs[1]);
        UNROLL for (int v = 0; v < 4; v++) {
            __m256i both = _mm256_add_epi32(_mm256_madd_epi16(a_even, even[v]), _mm256_madd_epi16(a_odd, odd[v]));
            sums[m][v] = _mm256_add_epi32(sums[m][v], both);
        }
    }
}

/* A group of inputs, weights of 8 bits. */
static inline __attribute__((always_inline)) void add_group8(const int lines, const int16_t *x, size_t inputs,
                                                             const uint8_t *record, __m256i (*sums)[4]) {
    for (int k = 0; k < GROUP; k += 4, record += PANEL * 4) {
        __m256i even[4], odd[4];
        UNROLL for (int v = 0; v < 4; v++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(record + v * 32));
            even[v] = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8);
            odd[v] = _mm256_srai_epi16(both, 8);
        }
        add_four(lines, x + k, inputs, even, odd, sums);
    }
}

/* Two words of each of 8 outputs. */
static inline __m256i twice(__m256i words) { return _mm256_or_si256(words, _mm256_slli_epi32(words, 16)); }

/* The same for weights of 4 bits. */
static inline __attribute__((always_inline)) void add_group4(const int lines, const int16_t *x, size_t inputs,
                                                             const uint8_t *record, __m256i (*sums)[4]) {
    const __m256i low = _mm256_set1_epi16(15), second = _mm256_set1_epi16(15 << 4);
    const uint8_t *numbers = record + GROUP * PANEL / 2;
    __m256i step[4], start[4], start16[4]; /* 16: times 16 */
    UNROLL for (int v = 0; v < 4; v++) {
        __m128i starts = _mm_loadu_si128((const __m128i *)(numbers + v * 16));
        __m128i steps = _mm_loadl_epi64((const __m128i *)(numbers + 2 * PANEL + v * 8));
        step[v] = twice(_mm256_cvtepu8_epi32(steps));
        start[v] = twice(_mm256_cvtepu16_epi32(starts));
        start16[v] = _mm256_slli_epi16(start[v], 4);
    }
    for (int k = 0; k < GROUP; k += 8, record += PANEL * 4) {
        __m256i both[4], even[4], odd[4];
        _mm_prefetch((const char *)record + AHEAD, _MM_HINT_T0);
        _mm_prefetch((const char *)record + AHEAD + 64, _MM_HINT_T0);
        UNROLL for (int v = 0; v < 4; v++) {
            both[v] = _mm256_loadu_si256((const __m256i *)(record + v * 32));
            even[v] = _mm256_mullo_epi16(_mm256_and_si256(both[v], low), step[v]);
            odd[v] = _mm256_mullo_epi16(_mm256_and_si256(_mm256_srli_epi16(both[v], 8), low), step[v]);
            even[v] = _mm256_srai_epi16(_mm256_add_epi16(even[v], start[v]), 4);
            odd[v] = _mm256_srai_epi16(_mm256_add_epi16(odd[v], start[v]), 4);
        }
        add_four(lines, x + k, inputs, even, odd, sums);
        UNROLL for (int v = 0; v < 4; v++) {
            even[v] = _mm256_mullo_epi16(_mm256_and_si256(both[v], second), step[v]);
            odd[v] = _mm256_mullo_epi16(_mm256_srli_epi16(both[v], 12), step[v]);
            even[v] = _mm256_srai_epi16(_mm256_add_epi16(even[v], start16[v]), 8);
            odd[v] = _mm256_srai_epi16(_mm256_add_epi16(odd[v], start[v]), 4);
        }
        add_four(lines, x + k + 4, inputs, even, odd, sums);
    }
}

/* Up to LINES lines x a panel. A sum is written as finish_pairs() reads it: 256 times an upper number and a lower one. */
static inline __attribute__((always_inline)) void words_block(const int bits, const int lines, const struct linear8 *layer,
                                                              const int16_t *x, int panel, struct prefetch *ahead,
                                                              int32_t *target) {
    const char *soon = ahead->at;
    const int soon_lines = bits == 8 ? prefetch_lines(ahead) * (GROUP / 4) : 0;
    const size_t inputs = (size_t)layer->inputs, bytes = record_bytes(bits);
    const uint8_t *record = (const uint8_t *)layer->packed + (size_t)panel * (inputs / GROUP) * bytes;
    __m256i upper[LINES][4], lower[LINES][4];
    UNROLL for (int v = 0; v < 4; v++) {
        __m256i zero = _mm256_loadu_si256((const __m256i *)(layer->sums + panel * PANEL + v * 8));
        UNROLL for (int m = 0; m < lines; m++) {
            upper[m][v] = _mm256_slli_epi32(zero, 7); /* finish_pairs() subtracts it */
            lower[m][v] = _mm256_setzero_si256();
        }
    }
    for (size_t begin = 0; begin < inputs; begin += EXACT_INPUTS) {
        size_t end = begin + EXACT_INPUTS < inputs ? begin + EXACT_INPUTS : inputs;
        __m256i sums[LINES][4];
        UNROLL for (int m = 0; m < lines; m++)
            UNROLL for (int v = 0; v < 4; v++) sums[m][v] = _mm256_setzero_si256();
        for (size_t k = begin; k < end; k += GROUP, record += bytes) {
            soon = prefetch(soon, soon_lines);
            if (bits == 8)
                add_group8(lines, x + k, inputs, record, sums);
            else
                add_group4(lines, x + k, inputs, record, sums);
        }
        UNROLL for (int m = 0; m < lines; m++)
            UNROLL for (int v = 0; v < 4; v++) {
                upper[m][v] = _mm256_add_epi32(upper[m][v], _mm256_srai_epi32(sums[m][v], 8));
                lower[m][v] = _mm256_add_epi32(lower[m][v], _mm256_and_si256(sums[m][v], _mm256_set1_epi32(255)));
            }
    }
    ahead->at = soon;
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < 4; v++) {
            _mm256_storeu_si256((__m256i *)(target + 2 * m * PANEL + v * 8), upper[m][v]);
            _mm256_storeu_si256((__m256i *)(target + (2 * m + 1) * PANEL + v * 8), lower[m][v]);
        }
}

#define WORDS_BLOCK(COUNT) \
    case COUNT: words_block(bits, COUNT, layer, x, panel, &ahead, sums); break;

static inline __attribute__((always_inline)) void words(const int bits, const struct linear8 *layer, const uint8_t *stored,
                                                        const struct row_grid *grids, const float *residual, int last,
                                                        int from, int to, float *target) {
    _Alignas(32) int32_t sums[2 * LINES * PANEL];
    int count = last / 2, chunks = (count + LINES - 1) / LINES;
    for (int panel = from; panel < to; panel++) {
        struct prefetch ahead = prefetch_of(layer, panel + 1, 1, chunks);
        for (int chunk = 0; chunk < chunks; chunk++) {
            int line = count * chunk / chunks, lines = count * (chunk + 1) / chunks - line;
            const int16_t *x = (const int16_t *)stored + (size_t)line * (size_t)layer->inputs;
            switch (lines) { WORDS_BLOCK(1) WORDS_BLOCK(2) WORDS_BLOCK(3) WORDS_BLOCK(4) }
            finish(layer, sums, grids, residual, 2 * line, 2 * lines, panel * PANEL, PANEL, target);
        }
    }
}

static void words8(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                   int first, int last, int from, int to, float *target) {
    (void)first; /* 0 */
    words(8, layer, stored, grids, residual, last, from, to, target);
}

static void words4(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                   int last, int from, int to, int8_t *room, float *target) {
    if (last <= MOST_WIDENED)
        words(4, layer, stored, grids, residual, last, from, to, target);
    else
        widen_and_multiply(words8, layer, stored, grids, residual, last, from, to, room, target);
}

const struct decoder_kernels penstock_decoder_avx2 = {QUERIES, 0,      quantise_words, root_norm, norm,  words8,
                                                      words4,  widen, attend,         narrow,    rotate};
const struct kernels penstock_avx2 = {0, quantise, norm, linear8, linear32, attention, pack_distances, embed, rotate,
                                       root_mean_square_norm};
#endif
