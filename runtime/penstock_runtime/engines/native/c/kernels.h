/* The interface of the kernels of an instruction set. A kernel computes a part of a step in the calling thread. */
#ifndef PENSTOCK_KERNELS_H
#define PENSTOCK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define PANEL 32    /* outputs that are packed together */
#define ALIGNMENT 64 /* bytes; of buffers and weights */
#define MOST_WIDTH (1 << 16) /* of a product's inputs: sums of fewer products of bytes fit into 32 bits */
#define MOST_NARROW_INPUTS 4096 /* of a product with weights of fewer than 8 bits: a panel is widened on the stack */

/* Adding it puts a float's nearest integer into the low bits, for magnitudes below 2^22. */
#define ROUNDER 12582912.0f

/* The quantisation of one row of activations: value = (stored - zero) * scale. */
struct row_grid {
    float scale, zero; /* zero is an integer */
};

#define PAIRS_ZERO 32768 /* `zero` of activations with 16 bits */

/* Bytes after packed weights up to which prefetches compute addresses: two panels, or some cache lines. They are part of the
same memory, since C defines no others. */
static inline size_t prefetched_bytes(int inputs) { return 2 * (size_t)inputs * PANEL + 8192; }

/* An 8-bit product. */
struct linear8 {
    int inputs;            /* a multiple of 4 */
    int outputs;           /* a multiple of PANEL */
    int activation;
    int gated;             /* the residual is multiplied with the result instead of added to it */
    int bits;              /* of a weight: 8, or fewer if the lower bits of all are 0 and narrow.h supports it */
    int pairs;             /* activations have 16 bits: two stored lines, of upper and of lower bytes, are one line of the result */
    const int8_t *packed;  /* [outputs / PANEL, inputs / 4, PANEL, 4]; 64 bytes after the end may be read */
    const float *scales;   /* [outputs] */
    const float *bias;     /* [outputs]; with `pairs` it may be NULL */
    const int32_t *sums;   /* [outputs]: of the weights over the inputs */
};

#define ALL_KEYS (1 << 24) /* more than a row has */

/* The vectors of distances of one head before they are packed: one for each column, some of them the same. */
struct distance_table {
    const float *vectors; /* [rows, width] */
    const int16_t *rows;  /* [2 * positions - 1]: the vector of each distance, from 1 - positions to positions - 1 */
    int positions, width;
};

/* Columns of the packed vectors. Column distance_middle() + d is for keys d places after their query; blocks of queries
and keys read a few columns beyond those that have a distance. */
static inline int distance_middle(int positions) { return (positions + 31) / 32 * 32; }
static inline int distance_columns(int positions) { return 2 * distance_middle(positions) + 32; }

static inline const float *distance_vector(const struct distance_table *table, int column) {
    int most = table->positions - 1, distance = column - distance_middle(table->positions);
    distance = distance < -most ? -most : distance > most ? most : distance;
    return table->vectors + (size_t)table->rows[distance + most] * (size_t)table->width;
}

/* Packed vectors of distances of one head. */
struct distance_vectors {
    const void *packed; /* as `attention` reads it; NULL: none */
    float back;         /* factor of the packed numbers */
};

/* The attention of one head in one row of the batch. */
struct head {
    const float *queries;         /* [tokens, stride] */
    const float *keys, *values;   /* [tokens, key_stride] */
    size_t stride, key_stride;
    float *target;                        /* [tokens, target_stride] */
    size_t target_stride;
    int tokens;
    int width;                            /* of the head; a multiple of 16 */
    float scale;
    const float *keep;                    /* [tokens]: 1 for a token, 0 for padding */
    const float *bias;                    /* bias[j - i] is added to the score of key j for query i; NULL: nothing */
    struct distance_vectors distance_keys, distance_queries; /* whose products with queries, and with keys, are added */
    int positions;                        /* of the vectors of distances */
    int before, after;                    /* query i attends to keys i - before..i + after; ALL_KEYS: no limit */
    float *scratch;                       /* attention_scratch() floats */
};

#define DISTANCES_SPARE 48 /* floats after each of the 16 lines of products with distances */

static inline int has_distances(const struct head *head) {
    return head->distance_keys.packed || head->distance_queries.packed;
}

/* ---- Decoders (text generation) ---- */

#define GROUP 32 /* inputs that share a step and a start, of weights of 4 bits */
#define BLOCK_TOKENS 32 /* in a block of the cache */

/* The activations of decoders have 16 bits and a scale for each token, weights 8 bits and a scale for each output. So every sum
is one of integers, and each way to compute it gives the same bits.

Bytes of a record: the weights of a panel for a group of inputs. In 8 bits: [GROUP / 4, PANEL, 4]. In 4 bits: numbers in the same
order, an odd line in the upper bits of the line before it; then for each of the PANEL outputs a start (int16), and for each a
step (uint8). They are widened to 8 bits: weight = floor((step * number + start) / 16). */
static inline size_t record_bytes(int bits) { return bits == 8 ? GROUP * PANEL : GROUP * PANEL / 2 + 3 * PANEL; }

/* Attention of up to `queries` queries of one sequence that read the same keys and values. */
struct paged_attention {
    const uint16_t *cache; /* float16: keys [width, BLOCK_TOKENS] and values [BLOCK_TOKENS, width] of block 0 */
    size_t stride;         /* numbers to the next block */
    const int32_t *blocks; /* of the sequence */
    int width;            /* of a head; a multiple of 16 */
    int window;           /* tokens that a query sees at most; 0: all before it */
    float scale;
    const float *query[8]; /* [width] each */
    float *target[8];
    int end[8]; /* tokens that the query sees, itself included */
    int count;
    float *scratch; /* [queries, tokens of the sequence rounded up to blocks + BLOCK_TOKENS] */
    size_t padded;  /* floats in a line of it */
};

#define TILE_LINES 8   /* quantised lines in a tile: 16 lines of bytes */
#define TILE_WIDTH 64  /* numbers */
#define LEAST_TILED 2  /* lines for which tiles pay */

/* Whether the quantised lines of a product are [lines / 8, width / 64, 8, 2, 64]; otherwise they are [lines, 2, width]. The 2 are
upper and lower bytes. */
static inline int in_tiles(int tiles, int width, int lines) {
    return tiles && width % TILE_WIDTH == 0 && lines >= LEAST_TILED;
}

struct decoder_kernels {
    int queries; /* most queries of one call of `attend` */
    int tiles;   /* of many lines: `linear8` reads them in tiles (in_tiles) */
    /* One line, quantised to 16 bits as `linear8` reads it. The upper and the lower bytes of 64 numbers are at `upper` and
    `lower`, those of the next 64 `step` further on; AVX2 has whole numbers at `upper` instead. */
    void (*quantise)(const float *source, int width, uint8_t *upper, uint8_t *lower, size_t step, struct row_grid *grid);
    /* One line: target = x / sqrt(sum(x^2) / count + epsilon) * weight + residual, which may be NULL; `width` is a multiple
    of 16. */
    void (*root_norm)(const float *x, const float *weight, const float *residual, float epsilon, int width, int count,
                      float *target);
    void (*norm)(const float *source, const float *weight, const float *bias, float epsilon, int width, int first,
                 int last, float *target);
    /* As in `struct kernels`, for layers with `pairs`. `last` counts stored lines; `first` is 0. */
    void (*linear8)(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                    const float *residual, int first, int last, int from, int to, float *target);
    /* The same for weights of 4 bits. `room`: [inputs, PANEL], for the weights of a panel in 8 bits. */
    void (*linear4)(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                    int last, int from, int to, int8_t *room, float *target);
    /* `count` records of weights of 4 bits in 8. */
    void (*widen)(const uint8_t *records, size_t count, int8_t *target);
    void (*attend)(const struct paged_attention *attention);
    /* The nearest float16 numbers, at most 65504, and NaN for those that are not finite; `width` is a multiple of 16. */
    void (*narrow)(const float *x, int width, uint16_t *target);
    void (*rotate)(const float *cosines, const float *sines, int heads, int half, float *line);
};

extern const struct decoder_kernels penstock_decoder_plain;
#if defined(__x86_64__)
extern const struct decoder_kernels penstock_decoder_avx2;
extern const struct decoder_kernels penstock_decoder_avx512_vnni;
extern const struct decoder_kernels penstock_decoder_amx;
#endif

struct kernels {
    int narrow; /* linear8 takes weights of fewer than 8 bits, given AVX-512 VBMI */
    /* Lines first..last of `source`, quantised to `stored` and `grids`. `factors` may be NULL. */
    void (*quantise)(const float *source, const float *factors, int width, int first, int last, uint8_t *stored,
                     struct row_grid *grids);
    void (*norm)(const float *source, const float *weight, const float *bias, float epsilon, int width, int first,
                 int last, float *target);
    /* Lines first..last, panels from..to. `residual` may be NULL, and may be the target. */
    void (*linear8)(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                    const float *residual, int first, int last, int from, int to, float *target);
    void (*linear32)(const float *source, const float *weights, const float *bias, int activation, int inputs,
                     int outputs, int first, int last, float *target);
    /* Queries first..last. */
    void (*attention)(const struct head *head, int first, int last);
    /* Packs the vectors of distances. `packed` may be NULL. Returns its size in bytes. */
    size_t (*pack_distances)(const struct distance_table *table, void *packed, float *back);
    /* One token: target = word * scale + position + type. `position` and `type` may be NULL. */
    void (*embed)(const int16_t *word, float scale, const float *position, const float *type, int width,
                  float *target);
    /* The rotary position of one token, in place: of each head, number i and number i + half are turned by an angle. */
    void (*rotate)(const float *cosines, const float *sines, int heads, int half, float *line);
    /* Lines first..last divided by their root mean square. `residual` is added and may be NULL. Both may be the target. */
    void (*root_mean_square_norm)(const float *source, const float *weight, const float *residual, float epsilon,
                                  int width, int first, int last, float *target);
};

extern const struct kernels penstock_plain;
#if defined(__x86_64__)
extern const struct kernels penstock_avx2;
extern const struct kernels penstock_avx512_vnni;
extern const struct kernels penstock_avx512_bf16;
extern const struct kernels penstock_amx;
#endif

/* Floats of scratch memory of one thread for the attention over `tokens` tokens: keys, values, the mask, and 16 lines
of scores whose starts are spread over the cache sets. With distances, 16-bit keys once more, and 16 lines of products. */
static inline size_t attention_scratch(int tokens, int width, int distances) {
    size_t padded = ((size_t)tokens + 31) / 32 * 32, more = padded * (size_t)width / 2 + 16 * (padded + DISTANCES_SPARE);
    return (padded + 16) * ((size_t)width + 17) + (distances ? more : 0);
}

#endif
