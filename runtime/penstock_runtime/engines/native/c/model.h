/* A model that is open. */
#ifndef PENSTOCK_MODEL_H
#define PENSTOCK_MODEL_H

#include <pthread.h>

#include "kernels.h"
#include "native.h"
#include "pool.h"

#define MOST_BUFFERS 64

/* What a phase does. A step is one phase or two: a product quantises its source first, unless the phase before did. */
enum task { EMBED, NORM, QUANTISE, LINEAR8, LINEAR32, ATTENTION, FIRST, CHOSEN };

/* What a buffer has a line for. */
enum per { PER_TOKEN, PER_ROW, PER_CHOSEN };

struct phase {
    enum task task;
    struct penstock_step step;
    const struct linear8 *layer; /* LINEAR8; NORM: of the product that reads the result, which is quantised at once */
    const float *factors;
    enum per per; /* of what it writes */
};

/* Phases first..last that follow each other and whose lines, of tokens, each depend on the same line alone; or one phase. */
struct stretch {
    int first, last;
};

/* The memory of one run: kept from run to run, and as large as the largest was. */
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
    int32_t *where;    /* [chosen]: the lines of the tokens that were chosen */
    float *attention;  /* [participants, attention floats] */
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
    int most_tokens; /* of a row; 0: as many as there are positions */
    int chosen_id;   /* -1: no step chooses */
    struct pool *pool;
    pthread_mutex_t lock; /* of the free list */
    struct scratch *free;
};

static inline size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

/* Whether this processor moves bytes and bits within a register (AVX-512 VBMI), as narrow.h has it. */
int has_vbmi(void);

/* The kernels of an instruction set; NULL when this processor has it not. */
const struct kernels *kernels_for(int isa);

/* Memory for so many rows, tokens of each and chosen tokens of all; NULL when there is none. Give it back. */
struct scratch *scratch_take(struct penstock_model *model, size_t rows, size_t tokens, size_t chosen);
void scratch_give(struct penstock_model *model, struct scratch *scratch);
void scratch_free(struct scratch *scratch);

#endif
