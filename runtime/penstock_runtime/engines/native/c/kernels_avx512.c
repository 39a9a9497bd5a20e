/* Kernels for AVX-512 with VNNI (Cascade Lake, Ice Lake), where one instruction multiplies 64 pairs of bytes, or 32 of
16-bit integers. */
#if defined(__x86_64__)
#include "prefetch.h"
#include "avx512.h"
#include "narrow.h"

#define TARGET16
#define WHOLE16 1
#define DOT16 "vpdpwssd"
#include "attention16.inc"
#include "product16.inc"

#define VNNI_LINES 8

/* Lines x panels of the product: all sums are in registers, each weight is loaded once. */
static inline __attribute__((always_inline)) void block(const int lines, const int panels, const struct narrow *narrow,
                                                        const struct linear8 *layer, const uint8_t *x, int panel,
                                                        struct prefetch *ahead, int32_t *target) {
    const char *soon = ahead->at;
    const int soon_lines = prefetch_lines(ahead);
    __m512i sums[VNNI_LINES][4], w[4];
    const int vectors = panels * 2;
    size_t inputs = (size_t)layer->inputs, bytes = narrow ? 8 * (size_t)layer->bits : 64; /* of 64 weights */
    const int8_t *weights = layer->packed + (size_t)panel * inputs / 2 * bytes;
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++) sums[m][v] = _mm512_setzero_si512();
    for (size_t k = 0; k < inputs; k += 4) {
        UNROLL for (int p = 0; p < panels; p++) {
            const int8_t *at = weights + ((size_t)p * inputs + k) / 2 * bytes;
            w[2 * p] = narrow ? widened(narrow, at) : _mm512_loadu_si512(at);
            w[2 * p + 1] = narrow ? widened(narrow, at + bytes) : _mm512_loadu_si512(at + bytes);
            if (soon_lines) {
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)at + AHEAD + 64, _MM_HINT_T0);
            }
        }
        soon = prefetch(soon, soon_lines);
        UNROLL for (int m = 0; m < lines; m++) {
            int32_t four;
            memcpy(&four, x + (size_t)m * inputs + k, 4);
            __m512i a = _mm512_set1_epi32(four);
            /* Not an intrinsic: gcc 12 would copy every sum in every turn. */
            UNROLL for (int v = 0; v < vectors; v++)
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[m][v]) : "v"(a), "v"(w[v]));
        }
    }
    ahead->at = soon;
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++)
            _mm512_storeu_si512(target + m * panels * PANEL + v * 16, sums[m][v]);
}

#define BLOCK(LINES, PANELS) \
    case LINES: block(LINES, PANELS, narrow, layer, x, panel, &ahead, sums); break;

/* `narrow`: NULL for weights of 8 bits. */
static inline __attribute__((always_inline)) void lines8(const struct narrow *narrow, const struct linear8 *layer,
                                                         const uint8_t *stored, const struct row_grid *grids,
                                                         const float *residual, int first, int last, int from, int to,
                                                         float *target) {
    int count = last - first, chunks = (count + VNNI_LINES - 1) / VNNI_LINES;
    int unit = layer->pairs ? 2 : 1, units = count / unit; /* a pair stays together */
    /* Few lines wait for the memory. AMD's processors (Zen 4) read one panel without prefetches fastest. */
    const int few = count <= VNNI_LINES / 2, amd = __builtin_cpu_is("amd") != 0;
    _Alignas(64) int32_t sums[VNNI_LINES * PANEL];
    for (int panel = from; panel < to;) {
        /* Few lines: two panels at once, for enough sums to hide the instruction's latency. */
        int panels = few && !amd && to - panel >= 2 ? 2 : 1;
        struct prefetch ahead = prefetch_of(layer, panel + panels, panels, chunks);
        if (few && amd) ahead.left = 0;
        for (int chunk = 0; chunk < chunks; chunk++) {
            int line = first + units * chunk / chunks * unit;
            int lines = first + units * (chunk + 1) / chunks * unit - line;
            const uint8_t *x = stored + (size_t)line * (size_t)layer->inputs;
            if (panels == 2) {
                switch (lines) { BLOCK(1, 2) BLOCK(2, 2) BLOCK(3, 2) BLOCK(4, 2) }
            } else {
                switch (lines) {
                    BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(5, 1) BLOCK(6, 1)
                    BLOCK(7, 1) BLOCK(8, 1)
                }
            }
            finish(layer, sums, grids, residual, line, lines, panel * PANEL, panels * PANEL, target);
        }
        panel += panels;
    }
}

void linear8_vnni(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                         const float *residual, int first, int last, int from, int to, float *target) {
    if (layer->bits < 8) {
        const struct narrow narrow = narrow_of(layer->bits);
        lines8(&narrow, layer, stored, grids, residual, first, last, from, to, target);
    } else {
        lines8(NULL, layer, stored, grids, residual, first, last, from, to, target);
    }
}

/* ---- Decoders ---- */

#include "decoder_kernels.inc"

/* Up to VNNI_LINES stored lines x a panel of weights of 4 bits. The widened weights are kept in `room` unless it is NULL. */
static inline __attribute__((always_inline)) void block4(const int lines, const struct linear8 *layer, const uint8_t *x,
                                                         const uint8_t *record, int8_t *room, int32_t *target) {
    const size_t inputs = (size_t)layer->inputs, bytes = record_bytes(4);
    __m512i sums[VNNI_LINES][2];
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < 2; v++) sums[m][v] = _mm512_setzero_si512();
    for (const uint8_t *end = x + inputs; x < end; record += bytes) {
        const uint8_t *numbers = record + GROUP * PANEL / 2;
        const struct levels levels[2] = {levels_of(numbers, 0), levels_of(numbers, 1)};
        _mm_prefetch((const char *)numbers + AHEAD, _MM_HINT_T1);
        _mm_prefetch((const char *)numbers + AHEAD + 64, _MM_HINT_T1);
        UNROLL for (int pair = 0; pair < GROUP / 8; pair++, x += 8) {
            __m512i w[2][2];
            UNROLL for (int v = 0; v < 2; v++) {
                const uint8_t *at = record + pair * PANEL * 4 + v * 64;
                _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T1);
                widened_lines(_mm512_loadu_si512(at), levels[v], &w[0][v], &w[1][v]);
            }
            if (room) {
                UNROLL for (int i = 0; i < 4; i++) _mm512_storeu_si512(room + i * 64, w[i / 2][i % 2]);
                room += 4 * 64;
            }
            UNROLL for (int half = 0; half < 2; half++)
                UNROLL for (int m = 0; m < lines; m++) {
                    int32_t four;
                    memcpy(&four, x + (size_t)m * inputs + half * 4, 4);
                    __m512i a = _mm512_set1_epi32(four);
                    UNROLL for (int v = 0; v < 2; v++)
                        __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[m][v]) : "v"(a), "v"(w[half][v]));
                }
        }
    }
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < 2; v++) _mm512_storeu_si512(target + m * PANEL + v * 16, sums[m][v]);
}

#define BLOCK4(LINES) \
    case LINES: block4(LINES, layer, stored, record, rest ? room : NULL, sums); break;

void linear4_vnni(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                  int last, int from, int to, int8_t *room, float *target) {
    const size_t bytes = (size_t)(layer->inputs / GROUP) * record_bytes(4);
    int chunks = (last + VNNI_LINES - 1) / VNNI_LINES, lines = last / 2 / chunks * 2, rest = last - lines;
    _Alignas(64) int32_t sums[VNNI_LINES * PANEL];
    for (int panel = from; panel < to; panel++) {
        const uint8_t *record = (const uint8_t *)layer->packed + (size_t)panel * bytes;
        switch (lines) { BLOCK4(2) BLOCK4(4) BLOCK4(6) BLOCK4(8) }
        finish(layer, sums, grids, residual, 0, lines, panel * PANEL, PANEL, target);
        if (rest) widened_product(linear8_vnni, layer, stored, grids, residual, lines, last, panel, room, target);
    }
}

const struct decoder_kernels penstock_decoder_avx512_vnni = {QUERIES,      0,     quantise_pairs, root_norm, norm,  linear8_vnni,
                                                             linear4_vnni, widen, attend,         narrow,    rotate};
const struct kernels penstock_avx512_vnni = {1, quantise, norm, linear8_vnni, linear32, attention16, pack_distances16, embed, rotate,
                                       root_mean_square_norm};
#endif
