/* Computes a step of a decoder: the tokens of all rows go through each layer together, so weights are read once.

A row's logits have the same bits whatever rows share the step, however its prompt was cut into steps, and with any number of
threads: products quantise each line on its own and sum integers; the attention sums in a fixed order (decoder_kernels.inc). */
#include <math.h>
#include <string.h>

#include "decoder.h"

#define LINES 4            /* lines in a unit of phases that compute line by line */
#define PIECE 16           /* tokens of a row in a unit of the attention */
#define BLOCKS_PER_THREAD 2 /* of a product, at least */
#define MOST_PANELS 48     /* in a block: limits the work that a late thread leaves to others */
#define MOST_LINES (1 << 15)

static int at_most(int a, int b) { return a < b ? a : b; }
static int parts_of(int whole, int part) { return (whole + part - 1) / part; }

/* ---- What a product reads ---- */

struct source {
    const float *lines;
    int width, count; /* numbers in a line, and lines */
    const struct penstock_normalisation *norm; /* NULL: none */
};

static struct source source_of(const struct penstock_decoder *d, enum decoder_task task, int layer) {
    const struct decoder_layer *l = &d->layers[layer];
    switch (task) {
    case ATTEND: return (struct source){d->x, d->hidden, d->lines, &l->parts.attention_norm};
    case OUTPUT: return (struct source){d->attended, l->output.inputs, d->lines, NULL};
    case NETWORK: return (struct source){d->x, d->hidden, d->lines, &l->parts.network_norm};
    case DOWN: return (struct source){d->inner, l->down.inputs, d->lines, NULL};
    default: return (struct source){d->wanted_x, d->hidden, d->wanted, &d->parts.final_norm};
    }
}

static void normalise(const struct penstock_decoder *d, const struct penstock_normalisation *norm, const float *x,
                      int width, float *target) {
    if (norm->bias)
        d->kernels->norm(x, norm->weight, norm->bias, norm->epsilon, width, 0, 1, target);
    else
        d->kernels->root_norm(x, norm->weight, NULL, norm->epsilon, width, width, target);
}

/* Lines first..last of a product's source, normalised and quantised. */
static void prepare_lines(const struct penstock_decoder *d, const struct source *source, int first, int last, float *room,
                          uint8_t *stored, struct row_grid *grids) {
    size_t width = (size_t)source->width;
    int tiled = in_tiles(d->kernels->tiles, source->width, source->count);
    for (int line = first; line < last; line++) {
        const float *x = source->lines + (size_t)line * width;
        if (source->norm) {
            normalise(d, source->norm, x, source->width, room);
            x = room;
        }
        uint8_t *upper = stored + 2 * width * (size_t)line, *lower = upper + width;
        if (tiled) {
            upper = stored + 2 * width * (size_t)(line / TILE_LINES * TILE_LINES) + (size_t)(line % TILE_LINES) * 2 * TILE_WIDTH;
            lower = upper + TILE_WIDTH;
        }
        size_t step = tiled ? 2 * TILE_LINES * TILE_WIDTH : TILE_WIDTH;
        d->kernels->quantise(x, source->width, upper, lower, step, grids + line);
    }
}

/* ---- Products ---- */

struct product {
    const struct linear8 *first, *second; /* the second multiplies the target with its result; may be NULL */
    const float *residual;
    float *target;
};

static struct product product_of(const struct penstock_decoder *d, enum decoder_task task, int layer) {
    const struct decoder_layer *l = &d->layers[layer];
    switch (task) {
    case ATTEND: return (struct product){&l->attend, NULL, NULL, d->joined_lines};
    case OUTPUT:
        if (l->parts.attended_norm.weight) return (struct product){&l->output, NULL, NULL, d->extra};
        return (struct product){&l->output, NULL, d->x, d->x};
    case NETWORK: return (struct product){&l->up, l->gate.outputs ? &l->gate : NULL, NULL, d->inner};
    case DOWN:
        if (l->parts.expanded_norm.weight) return (struct product){&l->down, NULL, NULL, d->extra};
        return (struct product){&l->down, NULL, d->x, d->x};
    default: return (struct product){&d->head, NULL, NULL, d->rows->result};
    }
}

static int panels_of(const struct penstock_decoder *d, const struct stage *stage) {
    return product_of(d, stage->task, stage->layer).first->outputs / PANEL;
}

static int panel_grain(const struct penstock_decoder *d, int panels) {
    int grain = panels / (d->threads * BLOCKS_PER_THREAD);
    return grain < 1 ? 1 : at_most(grain, MOST_PANELS);
}

/* Panels from..to of a product for all lines. */
static void multiply_panels(const struct penstock_decoder *d, const struct linear8 *layer, const uint8_t *stored,
                            const struct row_grid *grids, const float *residual, int lines, int from, int to, int8_t *room,
                            float *target) {
    if (layer->bits == 8)
        d->kernels->linear8(layer, stored, grids, residual, 0, 2 * lines, from, to, target);
    else
        d->kernels->linear4(layer, stored, grids, residual, 2 * lines, from, to, room, target);
}

static void multiply(struct penstock_decoder *d, int number, int block, struct participant *own) {
    const struct stage *stage = &d->stages[number];
    struct source source = source_of(d, stage->task, stage->layer);
    struct product product = product_of(d, stage->task, stage->layer);
    const uint8_t *stored = d->stored;
    const struct row_grid *grids = d->grids;
    if (source.count <= PRIVATE_LINES) {
        if (own->prepared != number) prepare_lines(d, &source, 0, source.count, own->line, own->stored, own->grids);
        own->prepared = number;
        stored = own->stored;
        grids = own->grids;
    }
    int panels = panels_of(d, stage), grain = panel_grain(d, panels);
    int from = block * grain, to = at_most(from + grain, panels);
    multiply_panels(d, product.first, stored, grids, product.residual, source.count, from, to, own->room, product.target);
    if (product.second)
        multiply_panels(d, product.second, stored, grids, product.target, source.count, from, to, own->room, product.target);
}

/* ---- Attention ---- */

static uint16_t *cache_of(const struct penstock_decoder *d, int layer, int block, int head) {
    size_t size = 2 * (size_t)d->parts.head_width * BLOCK_TOKENS;
    return d->cache + (((size_t)layer * (size_t)d->blocks + (size_t)block) * (size_t)d->parts.key_heads + (size_t)head) * size;
}

/* Normalises and rotates `count` consecutive heads. */
static void turn(const struct penstock_decoder *d, const struct penstock_normalisation *norm, int rope, int line, int count,
                 float *heads) {
    int width = d->parts.head_width;
    if (norm->weight)
        for (int h = 0; h < count; h++)
            d->kernels->root_norm(heads + h * width, norm->weight, NULL, norm->epsilon, width, d->parts.head_size,
                                  heads + h * width);
    if (rope < 0) return;
    const float *angles = d->angles;
    for (int r = 0; r < rope; r++) angles += 2 * (size_t)d->ropes[r].half * (size_t)d->lines;
    int half = d->ropes[rope].half;
    angles += 2 * (size_t)half * (size_t)line;
    if (2 * half == width) {
        d->kernels->rotate(angles, angles + half, count, half, heads);
    } else {
        for (int h = 0; h < count; h++) d->kernels->rotate(angles, angles + half, 1, half, heads + h * width);
    }
}

/* A line's queries, keys and values of one key head: turned, and the keys and values written to the cache. */
static void place(const struct penstock_decoder *d, int layer, int line, int head) {
    const struct penstock_layer *l = &d->layers[layer].parts;
    int width = d->parts.head_width, shared = d->parts.heads / d->parts.key_heads;
    float *joined = d->joined_lines + (size_t)line * (size_t)d->joined;
    float *key = joined + (d->parts.heads + head) * width, *value = key + d->parts.key_heads * width;
    turn(d, &l->query_norm, l->rope, line, shared, joined + head * shared * width);
    turn(d, &l->key_norm, l->rope, line, 1, key);
    int position = d->line_position[line], slot = position % BLOCK_TOKENS;
    int block = d->rows->blocks[d->row_block[d->line_row[line]] + position / BLOCK_TOKENS];
    uint16_t *keys = cache_of(d, layer, block, head), *values = keys + width * BLOCK_TOKENS, narrow[MOST_HEAD_WIDTH];
    d->kernels->narrow(key, width, narrow);
    for (int c = 0; c < width; c++) keys[c * BLOCK_TOKENS + slot] = narrow[c];
    d->kernels->narrow(value, width, values + slot * width);
}

static int places_first(const struct penstock_decoder *d) { return d->lines == d->rows->rows; }

static void attention_unit(const struct penstock_decoder *d, int layer, int unit, struct participant *own) {
    int head = unit % d->parts.key_heads, piece = unit / d->parts.key_heads;
    int row = d->unit_row[piece], first = d->row_line[row] + d->unit_first[piece];
    int count = at_most(d->rows->counts[row] - d->unit_first[piece], PIECE);
    int width = d->parts.head_width, shared = d->parts.heads / d->parts.key_heads, items = count * shared;
    if (places_first(d)) place(d, layer, first, head);
    struct paged_attention attention = {
        .cache = cache_of(d, layer, 0, head),
        .stride = 2 * (size_t)d->parts.key_heads * (size_t)width * BLOCK_TOKENS,
        .blocks = d->rows->blocks + d->row_block[row],
        .width = width,
        .window = d->layers[layer].parts.window,
        .scale = d->layers[layer].parts.scale,
        .scratch = own->scores,
        .padded = ((size_t)d->blocks + 1) * BLOCK_TOKENS,
    };
    for (int item = 0; item < items; item += attention.count) {
        attention.count = at_most(items - item, d->kernels->queries);
        for (int r = 0; r < attention.count; r++) {
            int line = first + (item + r) / shared, of = head * shared + (item + r) % shared;
            attention.query[r] = d->joined_lines + (size_t)line * (size_t)d->joined + of * width;
            attention.target[r] = d->attended + ((size_t)line * (size_t)d->parts.heads + (size_t)of) * (size_t)width;
            attention.end[r] = d->line_position[line] + 1;
        }
        d->kernels->attend(&attention);
    }
}

/* ---- Line by line ---- */

static void read_table(const struct penstock_decoder *d, int line) {
    const struct linear8 *table = &d->embeddings; /* 8 bits */
    int token = d->rows->tokens[line], hidden = d->hidden;
    const int8_t *weights = table->packed + (size_t)(token / PANEL) * (size_t)hidden * PANEL + token % PANEL * 4;
    float scale = table->scales[token] * d->parts.embedding_scale;
    const float *position = NULL;
    if (d->parts.position_table)
        position = d->parts.position_table + (size_t)d->line_position[line] * (size_t)hidden;
    float *x = d->x + (size_t)line * (size_t)hidden;
    for (int k = 0; k < hidden; k++) {
        float value = (float)weights[k / 4 * PANEL * 4 + k % 4] * scale;
        x[k] = position ? value + position[k] : value;
    }
}

static void do_line(struct penstock_decoder *d, const struct stage *stage, int line, struct participant *own) {
    size_t hidden = (size_t)d->hidden;
    switch (stage->task) {
    case TABLE: read_table(d, line); break;
    case PREPARE: {
        struct source source = source_of(d, stage->of, stage->layer);
        prepare_lines(d, &source, line, line + 1, own->line, d->stored, d->grids);
        break;
    }
    case PLACE:
        for (int head = 0; head < d->parts.key_heads; head++) place(d, stage->layer, line, head);
        break;
    case SUM: {
        const struct penstock_layer *l = &d->layers[stage->layer].parts;
        const float *extra = d->extra + (size_t)line * hidden;
        float *x = d->x + (size_t)line * hidden;
        normalise(d, stage->of == OUTPUT ? &l->attended_norm : &l->expanded_norm, extra, d->hidden, own->line);
        for (size_t i = 0; i < hidden; i++) x[i] += own->line[i];
        break;
    }
    case WANTED: memcpy(d->wanted_x + (size_t)line * hidden, d->x + (size_t)d->wanted_line[line] * hidden, hidden * sizeof(float)); break;
    default: break; /* not of this kind */
    }
}

/* ---- Phases ---- */

static int stage_lines(const struct penstock_decoder *d, const struct stage *stage) {
    int wanted = stage->task == WANTED || (stage->task == PREPARE && stage->of == HEAD);
    return wanted ? d->wanted : d->lines;
}

static int attention_grain(const struct penstock_decoder *d) {
    return parts_of(d->units_tokens * d->parts.key_heads, POOL_MOST_BLOCKS);
}

static int count_blocks(void *job, int number) {
    struct penstock_decoder *d = job;
    const struct stage *stage = &d->stages[number];
    switch (stage->task) {
    case ATTEND:
    case OUTPUT:
    case NETWORK:
    case DOWN:
    case HEAD: {
        int panels = panels_of(d, stage);
        return parts_of(panels, panel_grain(d, panels));
    }
    case ATTENTION_OF: return parts_of(d->units_tokens * d->parts.key_heads, attention_grain(d));
    default: return parts_of(stage_lines(d, stage), LINES);
    }
}

static void run_block(void *job, int number, int block, int participant) {
    struct penstock_decoder *d = job;
    struct participant *own = &d->participants[participant];
    const struct stage *stage = &d->stages[number];
    switch (stage->task) {
    case ATTEND:
    case OUTPUT:
    case NETWORK:
    case DOWN:
    case HEAD: multiply(d, number, block, own); break;
    case ATTENTION_OF: {
        int grain = attention_grain(d), units = d->units_tokens * d->parts.key_heads;
        for (int unit = block * grain; unit < at_most((block + 1) * grain, units); unit++)
            attention_unit(d, stage->layer, unit, own);
        break;
    }
    default: {
        int lines = stage_lines(d, stage);
        for (int line = block * LINES; line < at_most((block + 1) * LINES, lines); line++) do_line(d, stage, line, own);
    }
    }
}

static void add_stage(struct penstock_decoder *d, enum decoder_task task, enum decoder_task of, int layer) {
    d->stages[d->stage_count++] = (struct stage){task, of, layer};
}

static void add_product(struct penstock_decoder *d, enum decoder_task task, int layer) {
    if (source_of(d, task, layer).count > PRIVATE_LINES) add_stage(d, PREPARE, task, layer);
    add_stage(d, task, task, layer);
}

static void list_stages(struct penstock_decoder *d) {
    d->stage_count = 0;
    add_stage(d, TABLE, TABLE, 0);
    for (int l = 0; l < d->parts.layers; l++) {
        const struct penstock_layer *own = &d->layers[l].parts;
        add_product(d, ATTEND, l);
        if (!places_first(d)) add_stage(d, PLACE, PLACE, l);
        add_stage(d, ATTENTION_OF, ATTENTION_OF, l);
        add_product(d, OUTPUT, l);
        if (own->attended_norm.weight) add_stage(d, SUM, OUTPUT, l);
        add_product(d, NETWORK, l);
        add_product(d, DOWN, l);
        if (own->expanded_norm.weight) add_stage(d, SUM, DOWN, l);
    }
    if (!d->wanted) return;
    add_stage(d, WANTED, WANTED, 0);
    add_product(d, HEAD, 0);
}

/* ---- A step ---- */

/* 0 if a number is outside of its range. */
static int check(const struct penstock_decoder *d, const struct penstock_rows *rows, int *lines, int *wanted) {
    const int32_t *token = rows->tokens, *block = rows->blocks;
    *lines = *wanted = 0;
    if (rows->rows < 1 || rows->rows > MOST_LINES) return 0;
    for (int r = 0; r < rows->rows; r++) {
        int count = rows->counts[r], position = rows->positions[r];
        if (count < 1 || count > MOST_LINES || position < 0 || rows->logits[r] < 0 || rows->logits[r] > count) return 0;
        if (position > d->blocks * BLOCK_TOKENS - count) return 0;
        if (d->parts.position_table && position + count > d->parts.positions) return 0;
        for (int t = 0; t < count; t++, token++)
            if (*token < 0 || *token >= d->parts.vocabulary) return 0;
        for (int b = 0; b < parts_of(position + count, BLOCK_TOKENS); b++, block++)
            if (*block < 0 || *block >= d->blocks) return 0;
        *lines += count;
        *wanted += rows->logits[r];
        if (*lines > MOST_LINES) return 0;
    }
    return 1;
}

static void describe_rows(struct penstock_decoder *d) {
    const struct penstock_rows *rows = d->rows;
    int line = 0, block = 0, wanted = 0;
    d->units_tokens = 0;
    for (int r = 0; r < rows->rows; r++) {
        int count = rows->counts[r];
        d->row_line[r] = line;
        d->row_block[r] = block;
        for (int t = 0; t < count; t += PIECE) {
            d->unit_row[d->units_tokens] = r;
            d->unit_first[d->units_tokens++] = t;
        }
        for (int t = 0; t < count; t++, line++) {
            d->line_row[line] = r;
            d->line_position[line] = rows->positions[r] + t;
            if (t >= count - rows->logits[r]) d->wanted_line[wanted++] = line;
        }
        block += parts_of(rows->positions[r] + count, BLOCK_TOKENS);
    }
}

static void compute_angles(struct penstock_decoder *d) {
    float *at = d->angles;
    for (int r = 0; r < d->parts.ropes; r++) {
        const struct penstock_rope *rope = &d->ropes[r];
        for (int line = 0; line < d->lines; line++, at += 2 * rope->half)
            for (int i = 0; i < rope->half; i++) {
                float angle = (float)d->line_position[line] * rope->frequencies[i];
                at[i] = cosf(angle) * rope->magnitude;
                at[rope->half + i] = sinf(angle) * rope->magnitude;
            }
    }
}

int32_t penstock_decoder_step(struct penstock_decoder *d, const struct penstock_rows *rows) {
    int lines, wanted;
    if (!check(d, rows, &lines, &wanted)) return PENSTOCK_BAD_INPUT;
    if (!decoder_grow(d, lines, rows->rows)) return PENSTOCK_NO_MEMORY;
    d->rows = rows;
    d->lines = lines;
    d->wanted = wanted;
    describe_rows(d);
    compute_angles(d);
    list_stages(d);
    for (int t = 0; t < d->threads; t++) d->participants[t].prepared = -1;
    if (!d->pool || !pool_run(d->pool, d->threads, d, d->stage_count, count_blocks, run_block))
        for (int s = 0; s < d->stage_count; s++)
            for (int block = 0, count = count_blocks(d, s); block < count; block++) run_block(d, s, block, 0);
    d->rows = NULL;
    return PENSTOCK_OK;
}
