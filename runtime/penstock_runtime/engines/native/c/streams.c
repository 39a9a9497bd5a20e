/* Threads that run jobs without the Python interpreter.

A Python thread would need the interpreter lock to take a batch and to return its result; if it is descheduled while it
holds the lock, all threads that wait for the lock are late. Here the lists of waiting and ended jobs have a lock that
is held for a few instructions only: a descheduled thread delays its own job and no other. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "native.h"

struct list {
    struct penstock_job *first, *last;
};

struct stream {
    struct penstock_streams *streams;
    pthread_t thread;
    pthread_cond_t wake;
    int asleep, number; /* number: the kernel's thread id; 0: it has not started */
};

struct penstock_streams {
    pthread_mutex_t lock;
    pthread_cond_t started;
    struct list waiting, ended;
    int event, count, stopping;
    struct stream each[];
};

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void append(struct list *list, struct penstock_job *job) {
    job->next = NULL;
    if (list->first)
        list->last->next = job;
    else
        list->first = job;
    list->last = job;
}

static struct penstock_job *take_first(struct list *list) {
    struct penstock_job *job = list->first;
    if (job) list->first = job->next;
    return job;
}

static void *stream_main(void *argument) {
    struct stream *stream = argument;
    struct penstock_streams *streams = stream->streams;
    pthread_mutex_lock(&streams->lock);
    stream->number = (int)syscall(SYS_gettid);
    pthread_cond_signal(&streams->started);
    for (;;) {
        struct penstock_job *job = take_first(&streams->waiting);
        if (!job) {
            if (streams->stopping) break;
            stream->asleep = 1;
            pthread_cond_wait(&stream->wake, &streams->lock);
            stream->asleep = 0;
            continue;
        }
        pthread_mutex_unlock(&streams->lock);
        job->started = nanoseconds();
        penstock_run(job);
        job->ended = nanoseconds();
        pthread_mutex_lock(&streams->lock);
        int first = !streams->ended.first; /* the first one since the last notification */
        append(&streams->ended, job);
        if (first) {
            pthread_mutex_unlock(&streams->lock);
            eventfd_write(streams->event, 1);
            pthread_mutex_lock(&streams->lock);
        }
    }
    pthread_mutex_unlock(&streams->lock);
    return NULL;
}

struct penstock_streams *penstock_streams_open(int32_t count, int32_t *threads) {
    if (count < 1 || count > 1024) return NULL;
    struct penstock_streams *streams = calloc(1, sizeof *streams + (size_t)count * sizeof(struct stream));
    if (!streams) return NULL;
    pthread_mutex_init(&streams->lock, NULL);
    pthread_cond_init(&streams->started, NULL);
    streams->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    while (streams->event >= 0 && streams->count < count) {
        struct stream *stream = &streams->each[streams->count];
        stream->streams = streams;
        pthread_cond_init(&stream->wake, NULL);
        if (pthread_create(&stream->thread, NULL, stream_main, stream)) break;
        streams->count++;
    }
    if (streams->count < count) {
        penstock_streams_close(streams);
        return NULL;
    }
    pthread_mutex_lock(&streams->lock);
    for (int i = 0; i < count; i++) {
        while (!streams->each[i].number) pthread_cond_wait(&streams->started, &streams->lock);
        threads[i] = streams->each[i].number;
    }
    pthread_mutex_unlock(&streams->lock);
    return streams;
}

int penstock_streams_event(const struct penstock_streams *streams) { return streams->event; }

void penstock_streams_submit(struct penstock_streams *streams, struct penstock_job *job) {
    pthread_mutex_lock(&streams->lock);
    append(&streams->waiting, job);
    for (int i = 0; i < streams->count; i++) {
        struct stream *stream = &streams->each[i];
        if (!stream->asleep) continue;
        stream->asleep = 0; /* otherwise the next job would wake the same thread again */
        pthread_cond_signal(&stream->wake);
        break;
    }
    pthread_mutex_unlock(&streams->lock);
}

int penstock_streams_retract(struct penstock_streams *streams, const struct penstock_job *job) {
    struct list kept = {NULL, NULL};
    int found = 0;
    pthread_mutex_lock(&streams->lock);
    for (struct penstock_job *one; (one = take_first(&streams->waiting));) {
        if (one == job)
            found = 1;
        else
            append(&kept, one);
    }
    streams->waiting = kept;
    pthread_mutex_unlock(&streams->lock);
    return found;
}

struct penstock_job *penstock_streams_collect(struct penstock_streams *streams) {
    eventfd_t count;
    eventfd_read(streams->event, &count); /* first: a job that ends in between makes it readable again */
    pthread_mutex_lock(&streams->lock);
    struct penstock_job *first = streams->ended.first;
    streams->ended.first = NULL;
    pthread_mutex_unlock(&streams->lock);
    return first;
}

void penstock_streams_close(struct penstock_streams *streams) {
    pthread_mutex_lock(&streams->lock);
    streams->stopping = 1;
    for (int i = 0; i < streams->count; i++) pthread_cond_signal(&streams->each[i].wake);
    pthread_mutex_unlock(&streams->lock);
    for (int i = 0; i < streams->count; i++) pthread_join(streams->each[i].thread, NULL);
    if (streams->event >= 0) close(streams->event);
    free(streams);
}
