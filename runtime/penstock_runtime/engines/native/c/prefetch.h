/* Prefetching of weights: a panel before its use, during the product of the previous one. Into the second-level cache,
which allows more outstanding lines than the first; that has no room for two panels. (The product of tiles,
kernels_amx.c, prefetches differently.) */
#ifndef PENSTOCK_PREFETCH_H
#define PENSTOCK_PREFETCH_H

#include "kernels.h"

#define CACHE_LINE 64

/* What the blocks of a panel prefetch in each turn. */
struct prefetch {
    const char *at;
    int each, left; /* cache lines in each turn: of one block, and of all remaining blocks */
};

/* `count` panels from `panel` on. After a layer's last panel comes the first one of the next layer. */
static inline struct prefetch prefetch_of(const struct linear8 *layer, int panel, int count, int blocks) {
    size_t bytes = (size_t)layer->inputs * PANEL / 8 * (size_t)layer->bits;
    int lines = (count * PANEL * 4 / 8 * layer->bits + CACHE_LINE - 1) / CACHE_LINE; /* a turn has four inputs */
    return (struct prefetch){(const char *)layer->packed + (size_t)panel * bytes, (lines + blocks - 1) / blocks, lines};
}

/* Lines that the next block prefetches in each turn. */
static inline int prefetch_lines(struct prefetch *ahead) {
    int lines = ahead->left > 0 ? ahead->each : 0;
    ahead->left -= lines;
    return lines;
}

static inline const char *prefetch(const char *at, int lines) {
    for (int i = 0; i < lines; i++, at += CACHE_LINE) __builtin_prefetch(at, 0, 2);
    return at;
}

#endif
