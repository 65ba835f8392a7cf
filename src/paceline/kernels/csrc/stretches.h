// What is looked at in long rows of logits to draw from them: weights, their sums, and who may win a
// race of seeded noise (draws.cpp).
#pragma once
#include "kernels.h"
#include "noise.h"
#include "vec.h"

namespace {

// e^(...) of 16 logits, zero where they are cut off or end.
template <class T>
inline F32x16 weights(const T* x, long left, const Law& law) {
  F32x16 a = load_partial(x, left);
  F32x16 w = zero_where_less(a, law.cut, exp((a - set1(law.first)) * set1(law.sharpness)));
  if (left >= 16) return w;
  float lanes[16];
  store(lanes, w);
  return load_partial(lanes, left);
}

template <class T>
float weigh_of(const T* x, long width, const Law& law, float scale, const float* less, float* y) {
  F32x16 total = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 w = weights(x + i, width - i, law) * set1(scale);
    if (less) w = max(w - load_partial(less + i, width - i), zero());
    if (y) store_partial(y + i, width - i, w);
    total = total + w;
  }
  return reduce_sum(total);
}

float weigh(int64_t dtype, const void* x, long width, const Law& law, float scale, const float* less, float* y) {
  if (dtype == PL_BFLOAT16) return weigh_of(static_cast<const uint16_t*>(x), width, law, scale, less, y);
  return weigh_of(static_cast<const float*>(x), width, law, scale, less, y);
}

// Noise E of random bits v is -log(1 - v), and never less than v: a weight w whose v * e^best is
// larger does not win. The others' noise is near a quotient of polynomials (Pade, of -log(1 - v)).
template <class T>
long contend_of(const T* x, long width, const Law& law, float best, uint64_t key, const int64_t* ids, int64_t id, int32_t* places, float* rest) {
  float v[STRETCH], w[STRETCH], ahead[STRETCH];
  for (long j = 0; j < width; j++) {
    uint64_t bits = random_bits(key, ids ? ids[j] : id + j);
    v[j] = static_cast<float>(static_cast<int32_t>(bits >> 32)) * 0x1p-31f;
  }
  F32x16 most = zero(), others = zero();
  float lanes[16], bar;
  store(lanes, exp(set1(best)));
  bar = lanes[0];
  for (long i = 0; i < width; i += 16) {
    F32x16 a = weights(x + i, width - i, law), u = load_partial(v + i, width - i);
    F32x16 more = a * set1(1.001f) - u * set1(bar);
    store(ahead + i, more);
    most = max(more, most);
    if (!rest) continue;
    u = u + set1(0x1p-32f);
    F32x16 above = u * fma(fma(set1(11.0f), u, set1(-60.0f)), u, set1(60.0f));
    F32x16 below = fma(fma(fma(set1(-3.0f), u, set1(36.0f)), u, set1(-90.0f)), u, set1(60.0f));
    a = a * below / above;
    store(w + i, a);
    others = others + a;
  }
  long count = 0;
  float sums = rest ? reduce_sum(others) : 0.0f;
  if (reduce_max(most) > 0)
    for (long j = 0; j < width; j++)
      if (ahead[j] > 0) places[count++] = static_cast<int32_t>(j), sums = sums - w[j];
  if (rest) *rest = *rest + (sums > 0 ? sums : 0.0f);
  return count;
}

long contend(int64_t dtype, const void* x, long width, const Law& law, float best, uint64_t key, const int64_t* ids, int64_t id, int32_t* places, float* rest) {
  if (dtype == PL_BFLOAT16) return contend_of(static_cast<const uint16_t*>(x), width, law, best, key, ids, id, places, rest);
  return contend_of(static_cast<const float*>(x), width, law, best, key, ids, id, places, rest);
}

template <class T>
long collect_of(const T* x, long width, float cut, float* y) {
  long count = 0;
  for (long i = 0; i < width; i += STRETCH) {
    long left = width - i < STRETCH ? width - i : STRETCH;
    F32x16 most = set1(-__builtin_inff());
    for (long j = 0; j < left; j += 16) most = max(load_partial(x + i + j, left - j), most);
    if (!(reduce_max(most) >= cut) && left == STRETCH) continue;
    for (long j = 0; j < left; j += 16) {
      float lane[16];
      store(lane, load_partial(x + i + j, left - j));
      for (long l = 0; l < 16 && j + l < left; l++)
        if (lane[l] >= cut) {
          if (y) y[count] = lane[l];
          count++;
        }
    }
  }
  return count;
}

long collect(int64_t dtype, const void* x, long width, float cut, float* y) {
  if (dtype == PL_BFLOAT16) return collect_of(static_cast<const uint16_t*>(x), width, cut, y);
  return collect_of(static_cast<const float*>(x), width, cut, y);
}

}  // namespace
