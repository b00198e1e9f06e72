#include "threads.h"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif
#include <time.h>

struct OpenMP openmp;

/* Seconds of a call on one thread from which on several are worth waking, and putting to sleep, which takes 0.15 ms together; and where
 * nothing puts them to sleep. */
static const double LONG_CALL = 5e-4, LONG_CALL_AWAKE = 4e-3;
/* A call on all threads that takes more than this part of the time on one is no gain: where a call wakes all threads, the rest of the run may
 * wait for a processor. So many calls are on one then, before it is tried again, and twice as many each time. Where it is one, one thread is
 * tried again, soon at first: its calls may have had a busy moment, as the first ones of a process have. */
static const double GAIN = 0.75;
enum { FIRST_PAUSE = 32, FIRST_STAY = 4, LONGEST = 4096 };
/* Seconds that a run must have taken, for each thread that putting the others to sleep makes. */
static const double LONG_RUN = 3e-3;

double seconds(int computed)
{
    struct timespec now;
#ifdef _WIN32
    (void)computed;
    timespec_get(&now, TIME_UTC);
#else
    clock_gettime(computed ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
#endif
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#ifdef _MSC_VER
static __declspec(thread) int outside;
#else
static __thread int outside; /* What was set before the call that this thread is in; 0: it is in none that changed it. */
#endif

/* With more threads than processors libgomp's wait for a microsecond and sleep: one more than that, where torch may have as many; else 0. Where
 * torch has less than half of the processors, its threads may stay awake. */
static int threads_that_sleep(void)
{
    int threads = openmp.parallel ? openmp.most() : 1, wanted = threads > 1 ? openmp.processors() + 1 : 0, more = wanted - threads;
    return more > 0 && more <= threads + 1 && openmp.limit() >= wanted ? wanted : 0;
}

/* Whether they need not stay awake: they are more than processors, or may be. */
static int can_sleep(void) { return openmp.parallel && (openmp.most() > openmp.processors() || threads_that_sleep()); }


Turn begin_turn(const Pace *pace)
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

void end_turn(Turn turn, Pace *pace)
{
    if (!turn.threads) {
        if (pace->stayed && !--pace->stayed) {
            pace->long_calls = LONG_CALLS - 1;
            pace->tries = 0;
        }
        return;
    }
    outside = 0;
    if (openmp.most() == 1) { /* else the call has set another number, of both */
        openmp.set_most(turn.threads);
        if (openmp.set_most_of_mkl)
            openmp.set_most_of_mkl(turn.mkl);
    }
    double took = seconds(turn.counted) - turn.begin;
    if (pace->paused)
        pace->paused--;
    else if (took > LONG_CALL && (took > LONG_CALL_AWAKE || can_sleep())) {
        pace->on_one = turn.counted && pace->on_one < took ? pace->on_one : took;
        pace->long_calls = turn.counted + 1;
    } else
        pace->long_calls = 0;
}

static int longer(int calls, int first) { return !calls ? first : calls < LONGEST ? 2 * calls : LONGEST; }

void end_try(Pace *pace, double took)
{
    pace->on_all = pace->tries && pace->on_all < took ? pace->on_all : took;
    if (++pace->tries < LONG_CALLS)
        return;
    if (pace->on_all < GAIN * pace->on_one) {
        pace->stay = pace->stayed = longer(pace->stay, FIRST_STAY);
        return;
    }
    pace->pause = pace->paused = longer(pace->pause, FIRST_PAUSE);
    pace->tries = pace->long_calls = pace->stay = 0;
}

#ifdef __linux__
/* What a thread that is made inherits: to run on the processor of its maker, which waits for it; elsewhere it may have to wait until a
 * thread of torch's that stays awake there sleeps, for milliseconds. */
typedef struct {
    cpu_set_t before, here;
    int changed;
} Place;

static __thread int was_here; /* The thread has been in such a region: this one did not make it. */

static void stay_here(Place *place)
{
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
    cpu_set_t now;
    if (place->changed && (openmp.number() == 0 || !was_here) && !sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &place->here))
        sched_setaffinity(0, sizeof place->before, &place->before);
    was_here = 1;
}
#else
typedef int Place;
static void stay_here(Place *place) { (void)place; }
static void go_back(void *place) { (void)place; }
#endif

/* The threads above torch's number end when it needs fewer. */
static void put_to_sleep(double last_run)
{
    int wanted = threads_that_sleep();
    if (wanted && last_run > LONG_RUN * (wanted - openmp.most())) {
        Place place;
        stay_here(&place);
        openmp.parallel(go_back, &place, (unsigned)wanted, 0);
    }
}

#ifdef __linux__
/* A call that is one task of a loop of onnxruntime's, whose other threads wait asleep in the others until it is over. None waits for ever: who
 * calls may find no task left, and a Function may wait for what only these threads do (`run_async` of its own session). */
typedef struct {
    void (*call)(void *);
    void *data;
    pthread_t caller;
    atomic_flag_t begun;
    int over; /* or it has taken as long as they wait; guarded by the lock */
    pthread_mutex_t lock;
    pthread_cond_t end;
} Loop;

static const double BEGIN_WAIT = 1e-3, LONGEST_WAIT = 0.1; /* seconds, the first for a call that has not begun */

static void finish(Loop *loop)
{
    pthread_mutex_lock(&loop->lock);
    loop->over = 1;
    pthread_cond_broadcast(&loop->end);
    pthread_mutex_unlock(&loop->lock);
}

/* Whether the call is over within so many seconds. */
static int wait_for(Loop *loop, double most)
{
    double end = seconds(0) + most;
    struct timespec until = {.tv_sec = (time_t)end, .tv_nsec = (long)((end - (double)(time_t)end) * 1e9)};
    int status = 0;
    pthread_mutex_lock(&loop->lock);
    while (!loop->over && !status)
        status = pthread_cond_timedwait(&loop->end, &loop->lock, &until);
    pthread_mutex_unlock(&loop->lock);
    return !status;
}

static void call_or_wait(void *data, size_t task)
{
    Loop *loop = data;
    (void)task;
    if (!pthread_equal(pthread_self(), loop->caller)) {
        if (!wait_for(loop, BEGIN_WAIT) && peek(&loop->begun) && !wait_for(loop, LONGEST_WAIT))
            finish(loop); /* for its other tasks, too */
    } else if (!exchange(&loop->begun, 1)) {
        loop->call(loop->data);
        put_to_sleep(INFINITY);
        finish(loop);
    }
}

void call_alone(const void *context, void (*call)(void *), void *data)
{
    Loop loop = {.call = call, .data = data, .caller = pthread_self(), .lock = PTHREAD_MUTEX_INITIALIZER};
    int processors = openmp.processors ? openmp.processors() : 0;
    pthread_condattr_t clock;
    if (processors > 1 && !pthread_condattr_init(&clock)) {
        pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
        if (!pthread_cond_init(&loop.end, &clock)) {
            Status status = CALL(PARALLEL_FOR, Status(*)(const void *, void (*)(void *, size_t), size_t, size_t, void *))(context, call_or_wait, (size_t)processors, 0, &loop);
            if (status) /* no task is left, whether they ran or not */
                CALL(RELEASE_STATUS, void (*)(void *))(status);
            pthread_cond_destroy(&loop.end);
        }
        pthread_condattr_destroy(&clock);
    }
    if (!peek(&loop.begun)) {
        call(data);
        put_to_sleep(INFINITY);
    }
}
#else
void call_alone(const void *context, void (*call)(void *), void *data) { (void)context; call(data); }
#endif

/* ------------------------------------------------------------------------------------------------- Python's side */

PyObject *threads(PyObject *module, PyObject *args)
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

PyObject *threads_outside(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(outside);
}

PyObject *sleep_before(PyObject *module, PyObject *last_run)
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
