/* Products with a matrix that many products share: laid out once, in panels of columns. Part of native.c; native_lstm.h is its user.
 *
 * onnxruntime lays the second matrix of a product out anew each time, and has no way to keep it. A recurrence multiplies by the same one at
 * each step: of 64 steps of (32 x 256) x (256 x 1024), half of the time went into that.
 */
#ifndef PYTHONOP_NATIVE_PRODUCT_H
#define PYTHONOP_NATIVE_PRODUCT_H

#include <stddef.h>
#include <string.h>

enum { PANEL = 32 }; /* columns of one */

/* to (rows x PANEL) += a (rows x depth, rows `stride` apart) times a panel (depth x PANEL). An element's terms are added in their order,
 * whatever the rows. */
typedef void (*MultiplyPanel)(size_t rows, float *to, const float *a, size_t stride, const float *panel, size_t depth);

#ifdef __GNUC__
#ifdef __clang__
#define FUSED
#else
#define FUSED optimize("fp-contract=fast"), /* x * b + sum as one instruction */
#endif
/* `at_once` rows of two vectors of so many bytes are as many sums as the processor has registers for. */
#define DEFINE_MULTIPLY(name, features, bytes, at_once)                                                                              \
    typedef float name##_vector __attribute__((vector_size(bytes), aligned(4), may_alias));                                         \
    features inline __attribute__((FUSED always_inline)) static void name##_rows(size_t rows, float *to, const float *a, size_t stride, \
                                                                                 const float *panel, size_t depth)                    \
    {                                                                                                                                \
        enum { LANES = (bytes) / 4 };                                                                                                \
        for (size_t column = 0; column < PANEL; column += 2 * LANES) {                                                              \
            name##_vector sums[at_once][2];                                                                                          \
            for (size_t i = 0; i < rows; i++)                                                                                        \
                for (size_t v = 0; v < 2; v++)                                                                                       \
                    sums[i][v] = *(const name##_vector *)(to + i * PANEL + column + v * LANES);                                      \
            for (size_t k = 0; k < depth; k++) {                                                                                     \
                const name##_vector low = *(const name##_vector *)(panel + k * PANEL + column);                                      \
                const name##_vector high = *(const name##_vector *)(panel + k * PANEL + column + LANES);                             \
                for (size_t i = 0; i < rows; i++) {                                                                                  \
                    sums[i][0] += a[i * stride + k] * low;                                                                           \
                    sums[i][1] += a[i * stride + k] * high;                                                                          \
                }                                                                                                                    \
            }                                                                                                                        \
            for (size_t i = 0; i < rows; i++)                                                                                        \
                for (size_t v = 0; v < 2; v++)                                                                                       \
                    *(name##_vector *)(to + i * PANEL + column + v * LANES) = sums[i][v];                                            \
        }                                                                                                                            \
    }                                                                                                                                \
    features __attribute__((FUSED noinline)) static void name(size_t rows, float *to, const float *a, size_t stride,                 \
                                                              const float *panel, size_t depth)                                       \
    {                                                                                                                                \
        for (; rows >= at_once; rows -= at_once, to += at_once * PANEL, a += at_once * stride)                                       \
            name##_rows(at_once, to, a, stride, panel, depth);                                                                       \
        for (; rows >= 2; rows -= 2, to += 2 * PANEL, a += 2 * stride)                                                              \
            name##_rows(2, to, a, stride, panel, depth);                                                                            \
        if (rows)                                                                                                                    \
            name##_rows(1, to, a, stride, panel, depth);                                                                            \
    }
#if defined(__x86_64__)
DEFINE_MULTIPLY(multiply_avx512, __attribute__((target("avx512f"))), 64, 8)
DEFINE_MULTIPLY(multiply_avx2, __attribute__((target("avx2,fma"))), 32, 6)
#endif
DEFINE_MULTIPLY(multiply_any, , 16, 6)
#else
static void multiply_any(size_t rows, float *to, const float *a, size_t stride, const float *panel, size_t depth)
{
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < depth; k++)
            for (size_t j = 0; j < PANEL; j++)
                to[i * PANEL + j] += a[i * stride + k] * panel[k * PANEL + j];
}
#endif

static MultiplyPanel multiply_panel(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f"))
        return multiply_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return multiply_avx2;
#endif
    return multiply_any;
}

static size_t panels(size_t columns) { return columns / PANEL + (columns % PANEL != 0); }

/* `count` columns of b (depth x columns) from `first` on as a panel; zeros behind them. */
static void lay_out_panel(float *panel, const float *b, size_t depth, size_t columns, size_t first, size_t count)
{
    for (size_t k = 0; k < depth; k++) {
        memcpy(panel + k * PANEL, b + k * columns + first, count * sizeof *b);
        memset(panel + k * PANEL + count, 0, (PANEL - count) * sizeof *b);
    }
}

#endif
