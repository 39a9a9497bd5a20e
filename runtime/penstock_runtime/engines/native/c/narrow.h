/* Weights of fewer than 8 bits, for processors with AVX-512 VBMI: short rows are bound by the reading of weights.

A weight of `bits` bits is an int8 whose lower bits are 0. What is left of 64 of them stands in 8 * bits bytes: each 8
weights in `bits` bytes, the first in the lowest bits. Three instructions make the int8 of it again. */
#ifndef PENSTOCK_NARROW_H
#define PENSTOCK_NARROW_H

#include <immintrin.h>
#include <stdint.h>

struct narrow {
    __m512i gather; /* which byte goes where: `bits` bytes to each 64-bit lane */
    __m512i shift;  /* where the 8 bits begin that end with a weight's own */
    __m512i keep;   /* its own bits */
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

/* 64 weights. Reads 64 bytes, of which 8 * bits are theirs. */
static inline __m512i widened(const struct narrow *narrow, const int8_t *at) {
    __m512i lanes, weights;
    /* As intrinsics they would ask for functions of their own target. */
    __asm__("vpermb %2, %1, %0" : "=v"(lanes) : "v"(narrow->gather), "m"(*(const __m512i_u *)at));
    __asm__("vpmultishiftqb %2, %1, %0" : "=v"(weights) : "v"(narrow->shift), "v"(lanes));
    return _mm512_and_si512(weights, narrow->keep);
}

#endif
