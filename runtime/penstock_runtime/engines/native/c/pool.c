/* Workers sleep in the kernel between runs. During a run the caller and the workers take blocks from one ticket:

    generation (24 bits) | phase (12) | blocks of the phase (14) | next block (14)

A thread takes a block with a compare-and-swap. The run cannot end before that block is done, since a phase ends when
all its blocks are done. A thread that is late, or was descheduled, finds another generation or phase in the ticket and
has delayed no other thread: no thread waits for one that holds no block.

There is one thread for each core. A caller that computes without the pool takes a core from the workers: one of them
pauses until that caller is done. Otherwise both would get half a core, and rows would wait for later ones. */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 600   /* polls of the ticket with a pause before a thread yields its processor: some 30 us */
#define YIELDS 1000 /* yields before a worker sleeps instead: about 1 ms */
#define NAP 100000  /* nanoseconds */
#define OVER 4095u  /* the phase of a run that has ended */

struct worker {
    struct pool *pool;
    int participant;
    pthread_t thread;
};

struct pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t done; /* blocks of this phase */
    _Alignas(64) _Atomic uint32_t wake; /* counts runs; workers sleep on it */
    _Alignas(64) _Atomic int wanted;    /* workers of this run */
    _Atomic int busy, stopping, resting;
    _Alignas(64) _Atomic uint32_t alone; /* callers that compute without the pool; pausing workers wait on it */
    void *job;
    int phases;
    pool_blocks *blocks;
    pool_work *work;
    cpu_set_t processors; /* allowed for the workers */
    int caller_on;        /* the processor that the workers were excluded from last; -1: none */
    int threads;
    struct worker workers[];
};

static uint64_t ticket(uint64_t generation, uint64_t phase, uint64_t blocks) {
    return generation << 40 | phase << 28 | blocks << 14;
}
static uint32_t generation_of(uint64_t t) { return (uint32_t)(t >> 40); }
static uint32_t phase_of(uint64_t t) { return t >> 28 & 0xfff; }
static uint32_t blocks_of(uint64_t t) { return t >> 14 & 0x3fff; }
static uint32_t next_of(uint64_t t) { return t & 0x3fff; }

static inline void pause_processor(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void wait_for_change(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void wake_sleepers(_Atomic uint32_t *word, int most) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
}

/* Whether there are more threads than cores; the worker then sleeps until the number of other callers changes. */
static int paused(struct pool *pool, int participant) {
    uint32_t alone = atomic_load_explicit(&pool->alone, memory_order_acquire);
    if (!participant || (uint32_t)participant + alone < (uint32_t)pool->threads) return 0;
    atomic_fetch_add(&pool->resting, 1);
    wait_for_change(&pool->alone, alone);
    atomic_fetch_sub(&pool->resting, 1);
    return 1;
}

void pool_enter_alone(struct pool *pool) {
    atomic_fetch_add(&pool->alone, 1);
    /* The worker that this thread has just preempted may hold a block, for which a whole run would wait. */
    if (atomic_load_explicit(&pool->busy, memory_order_relaxed)) sched_yield();
}

void pool_leave_alone(struct pool *pool) {
    atomic_fetch_sub(&pool->alone, 1);
    if (atomic_load(&pool->resting)) wake_sleepers(&pool->alone, pool->threads - 1);
}

int pool_has_other_callers(struct pool *pool) {
    return atomic_load_explicit(&pool->alone, memory_order_relaxed) > 1 ||
           atomic_load_explicit(&pool->busy, memory_order_relaxed);
}

/* Takes part in a run until it ends. A worker stays even if a block takes long or its thread is descheduled: the worker
is needed for the next phase. */
static void take_part(struct pool *pool, uint32_t generation, int participant) {
    int idle = 0;
    for (;;) {
        uint64_t t = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        if (generation_of(t) != generation || phase_of(t) == OVER) return;
        if (paused(pool, participant)) continue;
        if (next_of(t) == blocks_of(t)) {
            if (idle < SPINS)
                pause_processor();
            else if (idle < SPINS + YIELDS || !participant)
                sched_yield();
            else
                nanosleep(&(struct timespec){.tv_nsec = NAP}, NULL);
            if (idle < SPINS + YIELDS) idle++;
            continue;
        }
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &t, t + 1, memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        idle = 0;
        /* This thread holds a block: the run cannot end before it is done, so its description stays valid. */
        pool->work(pool->job, (int)phase_of(t), (int)next_of(t), participant);
        if (atomic_fetch_add_explicit(&pool->done, 1, memory_order_acq_rel) + 1 == blocks_of(t)) {
            uint32_t phase = phase_of(t) + 1;
            atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
            uint64_t then = ticket(generation, OVER, 0);
            if ((int)phase < pool->phases)
                then = ticket(generation, phase, (uint64_t)pool->blocks(pool->job, (int)phase));
            atomic_store_explicit(&pool->ticket, then, memory_order_release);
        }
    }
}

/* Excludes the workers from the processor of the caller. The kernel often wakes a worker there although another
processor is idle: it preempts the caller or waits for it, and the run has one processor fewer. Only if there is one
thread for each processor: otherwise the kernel has others to choose from. */
static void leave_processor_to_caller(struct pool *pool) {
    int here = sched_getcpu();
    if (here == pool->caller_on || CPU_COUNT(&pool->processors) != pool->threads) return;
    cpu_set_t others = pool->processors;
    CPU_CLR(here, &others);
    /* Errors of the kernel are ignored: results are the same. */
    for (int i = 0; i < pool->threads - 1; i++)
        pthread_setaffinity_np(pool->workers[i].thread, sizeof others, &others);
    pool->caller_on = here;
}

static void *worker_main(void *argument) {
    struct worker *worker = argument;
    struct pool *pool = worker->pool;
    uint32_t seen = 0;
    for (;;) {
        uint32_t now;
        while ((now = atomic_load_explicit(&pool->wake, memory_order_acquire)) == seen)
            wait_for_change(&pool->wake, seen);
        if (atomic_load_explicit(&pool->stopping, memory_order_acquire)) return NULL;
        seen = now;
        if (worker->participant <= atomic_load_explicit(&pool->wanted, memory_order_relaxed))
            take_part(pool, now & 0xffffff, worker->participant);
    }
}

struct pool *pool_start(int threads) {
    size_t size = (sizeof(struct pool) + (size_t)(threads - 1) * sizeof(struct worker) + 63) / 64 * 64;
    struct pool *pool = aligned_alloc(64, size);
    if (!pool) return NULL;
    atomic_init(&pool->ticket, ticket(0, OVER, 0));
    atomic_init(&pool->done, 0);
    atomic_init(&pool->wake, 0);
    atomic_init(&pool->wanted, 0);
    atomic_init(&pool->busy, 0);
    atomic_init(&pool->stopping, 0);
    atomic_init(&pool->resting, 0);
    atomic_init(&pool->alone, 0);
    pool->caller_on = -1;
    CPU_ZERO(&pool->processors);
    sched_getaffinity(0, sizeof pool->processors, &pool->processors);
    pool->threads = 1;
    for (int i = 0; i < threads - 1; i++) {
        struct worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->participant = i + 1;
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) {
            pool_stop(pool);
            return NULL;
        }
        pool->threads++;
    }
    return pool;
}

static void wake_all(struct pool *pool) {
    atomic_fetch_add_explicit(&pool->wake, 1, memory_order_release);
    wake_sleepers(&pool->wake, pool->threads - 1);
}

void pool_stop(struct pool *pool) {
    if (!pool) return;
    atomic_store_explicit(&pool->stopping, 1, memory_order_release);
    wake_all(pool);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->workers[i].thread, NULL);
    free(pool);
}

int pool_run(struct pool *pool, int threads, void *job, int phases, pool_blocks *blocks, pool_work *work) {
    int free_pool = 0;
    if (!atomic_compare_exchange_strong_explicit(&pool->busy, &free_pool, 1, memory_order_acquire,
                                                 memory_order_relaxed))
        return 0;
    leave_processor_to_caller(pool);
    pool->job = job;
    pool->phases = phases;
    pool->blocks = blocks;
    pool->work = work;
    uint32_t generation = (atomic_load_explicit(&pool->wake, memory_order_relaxed) + 1) & 0xffffff;
    atomic_store_explicit(&pool->wanted, threads - 1, memory_order_relaxed);
    atomic_store_explicit(&pool->ticket, ticket(generation, 0, (uint64_t)blocks(job, 0)), memory_order_release);
    wake_all(pool);
    take_part(pool, generation, 0);
    atomic_store_explicit(&pool->busy, 0, memory_order_release);
    return 1;
}
