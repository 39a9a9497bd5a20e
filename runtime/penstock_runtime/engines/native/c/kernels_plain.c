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
    for (int panel = from; panel < to; panel++) {
        const int8_t *weights = layer->packed + (size_t)panel * PANEL * inputs;
        for (int line = first; line < last; line++) {
            const uint8_t *x = stored + (size_t)line * inputs;
            int32_t sums[PANEL] = {0};
            for (size_t k = 0; k < inputs; k += 4)
                for (int n = 0; n < PANEL; n++) {
                    const int8_t *w = weights + k * PANEL + n * 4;
                    sums[n] += x[k] * w[0] + x[k + 1] * w[1] + x[k + 2] * w[2] + x[k + 3] * w[3];
                }
            finish(layer, sums, grids, residual, line, 1, panel * PANEL, PANEL, target);
        }
    }
}

#include "decoder_kernels.inc"

static void grouped(const struct grouped *layer, const int8_t *stored, const struct group_grid *grids,
                    const float *residual, int first, int last, int from, int to, uint8_t *room, float *target) {
    int inputs = layer->inputs, groups = inputs / GROUP;
    size_t bytes = record_bytes(layer->bits);
    for (int panel = from; panel < to; panel++)
        for (int line = first; line < last; line++) {
            const uint8_t *record = layer->packed + (size_t)panel * (size_t)groups * bytes;
            const struct group_grid *grid = grids + (size_t)line * (size_t)groups;
            V y[PANEL / LANES];
            for (int v = 0; v < PANEL / LANES; v++) y[v] = v_zero();
            for (int g = 0; g < groups; g++, record += bytes, grid++) {
                const uint8_t *weights = record_weights(record, layer->bits, room);
                const int8_t *x = stored + (size_t)line * (size_t)inputs + g * GROUP;
                const uint16_t *scales = (const uint16_t *)(record + bytes) - (layer->bits == 8 ? PANEL : 2 * PANEL);
                int32_t sums[PANEL] = {0};
                for (int k = 0; k < GROUP; k++)
                    for (int n = 0; n < PANEL; n++) sums[n] += x[k] * weights[k / 4 * PANEL * 4 + n * 4 + k % 4];
                for (int v = 0; v < PANEL / LANES; v++) {
                    V whole = v_convert(*(const VI_unaligned *)(sums + v * LANES)), scale = v_halves(scales + v * LANES);
                    if (layer->bits == 8)
                        y[v] = add_group(8, y[v], whole, scale, v_zero(), grid);
                    else
                        y[v] = add_group(4, y[v], whole, scale, v_halves(scales + PANEL + v * LANES), grid);
                }
            }
            finish_grouped(layer, (const float *)y, residual, line, 1, panel * PANEL, PANEL, target);
        }
}

const struct decoder_kernels penstock_decoder_plain = {QUERIES, quantise_groups, root_norm, norm,
                                                       grouped, attend,          narrow,    rotate};
const struct kernels penstock_plain = {0, quantise, norm, linear8, linear32, attention, pack_distances, embed, rotate,
                                       root_mean_square_norm};
