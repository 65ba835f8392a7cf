// Distributions of rows of logits, and sampling from them (sampling.cpp).
#pragma once
#include <cmath>

#include "kernels.h"

// glibc 2.29 gave exp and log another symbol version. The older one has the same digits, and wheels run from 2.28 on.
#if defined(__GLIBC__) && defined(__x86_64__)
asm(".symver exp, exp@GLIBC_2.2.5\n.symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
asm(".symver exp, exp@GLIBC_2.17\n.symver log, log@GLIBC_2.17");
#endif

struct SamplingParams {
  float inverse_temperature, top_p, min_p;  // inverse_temperature: 1 / temperature
  int64_t top_k;
};

struct LogitRow {
  int64_t dtype;
  const char* data;
  long width;

  const char* at(long i) const { return data + i * dtype_bytes(dtype); }
  float operator[](long i) const;
};

// What block verification leaves of a distribution p: max(0, scale * p - q). The default is p itself.
struct Residual {
  double scale = 1.0;
  const float* q = nullptr;  // [q_width], zero for the tokens after these
  long q_width = 0;
};

// Computes the distribution of a row of logits, truncated by min_p, top_k and top_p. Returns false if there is none:
// a logit is NaN, or the largest is not finite. Its mass is computed only if `needs_mass`; Gumbel-max needs none.
// `chunk_sums`, unless NULL, gets the weights' sum of each chunk.
bool compute_distribution(const Kernels& k, const LogitRow& row, const SamplingParams& params, bool needs_mass,
                          Distribution* p, float* chunk_sums);

double probability(const Distribution& p, const LogitRow& row, long token);

// The mass of a residual. Its weights go to `weights` and the sums of each chunk to `chunk_sums`, unless NULL.
double residual_mass(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual,
                     float* weights, float* chunk_sums);

// Samples a token from a residual by inversion of its cumulative sum; -1 if it has no mass. Its weights go to
// `weights`, unless NULL.
long sample_residual(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual,
                     double uniform, float* weights);

// The `count` best columns by Gumbel-max with seeded noise, best first; a missing one is 0. `log_shares`, unless NULL,
// gets the logarithm of each one's share of the sum of weight by noise, -infinity if missing. `hashes`: of each
// token's id (noise.h). `ids`: the token of each column, NULL if it is the column's number.
void gumbel_top(const Kernels& k, const LogitRow& row, const Distribution& p, uint64_t key, const uint64_t* hashes,
                const int64_t* ids, long count, int32_t* columns, float* log_shares);

// See pl_verification.
void verify_draft(const Kernels& k, const pl_verification& v);
