/* torch's threads beside onnxruntime's. Part of native.c, its only user.
 *
 * Each of the two libraries has a thread per processor, and both let them wait awake for the next operator: libgomp, which is torch's, for
 * some milliseconds. Two such threads on one processor get half of it each, in turns of milliseconds. So
 *   - a short call of torch's code runs on the thread that is there (`Turn`);
 *   - in a long one, onnxruntime's threads sleep (`call_alone`), and then torch's;
 *   - before a long run of a session, torch's threads are put to sleep (`put_to_sleep`).
 */
#ifndef PYTHONOP_NATIVE_THREADS_H
#define PYTHONOP_NATIVE_THREADS_H

#include "native_tensors.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif
#include <time.h>

/* Functions of torch, and of the OpenMP and the MKL that it runs on; NULL where there is none. Filled by threads(). */
static struct {
    int (*most)(void);                                               /* at::get_num_threads: gives a thread torch's number, where it has none yet */
    void (*set_most)(int);                                           /* omp_set_num_threads: of the calling thread */
    int (*processors)(void);                                         /* omp_get_num_procs */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  /* GOMP_parallel */
    int (*set_most_of_mkl)(int);                                     /* MKL_Set_Num_Threads_Local: returns what was, 0 for OpenMP's */
    int (*limit)(void);                                              /* omp_get_thread_limit */
    int (*number)(void);                                             /* omp_get_thread_num: of the calling thread in a region */
} openmp;

/* Seconds of a call on one thread from which on several are worth waking, and putting to sleep, which takes 0.15 ms together; and where
 * nothing puts them to sleep. */
static const double LONG_CALL = 5e-4, LONG_CALL_AWAKE = 4e-3;
/* So many calls must have taken as long, one after the other: the first ones import and compile. After one, the time counts that the thread
 * has computed, without waiting for the GIL or for a processor; to ask for that takes several times as long. As many calls are then tried on
 * all threads. */
enum { LONG_CALLS = 3 };
/* A call on all threads that takes more than this part of the time on one is no gain; a call that takes so many times as long is another one. */
static const double GAIN = 0.9, OTHER = 4;
/* Seconds that a run must have taken, for each thread that putting the others to sleep makes. */
static const double LONG_RUN = 3e-3;

static double seconds(int long_calls)
{
    struct timespec now;
#ifdef _WIN32
    (void)long_calls;
    timespec_get(&now, TIME_UTC);
#else
    clock_gettime(long_calls ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
#endif
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#ifdef _MSC_VER
static __declspec(thread) int outside;
#else
static __thread int outside; /* What was set before the call that this thread is in; 0: it is in none that changed it. */
#endif

/* One call of torch's code within a run. Begins with the GIL held: waiting for that is no work. */
typedef struct {
    int threads, mkl, counted; /* what was set before; 0 threads: nothing was changed. Long calls so far */
    double begin;
} Turn;

static Turn begin_turn(const Pace *pace)
{
    Turn turn = {.counted = pace->long_calls};
    if (turn.counted < LONG_CALLS && openmp.most && (turn.threads = openmp.most()) > 1) {
        outside = turn.threads;
        openmp.set_most(1);
        if (openmp.set_most_of_mkl)
            turn.mkl = openmp.set_most_of_mkl(1);
        turn.begin = seconds(turn.counted);
    } else
        turn.threads = 0;
    return turn;
}

static void end_turn(Turn turn, Pace *pace)
{
    if (!turn.threads)
        return;
    outside = 0;
    if (openmp.most() == 1) { /* else the call has set another number, of both */
        openmp.set_most(turn.threads);
        if (openmp.set_most_of_mkl)
            openmp.set_most_of_mkl(turn.mkl);
    }
    double took = seconds(turn.counted) - turn.begin;
    if (took > (openmp.parallel ? LONG_CALL : LONG_CALL_AWAKE) && took > OTHER * pace->no_gain) {
        pace->alone = turn.counted && pace->alone < took ? pace->alone : took;
        pace->long_calls = turn.counted + 1;
    } else
        pace->long_calls = 0;
}

/* After a call on all threads: back to one where none of the first was quicker. */
static void end_try(Pace *pace, double took)
{
    pace->together = pace->tries && pace->together < took ? pace->together : took;
    if (++pace->tries < LONG_CALLS || pace->together < GAIN * pace->alone)
        return;
    pace->no_gain = pace->alone;
    pace->tries = pace->long_calls = 0;
}

#ifdef __linux__
/* What a thread that is made inherits: to run on the processor of its maker, which waits for it; elsewhere it may have to wait until a
 * thread of torch's that stays awake there sleeps, for milliseconds. */
typedef struct {
    cpu_set_t before, here;
    int threads, changed; /* so many there are already */
} Place;

static void stay_here(Place *place, int threads)
{
    place->threads = threads;
    int processor = sched_getcpu();
    CPU_ZERO(&place->here);
    place->changed = processor >= 0 && processor < CPU_SETSIZE && !sched_getaffinity(0, sizeof place->before, &place->before);
    if (place->changed) {
        CPU_SET(processor, &place->here);
        place->changed = !sched_setaffinity(0, sizeof place->here, &place->here);
    }
}

/* In each thread of a region: the maker, and those that were made, go where it was. */
static void go_back(void *data)
{
    Place *place = data;
    int number = openmp.number();
    cpu_set_t now;
    if (place->changed && (number == 0 || number >= place->threads) && !sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &place->here))
        sched_setaffinity(0, sizeof place->before, &place->before);
}
#else
typedef int Place;
static void stay_here(Place *place, int threads) { *place = threads; }
static void go_back(void *place) { (void)place; }
#endif

/* With more threads than processors libgomp's wait for a microsecond and sleep: it is given one more than that, which ends when torch
 * needs fewer. Where torch has less than half of the processors, it may keep them. */
static void put_to_sleep(double last_run)
{
    int threads = openmp.parallel ? openmp.most() : 1, wanted = threads > 1 ? openmp.processors() + 1 : 0, more = wanted - threads;
    if (more > 0 && more <= threads + 1 && last_run > LONG_RUN * more && openmp.limit() >= wanted) {
        Place place;
        stay_here(&place, threads);
        openmp.parallel(go_back, &place, (unsigned)wanted, 0);
    }
}

#ifdef __linux__
/* A call that is one task of a loop of onnxruntime's, whose other threads wait asleep in the others until it is over. */
typedef struct {
    void (*call)(void *);
    void *data;
    pthread_t caller;
    int begun, over; /* over: guarded by the lock */
    pthread_mutex_t lock;
    pthread_cond_t end;
} Loop;

static void call_or_wait(void *data, size_t task)
{
    Loop *loop = data;
    (void)task;
    if (!pthread_equal(pthread_self(), loop->caller)) {
        pthread_mutex_lock(&loop->lock);
        while (!loop->over)
            pthread_cond_wait(&loop->end, &loop->lock);
        pthread_mutex_unlock(&loop->lock);
    } else if (!loop->begun) {
        loop->begun = 1;
        loop->call(loop->data);
        put_to_sleep(INFINITY);
        pthread_mutex_lock(&loop->lock);
        loop->over = 1;
        pthread_cond_broadcast(&loop->end);
        pthread_mutex_unlock(&loop->lock);
    }
}

static void call_alone(const void *context, void (*call)(void *), void *data)
{
    Loop loop = {.call = call, .data = data, .caller = pthread_self(), .lock = PTHREAD_MUTEX_INITIALIZER, .end = PTHREAD_COND_INITIALIZER};
    int processors = openmp.processors ? openmp.processors() : 0;
    Status status = NULL;
    if (processors > 1)
        status = CALL(PARALLEL_FOR, Status(*)(const void *, void (*)(void *, size_t), size_t, size_t, void *))(context, call_or_wait, (size_t)processors, 0, &loop);
    if (status) /* none of the tasks is left, whether they ran or not */
        CALL(RELEASE_STATUS, void (*)(void *))(status);
    if (!loop.begun)
        call(data);
}
#else
static void call_alone(const void *context, void (*call)(void *), void *data) { (void)context; call(data); }
#endif

/* ------------------------------------------------------------------------------------------------- Python's side */

/* threads(most, set_most, processors, parallel, set_most_of_mkl, limit, number): addresses, 0 for what torch's OpenMP and MKL do not have */
static PyObject *threads(PyObject *module, PyObject *args)
{
    (void)module;
    void **targets[] = {(void **)&openmp.most, (void **)&openmp.set_most, (void **)&openmp.processors, (void **)&openmp.parallel, (void **)&openmp.set_most_of_mkl, (void **)&openmp.limit, (void **)&openmp.number};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        PyObject *address = PyTuple_GetItem(args, (Py_ssize_t)i);
        *targets[i] = address ? PyLong_AsVoidPtr(address) : NULL;
        if (PyErr_Occurred())
            return NULL;
    }
    Py_RETURN_NONE;
}

/* threads_outside(): how many torch has where the call began that this thread is in; 0 where it is in none that changed it */
static PyObject *threads_outside(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(outside);
}

/* put_to_sleep(seconds of the last run) */
static PyObject *sleep_before(PyObject *module, PyObject *last_run)
{
    (void)module;
    double last = PyFloat_AsDouble(last_run);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    put_to_sleep(last);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

#endif
