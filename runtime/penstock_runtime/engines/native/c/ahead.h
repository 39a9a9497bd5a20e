/* Weights are asked for from memory a panel before their use, while others are multiplied. Into the second-level cache:
more lines are on their way to it at a time than to the first, which has no room for two panels. (The product of tiles,
kernels_amx.c, asks in its own way.) */
#ifndef PENSTOCK_AHEAD_H
#define PENSTOCK_AHEAD_H

#include "kernels.h"

#define CACHE_LINE 64

/* What is to be asked for by the blocks that a panel is read in, turn by turn. */
struct ahead {
    const char *at;
    int each, left; /* cache lines for each turn: by one block, and by all that are to come */
};

/* `count` panels from `panel` on. Behind a layer's last panel the next layer's first one lies. */
static inline struct ahead ahead_of(const struct linear8 *layer, int panel, int count, int blocks) {
    size_t bytes = (size_t)layer->inputs * PANEL / 8 * (size_t)layer->bits;
    int lines = (count * PANEL * 4 / 8 * layer->bits + CACHE_LINE - 1) / CACHE_LINE; /* a turn has four inputs */
    return (struct ahead){(const char *)layer->packed + (size_t)panel * bytes, (lines + blocks - 1) / blocks, lines};
}

/* How many lines the next block asks for in each turn. */
static inline int lines_ahead(struct ahead *ahead) {
    int lines = ahead->left > 0 ? ahead->each : 0;
    ahead->left -= lines;
    return lines;
}

static inline const char *ask(const char *at, int lines) {
    for (int i = 0; i < lines; i++, at += CACHE_LINE) __builtin_prefetch(at, 0, 2);
    return at;
}

#endif
