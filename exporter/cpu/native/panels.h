/* Products by panels: the second matrix laid out 32 columns at a time. Included by lstm.c, gru.c
 * and convolution.c.
 *
 * A recurrence lays the weights of its states out once for all steps, which onnxruntime cannot; the gradient of a Conv lays out what a task
 * needs in the caches. For others onnxruntime's are as quick.
 */
#ifndef PYTHONOP_CPU_PANELS_H
#define PYTHONOP_CPU_PANELS_H

#include <stddef.h>

enum { PANEL = 32, TOGETHER = 8 }; /* columns of one, rows of windows at once */

/* to (rows x PANEL) += a (rows x depth, rows `stride` apart) times a panel (depth x PANEL). An element's terms are added in their order,
 * whatever the rows. */
typedef void (*MultiplyPanel)(size_t rows, float *to, const float *a, size_t stride, const float *panel, size_t depth);
/* to (TOGETHER x PANEL) += TOGETHER rows times a panel. Of what begins where the row does, it is `parts` times `wide` numbers, at `places`. */
typedef void (*MultiplyWindows)(float *to, const float *const *begins, const size_t *places, size_t parts, size_t wide, const float *panel);

/* Whether the processor has AVX-512, and this library uses it. */
int has_wide_vectors(void);
/* The quickest that the processor can. */
MultiplyPanel multiply_panel(void);
MultiplyWindows multiply_windows(void);

/* How many panels so many columns are. */
static inline size_t panels(size_t columns) { return columns / PANEL + (columns % PANEL != 0); }
/* `count` columns of b (rows `row` apart, columns `column` apart) as a panel; zeros behind them. */
void lay_out_panel(float *panel, const float *b, size_t depth, size_t row, size_t column, size_t count);
/* The first `count` columns of `depth` rows, `stride` apart, as rows, `pitch` apart. */
void lay_out_columns(float *to, size_t pitch, const float *rows, size_t stride, size_t depth, size_t count);
/* `count` numbers, every second from `from` on, where there are `left`. */
void take_every_second(float *to, size_t count, const float *from, size_t left);

#endif
