/* Molecular dynamics from a file, in C on onnxruntime alone: the simulation of run.py, without Python.
 *
 *     cc -O2 -I exporter/runtime/native examples/md/verlet.c -o verlet -lm -ldl        (-DREAL=double for a file in float64)
 *     ./verlet LIBRARY field.onnx start.txt STEPS [end.txt]
 *
 * LIBRARY is onnxruntime's shared library: that of its pip package (onnxruntime/capi/libonnxruntime.so.1.*) or of a release. It is opened when the program runs:
 * the name that a linker would write down (libonnxruntime.so.1) is not in the pip package. start.txt is what `python -m examples.md.run --write-start` writes, and end.txt has its form.
 *
 * There is no header of onnxruntime in the pip package either. ort_abi.h has the rules of its function table, and the slots below are the ones this program calls;
 * with onnxruntime_c_api.h of a release, ORT(CREATE_SESSION, ...)(...) is api->CreateSession(...).
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <time.h>

#include "ort_abi.h"

#ifndef REAL
#define REAL float
#endif

const void *const *api;

enum { /* slots of the OrtApi table, as stable as those of ort_abi.h */
    ERROR_MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION = 7, RUN = 9, CREATE_OPTIONS = 10, INTRA_THREADS = 24, SESSION_INPUTS = 30,
    SESSION_OUTPUTS = 31, INPUT_TYPE = 33, INPUT_NAME = 36, OUTPUT_NAME = 37, TENSOR_OF_DATA = 49, TENSOR_INFO = 55,
    CPU_MEMORY = 69, FREE = 76, ALLOCATOR = 78, RELEASE_ENV = 92, RELEASE_MEMORY = 94, RELEASE_SESSION = 95, RELEASE_VALUE = 96, RELEASE_TYPE = 98, RELEASE_OPTIONS = 100
};
#define ORT(slot, ...) CALL(slot, Status (*)(__VA_ARGS__))

static const double DT = 0.002, CUTOFF = 2.0, SKIN = 0.3;

static void stop(const char *what, const char *why) {
    fprintf(stderr, "verlet: %s: %s\n", what, why);
    exit(1);
}

static void check(Status status, const char *what) {
    if (status) stop(what, CALL(ERROR_MESSAGE, const char *(*)(Status))(status));
}

static void *room(void *old, size_t count, size_t size) {
    void *got = realloc(old, (count ? count : 1) * size);
    if (!got) stop("memory", "there is not enough");
    return got;
}

/* ------------------------------------------------------------------------------------------- the file */

typedef struct {
    void *env, *options, *session, *memory, *allocator;
    char *inputs[3], *outputs[2];
} Field;

static Field open_field(const char *library, const char *path) {
    void *opened = dlopen(library, RTLD_NOW);
    if (!opened) stop("the library", dlerror());
    const ApiBase *(*base)(void) = (const ApiBase *(*)(void))dlsym(opened, "OrtGetApiBase");
    if (!base || !(api = base()->get_api(ORT_API))) stop(library, "this is no onnxruntime of 1.17 or newer");
    Field f;
    void *type;
    const void *info;
    size_t inputs, outputs;
    check(ORT(CREATE_ENV, int, const char *, void **)(3, "verlet", &f.env), "the environment");
    check(ORT(CREATE_OPTIONS, void **)(&f.options), "the options");
    check(ORT(INTRA_THREADS, void *, int)(f.options, 1), "the options");
    check(ORT(CREATE_SESSION, void *, const char *, void *, void **)(f.env, path, f.options, &f.session), path);
    check(ORT(CPU_MEMORY, int, int, void **)(0, 0, &f.memory), "the memory");
    check(ORT(ALLOCATOR, void **)(&f.allocator), "the allocator");
    check(ORT(SESSION_INPUTS, void *, size_t *)(f.session, &inputs), path);
    check(ORT(SESSION_OUTPUTS, void *, size_t *)(f.session, &outputs), path);
    if (inputs != 3 || outputs != 2) stop(path, "a field takes positions, edges and shifts, and gives energy and forces");
    for (size_t i = 0; i < 3; i++) check(ORT(INPUT_NAME, void *, size_t, void *, char **)(f.session, i, f.allocator, &f.inputs[i]), path);
    for (size_t i = 0; i < 2; i++) check(ORT(OUTPUT_NAME, void *, size_t, void *, char **)(f.session, i, f.allocator, &f.outputs[i]), path);
    int element = 0;
    check(ORT(INPUT_TYPE, void *, size_t, void **)(f.session, 0, &type), path);
    check(ORT(TENSOR_INFO, const void *, const void **)(type, &info), path);
    if (info) check(ORT(ELEMENT_TYPE, const void *, int *)(info, &element), path);
    CALL(RELEASE_TYPE, void (*)(void *))(type);
    if (element != (sizeof(REAL) == 8 ? ONNX_DOUBLE : ONNX_FLOAT)) stop(path, "its floats are not this program's: compile with -DREAL=double for float64, -DREAL=float for float32");
    return f;
}

static void close_field(Field *f) {
    for (int i = 0; i < 3; i++) check(ORT(FREE, void *, void *)(f->allocator, f->inputs[i]), "the names");
    for (int i = 0; i < 2; i++) check(ORT(FREE, void *, void *)(f->allocator, f->outputs[i]), "the names");
    CALL(RELEASE_MEMORY, void (*)(void *))(f->memory);
    CALL(RELEASE_SESSION, void (*)(void *))(f->session);
    CALL(RELEASE_OPTIONS, void (*)(void *))(f->options);
    CALL(RELEASE_ENV, void (*)(void *))(f->env);
}

/* A tensor over memory of ours, which onnxruntime reads or writes in place; `old` is released. */
static void *tensor(const Field *f, void *old, void *data, size_t bytes, const int64_t *dims, size_t rank, int type) {
    void *made = NULL;
    if (old) CALL(RELEASE_VALUE, void (*)(void *))(old);
    check(ORT(TENSOR_OF_DATA, const void *, void *, size_t, const int64_t *, size_t, int, void **)(f->memory, data, bytes, dims, rank, type, &made), "a tensor");
    return made;
}

/* ------------------------------------------------------------------------------------------- the simulation */

typedef struct {
    size_t atoms, edges, space; /* space: how many edges the lists below have room for */
    REAL *positions, *velocities, *forces, *listed, energy, length;
    int64_t *pairs; /* (2, edges) */
    int64_t *first, *second;
    REAL *shifts; /* (edges, 3) */
    void *in[3], *out[2];
} System;

/* All pairs nearer than the cutoff and the skin, in both directions and over the box's faces. Every pair is looked at, as in run.py; many atoms would want cells. */
static void list(const Field *f, System *s) {
    const REAL most = (REAL)((CUTOFF + SKIN) * (CUTOFF + SKIN)), length = s->length;
    const int type = sizeof(REAL) == 8 ? ONNX_DOUBLE : ONNX_FLOAT;
    s->edges = 0;
    for (size_t i = 0; i < s->atoms; i++)
        for (size_t j = 0; j < s->atoms; j++) {
            REAL shift[3], distance = 0;
            for (int k = 0; k < 3; k++) {
                REAL apart = s->positions[3 * j + k] - s->positions[3 * i + k];
                shift[k] = -length * (REAL)rint(apart / length);
                apart += shift[k];
                distance += apart * apart;
            }
            if (i == j || !(distance < most)) continue;
            if (s->edges == s->space) {
                s->space = 2 * s->space + 1024;
                s->first = room(s->first, s->space, sizeof(int64_t));
                s->second = room(s->second, s->space, sizeof(int64_t));
                s->shifts = room(s->shifts, 3 * s->space, sizeof(REAL));
            }
            s->first[s->edges] = (int64_t)i;
            s->second[s->edges] = (int64_t)j;
            memcpy(s->shifts + 3 * s->edges++, shift, sizeof shift);
        }
    s->pairs = room(s->pairs, 2 * s->edges, sizeof(int64_t));
    if (s->edges) {
        memcpy(s->pairs, s->first, s->edges * sizeof(int64_t));
        memcpy(s->pairs + s->edges, s->second, s->edges * sizeof(int64_t));
    }
    s->shifts = room(s->shifts, 3 * s->space, sizeof(REAL));
    memcpy(s->listed, s->positions, 3 * s->atoms * sizeof(REAL));
    const int64_t two[] = {2, (int64_t)s->edges}, three[] = {(int64_t)s->edges, 3};
    s->in[1] = tensor(f, s->in[1], s->pairs, 2 * s->edges * sizeof(int64_t), two, 2, ONNX_INT64);
    s->in[2] = tensor(f, s->in[2], s->shifts, 3 * s->edges * sizeof(REAL), three, 2, type);
}

/* Energy and forces of the positions, written where the tensors of `out` lie. */
static void forces(const Field *f, System *s) {
    check(ORT(RUN, void *, const void *, const char *const *, void *const *, size_t, const char *const *, size_t, void **)(
              f->session, NULL, (const char *const *)f->inputs, s->in, 3, (const char *const *)f->outputs, 2, s->out),
          "the field");
}

static int moved(const System *s) {
    const REAL most = (REAL)((SKIN / 2) * (SKIN / 2));
    for (size_t i = 0; i < s->atoms; i++) {
        REAL way = 0;
        for (size_t k = 3 * i; k < 3 * i + 3; k++) way += (s->positions[k] - s->listed[k]) * (s->positions[k] - s->listed[k]);
        if (way > most) return 1;
    }
    return 0;
}

/* Velocity Verlet with masses of 1; the whole energy after the step. */
static double step(const Field *f, System *s) {
    const REAL half = (REAL)(DT / 2);
    double kinetic = 0;
    for (size_t i = 0; i < 3 * s->atoms; i++) {
        s->velocities[i] += half * s->forces[i];
        s->positions[i] += 2 * half * s->velocities[i];
    }
    if (moved(s)) list(f, s);
    forces(f, s);
    for (size_t i = 0; i < 3 * s->atoms; i++) {
        s->velocities[i] += half * s->forces[i];
        kinetic += (double)s->velocities[i] * s->velocities[i];
    }
    return s->energy + 0.5 * kinetic;
}

/* ------------------------------------------------------------------------------------------- its start and its end */

static System *begin(const Field *f, const char *path) {
    System *s = room(NULL, 1, sizeof *s); /* stays where it is: onnxruntime writes the energy into it */
    memset(s, 0, sizeof *s);
    double length, row[6];
    FILE *file = fopen(path, "r");
    if (!file) stop(path, "it cannot be opened");
    if (fscanf(file, "%zu %lf", &s->atoms, &length) != 2 || s->atoms < 2 || s->atoms > 1000000) stop(path, "its first line is no number of atoms and length of the box");
    if (!(length >= 2 * (CUTOFF + SKIN))) stop(path, "the box is too short: the nearest images alone are looked at, which needs 4.6");
    s->length = (REAL)length;
    s->positions = room(NULL, 3 * s->atoms, sizeof(REAL));
    s->velocities = room(NULL, 3 * s->atoms, sizeof(REAL));
    s->forces = room(NULL, 3 * s->atoms, sizeof(REAL));
    s->listed = room(NULL, 3 * s->atoms, sizeof(REAL));
    for (size_t i = 0; i < s->atoms; i++) {
        for (int k = 0; k < 6; k++)
            if (fscanf(file, "%lf", &row[k]) != 1 || !isfinite(row[k])) stop(path, "an atom has no three numbers of its position and three of its velocity");
        for (int k = 0; k < 3; k++) s->positions[3 * i + k] = (REAL)row[k], s->velocities[3 * i + k] = (REAL)row[3 + k];
    }
    fclose(file);
    const int64_t dims[] = {(int64_t)s->atoms, 3};
    const int type = sizeof(REAL) == 8 ? ONNX_DOUBLE : ONNX_FLOAT;
    s->in[0] = tensor(f, NULL, s->positions, 3 * s->atoms * sizeof(REAL), dims, 2, type);
    s->out[0] = tensor(f, NULL, &s->energy, sizeof(REAL), NULL, 0, type);
    s->out[1] = tensor(f, NULL, s->forces, 3 * s->atoms * sizeof(REAL), dims, 2, type);
    return s;
}

static void write_end(const System *s, const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) stop(path, "it cannot be written");
    fprintf(file, "%zu %.17g\n", s->atoms, (double)s->length);
    for (size_t i = 0; i < 3 * s->atoms; i += 3) {
        const REAL *x = s->positions + i, *v = s->velocities + i;
        fprintf(file, "%.17g %.17g %.17g %.17g %.17g %.17g\n", (double)x[0], (double)x[1], (double)x[2], (double)v[0], (double)v[1], (double)v[2]);
    }
    if (fclose(file)) stop(path, "it cannot be written");
}

int main(int count, char **words) {
    const long steps = count > 4 ? strtol(words[4], NULL, 10) : 0;
    if (steps < 1) stop("called wrongly", "./verlet LIBRARY field.onnx start.txt STEPS [end.txt]");
    Field f = open_field(words[1], words[2]);
    System *s = begin(&f, words[3]);
    double energy = 0, early = 0;
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    list(&f, s);
    forces(&f, s);
    for (long n = 0; n < steps; n++) {
        energy = step(&f, s);
        if (!n) early = energy;
    }
    clock_gettime(CLOCK_MONOTONIC, &to);
    const double spent = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    printf("%zu atoms, %ld steps in %.1f s: %.3g atoms a second\n", s->atoms, steps, spent, (double)s->atoms * (double)steps / spent);
    printf("energy an atom: %.9f at the start, %.9f at the end\n", early / (double)s->atoms, energy / (double)s->atoms);
    if (count > 5) write_end(s, words[5]);
    for (int i = 0; i < 3; i++) CALL(RELEASE_VALUE, void (*)(void *))(s->in[i]);
    for (int i = 0; i < 2; i++) CALL(RELEASE_VALUE, void (*)(void *))(s->out[i]);
    close_field(&f);
    free(s->positions), free(s->velocities), free(s->forces), free(s->listed), free(s->pairs), free(s->first), free(s->second), free(s->shifts), free(s);
    return 0;
}
