/* A small thread pool that helps one caller at a time to compute phases of many small blocks. */
#ifndef PENSTOCK_POOL_H
#define PENSTOCK_POOL_H

#include <stdint.h>

#define POOL_MOST_BLOCKS 16383
#define POOL_MOST_PHASES 4094

/* Computes one block of a phase; `participant` is 0 for the caller and below the pool's threads for all. */
typedef void pool_work(void *job, int phase, int block, int participant);
/* The number of blocks of a phase: 1..POOL_MOST_BLOCKS. */
typedef int pool_blocks(void *job, int phase);

struct pool;

/* `threads` includes the caller. NULL if the threads cannot be started. */
struct pool *pool_start(int threads);
void pool_stop(struct pool *pool);

/* Runs all phases in order with up to `threads` threads. 0 if another caller uses the pool: nothing was done. */
int pool_run(struct pool *pool, int threads, void *job, int phases, pool_blocks *blocks, pool_work *work);

/* To be called before and after a caller computes without the pool: meanwhile one worker fewer helps in `pool_run`. */
void pool_enter_alone(struct pool *pool);
void pool_leave_alone(struct pool *pool);

/* Whether there are other callers; to be called between the two functions above. */
int pool_has_other_callers(struct pool *pool);

#endif
