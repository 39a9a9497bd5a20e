/* A model: its steps, packed weights, and how a batch runs through them phase by phase. */
#define _GNU_SOURCE
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"
#include "native.h"
#include "pool.h"

#define MOST_BUFFERS 64
#define LINES 8         /* of tokens, that one block of a phase over lines has */
#define PRODUCT_LINES 64 /* and one of a product: enough to pay for reading the weights */
#define QUERIES_AT_ONCE 64
#define HUGE_PAGE ((size_t)2 << 20)

/* What a phase does. A step is one phase or two: a product quantises its source first, unless the phase before did. */
enum task { EMBED, NORM, QUANTISE, LINEAR8, LINEAR32, ATTENTION, FIRST };

struct phase {
    enum task task;
    struct penstock_step step;
    const struct linear8 *layer; /* LINEAR8; NORM: of the product that reads the result, which is quantised at once */
    const float *factors;
    int per_row; /* one line for each row, not for each token */
};

struct scratch {
    struct scratch *next;
    size_t lines, tokens, rows;
    int participants;
    char *memory;
    size_t size;
    float *buffers[MOST_BUFFERS];
    uint8_t *stored;
    struct row_grid *grids;
    float *keep;       /* [rows, tokens] */
    int32_t *position; /* [rows, tokens] */
    float *attention;  /* [participants, attention floats] */
    size_t attention_floats;
};

struct penstock_model {
    const struct kernels *kernels;
    struct phase *phases;
    int phase_count;
    struct linear8 *layers;
    char *packed;
    size_t packed_size;
    int buffer_widths[MOST_BUFFERS]; /* 0 until a step writes it */
    int buffer_per_row[MOST_BUFFERS]; /* 1 for what FIRST made, and what was made of that */
    int buffers, output, widest_stored, head_width, threads;
    struct pool *pool;
    pthread_mutex_t lock; /* of the free list */
    struct scratch *free;
};

struct run {
    struct penstock_model *model;
    struct scratch *scratch;
    const int64_t *ids, *mask, *types;
    int rows, tokens;
};

int penstock_abi(void) { return PENSTOCK_ABI; }

#if defined(__x86_64__)
/* The processor has the tiles, and the kernel lets this process use them. */
static int has_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bit_AMX_TILE) || !(d & bit_AMX_INT8)) return 0;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
}
#endif

int penstock_best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        return has_amx() ? PENSTOCK_AMX : PENSTOCK_AVX512_VNNI;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return PENSTOCK_AVX2;
#endif
    return PENSTOCK_PLAIN;
}

static const struct kernels *kernels_for(int isa) {
    if (isa > penstock_best_isa()) return NULL;
    switch (isa) {
#if defined(__x86_64__)
    case PENSTOCK_AMX: return &penstock_amx;
    case PENSTOCK_AVX512_VNNI: return &penstock_avx512_vnni;
    case PENSTOCK_AVX2: return &penstock_avx2;
#endif
    case PENSTOCK_PLAIN: return &penstock_plain;
    default: return NULL;
    }
}

static size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }

/* Large pages where there are some: weights are read from end to end, and the processor knows few small pages. */
static void *take_pages(size_t size) {
    size_t whole = size + HUGE_PAGE;
    char *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    size_t before = rounded((size_t)memory, HUGE_PAGE) - (size_t)memory;
    if (before) munmap(memory, before);
    if (HUGE_PAGE - before) munmap(memory + before + size, HUGE_PAGE - before);
    (void)madvise(memory + before, size, MADV_HUGEPAGE);
    return memory + before;
}

/* ---- opening ---- */

static size_t layer_size(const struct penstock_step *s) {
    size_t in = (size_t)s->inputs, out = (size_t)s->outputs;
    return rounded(in * out, ALIGNMENT) + 3 * rounded(out * 4, ALIGNMENT) + rounded(in * 4, ALIGNMENT);
}

static void pack(const struct penstock_step *s, struct linear8 *layer, const float **factors, char *at) {
    size_t in = (size_t)s->inputs, out = (size_t)s->outputs;
    const int8_t *weights = s->weights;
    int8_t *packed = (int8_t *)at;
    float *scales = (float *)(at += rounded(in * out, ALIGNMENT));
    float *bias = (float *)(at += rounded(out * 4, ALIGNMENT));
    int32_t *sums = (int32_t *)(at += rounded(out * 4, ALIGNMENT));
    float *factor = (float *)(at += rounded(out * 4, ALIGNMENT));
    for (size_t n = 0; n < out; n++) {
        int32_t sum = 0;
        for (size_t k = 0; k < in; k++) {
            int8_t w = weights[k * out + n];
            packed[(n / PANEL * (in / 4) + k / 4) * (PANEL * 4) + n % PANEL * 4 + k % 4] = w;
            sum += w;
        }
        sums[n] = sum;
    }
    memcpy(scales, s->scales, out * sizeof(float));
    memcpy(bias, s->bias, out * sizeof(float));
    if (s->factors) memcpy(factor, s->factors, in * sizeof(float));
    *factors = s->factors ? factor : NULL;
    *layer = (struct linear8){s->inputs, s->outputs, s->activation, packed, scales, bias, sums};
}

static int bad_buffer(const struct penstock_model *m, int buffer, int width) {
    return buffer < 0 || buffer >= MOST_BUFFERS || m->buffer_widths[buffer] != width;
}

/* The shape of a buffer that a step writes; all its writers agree. */
static int declare(struct penstock_model *m, int buffer, int width, int per_row) {
    if (buffer < 0 || buffer >= MOST_BUFFERS || width <= 0) return 0;
    if (buffer >= m->buffers) m->buffers = buffer + 1;
    if (m->buffer_widths[buffer] && m->buffer_widths[buffer] != width) return 0;
    if (m->buffer_widths[buffer] && m->buffer_per_row[buffer] != per_row) return 0;
    m->buffer_widths[buffer] = width;
    m->buffer_per_row[buffer] = per_row;
    return 1;
}

/* Whether a step reads what is there, and declares what it writes. `per_row` is that of its source. */
static int check_step(struct penstock_model *m, const struct penstock_step *s, int per_row) {
    int panels = s->outputs > 0 && s->outputs % PANEL == 0;
    switch (s->kind) {
    case PENSTOCK_EMBED:
        return panels && s->inputs > 0 && s->positions > 0 && s->weights && s->scales && s->position_table &&
               (!s->types || s->type_table) && declare(m, s->target, s->outputs, 0);
    case PENSTOCK_NORM:
        return panels && s->weights && s->bias && !bad_buffer(m, s->source, s->outputs) &&
               declare(m, s->target, s->outputs, per_row);
    case PENSTOCK_LINEAR8:
        return panels && s->inputs > 0 && s->inputs % PANEL == 0 && s->weights && s->scales && s->bias &&
               !bad_buffer(m, s->source, s->inputs) && s->source != s->target &&
               declare(m, s->target, s->outputs, per_row) &&
               (s->residual < 0 ||
                (!bad_buffer(m, s->residual, s->outputs) && m->buffer_per_row[s->residual] == per_row));
    case PENSTOCK_LINEAR32:
        return s->inputs > 0 && s->inputs % PANEL == 0 && s->weights && s->bias &&
               !bad_buffer(m, s->source, s->inputs) && s->source != s->target &&
               declare(m, s->target, s->outputs, per_row);
    case PENSTOCK_ATTENTION: {
        int together = s->keys == s->source && s->values == s->source, width = together ? 3 * s->outputs : s->outputs;
        return panels && s->heads > 0 && s->outputs % (s->heads * 16) == 0 && !bad_buffer(m, s->source, width) &&
               !bad_buffer(m, s->keys, width) && !bad_buffer(m, s->values, width) && !m->buffer_per_row[s->keys] &&
               !m->buffer_per_row[s->values] && s->target != s->source && s->target != s->keys &&
               s->target != s->values && declare(m, s->target, s->outputs, per_row);
    }
    case PENSTOCK_FIRST:
        return s->outputs > 0 && !bad_buffer(m, s->source, s->outputs) && !per_row && s->source != s->target &&
               declare(m, s->target, s->outputs, 1);
    default: return 0;
    }
}

static int add_steps(struct penstock_model *m, const struct penstock_step *steps, int count) {
    static const enum task tasks[] = {EMBED, NORM, LINEAR8, LINEAR32, ATTENTION, FIRST};
    char *at = m->packed;
    int layers = 0;
    for (int i = 0; i < count; i++) {
        const struct penstock_step *s = &steps[i];
        int per_row = s->source >= 0 && s->source < MOST_BUFFERS && m->buffer_per_row[s->source];
        if (!check_step(m, s, per_row) || (i == 0) != (s->kind == PENSTOCK_EMBED)) return 0;
        struct phase phase = {.task = tasks[s->kind], .step = *s, .per_row = per_row || s->kind == PENSTOCK_FIRST};
        if (s->kind == PENSTOCK_ATTENTION && s->outputs / s->heads > m->head_width)
            m->head_width = s->outputs / s->heads;
        if (s->kind == PENSTOCK_LINEAR8) {
            struct linear8 *layer = &m->layers[layers++];
            pack(s, layer, &phase.factors, at);
            at += layer_size(s);
            if (s->inputs > m->widest_stored) m->widest_stored = s->inputs;
            struct phase *before = &m->phases[m->phase_count - 1];
            if (before->task == NORM && before->step.target == s->source) {
                before->layer = layer;
                before->factors = phase.factors;
            } else {
                phase.task = QUANTISE;
                m->phases[m->phase_count++] = phase;
                phase.task = LINEAR8;
            }
            phase.layer = layer;
        }
        m->phases[m->phase_count++] = phase;
    }
    return !bad_buffer(m, m->output, m->buffer_widths[m->output]) && m->buffer_widths[m->output] &&
           m->phase_count <= POOL_MOST_PHASES;
}

struct penstock_model *penstock_open(const struct penstock_step *steps, int32_t count, int32_t output, int32_t threads,
                                     int32_t isa, int32_t *status) {
    size_t packed = 0;
    int layers = 0;
    *status = PENSTOCK_BAD_MODEL;
    const struct kernels *kernels = kernels_for(isa);
    if (!kernels || count <= 0 || count > POOL_MOST_PHASES / 2 || threads < 1 || threads > 1024 || output < 0 || output >= MOST_BUFFERS) return NULL;
    for (int i = 0; i < count; i++)
        if (steps[i].kind == PENSTOCK_LINEAR8) {
            if (steps[i].inputs <= 0 || steps[i].outputs <= 0 || steps[i].outputs % PANEL || steps[i].inputs % PANEL || !steps[i].weights) return NULL;
            packed += layer_size(&steps[i]);
            layers++;
        }
    *status = PENSTOCK_NO_MEMORY;
    struct penstock_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    pthread_mutex_init(&m->lock, NULL);
    m->kernels = kernels;
    m->output = output;
    m->threads = threads;
    m->packed_size = rounded(packed + 1, HUGE_PAGE);
    m->packed = take_pages(m->packed_size);
    m->phases = calloc((size_t)count * 2, sizeof *m->phases);
    m->layers = calloc((size_t)layers + 1, sizeof *m->layers);
    m->pool = threads > 1 ? pool_start(threads) : NULL;
    if (!m->packed || !m->phases || !m->layers || (threads > 1 && !m->pool)) {
        penstock_close(m);
        return NULL;
    }
    if (!add_steps(m, steps, count)) {
        *status = PENSTOCK_BAD_MODEL;
        penstock_close(m);
        return NULL;
    }
    *status = PENSTOCK_OK;
    return m;
}

static void scratch_free(struct scratch *s) {
    if (!s) return;
    if (s->memory) munmap(s->memory, s->size);
    free(s);
}

void penstock_close(struct penstock_model *m) {
    if (!m) return;
    pool_stop(m->pool);
    while (m->free) {
        struct scratch *s = m->free;
        m->free = s->next;
        scratch_free(s);
    }
    if (m->packed) munmap(m->packed, m->packed_size);
    free(m->phases);
    free(m->layers);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

/* ---- memory of a run ---- */

static int scratch_grow(struct scratch *s, const struct penstock_model *m, size_t rows, size_t tokens) {
    size_t lines = rows * tokens;
    if (s->memory && lines <= s->lines && tokens <= s->tokens && rows <= s->rows) return 1;
    if (lines < s->lines) lines = s->lines;
    if (tokens < s->tokens) tokens = s->tokens;
    if (rows < s->rows) rows = s->rows;
    size_t at[MOST_BUFFERS], size = 0;
    for (int b = 0; b < m->buffers; b++) {
        at[b] = size;
        size += rounded(lines * (size_t)m->buffer_widths[b] * sizeof(float), ALIGNMENT);
    }
    size_t stored = size, grids, keep, position, attention;
    grids = stored + rounded(lines * (size_t)m->widest_stored, ALIGNMENT);
    keep = grids + rounded(lines * sizeof(struct row_grid), ALIGNMENT);
    position = keep + rounded(lines * sizeof(float), ALIGNMENT);
    attention = position + rounded(lines * sizeof(int32_t), ALIGNMENT);
    s->attention_floats = rounded(attention_scratch((int)tokens, m->head_width), ALIGNMENT);
    size = attention + (size_t)m->threads * s->attention_floats * sizeof(float);
    if (s->memory) munmap(s->memory, s->size);
    s->size = rounded(size, 4096);
    s->memory = mmap(NULL, s->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->memory == MAP_FAILED) {
        s->memory = NULL;
        return 0;
    }
    for (int b = 0; b < m->buffers; b++) s->buffers[b] = (float *)(s->memory + at[b]);
    s->stored = (uint8_t *)s->memory + stored;
    s->grids = (struct row_grid *)(s->memory + grids);
    s->keep = (float *)(s->memory + keep);
    s->position = (int32_t *)(s->memory + position);
    s->attention = (float *)(s->memory + attention);
    s->lines = lines;
    s->tokens = tokens;
    s->rows = rows;
    return 1;
}

static struct scratch *scratch_take(struct penstock_model *m, size_t rows, size_t tokens) {
    pthread_mutex_lock(&m->lock);
    struct scratch *s = m->free;
    if (s) m->free = s->next;
    pthread_mutex_unlock(&m->lock);
    if (!s) s = calloc(1, sizeof *s);
    if (s && !scratch_grow(s, m, rows, tokens)) {
        scratch_free(s);
        return NULL;
    }
    return s;
}

static void scratch_give(struct penstock_model *m, struct scratch *s) {
    pthread_mutex_lock(&m->lock);
    s->next = m->free;
    m->free = s;
    pthread_mutex_unlock(&m->lock);
}

/* ---- phases ---- */

static int at_most(int a, int b) { return a < b ? a : b; }
static int parts(int whole, int part) { return (whole + part - 1) / part; }

static int phase_lines(const struct run *run, const struct phase *phase) {
    return phase->per_row ? run->rows : run->rows * run->tokens;
}

/* How many units of work a phase has, each of which is done by one thread. */
static int phase_units(const struct run *run, const struct phase *phase) {
    int lines = phase_lines(run, phase);
    switch (phase->task) {
    case LINEAR8: return parts(lines, PRODUCT_LINES) * (phase->layer->outputs / PANEL);
    case ATTENTION: return run->rows * phase->step.heads * parts(lines / run->rows, QUERIES_AT_ONCE);
    default: return parts(lines, LINES);
    }
}

/* Units that go together: pairs of panels, and more where there would be more blocks than a ticket can count. */
static int phase_grain(const struct run *run, const struct phase *phase) {
    int least = phase->task == LINEAR8 && phase_lines(run, phase) < 16 ? 2 : 1;
    int most = parts(phase_units(run, phase), POOL_MOST_BLOCKS);
    return most > least ? most : least;
}

static void embed_lines(const struct run *run, const struct penstock_step *s, int first, int last) {
    float *target = run->scratch->buffers[s->target];
    for (int line = first; line < last; line++) {
        size_t width = (size_t)s->outputs, id = (size_t)run->ids[line];
        const float *type = s->types ? s->type_table + (run->types ? (size_t)run->types[line] : 0) * width : NULL;
        run->model->kernels->embed((const int16_t *)s->weights + id * width, s->scales[id],
                                   s->position_table + (size_t)run->scratch->position[line] * width, type, s->outputs,
                                   target + (size_t)line * width);
    }
}

static void attention_unit(const struct run *run, const struct phase *phase, int unit, int participant) {
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    int queries = phase->per_row ? 1 : run->tokens, chunks = parts(queries, QUERIES_AT_ONCE);
    int chunk = unit % chunks, number = unit / chunks % s->heads, row = unit / chunks / s->heads;
    size_t width = (size_t)s->outputs, head_width = width / (size_t)s->heads, column = (size_t)number * head_width;
    int together = s->keys == s->source && s->values == s->source;
    size_t stride = together ? 3 * width : width, line = (size_t)row * (size_t)run->tokens;
    size_t query_line = (size_t)row * (size_t)queries;
    struct head head = {
        .queries = scratch->buffers[s->source] + query_line * stride + column,
        .keys = scratch->buffers[s->keys] + line * stride + column + (together ? width : 0),
        .values = scratch->buffers[s->values] + line * stride + column + (together ? 2 * width : 0),
        .stride = stride,
        .target = scratch->buffers[s->target] + query_line * width + column,
        .target_stride = width,
        .tokens = run->tokens,
        .width = (int)head_width,
        .scale = s->epsilon,
        .keep = scratch->keep + line,
        .scratch = scratch->attention + (size_t)participant * scratch->attention_floats,
    };
    run->model->kernels->attention(&head, chunk * QUERIES_AT_ONCE, at_most((chunk + 1) * QUERIES_AT_ONCE, queries));
}

static void units(const struct run *run, const struct phase *phase, int from, int to, int participant) {
    const struct kernels *k = run->model->kernels;
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    float **buffers = scratch->buffers;
    int lines = phase_lines(run, phase), first = from * LINES, last = at_most(to * LINES, lines);
    switch (phase->task) {
    case EMBED: embed_lines(run, s, first, last); break;
    case NORM:
        k->norm(buffers[s->source], s->weights, s->bias, s->epsilon, s->outputs, first, last, buffers[s->target]);
        if (phase->layer)
            k->quantise(buffers[s->target], phase->factors, s->outputs, first, last, scratch->stored, scratch->grids);
        break;
    case QUANTISE:
        k->quantise(buffers[s->source], phase->factors, s->inputs, first, last, scratch->stored, scratch->grids);
        break;
    case LINEAR8: {
        int panels = phase->layer->outputs / PANEL;
        const float *residual = s->residual < 0 ? NULL : buffers[s->residual];
        while (from < to) { /* units of the same lines in one go */
            int chunk = from / panels, stop = at_most(to, (chunk + 1) * panels);
            k->linear8(phase->layer, scratch->stored, scratch->grids, residual, chunk * PRODUCT_LINES,
                       at_most((chunk + 1) * PRODUCT_LINES, lines), from - chunk * panels, stop - chunk * panels,
                       buffers[s->target]);
            from = stop;
        }
        break;
    }
    case LINEAR32:
        k->linear32(buffers[s->source], s->weights, s->bias, s->activation, s->inputs, s->outputs, first, last,
                    buffers[s->target]);
        break;
    case ATTENTION:
        for (int unit = from; unit < to; unit++) attention_unit(run, phase, unit, participant);
        break;
    case FIRST:
        for (int line = first; line < last; line++)
            memcpy(buffers[s->target] + (size_t)line * (size_t)s->outputs,
                   buffers[s->source] + (size_t)line * (size_t)run->tokens * (size_t)s->outputs,
                   (size_t)s->outputs * sizeof(float));
        break;
    }
}

static int count_blocks(void *job, int number) {
    const struct run *run = job;
    const struct phase *phase = &run->model->phases[number];
    return parts(phase_units(run, phase), phase_grain(run, phase));
}

static void run_block(void *job, int number, int block, int participant) {
    const struct run *run = job;
    const struct phase *phase = &run->model->phases[number];
    int grain = phase_grain(run, phase);
    units(run, phase, block * grain, at_most((block + 1) * grain, phase_units(run, phase)), participant);
}

/* What is kept of each row, and where its tokens stand. 0 when a number is outside of the tables. */
static int prepare(struct run *run) {
    const struct penstock_step *s = &run->model->phases[0].step;
    for (int row = 0; row < run->rows; row++) {
        size_t line = (size_t)row * (size_t)run->tokens;
        int kept = 0, counted = 0;
        for (int t = 0; t < run->tokens; t++) {
            size_t at = line + (size_t)t;
            int64_t id = run->ids[at], type = run->types ? run->types[at] : 0;
            int position = t;
            if (s->padding >= 0) position = id == s->padding ? s->padding : s->padding + ++counted;
            if (id < 0 || id >= s->inputs || position >= s->positions) return 0;
            if (s->types && (type < 0 || type >= s->types)) return 0;
            kept += run->mask[at] != 0;
            run->scratch->keep[at] = run->mask[at] != 0 ? 1.0f : 0.0f;
            run->scratch->position[at] = position;
        }
        if (!kept) /* nobody asks for such a row; without this it would be divided by 0 */
            for (int t = 0; t < run->tokens; t++) run->scratch->keep[line + (size_t)t] = 1.0f;
    }
    return 1;
}

int penstock_run(struct penstock_model *m, const int64_t *ids, const int64_t *mask, const int64_t *types,
                 int32_t rows, int32_t tokens, int32_t threads, float *result) {
    if (rows < 1 || tokens < 1 || (int64_t)rows * tokens > 1 << 17) return PENSTOCK_BAD_INPUT;
    struct scratch *scratch = scratch_take(m, (size_t)rows, (size_t)tokens);
    if (!scratch) return PENSTOCK_NO_MEMORY;
    struct run run = {m, scratch, ids, mask, types, rows, tokens};
    int status = PENSTOCK_BAD_INPUT;
    if (prepare(&run)) {
        if (threads > m->threads) threads = m->threads;
        if (threads < 2 || !pool_run(m->pool, threads, &run, m->phase_count, count_blocks, run_block))
            for (int p = 0; p < m->phase_count; p++)
                units(&run, &m->phases[p], 0, phase_units(&run, &m->phases[p]), 0);
        size_t lines = m->buffer_per_row[m->output] ? (size_t)rows : (size_t)rows * (size_t)tokens;
        memcpy(result, scratch->buffers[m->output], lines * (size_t)m->buffer_widths[m->output] * sizeof(float));
        status = PENSTOCK_OK;
    }
    scratch_give(m, scratch);
    return status;
}
