// A step of recurrent layers with a state for each head: Mamba-2's and the gated delta rule's.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

// One head of a row: `to` is `from` behind it, both [keys][values]; they may be the same.
inline void delta_step(const pl_recurrence& r, long at, const float* from, float* to) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys, *v = r.value + at * r.values;
  V decay = set1(r.decay[at]), beta = set1(r.beta[at]);
  for (long j = 0; j < r.values; j += PANEL) {
    V read[2] = {zero(), zero()}, out[2] = {zero(), zero()}, error[2];
    for (long i = 0; i < r.keys; i++)
      for (int c = 0; c < 2; c++) read[c] = fma(set1(k[i]), decay * load(from + i * r.values + j + 16 * c), read[c]);
    for (int c = 0; c < 2; c++) error[c] = (load(v + j + 16 * c) - read[c]) * beta;
    for (long i = 0; i < r.keys; i++)
      for (int c = 0; c < 2; c++) {
        long n = i * r.values + j + 16 * c;
        V state = fma(set1(k[i]), error[c], decay * load(from + n));
        store(to + n, state);
        out[c] = fma(set1(q[i]), state, out[c]);
      }
    for (int c = 0; c < 2; c++) store(r.out + at * r.values + j + 16 * c, out[c]);
  }
}

// The same without an error to correct; [values][keys].
inline void mamba2_step(const pl_recurrence& r, long at, const float* from, float* to) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys, *v = r.value + at * r.values;
  V decay = set1(r.decay[at]);
  for (long j = 0; j < r.values; j++, from += r.keys, to += r.keys) {
    V out = zero();
    for (long i = 0; i < r.keys; i += 16) {
      V state = fma(set1(v[j]), load(k + i), decay * load(from + i));
      store(to + i, state);
      out = fma(load(q + i), state, out);
    }
    r.out[at * r.values + j] = sum(out);
  }
}

// All rows of one head, in order.
void recur(const pl_recurrence& r, long head) {
  for (long row = 0; row < r.rows; row++) {
    auto state = [&](long slot) { return r.states + (slot * r.heads + head) * r.keys * r.values; };
    auto step = r.beta ? delta_step : mamba2_step;
    step(r, row * r.heads + head, state(r.before[row]), state(r.behind[row]));
  }
}

}  // namespace
