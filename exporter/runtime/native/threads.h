/* torch's threads beside onnxruntime's.
 *
 * Each of the two libraries has a thread per processor, and both let them wait awake for the next operator: libgomp, which is torch's, for
 * some milliseconds. Two such threads on one processor get half of it each, in turns of milliseconds. So
 *   - a short call of torch's code runs on the thread that is there (`Turn`);
 *   - in a long one, onnxruntime's threads sleep (`call_alone`), and then torch's;
 *   - before a long run of a session, torch's threads are put to sleep (`put_to_sleep`).
 */
#ifndef PYTHONOP_THREADS_H
#define PYTHONOP_THREADS_H

#include "tensors.h"

/* Functions of torch, and of the OpenMP and the MKL that it runs on; NULL where there is none. Filled by threads(). */
extern struct OpenMP {
    int (*most)(void);                                               /* at::get_num_threads: gives a thread torch's number, where it has none yet */
    void (*set_most)(int);                                           /* omp_set_num_threads: of the calling thread */
    int (*processors)(void);                                         /* omp_get_num_procs */
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  /* GOMP_parallel */
    int (*set_most_of_mkl)(int);                                     /* MKL_Set_Num_Threads_Local: returns what was, 0 for OpenMP's */
    int (*limit)(void);                                              /* omp_get_thread_limit */
    int (*number)(void);                                             /* omp_get_thread_num: of the calling thread in a region */
} openmp;

/* So many calls must have taken as long, one after the other: the first ones import and compile. After one, the time counts that the thread
 * has computed, without waiting for the GIL or for a processor; to ask for that takes several times as long. As many calls are then tried on
 * all threads. */
enum { LONG_CALLS = 3 };

/* One call of torch's code within a run. Begins with the GIL held: waiting for that is no work. */
typedef struct {
    int threads, mkl, counted; /* what was set before; 0 threads: nothing was changed. Long calls so far */
    double begin;
} Turn;

/* Of a clock, or that this thread has computed. */
double seconds(int computed);
Turn begin_turn(const Pace *pace);
void end_turn(Turn turn, Pace *pace);
/* After a call on all threads: back to one where none of the first was quicker. */
void end_try(Pace *pace, double took);
void call_alone(const void *context, void (*call)(void *), void *data);
/* threads(most, set_most, processors, parallel, set_most_of_mkl, limit, number): addresses, 0 for what torch's OpenMP and MKL do not have */
PyObject *threads(PyObject *module, PyObject *args);
/* threads_outside(): how many torch has where the call began that this thread is in; 0 where it is in none that changed it */
PyObject *threads_outside(PyObject *module, PyObject *unused);
/* put_to_sleep(seconds of the last run) */
PyObject *sleep_before(PyObject *module, PyObject *last_run);

#endif
