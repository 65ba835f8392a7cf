// I32x16, sixteen int32 sums, and U8x64, a 64-byte line of weights whose bytes 4 i .. 4 i + 3 are four inputs of
// output i.
//
// quantised.cpp is compiled once for each instruction set, each with one of the ints_*.h below. Integer sums are
// exact, so they are the same in all of them. All but NEON define:
//
//   load_line                  a U8x64
//   low_nibbles, high_nibbles  the lower and upper four bits of each byte
//   even_bytes, odd_bytes      bytes 0 and 2, or 1 and 3, of each four, as 16-bit numbers
//   dot4(s, w, x)              lane i of s plus the sum of four products w[4 i + j] (0 .. 255) * x[j] (int8). Without
//                              BYTE_DOTS w is at most 15, and a lane of s is two 16-bit sums until widen_sums()
//   dot2(s, w, x)              lane i of s plus w[2 i] * x[0] + w[2 i + 1] * x[1], all 16-bit numbers
//
// and all define:
//
//   INT8_BIAS                  what unsigned 8-bit weights exceed the signed ones by when they are multiplied
//   to_float                   rounded to nearest, exact below 2^24
//   load_half                  16 IEEE fp16 numbers
//   store_i8, store_i16        floats that are whole numbers, 32 and 16 of them
//   PREFETCH_IN_BURSTS         prefetch the next panel after each span, not line by line
//   MAX_QUANTISED_ROWS         rows of a register tile with int8 activations; MAX_INT16_ROWS: with int16
//   MAX_QUANTISED_ACCUMULATORS vectors of sums of a register tile
#pragma once
#include "vec.h"

#if defined(PACELINE_AVX512)
#include "ints_vnni.h"
#elif defined(PACELINE_AVX2)
#include "ints_avx2.h"
#elif defined(PACELINE_NEON)
#include "ints_neon.h"
#else
#include "ints_portable.h"
#endif

#if !defined(PACELINE_AVX2)
constexpr bool PREFETCH_IN_BURSTS = true;
#endif
#if !defined(PACELINE_NEON)  // which computes all sums of a span in span_sums()
constexpr bool INT16_AS_BYTES = false;
constexpr int32_t INT8_BIAS = 128;
constexpr int MAX_INT16_ROWS = MAX_QUANTISED_ROWS;
#endif
