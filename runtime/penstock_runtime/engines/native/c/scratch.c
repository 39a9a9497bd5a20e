/* The memory of runs: one block for each concurrent run, kept in a free list between runs. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

#include "model.h"

void scratch_free(struct scratch *s) {
    if (!s) return;
    if (s->memory) munmap(s->memory, s->size);
    free(s);
}

static int scratch_grow(struct scratch *s, const struct penstock_model *m, size_t rows, size_t tokens,
                        size_t chosen) {
    size_t lines = rows * tokens;
    if (s->memory && lines <= s->lines && tokens <= s->tokens && rows <= s->rows && chosen <= s->chosen) return 1;
    if (lines < s->lines) lines = s->lines;
    if (tokens < s->tokens) tokens = s->tokens;
    if (rows < s->rows) rows = s->rows;
    if (chosen < s->chosen) chosen = s->chosen;
    size_t at[MOST_BUFFERS], size = 0;
    for (int b = 0; b < m->buffers; b++) {
        size_t count = m->buffer_per[b] == PER_CHOSEN ? chosen : m->buffer_per[b] == PER_ROW ? rows : lines;
        at[b] = size;
        size += rounded(count * (size_t)m->buffer_widths[b] * sizeof(float), ALIGNMENT);
    }
    size_t stored = size, grids, keep, position, where, attention;
    grids = stored + rounded(lines * (size_t)m->widest_stored, ALIGNMENT);
    keep = grids + rounded(lines * sizeof(struct row_grid), ALIGNMENT);
    position = keep + rounded(lines * sizeof(float), ALIGNMENT);
    where = position + rounded(lines * sizeof(int32_t), ALIGNMENT);
    attention = where + rounded(chosen * sizeof(int32_t), ALIGNMENT);
    s->attention_floats = rounded(attention_scratch((int)tokens, m->head_width, m->has_distances), ALIGNMENT);
    size_t results = m->has_largest ? LARGEST_LINES * LARGEST_PANELS * PANEL : 0;
    if (results > s->attention_floats) s->attention_floats = results;
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
    s->where = (int32_t *)(s->memory + where);
    s->attention = (float *)(s->memory + attention);
    s->lines = lines;
    s->tokens = tokens;
    s->rows = rows;
    s->chosen = chosen;
    return 1;
}

struct scratch *scratch_take(struct penstock_model *m, size_t rows, size_t tokens, size_t chosen) {
    pthread_mutex_lock(&m->lock);
    struct scratch *s = m->free;
    if (s) m->free = s->next;
    pthread_mutex_unlock(&m->lock);
    if (!s) s = calloc(1, sizeof *s);
    if (s && !scratch_grow(s, m, rows, tokens, chosen)) {
        scratch_free(s);
        return NULL;
    }
    return s;
}

void scratch_give(struct penstock_model *m, struct scratch *s) {
    pthread_mutex_lock(&m->lock);
    s->next = m->free;
    m->free = s;
    pthread_mutex_unlock(&m->lock);
}
