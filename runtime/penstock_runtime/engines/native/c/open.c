/* Opens a model: checks its steps, turns them into phases, and packs the weights. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "model.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define MOST_POSITIONS (1 << 20) /* of the vectors of distances */

/* Weights are read sequentially, and the TLB has few entries for small pages. */
void *take_pages(size_t size) {
    size_t whole = size + HUGE_PAGE;
    char *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    size_t before = rounded((size_t)memory, HUGE_PAGE) - (size_t)memory;
    if (before) munmap(memory, before);
    if (HUGE_PAGE - before) munmap(memory + before + size, HUGE_PAGE - before);
    (void)madvise(memory + before, size, MADV_HUGEPAGE);
    return memory + before;
}

static size_t layer_size(const struct penstock_step *s, int bits) {
    size_t in = (size_t)s->inputs, out = (size_t)s->outputs;
    return rounded(in * out / 8 * (size_t)bits, ALIGNMENT) + 3 * rounded(out * 4, ALIGNMENT) + rounded(in * 4, ALIGNMENT);
}

/* The bits of a product's weights: the lower ones are 0 in all weights. */
static int weight_bits(const struct penstock_model *m, const struct penstock_step *s) {
    const uint8_t *weights = s->weights;
    unsigned all = 0x10; /* 4 bits at least */
    if (!m->kernels->narrow || !has_vbmi() || s->inputs > MOST_NARROW_INPUTS) return 8;
    for (size_t i = 0; i < (size_t)s->inputs * (size_t)s->outputs; i++) all |= weights[i];
    return 8 - __builtin_ctz(all);
}

static void pack(const struct penstock_step *s, struct linear8 *layer, const float **factors, int bits, char *at) {
    size_t in = (size_t)s->inputs, out = (size_t)s->outputs, eight = (size_t)bits; /* bytes of eight weights */
    const int8_t *weights = s->weights;
    uint8_t *packed = (uint8_t *)at;
    float *scales = (float *)(at += rounded(in * out / 8 * eight, ALIGNMENT));
    float *bias = (float *)(at += rounded(out * 4, ALIGNMENT));
    int32_t *sums = (int32_t *)(at += rounded(out * 4, ALIGNMENT));
    float *factor = (float *)(at += rounded(out * 4, ALIGNMENT));
    for (size_t n = 0; n < out; n++) {
        int32_t sum = 0;
        for (size_t k = 0; k < in; k++) {
            int8_t w = weights[k * out + n];
            size_t place = (n / PANEL * (in / 4) + k / 4) * (PANEL * 4) + n % PANEL * 4 + k % 4;
            size_t bit = place % 8 * eight;
            unsigned own = (unsigned)(uint8_t)w >> (8 - bits) << bit % 8;
            packed[place / 8 * eight + bit / 8] |= (uint8_t)own;
            if (own >> 8) packed[place / 8 * eight + bit / 8 + 1] |= (uint8_t)(own >> 8);
            sum += w;
        }
        sums[n] = sum;
    }
    memcpy(scales, s->scales, out * sizeof(float));
    memcpy(bias, s->bias, out * sizeof(float));
    if (s->factors) memcpy(factor, s->factors, in * sizeof(float));
    *factors = s->factors ? factor : NULL;
    *layer = (struct linear8){s->inputs, s->outputs, s->activation, s->gated, bits, 0, (int8_t *)packed, scales, bias, sums};
}

static int has_vectors(const struct penstock_step *s) {
    return s->kind == PENSTOCK_ATTENTION && (s->distance_keys || s->distance_queries);
}

static struct distance_table distance_table(const struct penstock_step *s, const float *vectors, int head) {
    size_t width = (size_t)(s->outputs / s->heads);
    return (struct distance_table){vectors + (size_t)head * (size_t)s->inputs * width, s->distance_rows, s->positions, (int)width};
}

/* Bytes of the packed vectors of one head. */
static size_t vectors_stride(const struct kernels *kernels, const struct penstock_step *s) {
    struct distance_table table = distance_table(s, NULL, 0);
    float back;
    return rounded(kernels->pack_distances(&table, NULL, &back), ALIGNMENT);
}

/* Bytes of the packed vectors of all heads, and of their factors. */
static size_t vectors_size(const struct kernels *kernels, const struct penstock_step *s) {
    return (size_t)s->heads * vectors_stride(kernels, s) + rounded((size_t)s->heads * sizeof(float), ALIGNMENT);
}

static struct packed_distances pack_vectors(const struct kernels *kernels, const struct penstock_step *s,
                                            const float *vectors, char *at) {
    size_t stride = vectors_stride(kernels, s);
    float *backs = (float *)(at + (size_t)s->heads * stride);
    for (int head = 0; head < s->heads; head++) {
        struct distance_table table = distance_table(s, vectors, head);
        kernels->pack_distances(&table, at + (size_t)head * stride, &backs[head]);
    }
    return (struct packed_distances){at, stride, backs};
}

static int is_product8(const struct penstock_step *s) {
    return s->kind == PENSTOCK_LINEAR8 || s->kind == PENSTOCK_LARGEST;
}

static int bad_buffer(const struct penstock_model *m, int buffer, int width) {
    return buffer < 0 || buffer >= MOST_BUFFERS || m->buffer_widths[buffer] != width;
}

/* Declares the shape of a buffer that a step writes; all its writers must agree. */
static int declare(struct penstock_model *m, int buffer, int width, enum per per) {
    if (buffer < 0 || buffer >= MOST_BUFFERS || width <= 0) return 0;
    if (buffer >= m->buffers) m->buffers = buffer + 1;
    if (m->buffer_widths[buffer] && m->buffer_widths[buffer] != width) return 0;
    if (m->buffer_widths[buffer] && m->buffer_per[buffer] != per) return 0;
    m->buffer_widths[buffer] = width;
    m->buffer_per[buffer] = per;
    return 1;
}

/* Whether each distance has one of the vectors; each head has keys of its own, and attends to all of them. */
static int good_vectors(const struct penstock_step *s) {
    if (s->distances || s->key_heads != s->heads || s->before >= 0 || s->after >= 0) return 0;
    for (int i = 0; i < 2 * s->positions - 1; i++)
        if (s->distance_rows[i] < 0 || s->distance_rows[i] >= s->inputs) return 0;
    return 1;
}

/* Checks that a step reads declared buffers, and declares its target. `per` is that of its source. */
static int check_step(struct penstock_model *m, const struct penstock_step *s, enum per per) {
    int panels = s->outputs > 0 && s->outputs % PANEL == 0;
    switch (s->kind) {
    case PENSTOCK_EMBED:
        return panels && s->inputs > 0 && s->weights && s->scales && (s->positions <= 0 || s->position_table) &&
               (!s->types || s->type_table) && declare(m, s->target, s->outputs, PER_TOKEN);
    case PENSTOCK_NORM:
        return panels && s->weights && !bad_buffer(m, s->source, s->outputs) &&
               (s->residual < 0 || (!s->bias && !bad_buffer(m, s->residual, s->outputs) &&
                                    m->buffer_per[s->residual] == per)) &&
               declare(m, s->target, s->outputs, per);
    case PENSTOCK_HEAD_NORM:
        return s->weights && s->heads > 0 && s->outputs > 0 && s->outputs % (s->heads * PANEL) == 0 && s->inputs >= 0 &&
               s->inputs % PANEL == 0 && s->source >= 0 && s->source < MOST_BUFFERS && s->source == s->target &&
               m->buffer_widths[s->source] >= s->inputs + s->outputs;
    case PENSTOCK_LINEAR8:
        return panels && s->inputs > 0 && s->inputs % PANEL == 0 && s->weights && s->scales && s->bias &&
               !bad_buffer(m, s->source, s->inputs) && s->source != s->target &&
               declare(m, s->target, s->outputs, per) &&
               (s->residual < 0 ||
                (!bad_buffer(m, s->residual, s->outputs) && m->buffer_per[s->residual] == per)) &&
               (!s->gated || (s->residual >= 0 && s->activation == PENSTOCK_NONE));
    case PENSTOCK_LINEAR32:
        return s->inputs > 0 && s->inputs % PANEL == 0 && s->weights && s->bias &&
               !bad_buffer(m, s->source, s->inputs) && s->source != s->target &&
               declare(m, s->target, s->outputs, per);
    case PENSTOCK_ATTENTION: {
        if (s->heads <= 0 || s->key_heads <= 0 || s->heads % s->key_heads || s->outputs % (s->heads * 16)) return 0;
        int together = s->keys == s->source && s->values == s->source, key_width = s->outputs / s->heads * s->key_heads;
        int width = together ? s->outputs + 2 * key_width : s->outputs;
        return panels && !bad_buffer(m, s->source, width) && per != PER_CHOSEN &&
               (together || (!bad_buffer(m, s->keys, key_width) && !bad_buffer(m, s->values, key_width))) &&
               m->buffer_per[s->keys] == PER_TOKEN && m->buffer_per[s->values] == PER_TOKEN &&
               s->target != s->source && s->target != s->keys && s->target != s->values && (!s->distances || s->positions > 0) &&
               (!has_vectors(s) || good_vectors(s)) && declare(m, s->target, s->outputs, per);
    }
    case PENSTOCK_LARGEST:
        return panels && s->inputs > 0 && s->inputs % PANEL == 0 && s->weights && s->scales && s->bias &&
               !bad_buffer(m, s->source, s->inputs) && per == PER_TOKEN && s->source != s->target && s->types > 0 &&
               s->activation == PENSTOCK_NONE && declare(m, s->target, s->outputs, PER_ROW);
    case PENSTOCK_FIRST:
    case PENSTOCK_LAST:
    case PENSTOCK_AVERAGE:
        return s->outputs > 0 && !bad_buffer(m, s->source, s->outputs) && per == PER_TOKEN &&
               s->source != s->target && declare(m, s->target, s->outputs, PER_ROW);
    case PENSTOCK_CHOSEN: /* of only one id in a model */
        if (s->padding < 0 || (m->chosen_id >= 0 && m->chosen_id != s->padding)) return 0;
        m->chosen_id = s->padding;
        return s->outputs > 0 && !bad_buffer(m, s->source, s->outputs) && per == PER_TOKEN &&
               s->source != s->target && declare(m, s->target, s->outputs, PER_CHOSEN);
    case PENSTOCK_ROTATE:
        return panels && s->heads > 0 && s->outputs % (s->heads * 2) == 0 && s->positions > 0 && s->cosines && s->sines &&
               s->source >= 0 && s->source < MOST_BUFFERS && s->source == s->target && per == PER_TOKEN &&
               m->buffer_widths[s->source] >= s->outputs;
    default: return 0;
    }
}

static int alone(const struct phase *phase) {
    return phase->per != PER_TOKEN || phase->task == ATTENTION || phase->task == FIRST || phase->task == CHOSEN ||
           phase->task == LAST || phase->step.kind == PENSTOCK_LARGEST;
}

static void find_stretches(struct penstock_model *m) {
    for (int p = 0; p < m->phase_count; p++) {
        if (p && !alone(&m->phases[p]) && !alone(&m->phases[p - 1]))
            m->stretches[m->stretch_count - 1].last++;
        else
            m->stretches[m->stretch_count++] = (struct stretch){p, p + 1};
    }
}

static int add_steps(struct penstock_model *m, const struct penstock_step *steps, int count) {
    static const enum task tasks[] = {EMBED, NORM, LINEAR8, LINEAR32, ATTENTION, FIRST, CHOSEN, ROTATE, AVERAGE,
                                      HEAD_NORM, LAST, LARGEST};
    char *at = m->packed;
    int layers = 0;
    for (int i = 0; i < count; i++) {
        const struct penstock_step *s = &steps[i];
        enum per per = s->source >= 0 && s->source < MOST_BUFFERS ? m->buffer_per[s->source] : PER_TOKEN;
        if (!check_step(m, s, per) || (i == 0) != (s->kind == PENSTOCK_EMBED)) return 0;
        struct phase phase = {.task = tasks[s->kind], .step = *s, .per = m->buffer_per[s->target]};
        if (s->kind == PENSTOCK_ATTENTION && s->outputs / s->heads > m->head_width)
            m->head_width = s->outputs / s->heads;
        int limits = (s->kind == PENSTOCK_ATTENTION && (s->distances || has_vectors(s))) || s->kind == PENSTOCK_ROTATE;
        if (limits && (!m->most_tokens || s->positions < m->most_tokens)) m->most_tokens = s->positions;
        if (is_product8(s)) {
            struct linear8 *layer = &m->layers[layers++];
            int bits = weight_bits(m, s);
            pack(s, layer, &phase.factors, bits, at);
            at += layer_size(s, bits);
            if (s->inputs > m->widest_stored) m->widest_stored = s->inputs;
            struct phase *before = &m->phases[m->phase_count - 1];
            int shared = s->kind == PENSTOCK_LINEAR8; /* threads of a stretch have quantised lines of their own */
            if (shared && before->task == NORM && before->step.target == s->source) {
                before->layer = layer;
                before->factors = phase.factors;
            } else if (!shared || before->task != LINEAR8 || before->step.source != s->source ||
                       before->step.target == s->source || before->step.factors != s->factors) {
                enum task product = phase.task;
                phase.task = QUANTISE;
                phase.per = per;
                m->phases[m->phase_count++] = phase;
                phase.task = product;
                phase.per = m->buffer_per[s->target];
            }
            phase.layer = layer;
            if (s->kind == PENSTOCK_LARGEST) m->has_largest = 1;
        }
        if (has_vectors(s)) {
            m->has_distances = 1;
            if (s->distance_keys) {
                phase.distance_keys = pack_vectors(m->kernels, s, s->distance_keys, at);
                at += vectors_size(m->kernels, s);
            }
            if (s->distance_queries) {
                phase.distance_queries = pack_vectors(m->kernels, s, s->distance_queries, at);
                at += vectors_size(m->kernels, s);
            }
        }
        m->phases[m->phase_count++] = phase;
    }
    return !bad_buffer(m, m->output, m->buffer_widths[m->output]) && m->buffer_widths[m->output] &&
           m->phase_count <= POOL_MOST_PHASES;
}

struct penstock_model *penstock_open(const struct penstock_step *steps, int32_t count, int32_t output, int32_t threads,
                                     int32_t isa, int32_t *status) {
    size_t packed = 0;
    int layers = 0, widest = 0;
    *status = PENSTOCK_BAD_MODEL;
    const struct kernels *kernels = kernels_for(isa);
    if (!kernels || count <= 0 || count > POOL_MOST_PHASES / 2 || threads < 1 || threads > 1024) return NULL;
    if (output < 0 || output >= MOST_BUFFERS) return NULL;
    for (int i = 0; i < count; i++)
        if (is_product8(&steps[i])) {
            if (steps[i].inputs <= 0 || steps[i].outputs <= 0 || !steps[i].weights) return NULL;
            if (steps[i].inputs % PANEL || steps[i].outputs % PANEL || steps[i].inputs >= MOST_WIDTH) return NULL;
            packed += layer_size(&steps[i], 8);
            if (steps[i].inputs > widest) widest = steps[i].inputs;
            layers++;
        } else if (has_vectors(&steps[i])) {
            if (!steps[i].distance_rows || steps[i].positions <= 0 || steps[i].positions > MOST_POSITIONS) return NULL;
            if (steps[i].heads <= 0 || steps[i].outputs <= 0 || steps[i].outputs % steps[i].heads) return NULL;
            packed += (size_t)(!!steps[i].distance_keys + !!steps[i].distance_queries) * vectors_size(kernels, &steps[i]);
        }
    *status = PENSTOCK_NO_MEMORY;
    struct penstock_model *m = calloc(1, sizeof *m);
    if (!m) return NULL;
    pthread_mutex_init(&m->lock, NULL);
    m->kernels = kernels;
    m->output = output;
    m->chosen_id = -1;
    m->threads = threads;
    m->packed_size = rounded(packed + prefetched_bytes(widest), HUGE_PAGE);
    m->packed = take_pages(m->packed_size);
    m->phases = calloc((size_t)count * 2, sizeof *m->phases);
    m->stretches = calloc((size_t)count * 2, sizeof *m->stretches);
    m->layers = calloc((size_t)layers + 1, sizeof *m->layers);
    m->pool = threads > 1 ? pool_start(threads) : NULL;
    if (!m->packed || !m->phases || !m->stretches || !m->layers || (threads > 1 && !m->pool)) {
        penstock_close(m);
        return NULL;
    }
    if (!add_steps(m, steps, count)) {
        *status = PENSTOCK_BAD_MODEL;
        penstock_close(m);
        return NULL;
    }
    find_stretches(m);
    *status = PENSTOCK_OK;
    return m;
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
    free(m->stretches);
    free(m->layers);
    pthread_mutex_destroy(&m->lock);
    free(m);
}
