/* The interface of the native engine: what Python calls through ctypes. Plain C types, no Python.

A model is a list of steps over buffers of floats, [rows * tokens, width], or [rows, width] from FIRST on, or [tokens of
an id in all rows, width] from CHOSEN on.
Weights stay where the caller has them, except those of 8-bit products, which are packed once when the model is
opened. */
#ifndef PENSTOCK_NATIVE_H
#define PENSTOCK_NATIVE_H

#include <stdint.h>

#define PENSTOCK_ABI 9
#define PENSTOCK_DISTANCES_SPARE 33 /* floats behind each line of `distances` that are read and not used */
#define PENSTOCK_API __attribute__((visibility("default")))

enum penstock_kind {
    PENSTOCK_EMBED = 0,     /* words + positions + types */
    PENSTOCK_NORM = 1,      /* layer normalisation */
    PENSTOCK_LINEAR8 = 2,   /* 8-bit product; activations are quantised row by row */
    PENSTOCK_LINEAR32 = 3,  /* float product, for small heads */
    PENSTOCK_ATTENTION = 4, /* of every query over the row's tokens */
    PENSTOCK_FIRST = 5,     /* the first token of each row; what is made of it has one line for each row */
    PENSTOCK_CHOSEN = 6,    /* the tokens of one id, row by row; what is made of it has one line for each of them */
};

enum penstock_activation {
    PENSTOCK_NONE = 0,
    PENSTOCK_GELU = 1,
    PENSTOCK_RELU = 2,
    PENSTOCK_TANH = 3,
    PENSTOCK_GELU_TANH = 4, /* GELU by way of tanh, as models of Google's have it */
};

/* What becomes of a row's lines, one for each of its tokens. */
enum penstock_pooling {
    PENSTOCK_EVERY = 0, /* they are the result as they are, padding too */
    PENSTOCK_MEAN = 1,  /* one line, of the tokens that count: their sum, one after the other, divided by their number */
    PENSTOCK_CLS = 2,   /* the first one */
};

enum penstock_isa {
    PENSTOCK_PLAIN = 0,
    PENSTOCK_AVX2 = 1,
    PENSTOCK_AVX512_VNNI = 2,
    PENSTOCK_AVX512_BF16 = 3,
    PENSTOCK_AMX = 4,
};

enum penstock_status { PENSTOCK_OK = 0, PENSTOCK_NO_MEMORY = 1, PENSTOCK_BAD_INPUT = 2, PENSTOCK_BAD_MODEL = 3 };

/* One step. Buffers are numbered from 0; -1 is none. All widths of what EMBED, LINEAR8, NORM and ATTENTION read and
write are multiples of 32, as is what LINEAR32 reads. */
struct penstock_step {
    int32_t kind;
    int32_t source;
    int32_t target;
    int32_t residual;   /* LINEAR8: added to the result */
    int32_t keys;       /* ATTENTION: the source holds the queries; where all three are the same buffer, it holds */
    int32_t values;     /* queries, keys and values side by side */
    int32_t inputs;     /* width of the source; EMBED: how many words there are */
    int32_t outputs;    /* width of the target */
    int32_t activation; /* of LINEAR8 and LINEAR32 */
    int32_t heads;      /* ATTENTION */
    int32_t positions;  /* EMBED: how many positions the table has; ATTENTION: how many tokens `distances` is for */
    int32_t types;      /* EMBED: how many types the table has; 0: none */
    int32_t padding;    /* EMBED: -1: positions count from 0; else the id of padding, from which other ids count up;
                           CHOSEN: the id of the tokens */
    float epsilon;      /* NORM; ATTENTION: the factor of the scores */
    const void *weights;  /* LINEAR8: int8 [inputs, outputs]; LINEAR32: float [outputs, inputs]; NORM: float [width];
                             EMBED: int16 [words, width] */
    const float *scales;  /* LINEAR8: [outputs]; EMBED: [words] */
    const float *bias;    /* LINEAR8, LINEAR32, NORM: [outputs] */
    const float *factors; /* LINEAR8: [inputs], what each channel of the source is multiplied by; may be NULL */
    const float *position_table; /* EMBED: [positions, width] */
    const float *type_table;     /* EMBED: [types, width]; may be NULL */
    const float *distances;      /* ATTENTION: [heads, 2 * positions - 1 + spare], added to the scores: of a key
                                    positions - 1 before its query, to one as far behind it; may be NULL */
};

struct penstock_model;

PENSTOCK_API int penstock_abi(void);
PENSTOCK_API int penstock_best_isa(void);

/* Packs the weights. `threads` includes the caller's. NULL when memory or the model is bad, with *status set. */
PENSTOCK_API struct penstock_model *penstock_open(const struct penstock_step *steps, int32_t count, int32_t output,
                                                  int32_t threads, int32_t isa, int32_t *status);

/* One batch. The upper part says what to run, and stays as it is until it is over; the lower one what came of it. */
struct penstock_job {
    struct penstock_model *model;
    const int64_t *ids, *mask, *types; /* [rows, tokens]; `types` may be NULL */
    float *result;                     /* takes the output buffer, or what it is pooled to: [rows, width] */
    int64_t floats;                    /* of `result`: as many as that has */
    int32_t rows, tokens;
    int32_t threads; /* at most; several callers at once are welcome, one of which gets the helpers */
    int32_t company; /* not 0: only once the other callers are gone */
    int32_t pooling; /* enum penstock_pooling; of buffers that have a line for each token alone */

    int64_t started, ended; /* nanoseconds of the monotonic clock; set by streams alone */
    int32_t status;
    struct penstock_job *next; /* for streams: what waits behind it, or ended after it */
};

/* Runs a job in the caller's thread. */
PENSTOCK_API void penstock_run(struct penstock_job *job);

/* No run may be under way. */
PENSTOCK_API void penstock_close(struct penstock_model *model);

/* Threads that run jobs, each one after the other: first come, first served, and of those that sleep the first is woken.
Submit, retract and collect are for one thread at a time. */
struct penstock_streams;

/* NULL when threads, memory or files cannot be had. `threads`: [count], takes the kernel's numbers of the threads. */
PENSTOCK_API struct penstock_streams *penstock_streams_open(int32_t count, int32_t *threads);

/* A file that can be read when jobs have ended that nobody has collected; collecting makes it silent again. */
PENSTOCK_API int penstock_streams_event(const struct penstock_streams *streams);

/* The job's memory is the streams' until it was collected or retracted. */
PENSTOCK_API void penstock_streams_submit(struct penstock_streams *streams, struct penstock_job *job);

/* Takes a job back that has not begun. 0 when it has. */
PENSTOCK_API int penstock_streams_retract(struct penstock_streams *streams, const struct penstock_job *job);

/* Those that have ended since, linked in that order; NULL when there are none. */
PENSTOCK_API struct penstock_job *penstock_streams_collect(struct penstock_streams *streams);

/* Runs what was submitted, then ends the threads. Nobody may use it any more. */
PENSTOCK_API void penstock_streams_close(struct penstock_streams *streams);

#endif
