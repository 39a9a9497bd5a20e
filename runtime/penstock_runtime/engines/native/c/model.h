/* An open model: its steps as phases, and the memory of its runs. */
#ifndef PENSTOCK_MODEL_H
#define PENSTOCK_MODEL_H

#include <pthread.h>

#include "kernels.h"
#include "native.h"
#include "pool.h"

#define MOST_BUFFERS 64

/* The kinds of phases. A step is one phase or two: a product quantises its source, unless a phase before did. */
enum task { EMBED, NORM, QUANTISE, LINEAR8, LINEAR32, ATTENTION, FIRST, CHOSEN, ROTATE, AVERAGE, HEAD_NORM, LAST, LARGEST };

/* What the lines of a buffer belong to. */
enum per { PER_TOKEN, PER_ROW, PER_CHOSEN };

/* Vectors of distances of all heads, packed. */
struct packed_distances {
    const char *at; /* NULL: none */
    size_t stride;  /* bytes to the next head */
    const float *backs; /* [heads] */
};

struct phase {
    enum task task;
    struct penstock_step step;
    const struct linear8 *layer; /* LINEAR8, LARGEST; NORM: the product that reads the result, which is quantised immediately */
    const float *factors;
    struct packed_distances distance_keys, distance_queries; /* ATTENTION */
    enum per per; /* of the target */
};

/* Consecutive phases first..last in which each line of a token depends on the same line only; or a single phase. */
struct stretch {
    int first, last;
};

/* The memory of one run. Reused by later runs, grown to the largest one. */
struct scratch {
    struct scratch *next;
    size_t lines, tokens, rows, chosen;
    char *memory;
    size_t size;
    float *buffers[MOST_BUFFERS];
    uint8_t *stored;
    struct row_grid *grids;
    float *keep;       /* [rows, tokens] */
    int32_t *position; /* [rows, tokens] */
    int32_t *where;    /* [chosen]: the lines of the chosen tokens */
    float *attention;  /* [participants, attention floats]; also for the results of LARGEST */
    size_t attention_floats;
};

struct penstock_model {
    const struct kernels *kernels;
    struct phase *phases;
    int phase_count;
    struct stretch *stretches;
    int stretch_count;
    struct linear8 *layers;
    char *packed;
    size_t packed_size;
    int buffer_widths[MOST_BUFFERS]; /* 0 until a step writes it */
    enum per buffer_per[MOST_BUFFERS];
    int buffers, output, widest_stored, head_width, threads;
    int most_tokens; /* of a row; 0: limited by the positions only */
    int chosen_id;   /* -1: no CHOSEN step */
    int has_distances; /* an attention has vectors of distances */
    int has_largest; /* there is a LARGEST step */
    struct pool *pool;
    pthread_mutex_t lock; /* of the free list */
    struct scratch *free;
};

#define LARGEST_PANELS 4  /* panels of a LARGEST step that are computed together, for LARGEST_LINES tokens at a time */
#define LARGEST_LINES 128

static inline size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

/* Whether this processor has AVX-512 VBMI, which narrow.h needs. */
int has_vbmi(void);

/* The kernels of an instruction set; NULL if this processor does not have it. */
const struct kernels *kernels_for(int isa);
const struct decoder_kernels *decoder_kernels_for(int isa);

/* Zeroed memory at a multiple of 64 bytes, in huge pages if available; NULL if there is none. munmap returns it. */
void *take_pages(size_t size);

/* Memory for `rows` rows of `tokens` tokens, and `chosen` chosen tokens in total; NULL if there is none. To be returned
with scratch_give. */
struct scratch *scratch_take(struct penstock_model *model, size_t rows, size_t tokens, size_t chosen);
void scratch_give(struct penstock_model *model, struct scratch *scratch);
void scratch_free(struct scratch *scratch);

#endif
