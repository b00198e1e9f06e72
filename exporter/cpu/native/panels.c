#include "panels.h"

#include <string.h>
#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vectors.h"

enum { AHEAD = 64 }; /* numbers behind those that are turned: what is read from there next is asked for */

#ifdef __GNUC__
/* `at_once` rows of two vectors of so many bytes are as many sums as the processor has registers for. */
#define DEFINE_MULTIPLY(name, features, bytes, at_once)                                                                                     \
    typedef float name##_vector __attribute__((vector_size(bytes), aligned(4), may_alias));                                                 \
    features inline __attribute__((FUSED always_inline)) static void name##_rows(size_t rows, float *to, const float *a, size_t stride,     \
                                                                                 const float *panel, size_t depth)                          \
    {                                                                                                                                       \
        enum { LANES = (bytes) / 4 };                                                                                                       \
        for (size_t column = 0; column < PANEL; column += 2 * LANES) {                                                                      \
            name##_vector sums[at_once][2];                                                                                                 \
            for (size_t i = 0; i < rows; i++)                                                                                               \
                for (size_t v = 0; v < 2; v++)                                                                                              \
                    sums[i][v] = *(const name##_vector *)(to + i * PANEL + column + v * LANES);                                             \
            for (size_t k = 0; k < depth; k++) {                                                                                            \
                const name##_vector low = *(const name##_vector *)(panel + k * PANEL + column);                                             \
                const name##_vector high = *(const name##_vector *)(panel + k * PANEL + column + LANES);                                    \
                for (size_t i = 0; i < rows; i++) {                                                                                         \
                    sums[i][0] += a[i * stride + k] * low;                                                                                  \
                    sums[i][1] += a[i * stride + k] * high;                                                                                 \
                }                                                                                                                           \
            }                                                                                                                               \
            for (size_t i = 0; i < rows; i++)                                                                                               \
                for (size_t v = 0; v < 2; v++)                                                                                              \
                    *(name##_vector *)(to + i * PANEL + column + v * LANES) = sums[i][v];                                                   \
        }                                                                                                                                   \
    }                                                                                                                                       \
    features __attribute__((FUSED noinline)) static void name(size_t rows, float *to, const float *a, size_t stride, const float *panel,    \
                                                              size_t depth)                                                                 \
    {                                                                                                                                       \
        for (; rows >= at_once; rows -= at_once, to += at_once * PANEL, a += at_once * stride)                                              \
            name##_rows(at_once, to, a, stride, panel, depth);                                                                              \
        for (; rows >= 2; rows -= 2, to += 2 * PANEL, a += 2 * stride)                                                                      \
            name##_rows(2, to, a, stride, panel, depth);                                                                                    \
        if (rows)                                                                                                                           \
            name##_rows(1, to, a, stride, panel, depth);                                                                                    \
    }                                                                                                                                       \
    features __attribute__((FUSED noinline)) static void name##_windows(float *to, const float *const *begins, const size_t *places,        \
                                                                        size_t parts, size_t wide, const float *panel)                      \
    {                                                                                                                                       \
        enum { LANES = (bytes) / 4, SOME = (at_once) == TOGETHER ? TOGETHER : 4 };                                                          \
        for (size_t row = 0; row < TOGETHER; row += SOME, to += SOME * PANEL)                                                               \
            for (size_t column = 0; column < PANEL; column += 2 * LANES) {                                                                  \
                const float *right = panel + column, *a[SOME];                                                                              \
                name##_vector sums[SOME][2];                                                                                                \
                for (size_t i = 0; i < SOME; i++) {                                                                                         \
                    a[i] = begins[row + i];                                                                                                 \
                    for (size_t v = 0; v < 2; v++)                                                                                          \
                        sums[i][v] = *(const name##_vector *)(to + i * PANEL + column + v * LANES);                                         \
                }                                                                                                                           \
                for (size_t part = 0; part < parts; part++)                                                                                 \
                    for (size_t k = places[part]; k < places[part] + wide; k++, right += PANEL) {                                           \
                        const name##_vector low = *(const name##_vector *)right, up = *(const name##_vector *)(right + LANES);              \
                        for (size_t i = 0; i < SOME; i++) {                                                                                 \
                            sums[i][0] += a[i][k] * low;                                                                                    \
                            sums[i][1] += a[i][k] * up;                                                                                     \
                        }                                                                                                                   \
                    }                                                                                                                       \
                for (size_t i = 0; i < SOME; i++)                                                                                           \
                    for (size_t v = 0; v < 2; v++)                                                                                          \
                        *(name##_vector *)(to + i * PANEL + column + v * LANES) = sums[i][v];                                               \
            }                                                                                                                               \
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

static void multiply_any_windows(float *to, const float *const *begins, const size_t *places, size_t parts, size_t wide, const float *panel)
{
    for (size_t part = 0; part < parts; part++, panel += wide * PANEL)
        for (size_t i = 0; i < TOGETHER; i++)
            multiply_any(1, to + i * PANEL, begins[i] + places[part], wide, panel, wide);
}
#endif

int has_wide_vectors(void)
{
#if defined(__GNUC__) && defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") != 0;
#else
    return 0;
#endif
}

#if defined(__GNUC__) && defined(__x86_64__)
#define QUICKEST(suffix)                                                                                       \
    (has_wide_vectors()                                            ? multiply_avx512##suffix                   \
     : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? multiply_avx2##suffix : multiply_any##suffix)
#else
#define QUICKEST(suffix) multiply_any##suffix
#endif
MultiplyPanel multiply_panel(void) { return QUICKEST(); }
MultiplyWindows multiply_windows(void) { return QUICKEST(_windows); }

#if defined(__GNUC__) && defined(__x86_64__)
/* 16 rows of 16 numbers, `stride` apart, as columns, of rows that are `pitch` apart: pairs, fours, then lanes of four change places. */
__attribute__((target("avx512f"))) static void turn_sixteen(float *to, size_t pitch, const float *rows, size_t stride)
{
    __m512 whole[16], pairs[16];
    for (size_t i = 0; i < 16; i++) {
        whole[i] = _mm512_loadu_ps(rows + i * stride);
        __builtin_prefetch(rows + i * stride + AHEAD, 0, 2); /* rows far apart, which the processor does not foresee */
    }
    for (size_t i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(whole[i], whole[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(whole[i], whole[i + 1]);
    }
    for (size_t i = 0; i < 16; i += 4)
        for (size_t half = 0; half < 2; half++) {
            __m512d low = _mm512_castps_pd(pairs[i + half]), high = _mm512_castps_pd(pairs[i + half + 2]);
            whole[i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            whole[i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (size_t c = 0; c < 4; c++) { /* whole[i + c]: of the rows i to i + 3 the columns c, c + 4, c + 8 and c + 12 */
        __m512 even = _mm512_shuffle_f32x4(whole[c], whole[4 + c], 0x88), odd = _mm512_shuffle_f32x4(whole[c], whole[4 + c], 0xdd);
        __m512 behind = _mm512_shuffle_f32x4(whole[8 + c], whole[12 + c], 0x88), last = _mm512_shuffle_f32x4(whole[8 + c], whole[12 + c], 0xdd);
        _mm512_storeu_ps(to + c * pitch, _mm512_shuffle_f32x4(even, behind, 0x88));
        _mm512_storeu_ps(to + (4 + c) * pitch, _mm512_shuffle_f32x4(odd, last, 0x88));
        _mm512_storeu_ps(to + (8 + c) * pitch, _mm512_shuffle_f32x4(even, behind, 0xdd));
        _mm512_storeu_ps(to + (12 + c) * pitch, _mm512_shuffle_f32x4(odd, last, 0xdd));
    }
}
#endif

void lay_out_panel(float *panel, const float *b, size_t depth, size_t row, size_t column, size_t count)
{
    size_t turned = 0; /* rows by sixteen, of 16 or 32 columns */
#if defined(__GNUC__) && defined(__x86_64__)
    if (row == 1 && count % 16 == 0 && has_wide_vectors())
        for (; turned + 16 <= depth; turned += 16)
            for (size_t j = 0; j < count; j += 16)
                turn_sixteen(panel + turned * PANEL + j, PANEL, b + turned + j * column, column);
#endif
    for (size_t k = 0; k < depth; k++) {
        if (k >= turned && column == 1)
            memcpy(panel + k * PANEL, b + k * row, count * sizeof *b);
        else if (k >= turned)
            for (size_t j = 0; j < count; j++)
                panel[k * PANEL + j] = b[k * row + j * column];
        if (count < PANEL)
            memset(panel + k * PANEL + count, 0, (PANEL - count) * sizeof *b);
    }
}

void lay_out_columns(float *to, size_t pitch, const float *rows, size_t stride, size_t depth, size_t count)
{
    size_t turned = 0;
#if defined(__GNUC__) && defined(__x86_64__)
    if (count % 16 == 0 && has_wide_vectors())
        for (; turned + 16 <= depth; turned += 16)
            for (size_t j = 0; j < count; j += 16)
                turn_sixteen(to + j * pitch + turned, pitch, rows + turned * stride + j, stride);
#endif
    for (size_t j = 0; j < count; j++)
        for (size_t k = turned; k < depth; k++)
            to[j * pitch + k] = rows[k * stride + j];
}

#if defined(__GNUC__) && defined(__x86_64__)
/* Sixteen at a time; of the `left` numbers from `from` on, none beyond them is read. */
__attribute__((target("avx512f"))) static void take_every_second_of_many(float *to, size_t count, const float *from, size_t left)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    for (size_t i = 0; i < count; i += 16) {
        size_t here = left - 2 * i;
        __mmask16 low = (__mmask16)(here < 16 ? (1u << here) - 1 : 0xffff), high = (__mmask16)(here < 16 ? 0 : here < 32 ? (1u << (here - 16)) - 1 : 0xffff);
        __m512 taken = _mm512_permutex2var_ps(_mm512_maskz_loadu_ps(low, from + 2 * i), even, _mm512_maskz_loadu_ps(high, from + 2 * i + 16));
        _mm512_mask_storeu_ps(to + i, (__mmask16)(count - i < 16 ? (1u << (count - i)) - 1 : 0xffff), taken);
    }
}
#endif

void take_every_second(float *to, size_t count, const float *from, size_t left)
{
#if defined(__GNUC__) && defined(__x86_64__)
    if (has_wide_vectors()) {
        take_every_second_of_many(to, count, from, left);
        return;
    }
#endif
    (void)left;
    for (size_t i = 0; i < count; i++)
        to[i] = from[2 * i];
}
