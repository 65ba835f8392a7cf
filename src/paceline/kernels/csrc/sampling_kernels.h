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

float residual_weights(int64_t dtype, const void* x, long width, const Distribution& p, float scale, const float* q, float* y) {
  F32x16 total = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 w = weights(dtype, x, i, width - i, p) * set1(scale);
    if (q) w = max(w - load_partial(q + i, width - i), zero());
    if (y) store_partial(y + i, width - i, w);
    total = total + w;
  }
  return reduce_sum(total);
}

// The exponential noise E = -log(1 - u) of uniform bits u is at least u. So a token of weight w whose
// u * e^best exceeds w cannot win, and only those that pass this test need the exact noise. The noise
// of the others, for the sum of w / E, is a Pade approximant of -log(1 - u).
long gumbel_candidates(int64_t dtype, const void* x, long width, const Distribution& p, float best, uint64_t key,
                       const int64_t* ids, int64_t first_id, int32_t* candidates, float* rest) {
  float uniform[LOGIT_CHUNK], quotients[LOGIT_CHUNK], margin[LOGIT_CHUNK];
  for (long j = 0; j < width; j++) {
    uint64_t bits = random_bits(key, ids ? ids[j] : first_id + j);
    uniform[j] = static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f;
  }
  F32x16 largest_margin = zero(), total = zero();
  float lanes[16];
  store(lanes, exp(set1(best)));
  float bar = lanes[0];
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
