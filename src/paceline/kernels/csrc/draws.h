// Distributions of rows of logits, and draws from them (draws.cpp).
#pragma once
#include <cmath>

#include "kernels.h"

// glibc 2.29 gave these another version; the older one has the same digits, and wheels run from 2.28 on.
#if defined(__GLIBC__) && defined(__x86_64__)
asm(".symver exp, exp@GLIBC_2.2.5\n.symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
asm(".symver exp, exp@GLIBC_2.17\n.symver log, log@GLIBC_2.17");
#endif

struct Sampling {
  float sharpness, top_p, min_p;
  int64_t top_k;
};

// Of `width` numbers in dtype.
struct LogitRow {
  int64_t dtype;
  const char* x;
  long width;

  const char* at(long i) const { return x + i * (dtype == PL_BFLOAT16 ? 2 : 4); }
  float operator[](long i) const;
};

// False where it is none: a number is not finite or not a number. `parts`: the sums of the law's mass, by stretch,
// unless NULL.
bool law_of(const Kernels& k, const LogitRow& row, const Sampling& how, Law* law, float* parts);

double chance(const Law& law, const LogitRow& row, long token);

// The sum of scale times the chances, less those of q, where that is more than nothing; all of
// them into y, and the sum of each stretch into parts, unless NULL.
double mass_of(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, float* y, float* parts);

// By inversion, from what mass_of sums and writes into y; -1 if that is nothing.
long drawn(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, double uniform, float* y);

// The `count` first of a race of seeded noise, and unless `shares` is NULL the logarithms of their shares
// of all. `ids`: of the columns, NULL for their numbers. Missing ones are 0, with -infinity.
void raced(const Kernels& k, const LogitRow& row, const Law& law, uint64_t key, const int64_t* ids, long count, int32_t* places, float* shares);

// See pl_verdict.
void decide(const Kernels& k, const pl_verdict& v);
