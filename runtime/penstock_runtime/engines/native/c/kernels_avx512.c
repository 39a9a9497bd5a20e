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

#define VNNI_LINES 12

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
            _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char *)at + AHEAD + 64, _MM_HINT_T0);
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
    _Alignas(64) int32_t sums[VNNI_LINES * PANEL];
    for (int panel = from; panel < to;) {
        /* Few lines: two panels at once, for enough sums to hide the instruction's latency. */
        int panels = count <= 6 && to - panel >= 2 ? 2 : 1;
        struct prefetch ahead = prefetch_of(layer, panel + panels, panels, chunks);
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

#define GROUPED_LINES 12

/* Lines x 16 columns, once or twice: all sums are in registers. */
static inline __attribute__((always_inline)) void grouped_block(const int lines, const int vectors, const int bits,
                                                                const struct grouped *layer, const int8_t *stored,
                                                                const struct group_grid *grids, int line, int column,
                                                                float *result) {
    const size_t inputs = (size_t)layer->inputs, groups = inputs / GROUP, bytes = record_bytes(bits);
    const size_t start = (size_t)(column % PANEL);
    const uint8_t *record = layer->packed + (size_t)(column / PANEL) * groups * bytes;
    const int8_t *x = stored + (size_t)line * inputs;
    const struct group_grid *grid = grids + (size_t)line * groups;
    const __m512i nibble = _mm512_set1_epi8(15);
    V y[GROUPED_LINES][2];
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++) y[m][v] = v_zero();
    for (size_t g = 0; g < groups; g++, record += bytes, x += GROUP, grid++) {
        const uint8_t *weights = record + start * 4;
        const uint16_t *scales = (const uint16_t *)(record + bytes) - (bits == 8 ? PANEL : 2 * PANEL) + start;
        __m512i sums[GROUPED_LINES][2];
        UNROLL for (int m = 0; m < lines; m++)
            UNROLL for (int v = 0; v < vectors; v++) sums[m][v] = _mm512_setzero_si512();
        UNROLL for (int k = 0; k < GROUP; k += 4) {
            __m512i w[2];
            UNROLL for (int v = 0; v < vectors; v++) {
                if (bits == 8) {
                    w[v] = _mm512_loadu_si512(weights + k * PANEL + v * 64);
                } else {
                    w[v] = _mm512_loadu_si512(weights + k / 8 * PANEL * 4 + v * 64);
                    w[v] = _mm512_and_si512(k % 8 ? _mm512_srli_epi16(w[v], 4) : w[v], nibble);
                }
                if (bits == 8 || k % 8 == 0)
                    _mm_prefetch((const char *)weights + (bits == 8 ? k * PANEL : k / 8 * PANEL * 4) + v * 64 + AHEAD,
                                 _MM_HINT_T0);
            }
            UNROLL for (int m = 0; m < lines; m++) {
                int32_t four;
                memcpy(&four, x + (size_t)m * inputs + k, 4);
                __m512i a = _mm512_set1_epi32(four);
                /* Not an intrinsic: gcc 12 would copy every sum in every turn. */
                UNROLL for (int v = 0; v < vectors; v++)
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[m][v]) : "v"(w[v]), "v"(a));
            }
        }
        _mm_prefetch((const char *)scales + AHEAD, _MM_HINT_T0);
        UNROLL for (int v = 0; v < vectors; v++) {
            V scale = v_halves(scales + v * LANES), minimum = bits == 8 ? v_zero() : v_halves(scales + PANEL + v * LANES);
            UNROLL for (int m = 0; m < lines; m++)
                y[m][v] = add_group(bits, y[m][v], _mm512_cvtepi32_ps(sums[m][v]), scale, minimum,
                                    grid + (size_t)m * groups);
        }
    }
    UNROLL for (int m = 0; m < lines; m++)
        UNROLL for (int v = 0; v < vectors; v++) v_store(result + (m * vectors + v) * LANES, y[m][v]);
}

#define GROUPED(LINES, VECTORS) \
    case LINES: grouped_block(LINES, VECTORS, bits, layer, stored, grids, line, column, sums); break;

static inline __attribute__((always_inline)) void grouped_as(const int bits, const struct grouped *layer,
                                                             const int8_t *stored, const struct group_grid *grids,
                                                             const float *residual, int first, int last, int from,
                                                             int to, float *target) {
    int count = last - first, chunks = (count + GROUPED_LINES - 1) / GROUPED_LINES;
    int step = count <= GROUPED_LINES / 2 ? PANEL : PANEL / 2; /* few lines: more columns hide the latency */
    _Alignas(64) float sums[GROUPED_LINES * PANEL / 2];
    for (int column = from * PANEL; column < to * PANEL; column += step)
        for (int chunk = 0; chunk < chunks; chunk++) {
            int line = first + count * chunk / chunks, lines = first + count * (chunk + 1) / chunks - line;
            if (step == PANEL) {
                switch (lines) { GROUPED(1, 2) GROUPED(2, 2) GROUPED(3, 2) GROUPED(4, 2) GROUPED(5, 2) GROUPED(6, 2) }
            } else {
                switch (lines) {
                    GROUPED(6, 1) GROUPED(7, 1) GROUPED(8, 1) GROUPED(9, 1)
                    GROUPED(10, 1) GROUPED(11, 1) GROUPED(12, 1)
                }
            }
            finish_grouped(layer, sums, residual, line, lines, column, step, target);
        }
}

void grouped_vnni(const struct grouped *layer, const int8_t *stored, const struct group_grid *grids,
                  const float *residual, int first, int last, int from, int to, uint8_t *room, float *target) {
    (void)room;
    if (layer->bits == 8)
        grouped_as(8, layer, stored, grids, residual, first, last, from, to, target);
    else
        grouped_as(4, layer, stored, grids, residual, first, last, from, to, target);
}

const struct decoder_kernels penstock_decoder_avx512_vnni = {QUERIES,      quantise_groups, root_norm, norm,
                                                             grouped_vnni, attend,          narrow,    rotate};
const struct kernels penstock_avx512_vnni = {1, quantise, norm, linear8_vnni, linear32, attention16, pack_distances16, embed, rotate,
                                       root_mean_square_norm};
#endif
