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

/* Tiles 0..3: sums of 16 lines and 16 columns; 4, 5: a group of 16 lines; 6, 7: of 16 columns. */
static inline AMX void shape_group_tiles(void) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = t == 4 || t == 5 ? GROUP : 64;
        shapes.rows[t] = t > 5 ? GROUP / 4 : TILE;
    }
    load_shapes(&shapes);
}

#define GROUPS 8 /* whose sums are kept in the first-level cache */
#define HALF_TILE (TILE / 2)

/* The bits of ROUNDER. A sum of integers that begins with them is, read as a float, ROUNDER plus the sum. */
static const _Alignas(64) int32_t rounders[TILE] = {[0 ... TILE - 1] = 0x4b400000};

/* The integer sums of a group, for 16 lines x 32 columns, on top of `rounders`. LEFT, FIRST and SECOND are tiles. */
#define GROUP_TILES(NUMBER, LEFT, FIRST, SECOND) \
    _tile_loadd(LEFT, x + (NUMBER) * GROUP, inputs); \
    _tile_loadd(6, weights + (NUMBER) * GROUP * PANEL, PANEL * 4); \
    _tile_loadd(7, weights + (NUMBER) * GROUP * PANEL + 64, PANEL * 4); \
    _tile_loadd(FIRST, rounders, 0); \
    _tile_dpbssd(FIRST, LEFT, 6); \
    _tile_loadd(SECOND, rounders, 0); \
    _tile_dpbssd(SECOND, LEFT, 7); \
    _tile_stored(FIRST, sums[NUMBER], PANEL * 4); \
    _tile_stored(SECOND, sums[NUMBER] + TILE, PANEL * 4)

/* The integer sums of `count` groups for 16 lines and a panel. */
static inline AMX void group_tiles(const int8_t *x, size_t inputs, const uint8_t *weights, size_t count,
                                   float (*sums)[TILE * PANEL]) {
    size_t g = 0;
    for (; g + 1 < count; g += 2) { /* two groups in independent tiles */
        GROUP_TILES(g, 4, 0, 1);
        GROUP_TILES(g + 1, 5, 2, 3);
    }
    if (g < count) {
        GROUP_TILES(g, 4, 0, 1);
    }
}

/* Adds `count` groups to the results `y` [8 lines, PANEL]. `factors`: [groups, 2, TILE], scales and shares of the lines. */
static inline __attribute__((always_inline)) void add_groups(const int bits, const uint8_t *record, size_t count,
                                                             const float *factors, const float (*sums)[TILE * PANEL],
                                                             size_t start, float *y) {
    const size_t bytes = record_bytes(bits);
    V own[HALF_TILE][2];
    UNROLL for (int m = 0; m < HALF_TILE; m++)
        UNROLL for (int v = 0; v < 2; v++) own[m][v] = v_load(y + m * PANEL + v * LANES);
    for (size_t g = 0; g < count; g++, record += bytes, factors += 2 * TILE) {
        const uint16_t *scales = (const uint16_t *)(record + bytes) - (bits == 8 ? PANEL : 2 * PANEL);
        const float *whole = sums[g] + start;
        V scale[2], shift[2], minimum[2];
        UNROLL for (int v = 0; v < 2; v++) {
            scale[v] = v_halves(scales + v * LANES);
            shift[v] = v_set(-ROUNDER) * scale[v]; /* exact: ROUNDER has 2 bits, and a scale 11 */
            minimum[v] = bits == 8 ? v_zero() : v_halves(scales + PANEL + v * LANES);
        }
        UNROLL for (int m = 0; m < HALF_TILE; m++) {
            V factor = v_set(factors[m]), share = v_set(factors[TILE + m]);
            UNROLL for (int v = 0; v < 2; v++) {
                V part = v_fma(v_load(whole + m * PANEL + v * LANES), scale[v], shift[v]);
                own[m][v] = v_fma(part, factor, own[m][v]);
                if (bits < 8) own[m][v] = v_fma(minimum[v], share, own[m][v]);
            }
        }
    }
    UNROLL for (int m = 0; m < HALF_TILE; m++)
        UNROLL for (int v = 0; v < 2; v++) v_store(y + m * PANEL + v * LANES, own[m][v]);
}

/* 16 lines of a panel. `weights`: of the panel, in 8 bits with a sign. */
static inline __attribute__((always_inline)) AMX void grouped_tile(const int bits, const struct grouped *layer,
                                                                   const int8_t *x, const float *factors,
                                                                   const float *residual, int line, int panel,
                                                                   const uint8_t *weights, float *target) {
    const size_t inputs = (size_t)layer->inputs, groups = inputs / GROUP, bytes = record_bytes(bits);
    const uint8_t *record = layer->packed + (size_t)panel * groups * bytes;
    _Alignas(64) float sums[GROUPS][TILE * PANEL];
    _Alignas(64) float y[TILE * PANEL] = {0};
    for (int m = 0; m < TILE; m++) { /* written last; lines of the target are far from each other */
        const float *at = target + (size_t)(line + m) * (size_t)layer->outputs + (size_t)panel * PANEL;
        __builtin_prefetch(at, 1);
        __builtin_prefetch(at + LANES, 1);
    }
    for (size_t g = 0; g < groups; g += GROUPS) {
        size_t count = groups - g < GROUPS ? groups - g : GROUPS;
        group_tiles(x + g * GROUP, inputs, weights + g * GROUP * PANEL, count, sums);
        for (int m = 0; m < TILE; m += HALF_TILE)
            add_groups(bits, record + g * bytes, count, factors + g * 2 * TILE + m, sums, (size_t)m * PANEL, y + m * PANEL);
    }
    finish_grouped(layer, y, residual, line, TILE, panel * PANEL, PANEL, target);
}

static inline __attribute__((always_inline)) AMX void grouped_tiles(const int bits, const struct grouped *layer,
                                                                    const int8_t *stored, const struct group_grid *grids,
                                                                    const float *residual, int first, int last, int from,
                                                                    int to, uint8_t *room, float *target) {
    size_t inputs = (size_t)layer->inputs, groups = inputs / GROUP, bytes = record_bytes(bits);
    float *factors = (float *)(room + groups * GROUP * PANEL); /* [lines / TILE, groups, 2, TILE] */
    for (int line = first; line < last; line++)
        for (size_t g = 0; g < groups; g++) {
            const struct group_grid *grid = grids + (size_t)line * groups + g;
            size_t number = (size_t)(line - first);
            float *own = factors + (number / TILE * groups + g) * 2 * TILE + number % TILE;
            own[0] = grid->scale;
            own[TILE] = grid->share;
        }
    for (int panel = from; panel < to; panel++) {
        for (size_t g = 0; g < groups; g++) {
            const uint8_t *record = layer->packed + ((size_t)panel * groups + g) * bytes;
            if (bits < 8)
                record_weights(record, bits, room + g * GROUP * PANEL);
            else
                for (int i = 0; i < GROUP * PANEL; i++) room[g * GROUP * PANEL + i] = record[i] ^ 0x80; /* signed */
        }
        __asm__ volatile("" : : : "memory"); /* the intrinsics that load tiles do not order stores before them */
        for (int line = first; line < last; line += TILE)
            grouped_tile(bits, layer, stored + (size_t)line * inputs, factors + (size_t)(line - first) * groups * 2,
                         residual, line, panel, room, target);
    }
}

static AMX void grouped_amx(const struct grouped *layer, const int8_t *stored, const struct group_grid *grids,
                            const float *residual, int first, int last, int from, int to, uint8_t *room, float *target) {
    int tiled = first + (last - first) / TILE * TILE;
    if (tiled > first) {
        shape_group_tiles();
        if (layer->bits == 8)
            grouped_tiles(8, layer, stored, grids, residual, first, tiled, from, to, room, target);
        else
            grouped_tiles(4, layer, stored, grids, residual, first, tiled, from, to, room, target);
        _tile_release(); /* otherwise every context switch would save them */
    }
    if (tiled < last) grouped_vnni(layer, stored, grids, residual, tiled, last, from, to, room, target);
}

const struct decoder_kernels penstock_decoder_amx = {QUERIES,     quantise_groups, root_norm, norm,
                                                     grouped_amx, attend,          narrow,    rotate};
const struct kernels penstock_amx = {1, quantise, norm, linear8_amx, linear32, attention16, pack_distances16, embed, rotate,
                                       root_mean_square_norm};
#endif
