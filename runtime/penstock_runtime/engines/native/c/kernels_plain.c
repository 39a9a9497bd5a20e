/* Kernels for any processor: vectors of four, compiled to the available instructions. The reference of the tests. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "native.h"

typedef float V __attribute__((vector_size(16)));
#define LANES 4
#define QUERIES 4
static inline V v_load(const float *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void v_store(float *p, V v) { memcpy(p, &v, sizeof v); }
static inline V v_set(float x) { return (V){x, x, x, x}; }
static inline V v_fma(V a, V b, V c) { return a * b + c; }
static inline V v_max(V a, V b) {
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
static inline V v_min(V a, V b) {
    for (int i = 0; i < LANES; i++) a[i] = a[i] < b[i] ? a[i] : b[i];
    return a;
}
static inline float v_sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
static inline float v_highest(V v) {
    float low = v[0] > v[2] ? v[0] : v[2], high = v[1] > v[3] ? v[1] : v[3];
    return low > high ? low : high;
}
static inline V v_signed_max(V a, V b) {
    typedef int32_t I __attribute__((vector_size(16)));
    I more = (I)a > (I)b;
    return (V)(((I)a & more) | ((I)b & ~more));
}
static inline V v_unsigned_max(V a, V b) {
    typedef uint32_t U __attribute__((vector_size(16)));
    U more = (U)((U)a > (U)b);
    return (V)(((U)a & more) | ((U)b & ~more));
}
static inline int32_t v_highest_signed(V v) {
    int32_t bits[LANES];
    memcpy(bits, &v, sizeof bits);
    int32_t low = bits[0] > bits[2] ? bits[0] : bits[2], high = bits[1] > bits[3] ? bits[1] : bits[3];
    return low > high ? low : high;
}
static inline V v_shorts(const int16_t *p) { return (V){p[0], p[1], p[2], p[3]}; }
static inline void v_store_bytes(uint8_t *p, V shifted) {
    uint32_t bits[LANES];
    memcpy(bits, &shifted, sizeof bits);
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)bits[i];
}
#include "float_kernels.inc"

static void linear8(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                    const float *residual, int first, int last, int from, int to, float *target) {
    size_t inputs = (size_t)layer->inputs;
    int lines = layer->pairs ? 2 : 1;
    for (int panel = from; panel < to; panel++) {
        const int8_t *weights = layer->packed + (size_t)panel * PANEL * inputs;
        for (int line = first; line < last; line += lines) {
            int32_t sums[2 * PANEL] = {0};
            for (int m = 0; m < lines; m++) {
                const uint8_t *x = stored + (size_t)(line + m) * inputs;
                for (size_t k = 0; k < inputs; k += 4)
                    for (int n = 0; n < PANEL; n++) {
                        const int8_t *w = weights + k * PANEL + n * 4;
                        sums[m * PANEL + n] += x[k] * w[0] + x[k + 1] * w[1] + x[k + 2] * w[2] + x[k + 3] * w[3];
                    }
            }
            finish(layer, sums, grids, residual, line, lines, panel * PANEL, PANEL, target);
        }
    }
}

#include "decoder_kernels.inc"

static void linear4(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                    int last, int from, int to, int8_t *room, float *target) {
    widen_and_multiply(linear8, layer, stored, grids, residual, last, from, to, room, target);
}

const struct decoder_kernels penstock_decoder_plain = {QUERIES, 0, quantise_pairs, root_norm, norm, linear8,
                                                       linear4, widen, attend, narrow, rotate};
const struct kernels penstock_plain = {0, quantise, norm, linear8, linear32, attention, pack_distances, embed, rotate,
                                       root_mean_square_norm};
