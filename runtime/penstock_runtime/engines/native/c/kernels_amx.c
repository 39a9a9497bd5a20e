/* Kernels for AMX, where one instruction multiplies 16,384 pairs of bytes, or 8,192 of 16-bit floats. */
#if defined(__x86_64__)
#include "avx512.h"
#include "narrow.h"

#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512bf16")))
#define TARGET16 AMX
#define WHOLE16 0
#include "attention16.inc"

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

static inline AMX void load_shapes(const struct tile_shapes *shapes) {
    /* gcc 12 takes the intrinsic for a read of 8 bytes, and may drop the other stores to the shapes. */
    __asm__ volatile("" : : "m"(*shapes));
    _tile_loadconfig(shapes);
}

/* Tiles 0..3: sums of 2 x 2; 4, 5: lines; 6, 7: weights. */
static inline AMX void shape_tiles(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)(t > 5 ? TILE : t < 2 || t == 4 ? upper : lower ? lower : 1);
    }
    load_shapes(&shapes);
}

/* ---- The 8-bit product ---- */

#define LEAST_LINES 4   /* for tiles to pay */
#define MOST_LINES 256  /* of which sums are kept */
#define PART 8          /* turns: weights of a panel that fit into the first-level cache together with the current lines */
#define TURN 64         /* inputs that one instruction multiplies and sums */
#define TURN_BYTES (TURN * PANEL) /* of the weights of a panel that one turn needs */

/* The next memory to read, and the number of its cache lines to prefetch in each turn. */
struct prefetch {
    const char *at;
    int lines;
};

/* The weights of one panel. Narrow ones are widened a turn before their use, into memory for the whole panel if other
lines follow, otherwise for two turns. */
struct panel {
    const int8_t *at; /* as packed */
    int bits;
    struct narrow narrow;
    int8_t *room;
    size_t kept; /* mask of the turn number: all bits, or the lowest */
};

static inline const int8_t *turn_weights(const struct panel *panel, size_t turn) {
    return panel->bits == 8 ? panel->at + turn * TURN_BYTES : panel->room + (turn & panel->kept) * TURN_BYTES;
}

static inline void widen_turn(const struct panel *panel, size_t turn) {
    size_t bytes = 8 * (size_t)panel->bits; /* of 64 weights */
    const int8_t *from = panel->at + turn * (TURN_BYTES / 64) * bytes;
    int8_t *to = panel->room + (turn & panel->kept) * TURN_BYTES;
    for (size_t v = 0; v < TURN_BYTES / 64; v++)
        _mm512_store_si512(to + v * 64, widened(&panel->narrow, from + v * bytes));
}

/* Turns begin..end of one panel for up to 32 lines. */
static AMX void tiles(const struct panel *panel, const uint8_t *x, size_t inputs, size_t begin, size_t end, int lines,
                      struct prefetch *ahead, int32_t *sums) {
    const char *soon = ahead->at;
    if (begin) {
        _tile_loadd(0, sums, PANEL * 4);
        _tile_loadd(1, sums + 16, PANEL * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
    }
    if (begin && lines > TILE) {
        _tile_loadd(2, sums + TILE * PANEL, PANEL * 4);
        _tile_loadd(3, sums + TILE * PANEL + 16, PANEL * 4);
    } else if (lines > TILE) {
        _tile_zero(2);
        _tile_zero(3);
    }
    x += begin * TURN;
    if (panel->bits < 8) widen_turn(panel, begin);
    for (size_t turn = begin; turn < end; turn++, x += TURN) {
        const int8_t *w = turn_weights(panel, turn);
        if (panel->bits < 8 && turn + 1 < end) widen_turn(panel, turn + 1);
        _tile_loadd(6, w, PANEL * 4);
        _tile_loadd(7, w + 64, PANEL * 4);
        _tile_loadd(4, x, inputs);
        for (int i = 0; i < ahead->lines; i++, soon += 64) _mm_prefetch(soon, _MM_HINT_T0);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (lines > TILE) {
            _tile_loadd(5, x + TILE * inputs, inputs);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
    }
    if (lines > TILE) {
        _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE * PANEL + 16, PANEL * 4);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    ahead->at = soon;
}

/* Up to MOST_LINES lines. */
static AMX void linear8_lines(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                              const float *residual, int first, int last, int from, int to, float *target) {
    size_t inputs = (size_t)layer->inputs, turns = inputs / TURN, bytes = inputs * PANEL / 8 * (size_t)layer->bits;
    _Alignas(64) int32_t sums[MOST_LINES / (2 * TILE)][2 * TILE * PANEL];
    _Alignas(64) int8_t room[MOST_NARROW_INPUTS * PANEL]; /* unused if weights have 8 bits */
    int upper = -1, lower = -1, chunks = (last - first + 2 * TILE - 1) / (2 * TILE);
    size_t part = chunks > 1 && turns > PART ? PART : turns;
    struct panel now = {.room = room, .kept = chunks > 1 ? SIZE_MAX : 1};
    if (layer->bits < 8) now.narrow = narrow_of(layer->bits);
    int cache_lines = TURN_BYTES / 64 * layer->bits / 8; /* of the weights of one turn */
    for (int panel = from; panel < to; panel++) {
        const int8_t *packed = layer->packed + (size_t)panel * bytes;
        /* Weights are read from memory once: prefetched shortly before their use for few lines, otherwise gradually during the
       previous panel. */
        struct prefetch ahead = {(const char *)packed + (chunks > 1 ? bytes : AHEAD),
                                 (cache_lines + chunks - 1) / chunks};
        for (size_t begin = 0, end; begin < turns; begin = end) {
            end = begin + part < turns ? begin + part : turns;
            now.at = packed;
            now.bits = layer->bits;
            for (int chunk = 0; chunk < chunks; chunk++) {
                int line = first + chunk * 2 * TILE, lines = last - line < 2 * TILE ? last - line : 2 * TILE;
                int now_upper = lines < TILE ? lines : TILE, now_lower = lines - now_upper;
                if (now_upper != upper || now_lower != lower) shape_tiles(upper = now_upper, lower = now_lower);
                int32_t *own = sums[part < turns ? chunk : 0];
                tiles(&now, stored + (size_t)line * inputs, inputs, begin, end, lines, &ahead, own);
                if (now.bits < 8 && chunks > 1) { /* widened for the following lines */
                    now.at = room;
                    now.bits = 8;
                }
                if (end == turns) finish(layer, own, grids, residual, line, lines, panel * PANEL, PANEL, target);
            }
        }
    }
    _tile_release(); /* otherwise every context switch would save them */
}

static AMX void linear8_amx(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                            const float *residual, int first, int last, int from, int to, float *target) {
    for (int line = first; line < last; line += MOST_LINES) {
        int end = last - line < MOST_LINES ? last : line + MOST_LINES;
        int small = layer->inputs % TURN || end - line < LEAST_LINES;
        (small ? penstock_avx512_vnni.linear8 : linear8_lines)(layer, stored, grids, residual, line, end, from, to, target);
    }
}

/* ---- The 16-bit product ---- */

static inline AMX void begin16(void) { shape_tiles(TILE, TILE); }
static inline AMX void end16(void) { _tile_release(); }

static inline AMX void product16(int lines, const uint16_t *left, size_t left_stride, const struct right16 *right,
                                 int tiles, float *target, size_t target_stride) {
    (void)lines; /* a tile has 16 */
    const __m512i *at = right->at;
    _tile_zero(0);
    _tile_zero(1);
    for (int t = 0; t < tiles; t++, left += TILE_FLOATS, at += right->tile) {
        _tile_loadd(4, left, left_stride * sizeof *left);
        _tile_loadd(6, at, 64);
        _tile_loadd(7, at + right->half, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, target, target_stride * sizeof *target);
    _tile_stored(1, target + TILE, target_stride * sizeof *target);
}


/* ---- Decoders ---- */

#include "decoder_kernels.inc"

#define TILE_BYTES (TILE * TURN)
#define PAIRS_BYTES (640 << 10) /* of the stored lines of one pass over the panels: they stay in the second-level cache */
#define PAIRS_LINES 1024        /* of one pass at most */
#define PAIRS_PART 9            /* turns: weights and lines of one part fit into the first-level cache */

/* Sums of lines of which results are still to be made. */
struct unfinished {
    const int32_t *sums;
    int line, lines, column;
};

/* A product with activations of 16 bits. */
struct pairs_run {
    const struct linear8 *layer;
    const uint8_t *stored;
    const struct row_grid *grids;
    const float *residual;
    float *target;
    struct unfinished before;
    int upper, lower; /* lines of the tiles */
};

/* Makes results of the next `lines` unfinished lines, an even number. */
static inline void finish_some(struct pairs_run *run, int lines) {
    struct unfinished *before = &run->before;
    if (lines > before->lines) lines = before->lines;
    if (!lines) return;
    finish_pairs(run->layer, before->sums, run->grids, run->residual, before->line, lines, before->column, PANEL, run->target);
    before->sums += lines * PANEL;
    before->line += lines;
    before->lines -= lines;
}

/* Turns begin..end of a panel for up to 32 stored lines. The results of the lines before are made between the products of tiles,
which use other units of the processor. */
static AMX void pairs_tiles(struct pairs_run *run, const int8_t *weights, int line, int lines, size_t begin, size_t end,
                            struct prefetch *ahead, int32_t *sums) {
    const size_t inputs = (size_t)run->layer->inputs;
    const uint8_t *x = run->stored + (size_t)line * inputs + begin * TILE_BYTES;
    const char *soon = ahead->at;
    int upper = lines < TILE ? lines : TILE, lower = lines - upper;
    int each = (int)(((size_t)run->before.lines / 2 + end - begin - 1) / (end - begin)) * 2;
    if (upper != run->upper || lower != run->lower) shape_tiles(run->upper = upper, run->lower = lower);
    if (begin) {
        _tile_loadd(0, sums, PANEL * 4);
        _tile_loadd(1, sums + 16, PANEL * 4);
        if (lower) {
            _tile_loadd(2, sums + TILE * PANEL, PANEL * 4);
            _tile_loadd(3, sums + TILE * PANEL + 16, PANEL * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    weights += begin * TURN_BYTES;
    for (size_t turn = begin; turn < end; turn++, x += TILE_BYTES, weights += TURN_BYTES) {
        _tile_loadd(6, weights, PANEL * 4);
        _tile_loadd(7, weights + 64, PANEL * 4);
        _tile_loadd(4, x, TURN);
        if (lower) _tile_loadd(5, x + TILE * inputs, TURN);
        for (int i = 0; i < ahead->lines; i++, soon += 64) _mm_prefetch(soon, _MM_HINT_T0);
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if (lower) {
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        finish_some(run, each);
    }
    if (lower) {
        _tile_stored(2, sums + TILE * PANEL, PANEL * 4);
        _tile_stored(3, sums + TILE * PANEL + 16, PANEL * 4);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    ahead->at = soon;
}

/* Up to PAIRS_LINES stored lines. */
static AMX void pairs_lines(struct pairs_run *run, int first, int last, int from, int to) {
    _Alignas(64) int32_t sums[PAIRS_LINES / (2 * TILE) + 1][2 * TILE * PANEL];
    const struct linear8 *layer = run->layer;
    size_t turns = (size_t)layer->inputs / TURN, bytes = (size_t)layer->inputs * PANEL;
    size_t parts = (turns + PAIRS_PART - 1) / PAIRS_PART, part = (turns + parts - 1) / parts;
    int chunks = (last - first + 2 * TILE - 1) / (2 * TILE), slot = 0;
    for (int panel = from; panel < to; panel++) {
        const int8_t *packed = layer->packed + (size_t)panel * bytes;
        struct prefetch ahead = {(const char *)packed + (chunks > 1 ? bytes : AHEAD), (TURN_BYTES / 64 + chunks - 1) / chunks};
        for (size_t begin = 0, end; begin < turns; begin = end) {
            end = begin + part < turns ? begin + part : turns;
            for (int chunk = 0; chunk < chunks; chunk++) {
                int line = first + chunk * 2 * TILE, lines = last - line < 2 * TILE ? last - line : 2 * TILE;
                int32_t *own = sums[parts > 1 ? chunk : (slot ^= 1)];
                if (end == turns) {
                    const float *at = run->target + (size_t)(line / 2) * (size_t)layer->outputs + (size_t)panel * PANEL;
                    for (int m = 0; m < lines / 2; m++, at += layer->outputs) {
                        __builtin_prefetch(at, 1);
                        __builtin_prefetch(at + LANES, 1);
                    }
                }
                pairs_tiles(run, packed, line, lines, begin, end, &ahead, own);
                if (end == turns) run->before = (struct unfinished){own, line, lines, panel * PANEL};
            }
        }
        if (parts > 1 && chunks < 2) finish_some(run, PAIRS_LINES); /* the next panel uses the memory of its sums */
    }
    finish_some(run, PAIRS_LINES);
}

static AMX void pairs_amx(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                          const float *residual, int first, int last, int from, int to, float *target) {
    struct pairs_run run = {layer, stored, grids, residual, target, {0}, -1, -1};
    if (!in_tiles(1, layer->inputs, (last - first) / 2)) {
        linear8_vnni(layer, stored, grids, residual, first, last, from, to, target);
        return;
    }
    int most = PAIRS_BYTES / layer->inputs / (2 * TILE) * 2 * TILE;
    most = most < 2 * TILE ? 2 * TILE : most > PAIRS_LINES ? PAIRS_LINES : most;
    for (int line = first; line < last; line += most)
        pairs_lines(&run, line, last - line < most ? last : line + most, from, to);
    _tile_release(); /* otherwise every context switch would save them */
}

static void pairs4_amx(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids, const float *residual,
                       int last, int from, int to, int8_t *room, float *target) {
    if (in_tiles(1, layer->inputs, last / 2))
        widen_and_multiply(pairs_amx, layer, stored, grids, residual, last, from, to, room, target);
    else
        linear4_vnni(layer, stored, grids, residual, last, from, to, room, target);
}

const struct decoder_kernels penstock_decoder_amx = {QUERIES,      1,     quantise_pairs, root_norm, norm,  pairs_amx,
                                                     pairs4_amx, widen, attend,         narrow,    rotate};
const struct kernels penstock_amx = {1, quantise, norm, linear8_amx, linear32, attention16, pack_distances16, embed, rotate,
                                       root_mean_square_norm};
#endif
