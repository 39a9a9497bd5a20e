/* AVX-512 with VNNI, where one instruction multiplies 64 pairs of bytes; and with AMX, where one multiplies 16,384. */
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "native.h"

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
static inline V v_shorts(const int16_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)p)));
}
static inline void v_store_bytes(uint8_t *p, V shifted) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted)));
}
#include "float_kernels.inc"

/* How far ahead of their use weights are asked for, in bytes: 2,048 to 8,192 make no difference. */
#define AHEAD 4096

/* ---- VNNI ---- */

#define VNNI_LINES 12
#define UNROLL _Pragma("GCC unroll 16")

/* Lines x panels of the product: all sums stay in registers, each weight is loaded once. */
static inline __attribute__((always_inline)) void block(const int lines, const int panels, const struct linear8 *layer,
                                                        const uint8_t *x, int panel, int32_t *target) {
    __m512i sums[VNNI_LINES][4], w[4];
    const int vectors = panels * 2;
    size_t inputs = (size_t)layer->inputs;
    const int8_t *weights = layer->packed + (size_t)panel * PANEL * inputs;
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++) sums[m][v] = _mm512_setzero_si512();
    for (size_t k = 0; k < inputs; k += 4) {
        UNROLL for (int p = 0; p < panels; p++) {
            const int8_t *at = weights + ((size_t)p * inputs + k) * PANEL;
            w[2 * p] = _mm512_loadu_si512(at);
            w[2 * p + 1] = _mm512_loadu_si512(at + 64);
            _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)at + AHEAD + 64, _MM_HINT_T0);
        }
        UNROLL for (int m = 0; m < lines; m++) {
            int32_t four;
            memcpy(&four, x + (size_t)m * inputs + k, 4);
            __m512i a = _mm512_set1_epi32(four);
            /* The intrinsic of this instruction makes gcc 12 copy every sum in every turn. */
            UNROLL for (int v = 0; v < vectors; v++)
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[m][v]) : "v"(a), "v"(w[v]));
        }
    }
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++)
            _mm512_storeu_si512(target + m * panels * PANEL + v * 16, sums[m][v]);
}

#define BLOCK(LINES, PANELS) \
    case LINES: block(LINES, PANELS, layer, x, panel, sums); break;

static void linear8_vnni(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                         const float *residual, int first, int last, int from, int to, float *target) {
    int count = last - first, chunks = (count + VNNI_LINES - 1) / VNNI_LINES;
    _Alignas(64) int32_t sums[VNNI_LINES * PANEL];
    for (int panel = from; panel < to;) {
        /* Few lines: two panels at once, so that there are enough sums to hide the instruction's latency. */
        int panels = count <= 6 && to - panel >= 2 ? 2 : 1;
        for (int chunk = 0; chunk < chunks; chunk++) {
            int line = first + count * chunk / chunks, lines = first + count * (chunk + 1) / chunks - line;
            const uint8_t *x = stored + (size_t)line * (size_t)layer->inputs;
            if (panels == 2) {
                switch (lines) { BLOCK(1, 2) BLOCK(2, 2) BLOCK(3, 2) BLOCK(4, 2) BLOCK(5, 2) BLOCK(6, 2) }
            } else {
                switch (lines) {
                    BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(5, 1) BLOCK(6, 1)
                    BLOCK(7, 1) BLOCK(8, 1) BLOCK(9, 1) BLOCK(10, 1) BLOCK(11, 1) BLOCK(12, 1)
                }
            }
            finish(layer, sums, grids, residual, line, lines, panel * PANEL, panels * PANEL, target);
        }
        panel += panels;
    }
}

/* ---- AMX ---- */

#define AMX __attribute__((target("amx-tile,amx-int8")))
#define AMX_LEAST 4 /* lines */
#define TILE 16 /* lines of a tile, each of 64 bytes */

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Tiles 0..3: sums of two times two; 4, 5: lines; 6, 7: weights. */
static inline AMX void shape_tiles(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)(t > 5 ? TILE : t < 2 || t == 4 ? upper : lower ? lower : 1);
    }
    _tile_loadconfig(&shapes);
}

static inline void fetch(const int8_t *at) {
    UNROLL for (int i = 0; i < 32; i += 2) {
        _mm_prefetch((const char *)at + AHEAD + i * 64, _MM_HINT_T0);
        _mm_prefetch((const char *)at + AHEAD + i * 64 + 64, _MM_HINT_T0);
    }
}

/* One panel for up to 32 lines. */
static AMX void tiles(const struct linear8 *layer, const uint8_t *x, int lines, int panel, int32_t *sums) {
    size_t inputs = (size_t)layer->inputs;
    const int8_t *w = layer->packed + (size_t)panel * PANEL * inputs;
    _tile_zero(0);
    _tile_zero(1);
    if (lines > TILE) {
        _tile_zero(2);
        _tile_zero(3);
        for (size_t k = 0; k < inputs; k += 64, w += 64 * PANEL) {
            _tile_loadd(6, w, PANEL * 4);
            _tile_loadd(7, w + 64, PANEL * 4);
            _tile_loadd(4, x + k, inputs);
            _tile_loadd(5, x + k + TILE * inputs, inputs);
            fetch(w);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE * PANEL + 16, PANEL * 4);
    } else {
        for (size_t k = 0; k < inputs; k += 64, w += 64 * PANEL) {
            _tile_loadd(4, x + k, inputs);
            _tile_loadd(6, w, PANEL * 4);
            _tile_loadd(7, w + 64, PANEL * 4);
            fetch(w);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
}

static AMX void linear8_amx(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                            const float *residual, int first, int last, int from, int to, float *target) {
    if (layer->inputs % 64 || last - first < AMX_LEAST) {
        linear8_vnni(layer, stored, grids, residual, first, last, from, to, target);
        return;
    }
    _Alignas(64) int32_t sums[2 * TILE * PANEL];
    int upper = -1, lower = -1;
    for (int panel = from; panel < to; panel++) {
        for (int line = first; line < last; line += 2 * TILE) {
            int lines = last - line < 2 * TILE ? last - line : 2 * TILE;
            int now_upper = lines < TILE ? lines : TILE, now_lower = lines - now_upper;
            if (now_upper != upper || now_lower != lower)
                shape_tiles(upper = now_upper, lower = now_lower);
            tiles(layer, stored + (size_t)line * (size_t)layer->inputs, lines, panel, sums);
            finish(layer, sums, grids, residual, line, lines, panel * PANEL, PANEL, target);
        }
    }
    _tile_release(); /* or every switch of threads would save them */
}

const struct kernels penstock_avx512_vnni = {quantise, norm, linear8_vnni, linear32, attention, embed};
const struct kernels penstock_amx = {quantise, norm, linear8_amx, linear32, attention, embed};
#endif
