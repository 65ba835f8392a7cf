// The kernels of sampling (sampling.cpp): weights of a chunk of logits, their sums, and which tokens may win a Gumbel-max
// with seeded noise.
#pragma once
#include "kernels.h"
#include "noise.h"
#include "rows.h"

namespace {

// The weights e^(inverse_temperature * (logit - largest)) of 16 logits from column i on, of which the row has `left`; zero below
// the cutoff and behind them.
inline F32x16 weights(int64_t dtype, const void* x, long i, long left, const Distribution& p) {
  F32x16 logits = with_dtype(dtype, x, [=](auto* row) { return load_partial(row + i, left); });
  F32x16 w = zero_where_less(logits, p.cutoff, exp((logits - set1(p.largest)) * set1(p.inverse_temperature)));
  if (left >= 16) return w;
  float lanes[16];
  store(lanes, w);
  return load_partial(lanes, left);
}

// The largest of a chunk's logits; infinity if the chunk is not whole.
inline float largest_of(int64_t dtype, const void* x, long width) {
  if (width < LOGIT_CHUNK) return __builtin_inff();
  return with_dtype(dtype, x, [](auto* row) {
    F32x16 largest = load(row);
    for (long i = 16; i < LOGIT_CHUNK; i += 16) largest = max(largest, load(row + i));
    return reduce_max(largest);
  });
}

float residual_weights(int64_t dtype, const void* x, long width, const Distribution& p, float scale, const float* q, float* y) {
  if (!y && p.cutoff > -__builtin_inff() && largest_of(dtype, x, width) < p.cutoff) return 0;
  F32x16 total = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 w = weights(dtype, x, i, width - i, p) * set1(scale);
    if (q) w = max(w - load_partial(q + i, width - i), zero());
    if (y) store_partial(y + i, width - i, w);
    total = total + w;
  }
  return reduce_sum(total);
}

// e^x with the bits of the other exponentials.
inline float exp_of(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// The exponential noise E = -log(1 - u) of uniform bits u is at least u. So a token of weight w whose
// u * e^best exceeds w cannot win, and only those that pass this test need the exact noise. The noise
// of the others, for the sum of w / E, is a Pade approximant of -log(1 - u). Most chunks need no weights: with its
// smallest u, even the token of its largest logit would not pass.
long gumbel_candidates(int64_t dtype, const void* x, long width, const Distribution& p, float best, uint64_t key,
                       const uint64_t* hashes, int32_t* candidates, float* rest) {
  float uniform[LOGIT_CHUNK], quotients[LOGIT_CHUNK], margin[LOGIT_CHUNK];
  float largest = largest_of(dtype, x, width), bar = exp_of(best);
  if (largest < p.cutoff) return 0;
  for (long j = 0; j < width; j++)
    uniform[j] = static_cast<float>(static_cast<int32_t>(random_bits(key, hashes[j]) >> 32)) * 0x1p-31f;
  if (!rest && width == LOGIT_CHUNK) {
    F32x16 least = load(uniform);
    for (long i = 16; i < LOGIT_CHUNK; i += 16) least = min(least, load(uniform + i));
    if (exp_of((largest - p.largest) * p.inverse_temperature) * 1.002f < -reduce_max(zero() - least) * bar) return 0;
  }
  F32x16 largest_margin = zero(), total = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 w = weights(dtype, x, i, width - i, p), u = load_partial(uniform + i, width - i);
    F32x16 m = w * set1(1.001f) - u * set1(bar);
    store(margin + i, m);
    largest_margin = max(m, largest_margin);
    if (!rest) continue;
    u = u + set1(0x1p-32f);
    F32x16 numerator = u * fma(fma(set1(11.0f), u, set1(-60.0f)), u, set1(60.0f));
    F32x16 denominator = fma(fma(fma(set1(-3.0f), u, set1(36.0f)), u, set1(-90.0f)), u, set1(60.0f));
    w = w * denominator / numerator;
    store(quotients + i, w);
    total = total + w;
  }
  long count = 0;
  float others = rest ? reduce_sum(total) : 0.0f;
  if (reduce_max(largest_margin) > 0)
    for (long j = 0; j < width; j++)
      if (margin[j] > 0) candidates[count++] = static_cast<int32_t>(j), others = others - quotients[j];
  if (rest) *rest = *rest + (others > 0 ? others : 0.0f);
  return count;
}

long collect_at_least(int64_t dtype, const void* x, long width, float least, float* y) {
  long count = 0;
  with_dtype(dtype, x, [&](auto* row) {
    scan_logits(row, width, least, [&](long, float logit) {
      if (!(logit >= least)) return;
      if (y) y[count] = logit;
      count++;
    });
  });
  return count;
}

}  // namespace
