/* AMX, where one instruction multiplies 16,384 pairs of bytes, or 8,192 of 16-bit floats. */
#if defined(__x86_64__)
#include "avx512.h"
#include "narrow.h"

#define AMX __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512bf16")))
#define TILE 16 /* lines of a tile, each of 64 bytes */

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Tiles 0..3: sums of two times two; 4, 5: lines; 6, 7: weights. */
static inline AMX void shape_tiles(int upper, int lower) {
    struct tile_shapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.bytes[t] = 64;
        shapes.rows[t] = (uint8_t)(t > 5 ? TILE : t < 2 || t == 4 ? upper : lower ? lower : 1);
    }
    _tile_loadconfig(&shapes);
}

/* ---- The 8-bit product ---- */

#define LEAST_LINES 4   /* for tiles to pay */
#define MOST_LINES 256  /* of which sums are kept */
#define PART 8          /* turns: weights of a panel that stay in the first-level cache beside the lines that go by */
#define TURN 64         /* inputs whose products are summed by one instruction */
#define TURN_BYTES (TURN * PANEL) /* of the weights of a panel that one turn needs */

/* What is to be read soon, and how many cache lines of it to ask for in each turn. */
struct ahead {
    const char *at;
    int lines;
};

/* The weights of one panel. Narrow ones are widened a turn before their use, into room for the whole panel where other
lines follow, else for two turns. */
struct panel {
    const int8_t *at; /* as packed */
    int bits;
    struct narrow narrow;
    int8_t *room;
    size_t kept; /* of the number of a turn: all bits, or the lowest */
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
                      struct ahead *ahead, int32_t *sums) {
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
    _Alignas(64) int8_t room[MOST_NARROW_INPUTS * PANEL]; /* untouched where weights have 8 bits */
    int upper = -1, lower = -1, chunks = (last - first + 2 * TILE - 1) / (2 * TILE);
    size_t part = chunks > 1 && turns > PART ? PART : turns;
    struct panel now = {.room = room, .kept = chunks > 1 ? SIZE_MAX : 1};
    if (layer->bits < 8) now.narrow = narrow_of(layer->bits);
    int cache_lines = TURN_BYTES / 64 * layer->bits / 8; /* of the weights of one turn */
    for (int panel = from; panel < to; panel++) {
        const int8_t *packed = layer->packed + (size_t)panel * bytes;
        /* Weights are read from far away once: for few lines just ahead, else a panel ahead, bit by bit. */
        struct ahead ahead = {(const char *)packed + (chunks > 1 ? bytes : AHEAD), (cache_lines + chunks - 1) / chunks};
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
                if (now.bits < 8 && chunks > 1) { /* they are wide from now on */
                    now.at = room;
                    now.bits = 8;
                }
                if (end == turns) finish(layer, own, grids, residual, line, lines, panel * PANEL, PANEL, target);
            }
        }
    }
    _tile_release(); /* or every switch of threads would save them */
}

static AMX void linear8_amx(const struct linear8 *layer, const uint8_t *stored, const struct row_grid *grids,
                            const float *residual, int first, int last, int from, int to, float *target) {
    for (int line = first; line < last; line += MOST_LINES) {
        int end = last - line < MOST_LINES ? last : line + MOST_LINES;
        int small = layer->inputs % TURN || end - line < LEAST_LINES;
        (small ? penstock_avx512_vnni.linear8 : linear8_lines)(layer, stored, grids, residual, line, end, from, to, target);
    }
}

/* ---- Attention: products of 16-bit floats, sums and powers in 32 bits ---- */

#define WIDEST_HEAD 128

/* 2^x to 1e-4, relative: less than a 16-bit float keeps; exact for 0. 0 where nothing is left. */
static inline V v_power(V x) {
    V rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* above the whole number below x */
    V y = v_set(0.078267469f); /* 2^rest, minimax on 0..1 and exact at both ends */
    y = v_fma(y, rest, v_set(0.226308357f));
    y = v_fma(y, rest, v_set(0.695424173f));
    y = v_fma(y, rest, v_set(1.0f));
    return _mm512_scalef_ps(y, x); /* takes the whole number of it */
}

/* 32 floats in 16 bits each. */
static inline AMX __m512i shorts(V low, V high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* What the queries of one head share: keys as the tiles read them [tokens / 16, width / 2, 16 pairs], values likewise
[tokens / 32, width / 16, 16 pairs, 16 pairs], and which tokens count. */
struct memory {
    int used; /* tokens, as a multiple of 32 */
    uint32_t *keys;
    __m512i *values;
    float *mask; /* added to scores: 0, or for tokens that do not count a number that is never the highest */
};

/* [16 lines, 16 words] transposed. */
static inline AMX void transpose(__m512i *lines) {
    __m512i fours[16]; /* in each 128 bits a word of 4 lines */
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512i a = _mm512_unpacklo_epi32(lines[i], lines[i + 1]);
        __m512i b = _mm512_unpackhi_epi32(lines[i], lines[i + 1]);
        __m512i c = _mm512_unpacklo_epi32(lines[i + 2], lines[i + 3]);
        __m512i d = _mm512_unpackhi_epi32(lines[i + 2], lines[i + 3]);
        fours[i] = _mm512_unpacklo_epi64(a, c);
        fours[i + 1] = _mm512_unpackhi_epi64(a, c);
        fours[i + 2] = _mm512_unpacklo_epi64(b, d);
        fours[i + 3] = _mm512_unpackhi_epi64(b, d);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88);
        __m512i b = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0x88);
        __m512i c = _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(fours[i + 8], fours[i + 12], 0xdd);
        lines[i] = _mm512_shuffle_i32x4(a, b, 0x88);
        lines[i + 4] = _mm512_shuffle_i32x4(c, d, 0x88);
        lines[i + 8] = _mm512_shuffle_i32x4(a, b, 0xdd);
        lines[i + 12] = _mm512_shuffle_i32x4(c, d, 0xdd);
    }
}

static AMX void remember(const struct head *head, const struct memory *memory) {
    size_t pairs = (size_t)head->width / 2;
    _Alignas(64) static const uint16_t mixed[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i together = _mm512_load_si512(mixed);
    for (int j = 0; j < memory->used; j++) memory->mask[j] = j < head->tokens && head->keep[j] ? 0.0f : -1e30f;
    for (int j = 0; j < memory->used; j += TILE)
        for (int c = 0; c < head->width; c += 32) {
            __m512i lines[TILE];
            UNROLL for (int r = 0; r < TILE; r++) {
                const float *key = head->keys + (size_t)(j + r) * head->stride + c;
                lines[r] = j + r < head->tokens ? shorts(v_load(key), v_load(key + 16)) : _mm512_setzero_si512();
            }
            transpose(lines);
            uint32_t *place = memory->keys + ((size_t)j / 16 * pairs + (size_t)c / 2) * 16;
            UNROLL for (int r = 0; r < TILE; r++) _mm512_storeu_si512(place + r * 16, lines[r]);
        }
    for (int j = 0; j < memory->used; j += 2)
        for (int c = 0; c < head->width; c += 16) {
            const float *value = head->values + (size_t)j * head->stride + c;
            V one = j < head->tokens ? v_load(value) : v_zero();
            V other = j + 1 < head->tokens ? v_load(value + head->stride) : v_zero();
            size_t tile = (size_t)(j / 32) * (size_t)(head->width / 16) + (size_t)(c / 16);
            memory->values[tile * 16 + (size_t)(j / 2 % 16)] = _mm512_permutexvar_epi16(together, shorts(one, other));
        }
}

/* Scores [16, used] of the queries from `first` on as powers that are not divided by their sums yet; each line ends as
16-bit floats where it began. */
static inline __attribute__((always_inline)) AMX void powers(const int biased, const struct head *head,
                                                             const struct memory *memory, float *scores, size_t stride,
                                                             int first, int count, float *inverse) {
    V scale = v_set(head->scale * 1.44269504f);
    for (int r = 0; r < count; r++) {
        float *line = scores + (size_t)r * stride;
        const float *bias = biased ? head->bias - (first + r) : NULL;
        V highest[2] = {v_set(-1e30f), v_set(-1e30f)}, sum = v_zero();
        for (int j = 0; j < memory->used; j += 2 * LANES)
            UNROLL for (int k = 0; k < 2; k++) {
                float *at = line + j + k * LANES;
                V score = v_fma(v_load(at), scale, v_load(memory->mask + j + k * LANES));
                if (biased) score = v_fma(v_load(bias + j + k * LANES), v_set(1.44269504f), score);
                v_store(at, score);
                highest[k] = v_max(highest[k], score);
            }
        V top = v_set(v_highest(v_max(highest[0], highest[1])));
        for (int j = 0; j < memory->used; j += 2 * LANES) {
            V left = v_power(v_load(line + j) - top), right = v_power(v_load(line + j + LANES) - top);
            sum += left + right;
            _mm512_storeu_si512((uint16_t *)line + j, shorts(left, right));
        }
        inverse[r] = 1.0f / v_sum(sum);
    }
}

static AMX void attention_amx(const struct head *head, int first, int last) {
    if (head->width % 32 || head->width > WIDEST_HEAD) {
        attention(head, first, last);
        return;
    }
    size_t width = (size_t)head->width;
    int used = (head->tokens + 31) / 32 * 32;
    size_t stride = (size_t)used + 16; /* or lines would share few places of the cache */
    struct memory memory = {.used = used, .mask = head->scratch};
    memory.keys = (uint32_t *)(memory.mask + used);
    memory.values = (__m512i *)(memory.keys + (size_t)used * width / 2);
    float *scores = (float *)memory.keys + (size_t)used * width;
    _Alignas(64) uint16_t queries[TILE][WIDEST_HEAD] = {0};
    _Alignas(64) float sums[TILE][2 * TILE];
    remember(head, &memory);
    shape_tiles(TILE, TILE);
    for (int q = first; q < last; q += TILE) {
        int count = last - q < TILE ? last - q : TILE;
        float inverse[TILE];
        for (int r = 0; r < count; r++)
            for (size_t c = 0; c < width; c += 32) {
                const float *query = head->queries + (size_t)(q + r) * head->stride + c;
                _mm512_store_si512(queries[r] + c, shorts(v_load(query), v_load(query + 16)));
            }
        for (int j = 0; j < used; j += 2 * TILE) {
            const uint32_t *keys = memory.keys + (size_t)j * width / 2;
            _tile_zero(0);
            _tile_zero(1);
            for (size_t c = 0; c < width; c += 32) {
                _tile_loadd(4, queries[0] + c, sizeof queries[0]);
                _tile_loadd(6, keys + c / 2 * 16, 64);
                _tile_loadd(7, keys + (width / 2 + c / 2) * 16, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, scores + j, stride * sizeof(float));
            _tile_stored(1, scores + j + TILE, stride * sizeof(float));
        }
        if (head->bias)
            powers(1, head, &memory, scores, stride, q, count, inverse);
        else
            powers(0, head, &memory, scores, stride, q, count, inverse);
        for (size_t c = 0; c < width; c += 2 * TILE) {
            _tile_zero(0);
            _tile_zero(1);
            for (int j = 0; j < used; j += 2 * TILE) {
                const __m512i *values = memory.values + ((size_t)(j / 32) * (width / 16) + c / 16) * 16;
                _tile_loadd(4, (uint16_t *)scores + j, stride * sizeof(float));
                _tile_loadd(6, values, 64);
                _tile_loadd(7, values + 16, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, sums[0], sizeof sums[0]);
            _tile_stored(1, sums[0] + TILE, sizeof sums[0]);
            for (int r = 0; r < count; r++)
                for (size_t k = 0; k < 2 * TILE; k += LANES)
                    v_store(head->target + (size_t)(q + r) * head->target_stride + c + k,
                            v_load(sums[r] + k) * v_set(inverse[r]));
        }
    }
    _tile_release();
}

const struct kernels penstock_amx = {1, quantise, norm, linear8_amx, linear32, attention_amx, embed};
#endif
