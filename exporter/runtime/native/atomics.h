/* Numbers that several threads change: C11's, and MSVC's. */
#ifndef PYTHONOP_ATOMICS_H
#define PYTHONOP_ATOMICS_H

#ifdef _MSC_VER /* its <stdatomic.h> needs a switch of its own */
#include <intrin.h>
typedef volatile long atomic_flag_t;
#define exchange(p, v) _InterlockedExchange((p), (v))
#define peek(p) _InterlockedOr((p), 0)
#else
#include <stdatomic.h>
typedef atomic_int atomic_flag_t;
#define exchange(p, v) atomic_exchange((p), (v))
#define peek(p) atomic_load(p)
#endif

#endif
