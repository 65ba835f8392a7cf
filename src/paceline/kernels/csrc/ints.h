// Sixteen sums of whole numbers, I, and the weights of a line, B: 64 bytes, of which lane i has the
// four from 4 i on. quantised.cpp is compiled once for each instruction set; whole numbers are exact
// in all of them.
//
//   line          64 bytes            low, high    their lower and upper four bits
//   dot(s, w, x)  lane i of s plus the sum of four products w[4 i + j] (0 .. 255) * x[j] (-127 .. 127);
//                 not BYTE_DOTS: w at most 15, and lanes are two sums of 16 bits until they are joined
//   evens, odds   the first and third, second and fourth of each four bytes, as numbers of 16 bits
//   dot_wide(s, w, x)  lane i of s plus w[2 i] * x[0] + w[2 i + 1] * x[1], all of 16 bits
//   BYTES_OFFSET  what codes of 8 bits have more than they stand for when they are multiplied
//   floats        rounded to the nearest, exact below 2^24
//   from_half     16 IEEE half numbers
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

#if !defined(PACELINE_AVX2)  // which fetches the next panel line by line
constexpr bool BURSTS = true;
#endif
#if !defined(PACELINE_NEON)  // which makes all sums of a span itself, by span_sums()
constexpr bool WIDE_BY_BYTES = false;
constexpr int32_t BYTES_OFFSET = 128;
constexpr int WIDE_ROWS = QUANTISED_ROWS;
#endif
