/* The interface of the native engine, which Python calls through ctypes. Plain C types, independent of Python.

A model is a list of steps over buffers of floats: [rows * tokens, width], or [rows, width] from FIRST or AVERAGE on, or [tokens of
an id in all rows, width] from CHOSEN on.
Weights stay in the caller's memory, except those of 8-bit products, which are packed once when the model is opened. */
#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#include <stdint.h>

#define PENSTOCK_ABI 13
#define PENSTOCK_DISTANCES_SPARE 33 /* floats after each line of `distances`, read but not used */
#define PENSTOCK_API __attribute__((visibility("default")))

enum penstock_kind {
    PENSTOCK_EMBED = 0,     /* words + positions + types */
    PENSTOCK_NORM = 1,      /* layer normalisation */
    PENSTOCK_LINEAR8 = 2,   /* 8-bit product; activations are quantised row by row */
    PENSTOCK_LINEAR32 = 3,  /* float product, for small heads */
    PENSTOCK_ATTENTION = 4, /* of all queries over the row's tokens */
    PENSTOCK_FIRST = 5,     /* the first token of each row; later steps have one line for each row */
    PENSTOCK_CHOSEN = 6,    /* the tokens of one id, row by row; later steps have one line for each of them */
    PENSTOCK_ROTATE = 7,    /* rotary positions of queries and keys, in place */
    PENSTOCK_AVERAGE = 8,   /* the mean of the unmasked tokens of each row; later steps have one line for each row */
    PENSTOCK_HEAD_NORM = 9, /* root mean square normalisation of each head of queries or keys, in place */
    PENSTOCK_LAST = 10,     /* the last unmasked token of each row; later steps have one line for each row */
    PENSTOCK_LARGEST = 11,  /* 8-bit product of which the largest result of a row's unmasked tokens counts, as log(1 + x)
                               of positive ones, or the sum of these; later steps have one line for each row */
};

enum penstock_activation {
    PENSTOCK_NONE = 0,
    PENSTOCK_GELU = 1,
    PENSTOCK_RELU = 2,
    PENSTOCK_TANH = 3,
    PENSTOCK_GELU_TANH = 4, /* the tanh approximation of GELU, used by Google's models */
    PENSTOCK_SILU = 5,
};

/* Pooling of a row's lines, one for each of its tokens. */
enum penstock_pooling {
    PENSTOCK_EVERY = 0, /* none: all lines are the result, also those of padding */
    PENSTOCK_MEAN = 1,  /* one line: the sum of the unmasked tokens, in their order, divided by their number */
    PENSTOCK_CLS = 2,   /* the first line */
    PENSTOCK_LAST_TOKEN = 3, /* the line of the last unmasked token */
};

enum penstock_isa {
    PENSTOCK_PLAIN = 0,
    PENSTOCK_AVX2 = 1,
    PENSTOCK_AVX512_VNNI = 2,
    PENSTOCK_AVX512_BF16 = 3,
    PENSTOCK_AMX = 4,
};

enum penstock_status { PENSTOCK_OK = 0, PENSTOCK_NO_MEMORY = 1, PENSTOCK_BAD_INPUT = 2, PENSTOCK_BAD_MODEL = 3 };

/* One step. Buffers are numbered from 0; -1 is none. EMBED, LINEAR8, LARGEST, NORM, ROTATE and ATTENTION read and
write widths that are multiples of 32, and heads of HEAD_NORM have such widths; LINEAR32 reads such widths. */
struct penstock_step {
    int32_t kind;
    int32_t source;
    int32_t target;
    int32_t residual;   /* LINEAR8, NORM: added to the result; LINEAR8 with `gated`: multiplied with it */
    int32_t keys;       /* ATTENTION: the source holds the queries; if all three are the same buffer, it holds */
    int32_t values;     /* queries, keys and values in this order */
    int32_t inputs;     /* width of the source; EMBED: size of the vocabulary; HEAD_NORM: column of the first head;
                           ATTENTION: vectors of distances, 0: none */
    int32_t outputs;    /* width of the target; ROTATE: of the queries and keys, with which each line begins; HEAD_NORM:
                           of all its heads */
    int32_t activation; /* of LINEAR8 and LINEAR32 */
    int32_t heads;      /* ATTENTION: of the queries; ROTATE: of queries and keys together, of an even width each */
    int32_t positions;  /* EMBED: number of positions, 0: none; ATTENTION: number of tokens that `distances` or the
                           vectors of distances support;
                           ROTATE: number of tokens that the tables support */
    int32_t types;      /* EMBED: number of token types; 0: none, 1: the same for all tokens; LARGEST: of logarithms */
    int32_t padding;    /* EMBED: -1: positions start at 0; otherwise the padding id, after which positions start;
                           CHOSEN: the id of the tokens; LAST: only tokens of this id count, -1: all do */
    int32_t gated;      /* LINEAR8 without an activation: the residual is a factor; LAST: only tokens of other ids count;
                           LARGEST: the sum over the tokens */
    int32_t key_heads;  /* ATTENTION: of keys and values, each for as many consecutive heads of queries */
    int32_t before, after; /* ATTENTION: how many keys before and after its own a query attends to; -1: all */
    float epsilon;      /* NORM, HEAD_NORM; ATTENTION: scale of the scores */
    const void *weights;  /* LINEAR8, LARGEST: int8 [inputs, outputs]; LINEAR32: float [outputs, inputs]; NORM: float
                             [width]; HEAD_NORM: float [width of a head]; EMBED: int16 [words, width] */
    const float *scales;  /* LINEAR8, LARGEST: [outputs]; EMBED: [words] */
    const float *bias;    /* LINEAR8, LARGEST, LINEAR32: [outputs]; NORM: [width]; NULL: by the root mean square */
    const float *factors; /* LINEAR8, LARGEST: [inputs], factor of each channel of the source; may be NULL */
    const float *position_table; /* EMBED: [positions, width]; NULL without positions */
    const float *type_table;     /* EMBED: [types, width]; may be NULL */
    const float *distances;      /* ATTENTION: [heads, 2 * positions - 1 + spare], added to the scores, from a
                                    key positions - 1 before its query to one as far after it; may be NULL */
    const float *cosines, *sines; /* ROTATE: [positions, half of a head] */
    /* ATTENTION: [heads, inputs, width of a head]. The products of queries with the former, and of keys with the latter, are
    added to the scores; either may be NULL. `distance_rows`: [2 * positions - 1], the vector for a distance, in the order of
    `distances`. */
    const float *distance_keys, *distance_queries;
    const int16_t *distance_rows;
};

struct penstock_model;

PENSTOCK_API int penstock_abi(void);
PENSTOCK_API int penstock_best_isa(void);

/* Packs the weights. `threads` includes the caller's. NULL, with *status set, without memory or for a bad model. */
PENSTOCK_API struct penstock_model *penstock_open(const struct penstock_step *steps, int32_t count, int32_t output,
                                                  int32_t threads, int32_t isa, int32_t *status);

/* One batch. The first part is the input, and must not change during the run; the second part is the result. */
struct penstock_job {
    struct penstock_model *model;
    const int64_t *ids, *mask, *types; /* [rows, tokens]; `types` may be NULL */
    float *result;                     /* gets the output buffer, or the pooled output [rows, width] */
    int64_t floats;                    /* size of `result` in floats */
    int32_t rows, tokens;
    int32_t threads; /* at most; of several concurrent callers one gets the pool's threads */
    int32_t when_idle; /* not 0: use the pool's threads only once there are no other callers */
    int32_t pooling; /* enum penstock_pooling; only for outputs with a line for each token */

    int64_t started, ended; /* nanoseconds of the monotonic clock; set by streams only */
    int32_t status;
    struct penstock_job *next; /* for streams: the next waiting or ended job */
};

/* Runs a job in the caller's thread. */
PENSTOCK_API void penstock_run(struct penstock_job *job);

/* No run may be in progress. */
PENSTOCK_API void penstock_close(struct penstock_model *model);

/* Threads that run jobs in the order of their submission. Of the sleeping threads the first one is woken.
Submit, retract and collect must be called by one thread at a time. */
struct penstock_streams;

/* NULL without threads, memory or file descriptors. `threads`: [count], gets the kernel's thread ids. */
PENSTOCK_API struct penstock_streams *penstock_streams_open(int32_t count, int32_t *threads);

/* A file descriptor that is readable while there are ended jobs that were not collected. */
PENSTOCK_API int penstock_streams_event(const struct penstock_streams *streams);

/* The streams use the job's memory until it is collected or retracted. */
PENSTOCK_API void penstock_streams_submit(struct penstock_streams *streams, struct penstock_job *job);

/* Withdraws a job that has not started. 0 if it has. */
PENSTOCK_API int penstock_streams_retract(struct penstock_streams *streams, const struct penstock_job *job);

/* The jobs that have ended since the last call, linked in that order; NULL if there are none. */
PENSTOCK_API struct penstock_job *penstock_streams_collect(struct penstock_streams *streams);

/* Runs all submitted jobs, then ends the threads and frees `streams`. */
PENSTOCK_API void penstock_streams_close(struct penstock_streams *streams);

/* ---- Decoders (text generation) ---- */

/* A product: weight = scale of the output * whole number. A part that a model does not have has 0 outputs. */
struct penstock_product {
    int32_t inputs, outputs, bits; /* inputs and outputs are multiples of 32; 8 or 4 bits */
    const uint8_t *packed; /* whole numbers from -127 to 127, packed as in kernels.h (record_bytes) */
    const float *scales; /* [outputs] */
    const float *bias; /* [outputs]; may be NULL */
};

/* Normalisation: with a bias by mean and variance, otherwise by the root mean square. A part that a model does not have has
no weight. */
struct penstock_normalisation {
    const float *weight, *bias;
    float epsilon;
};

struct penstock_layer {
    struct penstock_product attend;  /* queries, keys and values: outputs are (heads + 2 key heads) x head width */
    struct penstock_product output, up, gate, down;
    struct penstock_normalisation attention_norm, network_norm; /* of the inputs of the attention and the network */
    struct penstock_normalisation query_norm, key_norm;         /* of each head, by the root mean square; optional */
    struct penstock_normalisation attended_norm, expanded_norm; /* of the outputs, before the sum; optional */
    float scale;    /* of the products of queries and keys */
    int32_t window; /* tokens that a token attends to at most, itself included; 0: all before it */
    int32_t rope;   /* number of the rotary positions; -1: none */
};

/* Rotary positions: numbers i and i + half of each head are turned by the angle position * frequencies[i]. */
struct penstock_rope {
    int32_t half;
    float magnitude; /* factor of cosine and sine */
    const float *frequencies; /* [half] */
};

struct penstock_decoder_parts {
    int32_t layers, ropes, heads, key_heads;
    int32_t head_width; /* as computed: a multiple of 16 */
    int32_t head_size;  /* without the zeros that fill a head up */
    int32_t vocabulary, positions; /* rows of the tables */
    int32_t activation;
    float embedding_scale;
    struct penstock_product embeddings; /* [vocabulary, hidden] */
    struct penstock_product head;       /* 0 outputs: the embeddings */
    const float *position_table;        /* [positions, hidden]; may be NULL */
    struct penstock_normalisation final_norm;
    const struct penstock_layer *layer;
    const struct penstock_rope *rope;
};

struct penstock_decoder;

/* Copies the weights, and takes the memory of `blocks` blocks of the cache, each of 32 tokens. `threads` includes the
caller's. NULL, with *status set, without memory or for parts that do not fit together. */
PENSTOCK_API struct penstock_decoder *penstock_decoder_open(const struct penstock_decoder_parts *parts, int32_t blocks,
                                                            int32_t threads, int32_t isa, int32_t *status);

/* The rows of a step: tokens of some sequences, which the cache holds up to `positions`. */
struct penstock_rows {
    int32_t rows;
    const int32_t *tokens;    /* row after row */
    const int32_t *counts;    /* [rows]: tokens of each row */
    const int32_t *positions; /* [rows] */
    const int32_t *blocks;    /* row after row, for each ceil((position + count) / 32) numbers */
    const int32_t *logits;    /* [rows]: its last tokens that need logits */
    float *result;            /* [sum of logits, outputs of the head] */
};

/* For one caller at a time. enum penstock_status. */
PENSTOCK_API int32_t penstock_decoder_step(struct penstock_decoder *decoder, const struct penstock_rows *rows);

PENSTOCK_API void penstock_decoder_close(struct penstock_decoder *decoder);

#endif
