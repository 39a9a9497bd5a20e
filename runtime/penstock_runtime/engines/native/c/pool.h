/* A few threads that help one caller at a time through phases of many small units. */
#ifndef PENSTOCK_POOL_H
#define PENSTOCK_POOL_H

#include <stdint.h>

#define POOL_MOST_BLOCKS 16383
#define POOL_MOST_PHASES 4094

/* Computes one block of a phase; `participant` is 0 for the caller and below the pool's threads for all. */
typedef void pool_work(void *job, int phase, int block, int participant);
/* How many blocks a phase has: 1..POOL_MOST_BLOCKS. */
typedef int pool_blocks(void *job, int phase);

struct pool;

/* `threads` includes the caller. NULL when threads cannot be had. */
struct pool *pool_start(int threads);
void pool_stop(struct pool *pool);

/* Runs all phases one after the other with up to `threads`. 0 when another caller has the pool: nothing was done. */
int pool_run(struct pool *pool, int threads, void *job, int phases, pool_blocks *blocks, pool_work *work);

/* Around what a caller computes without helpers: meanwhile one helper fewer works for the caller of `pool_run`. */
void pool_enter_alone(struct pool *pool);
void pool_leave_alone(struct pool *pool);

/* Asked by a caller in between the two: whether there are other callers. */
int pool_has_company(struct pool *pool);

#endif
