/* What lets a compiler make vectors of a loop. */
#ifndef PYTHONOP_CPU_VECTORS_H
#define PYTHONOP_CPU_VECTORS_H

/* Of an attribute: x * b + sum as one instruction. */
#if defined(__GNUC__) && !defined(__clang__)
#define FUSED optimize("fp-contract=fast"),
#else
#define FUSED
#endif

#ifdef __GNUC__
#define NO_DEPENDENCY _Pragma("GCC ivdep")
#else
#define NO_DEPENDENCY
#endif

/* The widest vectors that the processor has, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

#endif
