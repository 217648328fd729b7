/* A small thread pool: `parallel_for(body, args, count)` runs body(args, i) for every i below count, once each.
 *
 * Why not OpenMP: its regions end when every thread has arrived, so one thread that the system has paused (another
 * program runs) stops the whole step, two hundred times a step. Here the caller works through the items itself and
 * waits only for items that somebody has begun; a helper that never wakes costs nothing. Items are claimed one by one,
 * which also evens out unequal ones. It is no general scheduler: one job at a time, no nesting; a second caller, or a
 * caller after fork, does its job alone.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

typedef void (*Body)(const void *args, int64_t item);

enum { MAX_THREADS = 256, SPIN_NS = 3000000 };
#define CLOSED 0xffffffffu /* an item number that no job has */

static struct {
    _Atomic uint64_t ticket; /* job number << 32 | next item */
    _Atomic int64_t done;    /* items of the job that are finished */
    _Atomic Body body;       /* these three change only while the ticket is closed */
    const void *_Atomic args;
    _Atomic int64_t count;
    _Atomic int sleeping;
    int num_helpers, num_wanted;
    pthread_mutex_t callers, sleep_lock;
    pthread_cond_t wake;
} pool = {.callers = PTHREAD_MUTEX_INITIALIZER, .sleep_lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* Claim and run items of the current job until none is left. A claim that succeeds proves that the job it read is
 * still the current one: the job cannot end before the claimed item does. */
static void work(void) {
    uint64_t ticket = atomic_load(&pool.ticket);
    for (;;) {
        Body body = atomic_load(&pool.body);
        const void *args = atomic_load(&pool.args);
        if ((int64_t)(uint32_t)ticket >= atomic_load(&pool.count)) return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        body(args, (int64_t)(uint32_t)ticket);
        atomic_fetch_add(&pool.done, 1);
        ticket = atomic_load(&pool.ticket);
    }
}

/* Wait for a job newer than `seen`: spin a little, since the next one is usually microseconds away, then sleep. */
static uint64_t next_job(uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    for (int i = 1; atomic_load(&pool.ticket) >> 32 == seen; i++) {
        relax();
        if (i % 64) continue;
        if (now_ns() > until) {
            pthread_mutex_lock(&pool.sleep_lock);
            atomic_fetch_add(&pool.sleeping, 1);
            while (atomic_load(&pool.ticket) >> 32 == seen) pthread_cond_wait(&pool.wake, &pool.sleep_lock);
            atomic_fetch_sub(&pool.sleeping, 1);
            pthread_mutex_unlock(&pool.sleep_lock);
        } else {
            sched_yield();
        }
    }
    return atomic_load(&pool.ticket) >> 32;
}

static void *helper(void *number) {
    uint64_t seen = 0;
    for (;;) {
        seen = next_job(seen);
        if ((intptr_t)number < pool.num_wanted - 1) work();
    }
    return NULL;
}

static void start_helpers(void) {
    while (pool.num_helpers < pool.num_wanted - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)pool.num_helpers)) return;
        pthread_detach(thread);
        pool.num_helpers++;
    }
}

/* Threads to use, the caller's own included; to be called while no job runs. */
void set_threads(int count) {
    pool.num_wanted = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
}

static inline int num_threads(void) { return pool.num_wanted < 1 ? 1 : pool.num_wanted; }

static void parallel_for(Body body, const void *args, int64_t count) {
    if (count <= 1 || pool.num_wanted <= 1 || pthread_mutex_trylock(&pool.callers)) {
        for (int64_t i = 0; i < count; i++) body(args, i);
        return;
    }
    start_helpers();
    uint64_t job = atomic_load(&pool.ticket) >> 32;
    atomic_store(&pool.ticket, job << 32 | CLOSED); /* a helper that still looks at the last job can claim nothing */
    atomic_store(&pool.done, 0);
    atomic_store(&pool.body, body);
    atomic_store(&pool.args, args);
    atomic_store(&pool.count, count);
    atomic_store(&pool.ticket, (uint64_t)(uint32_t)(job + 1) << 32);
    if (atomic_load(&pool.sleeping)) {
        pthread_mutex_lock(&pool.sleep_lock);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep_lock);
    }
    work();
    while (atomic_load(&pool.done) < count) relax();
    pthread_mutex_unlock(&pool.callers);
}
