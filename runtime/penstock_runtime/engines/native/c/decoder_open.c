/* Opens a decoder: checks its parts, copies the weights into huge pages, and takes the memory of the cache. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "decoder.h"

#define STAGES_OF_LAYER 12

/* Copies parts of the model one after the other. The first pass, without memory, finds the size. */
struct copier {
    char *at;
    size_t size;
    const struct decoder_kernels *kernels;
};

/* NULL in the first pass. */
static void *take(struct copier *copier, size_t bytes) {
    char *to = copier->at ? copier->at + copier->size : NULL;
    copier->size += rounded(bytes, ALIGNMENT);
    return to;
}

static const void *copy(struct copier *copier, const void *from, size_t bytes) {
    if (!from) return NULL;
    void *to = take(copier, bytes);
    if (to) memcpy(to, from, bytes);
    return to;
}

/* The sum of each output's weights. */
static void sum_weights(const struct decoder_kernels *kernels, const struct linear8 *layer, int32_t *sums) {
    size_t groups = (size_t)(layer->inputs / GROUP), records = groups * (size_t)(layer->outputs / PANEL);
    memset(sums, 0, (size_t)layer->outputs * sizeof *sums);
    for (size_t r = 0; r < records; r++) {
        int8_t room[GROUP * PANEL];
        const int8_t *weights = layer->packed + r * record_bytes(layer->bits);
        if (layer->bits == 4) {
            kernels->widen((const uint8_t *)weights, 1, room);
            weights = room;
        }
        for (int i = 0; i < GROUP * PANEL; i++) sums[r / groups * PANEL + (size_t)(i / 4 % PANEL)] += weights[i];
    }
}

static struct linear8 copy_product(struct copier *copier, const struct penstock_product *p, int activation) {
    if (!p->outputs) return (struct linear8){0};
    size_t records = (size_t)(p->outputs / PANEL) * (size_t)(p->inputs / GROUP), numbers = (size_t)p->outputs * 4;
    struct linear8 layer = {p->inputs, p->outputs, .activation = activation, .bits = p->bits, .pairs = 1};
    layer.packed = copy(copier, p->packed, records * record_bytes(p->bits));
    layer.scales = copy(copier, p->scales, numbers);
    layer.bias = copy(copier, p->bias, numbers);
    int32_t *sums = take(copier, numbers);
    if (sums) sum_weights(copier->kernels, &layer, sums);
    layer.sums = sums;
    return layer;
}

static void copy_norm(struct copier *copier, struct penstock_normalisation *norm, int width) {
    norm->weight = copy(copier, norm->weight, (size_t)width * 4);
    norm->bias = copy(copier, norm->bias, (size_t)width * 4);
}

static void copy_parts(struct penstock_decoder *d, struct copier *copier) {
    const struct penstock_decoder_parts *parts = &d->parts;
    int hidden = d->hidden, head = parts->head_width;
    for (int l = 0; l < parts->layers; l++) {
        struct decoder_layer *layer = &d->layers[l];
        struct penstock_layer *own = &layer->parts;
        *own = parts->layer[l];
        copy_norm(copier, &own->attention_norm, hidden);
        layer->attend = copy_product(copier, &own->attend, PENSTOCK_NONE);
        copy_norm(copier, &own->query_norm, head);
        copy_norm(copier, &own->key_norm, head);
        layer->output = copy_product(copier, &own->output, PENSTOCK_NONE);
        copy_norm(copier, &own->attended_norm, hidden);
        copy_norm(copier, &own->network_norm, hidden);
        layer->up = copy_product(copier, &own->up, own->gate.outputs ? PENSTOCK_NONE : parts->activation);
        layer->gate = copy_product(copier, &own->gate, parts->activation);
        layer->gate.gated = 1;
        layer->down = copy_product(copier, &own->down, PENSTOCK_NONE);
        copy_norm(copier, &own->expanded_norm, hidden);
    }
    for (int r = 0; r < parts->ropes; r++) {
        d->ropes[r] = parts->rope[r];
        d->ropes[r].frequencies = copy(copier, parts->rope[r].frequencies, (size_t)parts->rope[r].half * 4);
    }
    copy_norm(copier, &d->parts.final_norm, hidden);
    d->embeddings = copy_product(copier, &parts->embeddings, PENSTOCK_NONE);
    d->head = parts->head.outputs ? copy_product(copier, &parts->head, PENSTOCK_NONE) : d->embeddings;
    if (parts->position_table)
        d->parts.position_table = copy(copier, parts->position_table, (size_t)parts->positions * (size_t)hidden * 4);
}

static int is_product(const struct penstock_product *p, int inputs, int outputs) {
    return p->packed && p->scales && p->inputs == inputs && p->outputs == outputs && inputs > 0 && outputs > 0 &&
           inputs < MOST_WIDTH && inputs % GROUP == 0 && outputs % PANEL == 0 && (p->bits == 8 || p->bits == 4);
}

static int is_norm(const struct penstock_normalisation *norm) { return norm->weight && norm->epsilon >= 0; }

static int is_layer(const struct penstock_decoder_parts *parts, const struct penstock_layer *l, int hidden) {
    int heads = parts->heads * parts->head_width, joined = heads + 2 * parts->key_heads * parts->head_width;
    int inner = l->up.outputs;
    int turned = l->rope >= 0 && l->rope < parts->ropes ? 2 * parts->rope[l->rope].half : 0;
    return is_product(&l->attend, hidden, joined) && is_product(&l->output, heads, hidden) &&
           is_product(&l->up, hidden, inner) && (!l->gate.outputs || is_product(&l->gate, hidden, inner)) &&
           is_product(&l->down, inner, hidden) && is_norm(&l->attention_norm) && is_norm(&l->network_norm) &&
           l->window >= 0 && l->rope >= -1 && l->rope < parts->ropes && turned <= parts->head_width &&
           !l->query_norm.bias && !l->key_norm.bias;
}

static int is_decoder(const struct penstock_decoder_parts *parts) {
    int hidden = parts->embeddings.inputs;
    if (parts->layers < 1 || parts->layers > POOL_MOST_PHASES / STAGES_OF_LAYER - 1 || parts->ropes < 0) return 0;
    if (parts->heads < 1 || parts->key_heads < 1 || parts->heads % parts->key_heads) return 0;
    if (parts->head_width < 16 || parts->head_width % 16 || parts->head_width > MOST_HEAD_WIDTH) return 0;
    if (parts->head_size < 1 || parts->head_size > parts->head_width || parts->heads > 4096) return 0;
    if (!is_product(&parts->embeddings, hidden, parts->embeddings.outputs) || parts->embeddings.bits != 8) return 0;
    if (parts->vocabulary < 1) return 0;
    if (parts->vocabulary > parts->embeddings.outputs || !is_norm(&parts->final_norm)) return 0;
    if (parts->embeddings.bias || (parts->position_table && parts->positions < 1)) return 0;
    if (parts->head.outputs && !is_product(&parts->head, hidden, parts->embeddings.outputs)) return 0;
    for (int r = 0; r < parts->ropes; r++)
        if (parts->rope[r].half < 1 || parts->rope[r].half > parts->head_width / 2 || !parts->rope[r].frequencies) return 0;
    for (int l = 0; l < parts->layers; l++)
        if (!is_layer(parts, &parts->layer[l], hidden)) return 0;
    return 1;
}

static void find_widest(struct penstock_decoder *d) {
    d->widest = d->hidden;
    for (int l = 0; l < d->parts.layers; l++) {
        const struct penstock_layer *layer = &d->parts.layer[l];
        if (layer->output.inputs > d->widest) d->widest = layer->output.inputs;
        if (layer->down.inputs > d->widest) d->widest = layer->down.inputs;
    }
}

static int take_participants(struct penstock_decoder *d) {
    size_t widest = (size_t)d->widest;
    size_t scores = (size_t)d->kernels->queries * ((size_t)d->blocks + 1) * BLOCK_TOKENS * sizeof(float);
    size_t stored = rounded(PRIVATE_LINES * 2 * widest, ALIGNMENT);
    size_t grids = rounded(PRIVATE_LINES * sizeof(struct row_grid), ALIGNMENT);
    size_t line = rounded(widest * sizeof(float), ALIGNMENT), room = widest * PANEL + prefetched_bytes(d->widest);
    size_t each = rounded(stored + grids + line + scores + room, 4096);
    d->own_size = each * (size_t)d->threads;
    d->own = mmap(NULL, d->own_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    d->participants = calloc((size_t)d->threads, sizeof *d->participants);
    if (d->own == MAP_FAILED) d->own = NULL;
    if (!d->own || !d->participants) return 0;
    for (int t = 0; t < d->threads; t++) {
        char *at = d->own + each * (size_t)t;
        d->participants[t] = (struct participant){
            -1, (uint8_t *)at, (struct row_grid *)(at + stored), (float *)(at + stored + grids),
            (float *)(at + stored + grids + line), (int8_t *)(at + stored + grids + line + scores)};
    }
    return 1;
}

struct penstock_decoder *penstock_decoder_open(const struct penstock_decoder_parts *parts, int32_t blocks,
                                               int32_t threads, int32_t isa, int32_t *status) {
    *status = PENSTOCK_BAD_MODEL;
    const struct decoder_kernels *kernels = decoder_kernels_for(isa);
    if (!kernels || blocks < 1 || threads < 1 || threads > 1024 || !is_decoder(parts)) return NULL;
    *status = PENSTOCK_NO_MEMORY;
    struct penstock_decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->kernels = kernels;
    d->parts = *parts;
    d->threads = threads;
    d->blocks = blocks;
    d->hidden = parts->embeddings.inputs;
    d->joined = (parts->heads + 2 * parts->key_heads) * parts->head_width;
    find_widest(d);
    d->layers = calloc((size_t)parts->layers, sizeof *d->layers);
    d->ropes = calloc((size_t)parts->ropes + 1, sizeof *d->ropes);
    d->stages = calloc((size_t)(parts->layers + 1) * STAGES_OF_LAYER, sizeof *d->stages);
    size_t block = 2 * (size_t)parts->key_heads * (size_t)parts->head_width * BLOCK_TOKENS * sizeof(uint16_t);
    d->cache_size = block * (size_t)blocks * (size_t)parts->layers;
    d->cache = take_pages(d->cache_size = rounded(d->cache_size, (size_t)2 << 20));
    d->pool = threads > 1 ? pool_start(threads) : NULL;
    struct copier copier = {NULL, 0, kernels};
    if (d->layers && d->ropes && d->stages && d->cache && (threads < 2 || d->pool) && take_participants(d)) {
        copy_parts(d, &copier);
        d->weights_size = rounded(copier.size + prefetched_bytes(d->widest), (size_t)2 << 20);
        d->weights = take_pages(d->weights_size);
    }
    if (!d->weights) {
        penstock_decoder_close(d);
        return NULL;
    }
    d->parts = *parts;
    copier = (struct copier){d->weights, 0, kernels};
    copy_parts(d, &copier);
    d->parts.layer = NULL; /* the caller's */
    d->parts.rope = NULL;
    *status = PENSTOCK_OK;
    return d;
}

void penstock_decoder_close(struct penstock_decoder *d) {
    if (!d) return;
    pool_stop(d->pool);
    if (d->weights) munmap(d->weights, d->weights_size);
    if (d->cache) munmap(d->cache, d->cache_size);
    if (d->own) munmap(d->own, d->own_size);
    if (d->memory) munmap(d->memory, d->memory_size);
    free(d->participants);
    free(d->stages);
    free(d->layers);
    free(d->ropes);
    free(d);
}

/* The parts of a step's memory in order, from `at` on; the size of all. */
static size_t divide(struct penstock_decoder *d, char *at, size_t lines, size_t rows) {
    size_t size = 0, floats = sizeof(float), numbers = sizeof(int);
#define PART(NAME, BYTES) (d->NAME = (void *)((uintptr_t)at + size), size += rounded((BYTES), ALIGNMENT))
    size_t inner = 0, angles = 0;
    for (int l = 0; l < d->parts.layers; l++)
        if ((size_t)d->layers[l].up.outputs > inner) inner = (size_t)d->layers[l].up.outputs;
    for (int r = 0; r < d->parts.ropes; r++) angles += 2 * (size_t)d->ropes[r].half;
    PART(x, lines * (size_t)d->hidden * floats);
    PART(wanted_x, lines * (size_t)d->hidden * floats);
    PART(extra, lines * (size_t)d->hidden * floats);
    PART(joined_lines, lines * (size_t)d->joined * floats);
    PART(attended, lines * (size_t)(d->parts.heads * d->parts.head_width) * floats);
    PART(inner, lines * inner * floats);
    PART(angles, lines * angles * floats);
    PART(stored, rounded(lines, TILE_LINES) * 2 * (size_t)d->widest);
    PART(grids, lines * sizeof(struct row_grid));
    PART(line_row, lines * numbers);
    PART(line_position, lines * numbers);
    PART(wanted_line, lines * numbers);
    PART(unit_row, lines * numbers);
    PART(unit_first, lines * numbers);
    PART(row_line, rows * numbers);
    PART(row_block, rows * numbers);
#undef PART
    return size;
}

int decoder_grow(struct penstock_decoder *d, int lines, int rows) {
    if (d->memory && lines <= d->most_lines && rows <= d->most_rows) return 1;
    if (lines < d->most_lines) lines = d->most_lines;
    if (rows < d->most_rows) rows = d->most_rows;
    if (d->memory) munmap(d->memory, d->memory_size);
    d->memory_size = rounded(divide(d, NULL, (size_t)lines, (size_t)rows), (size_t)2 << 20);
    d->memory = take_pages(d->memory_size);
    if (!d->memory) {
        d->most_lines = d->most_rows = 0;
        return 0;
    }
    divide(d, d->memory, (size_t)lines, (size_t)rows);
    d->most_lines = lines;
    d->most_rows = rows;
    return 1;
}
