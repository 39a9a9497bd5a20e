/* Weights of fewer than 8 bits, for processors with AVX-512 VBMI: short rows are bound by the reading of weights.

A weight of `bits` bits is an int8 whose lower bits are 0. 64 of them are packed without these bits into 8 * bits bytes:
each 8 weights in `bits` bytes, the first in the lowest bits. Three instructions restore the int8 values. */
#ifndef PENSTOCK_NARROW_H
#define PENSTOCK_NARROW_H

#include <immintrin.h>
#include <stdint.h>

struct narrow {
    __m512i gather; /* source byte of each byte: `bits` bytes for each 64-bit lane */
    __m512i shift;  /* start of the 8 bits that end with the bits of a weight */
    __m512i keep;   /* mask of the bits of a weight */
};

static inline struct narrow narrow_of(int bits) {
    uint8_t gather[64], shift[64];
    for (int i = 0; i < 64; i++) {
        int of = i % 8;
        gather[i] = (uint8_t)(i / 8 * bits + (of < bits ? of : 0));
        shift[i] = (uint8_t)((of * bits - (8 - bits)) & 63);
    }
    return (struct narrow){_mm512_loadu_si512(gather), _mm512_loadu_si512(shift),
                           _mm512_set1_epi8((char)(uint8_t)(0xff << (8 - bits)))};
}

/* 64 weights. Reads 64 bytes, of which 8 * bits are used. */
static inline __m512i widened(const struct narrow *narrow, const int8_t *at) {
    __m512i lanes, weights;
    /* As intrinsics they would need functions with their own target attribute. */
    __asm__("vpermb %2, %1, %0" : "=v"(lanes) : "v"(narrow->gather), "m"(*(const __m512i_u *)at));
    __asm__("vpmultishiftqb %2, %1, %0" : "=v"(weights) : "v"(narrow->shift), "v"(lanes));
    return _mm512_and_si512(weights, narrow->keep);
}

#endif
