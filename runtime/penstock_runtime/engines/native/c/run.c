/* Runs a batch through a model: phase by phase, each divided into units that any thread may compute. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "model.h"

#define LINES 8          /* lines in one unit of most phases */
#define PRODUCT_LINES 256 /* lines in one unit of a product: weights are read from memory once for all of them */
#define BLOCKS_PER_THREAD 2 /* of a product: limits the work that a late thread leaves to the rest */
#define QUERIES_AT_ONCE 256 /* each unit of the attention prepares its keys and values */
#define FULL_LINES 32     /* a product is fastest with this number of lines */
#define IDLE_NANOSECONDS 200000 /* without other callers until they count as idle */
#define SLOW_INPUTS 128   /* inputs of a product that take as long as reading the same lines from another core's cache */

struct run {
    struct penstock_model *model;
    struct scratch *scratch;
    const int64_t *ids, *mask, *types;
    int rows, tokens, threads, chosen;
    int share; /* lines of each block of a stretch; 0: phases run one by one */
    int begun; /* stretches, or phases, that were done before the pool helped */
};

/* Lines of tokens first..last. `apart`: threads are in different phases: quantised lines have separate memory. */
struct span {
    int first, last, apart;
};

static int at_most(int a, int b) { return a < b ? a : b; }
static int parts(int whole, int part) { return (whole + part - 1) / part; }

static int lines_of(const struct run *run, enum per per) {
    return per == PER_CHOSEN ? run->chosen : per == PER_ROW ? run->rows : run->rows * run->tokens;
}

static int phase_lines(const struct run *run, const struct phase *phase) {
    return lines_of(run, phase->per);
}

/* The units of work of a phase; one thread computes a unit. */
static int phase_units(const struct run *run, const struct phase *phase) {
    int lines = phase_lines(run, phase);
    switch (phase->task) {
    case LINEAR8: return parts(lines, PRODUCT_LINES) * (phase->layer->outputs / PANEL);
    case LARGEST: return lines * parts(phase->layer->outputs / PANEL, LARGEST_PANELS);
    case ATTENTION: return run->rows * phase->step.heads * parts(lines / run->rows, QUERIES_AT_ONCE);
    default: return parts(lines, LINES);
    }
}

/* Units in a block: more if there were more blocks than a ticket can count. Consecutive panels are prefetched, which is
lost if another thread takes the next one. */
static int phase_grain(const struct run *run, const struct phase *phase) {
    int units = phase_units(run, phase);
    int least = phase->task == LINEAR8 ? units / (run->threads * BLOCKS_PER_THREAD) : 1;
    int most = parts(units, POOL_MOST_BLOCKS);
    return most > least ? most : least;
}

/* The mean of the unmasked lines (at least one), summed in numpy's order for bitwise equal results. */
static void mean(const float *lines, const float *keep, int tokens, size_t width, float *target) {
    int count = 0;
    memset(target, 0, width * sizeof(float));
    for (int t = 0; t < tokens; t++, lines += width) {
        if (keep[t] == 0.0f) continue;
        for (size_t i = 0; i < width; i++) target[i] += lines[i];
        count++;
    }
    for (size_t i = 0; i < width; i++) target[i] /= (float)count;
}

static void embed_lines(const struct run *run, const struct penstock_step *s, int first, int last) {
    float *target = run->scratch->buffers[s->target];
    int several = s->types > 1; /* a single type is that of all tokens */
    for (int line = first; line < last; line++) {
        size_t width = (size_t)s->outputs, id = (size_t)run->ids[line];
        const float *type = s->types ? s->type_table + (several && run->types ? (size_t)run->types[line] : 0) * width : NULL;
        const float *position = s->positions ? s->position_table + (size_t)run->scratch->position[line] * width : NULL;
        run->model->kernels->embed((const int16_t *)s->weights + id * width, s->scales[id],
                                   position, type, s->outputs, target + (size_t)line * width);
    }
}

static struct distance_vectors distances_of(const struct packed_distances *packed, int head) {
    if (!packed->at) return (struct distance_vectors){NULL, 0.0f};
    return (struct distance_vectors){packed->at + (size_t)head * packed->stride, packed->backs[head]};
}

static void attention_unit(const struct run *run, const struct phase *phase, int unit, int participant) {
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    int queries = phase->per == PER_ROW ? 1 : run->tokens, chunks = parts(queries, QUERIES_AT_ONCE);
    int chunk = unit % chunks, number = unit / chunks % s->heads, row = unit / chunks / s->heads;
    size_t width = (size_t)s->outputs, head_width = width / (size_t)s->heads, column = (size_t)number * head_width;
    int together = s->keys == s->source && s->values == s->source;
    size_t key_width = head_width * (size_t)s->key_heads, key_column = (size_t)(number / (s->heads / s->key_heads)) * head_width;
    size_t stride = together ? width + 2 * key_width : width, key_stride = together ? stride : key_width;
    size_t line = (size_t)row * (size_t)run->tokens;
    size_t query_line = (size_t)row * (size_t)queries;
    size_t distances_line = 2 * (size_t)s->positions - 1 + PENSTOCK_DISTANCES_SPARE;
    struct head head = {
        .queries = scratch->buffers[s->source] + query_line * stride + column,
        .keys = scratch->buffers[s->keys] + line * key_stride + key_column + (together ? width : 0),
        .values = scratch->buffers[s->values] + line * key_stride + key_column + (together ? width + key_width : 0),
        .stride = stride,
        .key_stride = key_stride,
        .target = scratch->buffers[s->target] + query_line * width + column,
        .target_stride = width,
        .tokens = run->tokens,
        .width = (int)head_width,
        .scale = s->epsilon,
        .keep = scratch->keep + line,
        .before = s->before < 0 ? ALL_KEYS : s->before,
        .after = s->after < 0 ? ALL_KEYS : s->after,
        .bias = s->distances ? s->distances + (size_t)number * distances_line + (size_t)s->positions - 1 : NULL,
        .distance_keys = distances_of(&phase->distance_keys, number),
        .distance_queries = distances_of(&phase->distance_queries, number),
        .positions = s->positions,
        .scratch = scratch->attention + (size_t)participant * scratch->attention_floats,
    };
    run->model->kernels->attention(&head, chunk * QUERIES_AT_ONCE, at_most((chunk + 1) * QUERIES_AT_ONCE, queries));
}

/* The base address of lines quantised to `width` bytes. */
static uint8_t *stored_at(const struct run *run, const struct span *span, int width) {
    size_t spare = span->apart ? (size_t)(run->model->widest_stored - width) : 0;
    return run->scratch->stored + (size_t)span->first * spare;
}

/* Panels from..to of a product. */
static void multiply(const struct run *run, const struct phase *phase, const struct span *span, int from, int to) {
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    const float *residual = s->residual < 0 ? NULL : scratch->buffers[s->residual];
    run->model->kernels->linear8(phase->layer, stored_at(run, span, phase->layer->inputs), scratch->grids, residual,
                                 span->first, span->last, from, to, scratch->buffers[s->target]);
}

/* The place of the last unmasked token of a row whose id is `id` (`other`: is not); -1 as the id: any. 0 if none is. */
static int last_token(const struct run *run, int row, int id, int other) {
    const float *keep = run->scratch->keep + (size_t)row * (size_t)run->tokens;
    const int64_t *ids = run->ids + (size_t)row * (size_t)run->tokens;
    for (int t = run->tokens - 1; t > 0; t--)
        if (keep[t] != 0.0f && (id < 0 || (ids[t] == id) != (other != 0))) return t;
    return 0;
}

/* log(1 + x) of a positive number, this number of times; 0 of others. */
static inline float logarithm(float x, int times) {
    x = x <= 0.0f ? 0.0f : x; /* NaN remains */
    while (times-- > 0 && x > 0.0f) x = log1pf(x);
    return x;
}

/* Some panels of a product for one row: the logarithm of the largest result of each output over the unmasked tokens, or the
sum of the logarithms. */
static void largest_unit(const struct run *run, const struct phase *phase, int unit, int participant) {
    const struct linear8 *whole = phase->layer;
    const struct scratch *scratch = run->scratch;
    int panels = whole->outputs / PANEL, chunks = parts(panels, LARGEST_PANELS), row = unit / chunks;
    int sums = phase->step.gated, times = phase->step.types;
    int from = unit % chunks * LARGEST_PANELS, count = at_most(panels - from, LARGEST_PANELS), width = count * PANEL;
    float *results = scratch->attention + (size_t)participant * scratch->attention_floats;
    float *target = scratch->buffers[phase->step.target] + (size_t)row * (size_t)whole->outputs + from * PANEL;
    struct linear8 part = *whole;
    part.outputs = width;
    part.packed += (size_t)from * (size_t)whole->inputs * PANEL / 8 * (size_t)whole->bits;
    part.scales += from * PANEL;
    part.bias += from * PANEL;
    part.sums += from * PANEL;
    for (int i = 0; i < width; i++) target[i] = sums ? 0.0f : -INFINITY;
    for (int begin = 0; begin < run->tokens; begin += LARGEST_LINES) {
        size_t first = (size_t)row * (size_t)run->tokens + (size_t)begin;
        int lines = at_most(run->tokens - begin, LARGEST_LINES);
        const uint8_t *stored = scratch->stored + first * (size_t)whole->inputs;
        run->model->kernels->linear8(&part, stored, scratch->grids + first, NULL, 0, lines, 0, count, results);
        for (int m = 0; m < lines; m++) {
            const float *line = results + (size_t)m * (size_t)width;
            if (scratch->keep[first + (size_t)m] == 0.0f) continue;
            if (sums)
                for (int i = 0; i < width; i++) target[i] += logarithm(line[i], times);
            else
                for (int i = 0; i < width; i++) target[i] = line[i] > target[i] || line[i] != line[i] ? line[i] : target[i];
        }
    }
    if (!sums)
        for (int i = 0; i < width; i++) target[i] = logarithm(target[i], times);
}

/* A phase in which each line depends on the same line only. */
static void do_lines(const struct run *run, const struct phase *phase, const struct span *span) {
    const struct kernels *k = run->model->kernels;
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    float **buffers = scratch->buffers;
    int first = span->first, last = span->last;
    switch (phase->task) {
    case EMBED: embed_lines(run, s, first, last); break;
    case NORM:
        if (s->bias)
            k->norm(buffers[s->source], s->weights, s->bias, s->epsilon, s->outputs, first, last, buffers[s->target]);
        else
            k->root_mean_square_norm(buffers[s->source], s->weights, s->residual < 0 ? NULL : buffers[s->residual],
                                     s->epsilon, s->outputs, first, last, buffers[s->target]);
        if (phase->layer)
            k->quantise(buffers[s->target], phase->factors, s->outputs, first, last,
                        stored_at(run, span, s->outputs), scratch->grids);
        break;
    case QUANTISE:
        k->quantise(buffers[s->source], phase->factors, s->inputs, first, last, stored_at(run, span, s->inputs),
                    scratch->grids);
        break;
    case LINEAR8: multiply(run, phase, span, 0, phase->layer->outputs / PANEL); break;
    case LINEAR32:
        k->linear32(buffers[s->source], s->weights, s->bias, s->activation, s->inputs, s->outputs, first, last,
                    buffers[s->target]);
        break;
    case ROTATE:
        for (int line = first; line < last; line++) {
            size_t half = (size_t)(s->outputs / s->heads / 2), at = (size_t)(line % run->tokens) * half;
            k->rotate(s->cosines + at, s->sines + at, s->heads, (int)half,
                      buffers[s->target] + (size_t)line * (size_t)run->model->buffer_widths[s->target]);
        }
        break;
    case HEAD_NORM:
        for (int line = first; line < last; line++)
            for (int head = 0; head < s->heads; head++) {
                int width = s->outputs / s->heads;
                float *at = buffers[s->target] + (size_t)line * (size_t)run->model->buffer_widths[s->target] +
                            (size_t)(s->inputs + head * width);
                k->root_mean_square_norm(at, s->weights, NULL, s->epsilon, width, 0, 1, at);
            }
        break;
    default: break; /* not of this kind */
    }
}

static void units(const struct run *run, const struct phase *phase, int from, int to, int participant) {
    const struct penstock_step *s = &phase->step;
    struct scratch *scratch = run->scratch;
    float **buffers = scratch->buffers;
    int lines = phase_lines(run, phase), first = from * LINES, last = at_most(to * LINES, lines);
    switch (phase->task) {
    case LINEAR8: {
        int panels = phase->layer->outputs / PANEL;
        while (from < to) { /* units of the same lines in one call */
            int chunk = from / panels, stop = at_most(to, (chunk + 1) * panels);
            struct span span = {chunk * PRODUCT_LINES, at_most((chunk + 1) * PRODUCT_LINES, lines), 0};
            multiply(run, phase, &span, from - chunk * panels, stop - chunk * panels);
            from = stop;
        }
        break;
    }
    case ATTENTION:
        for (int unit = from; unit < to; unit++) attention_unit(run, phase, unit, participant);
        break;
    case FIRST:
        for (int line = first; line < last; line++)
            memcpy(buffers[s->target] + (size_t)line * (size_t)s->outputs,
                   buffers[s->source] + (size_t)line * (size_t)run->tokens * (size_t)s->outputs,
                   (size_t)s->outputs * sizeof(float));
        break;
    case LAST:
        for (int line = first; line < last; line++) {
            size_t place = (size_t)last_token(run, line, s->padding, s->gated);
            memcpy(buffers[s->target] + (size_t)line * (size_t)s->outputs,
                   buffers[s->source] + ((size_t)line * (size_t)run->tokens + place) * (size_t)s->outputs,
                   (size_t)s->outputs * sizeof(float));
        }
        break;
    case LARGEST:
        for (int unit = from; unit < to; unit++) largest_unit(run, phase, unit, participant);
        break;
    case AVERAGE:
        for (int line = first; line < last; line++) {
            size_t width = (size_t)s->outputs, begin = (size_t)line * (size_t)run->tokens;
            mean(buffers[s->source] + begin * width, scratch->keep + begin, run->tokens, width,
                 buffers[s->target] + (size_t)line * width);
        }
        break;
    case CHOSEN:
        for (int line = first; line < last; line++)
            memcpy(buffers[s->target] + (size_t)line * (size_t)s->outputs,
                   buffers[s->source] + (size_t)scratch->where[line] * (size_t)s->outputs,
                   (size_t)s->outputs * sizeof(float));
        break;
    default: do_lines(run, phase, &(struct span){first, last, 0});
    }
}

static int count_units(const struct run *run, const struct phase *phase) {
    int count = phase_units(run, phase);
    return count ? parts(count, phase_grain(run, phase)) : 1; /* an empty one if no token was chosen */
}

static void run_units(const struct run *run, const struct phase *phase, int block, int participant) {
    int grain = phase_grain(run, phase);
    units(run, phase, block * grain, at_most((block + 1) * grain, phase_units(run, phase)), participant);
}

/* Several threads compute a model phase by phase, or stretch by stretch. */

static struct stretch stretch_of(const struct run *run, int number) {
    number += run->begun;
    return run->share ? run->model->stretches[number] : (struct stretch){number, number + 1};
}

static int count_blocks(void *job, int number) {
    const struct run *run = job;
    struct stretch stretch = stretch_of(run, number);
    if (stretch.last - stretch.first == 1) return count_units(run, &run->model->phases[stretch.first]);
    return parts(run->rows * run->tokens, run->share);
}

static void run_block(void *job, int number, int block, int participant) {
    const struct run *run = job;
    const struct phase *phases = run->model->phases;
    struct stretch stretch = stretch_of(run, number);
    if (stretch.last - stretch.first == 1) {
        run_units(run, &phases[stretch.first], block, participant);
        return;
    }
    struct span span = {block * run->share, at_most((block + 1) * run->share, run->rows * run->tokens), 1};
    for (int p = stretch.first; p < stretch.last; p++) do_lines(run, &phases[p], &span);
}

/* Lines of each thread if threads compute lines through stretches; 0 if they share each phase. With shared phases they
read the results of other threads; with stretches some have fewer lines, and each reads all weights. */
static int lines_share(const struct run *run) {
    long lines = (long)run->rows * run->tokens, width = run->model->buffer_widths[run->model->phases[0].step.target];
    long share = (long)parts(parts((int)lines, run->threads), FULL_LINES) * FULL_LINES;
    return share * run->threads * width <= lines * (width + SLOW_INPUTS) ? (int)share : 0;
}

/* Sets the mask, the positions and the chosen tokens. 0 if an id, position or type is outside of its table. */
static int prepare(struct run *run) {
    const struct penstock_step *s = &run->model->phases[0].step;
    int32_t *where = run->scratch->where;
    for (int row = 0; row < run->rows; row++) {
        size_t line = (size_t)row * (size_t)run->tokens;
        int kept = 0, counted = 0;
        for (int t = 0; t < run->tokens; t++) {
            size_t at = line + (size_t)t;
            int64_t id = run->ids[at], type = run->types ? run->types[at] : 0;
            int position = t;
            if (s->padding >= 0) position = id == s->padding ? s->padding : s->padding + ++counted;
            if (id < 0 || id >= s->inputs || (s->positions && position >= s->positions)) return 0;
            if (s->types > 1 && (type < 0 || type >= s->types)) return 0;
            kept += run->mask[at] != 0;
            run->scratch->keep[at] = run->mask[at] != 0 ? 1.0f : 0.0f;
            run->scratch->position[at] = position;
            if (id == run->model->chosen_id) *where++ = (int32_t)at;
        }
        if (!kept) /* a row without unmasked tokens is not useful; this avoids a division by 0 */
            for (int t = 0; t < run->tokens; t++) run->scratch->keep[line + (size_t)t] = 1.0f;
    }
    return 1;
}

/* The rest of the stretches, from `first` on, with the pool. 0 if another caller uses it: nothing was done. */
static int run_wide(struct run *run, int first) {
    const struct penstock_model *m = run->model;
    run->share = lines_share(run);
    run->begun = run->share ? first : m->stretches[first].first;
    int stages = run->share ? m->stretch_count : m->phase_count;
    return pool_run(m->pool, run->threads, run, stages - run->begun, count_blocks, run_block);
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Without the pool. A run with several threads gets it once there were no other callers for a while: between two rows
of a caller is little time. */
static void run_alone(struct run *run) {
    const struct penstock_model *m = run->model;
    int64_t since = 0; /* since when there are no other callers; 0: there are some */
    if (m->pool) pool_enter_alone(m->pool);
    for (int s = 0; s < m->stretch_count; s++) {
        if (since && nanoseconds() - since > IDLE_NANOSECONDS) {
            pool_leave_alone(m->pool);
            if (run_wide(run, s)) return;
            pool_enter_alone(m->pool);
        }
        for (int p = m->stretches[s].first; p < m->stretches[s].last; p++) {
            units(run, &m->phases[p], 0, phase_units(run, &m->phases[p]), 0);
            if (run->threads > 1) since = pool_has_other_callers(m->pool) ? 0 : since ? since : nanoseconds();
        }
    }
    if (m->pool) pool_leave_alone(m->pool);
}

static void pool_rows(const struct run *run, int pooling, float *result) {
    const struct scratch *scratch = run->scratch;
    size_t width = (size_t)run->model->buffer_widths[run->model->output], tokens = (size_t)run->tokens;
    const float *lines = scratch->buffers[run->model->output], *keep = scratch->keep;
    for (int row = 0; row < run->rows; row++, lines += tokens * width, keep += tokens, result += width)
        if (pooling == PENSTOCK_MEAN) {
            mean(lines, keep, run->tokens, width, result);
        } else {
            size_t place = pooling == PENSTOCK_LAST_TOKEN ? (size_t)last_token(run, row, -1, 0) : 0;
            memcpy(result, lines + place * width, width * sizeof(float));
        }
}

static int run_job(const struct penstock_job *job) {
    struct penstock_model *m = job->model;
    int rows = job->rows, tokens = job->tokens, pooling = job->pooling;
    if (rows < 1 || tokens < 1 || (int64_t)rows * tokens > 1 << 17) return PENSTOCK_BAD_INPUT;
    if (m->most_tokens && tokens > m->most_tokens) return PENSTOCK_BAD_INPUT;
    if (pooling < PENSTOCK_EVERY || pooling > PENSTOCK_LAST_TOKEN) return PENSTOCK_BAD_INPUT;
    if (pooling != PENSTOCK_EVERY && m->buffer_per[m->output] != PER_TOKEN) return PENSTOCK_BAD_MODEL;
    int threads = at_most(job->threads, m->threads);
    struct run run = {m, NULL, job->ids, job->mask, job->types, rows, tokens, threads, 0, 0, 0};
    if (m->chosen_id >= 0)
        for (int at = 0; at < rows * tokens; at++) run.chosen += run.ids[at] == m->chosen_id;
    size_t lines = pooling ? (size_t)rows : (size_t)lines_of(&run, m->buffer_per[m->output]);
    size_t size = lines * (size_t)m->buffer_widths[m->output];
    if (job->floats < 0 || (size_t)job->floats != size) return PENSTOCK_BAD_MODEL;
    struct scratch *scratch = run.scratch = scratch_take(m, (size_t)rows, (size_t)tokens, (size_t)run.chosen);
    if (!scratch) return PENSTOCK_NO_MEMORY;
    int status = PENSTOCK_BAD_INPUT;
    if (prepare(&run)) {
        if (threads < 2 || job->when_idle || !run_wide(&run, 0)) run_alone(&run);
        if (pooling) pool_rows(&run, pooling, job->result);
        else memcpy(job->result, scratch->buffers[m->output], size * sizeof(float));
        status = PENSTOCK_OK;
    }
    scratch_give(m, scratch);
    return status;
}

void penstock_run(struct penstock_job *job) { job->status = run_job(job); }
