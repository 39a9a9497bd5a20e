/* An open decoder: its products, its cache, and the memory of a step. */
#ifndef PENSTOCK_DECODER_H
#define PENSTOCK_DECODER_H

#include "model.h"

#define MOST_HEAD_WIDTH 1024
#define PRIVATE_LINES 8 /* up to this number each thread prepares the lines of a product itself: a phase less to wait for */

enum decoder_task {
    TABLE,         /* embeddings and positions of the tokens */
    PREPARE,       /* normalisation and quantisation of a product's source, for many lines */
    ATTEND,        /* queries, keys and values */
    PLACE,         /* rotates, and writes the cache */
    ATTENTION_OF,  /* over the cache; places first if no phase did */
    OUTPUT,        /* the attention's product, added to the hidden states */
    NETWORK,       /* up and gate */
    DOWN,          /* the network's product, added to the hidden states */
    SUM,           /* a normalised output, added to the hidden states */
    WANTED,        /* copies the lines whose logits are wanted */
    HEAD,
};

/* One phase of a step. `layer` may be the number of layers, for the final phases. */
struct stage {
    enum decoder_task task, of; /* `of`: PREPARE, SUM: the product */
    int layer;
};

struct decoder_layer {
    struct penstock_layer parts; /* normalisations, with weights in the decoder's memory */
    struct linear8 attend, output, up, gate, down;
};

/* Memory of one thread. */
struct participant {
    int prepared; /* the stage whose lines are in `stored`; -1: none */
    uint8_t *stored;
    struct row_grid *grids;
    float *line;   /* [widest] */
    float *scores; /* [queries, tokens of a sequence] */
    int8_t *room;  /* [widest, PANEL]: weights of 4 bits of a panel in 8 bits */
};

struct penstock_decoder {
    const struct decoder_kernels *kernels;
    struct penstock_decoder_parts parts;
    struct decoder_layer *layers;
    struct penstock_rope *ropes;
    struct linear8 embeddings, head;
    char *weights;
    size_t weights_size;
    uint16_t *cache; /* float16 [layers, blocks, key heads, 2, head width * BLOCK_TOKENS] */
    size_t cache_size;
    int blocks, threads;
    int hidden, widest; /* inputs of a product */
    int joined;         /* width of queries, keys and values */
    struct pool *pool;
    struct participant *participants;
    char *own;          /* memory of the participants */
    size_t own_size;
    struct stage *stages;

    /* Of the current step. */
    const struct penstock_rows *rows;
    int lines, wanted, stage_count, units_tokens;
    int *line_row, *line_position; /* [lines] */
    int *row_line, *row_block;     /* [rows]: the first of its lines and blocks */
    int *wanted_line;              /* [wanted] */
    int *unit_row, *unit_first;    /* [units_tokens]: pieces of rows that one unit of the attention computes */
    char *memory;
    size_t memory_size;
    int most_lines, most_rows;
    float *x, *wanted_x, *joined_lines, *attended, *inner, *extra, *angles;
    uint8_t *stored; /* [lines, 2, widest] */
    struct row_grid *grids;
};

/* Makes room for a step. 0 if there is no memory. */
int decoder_grow(struct penstock_decoder *decoder, int lines, int rows);

#endif
