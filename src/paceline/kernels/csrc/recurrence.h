// A step of recurrent layers with a state for each head: Mamba-2's and the gated delta rule's.
#pragma once
#include <vector>

#include "kernels.h"
#include "vec.h"

namespace {

// Some values of a head of a row: `to`, in rows of `wide` numbers, is `from` behind it, in rows of `apart`; they may be
// the same. `far`, if any, gets it past the caches, which a chain's states would fill.
inline void delta_step(const pl_recurrence& r, long at, long j, const float* from, long apart, float* to, long wide,
                       float* far) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys, *v = r.value + at * r.values;
  V decay = set1(r.decay[at]), beta = set1(r.beta[at]);
  V read[2] = {zero(), zero()}, out[2] = {zero(), zero()}, error[2];
  for (long i = 0; i < r.keys; i++)
    for (int c = 0; c < 2; c++) read[c] = fma(set1(k[i]), decay * load(from + i * apart + 16 * c), read[c]);
  for (int c = 0; c < 2; c++) error[c] = (load(v + j + 16 * c) - read[c]) * beta;
  for (long i = 0; i < r.keys; i++)
    for (int c = 0; c < 2; c++) {
      V state = fma(set1(k[i]), error[c], decay * load(from + i * apart + 16 * c));
      store(to + i * wide + 16 * c, state);
#if defined(PACELINE_AVX512)
      if (far) _mm512_stream_ps(far + i * r.values + 16 * c, state.v);
#endif
      out[c] = fma(set1(q[i]), state, out[c]);
    }
  for (int c = 0; c < 2; c++) store(r.out + at * r.values + j + 16 * c, out[c]);
}

// One value without an error to correct: [keys] of it.
inline void mamba2_step(const pl_recurrence& r, long at, long j, const float* from, float* to) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys;
  V decay = set1(r.decay[at]), v = set1(r.value[at * r.values + j]), out = zero();
  for (long i = 0; i < r.keys; i += 16) {
    V state = fma(v, load(k + i), decay * load(from + i));
    store(to + i, state);
    out = fma(load(q + i), state, out);
  }
  r.out[at * r.values + j] = sum(out);
}

// All rows of one head: some values go through all of them before the next do, so that a row of a
// chain reads what has just been written.
void recurrent_steps(const pl_recurrence& r, long head) {
  auto state = [&](long slot) { return r.states + (slot * r.heads + head) * r.keys * r.values; };
#if defined(PACELINE_AVX512)
  bool streams = r.beta && reinterpret_cast<uintptr_t>(r.states) % 64 == 0;
#else
  bool streams = false;
#endif
  std::vector<float> held(streams ? static_cast<size_t>(r.keys * PANEL) : 0);
  for (long j = 0; j < r.values; j += r.beta ? PANEL : 1)
    for (long row = 0, at = head; row < r.rows; row++, at += r.heads) {
      float *from = state(r.before[row]), *to = state(r.behind[row]);
      bool chain = streams && row && r.before[row] == r.behind[row - 1];
      if (r.beta)
        delta_step(r, at, j, chain ? held.data() : from + j, chain ? PANEL : r.values, streams ? held.data() : to + j,
                   streams ? PANEL : r.values, streams ? to + j : nullptr);
      else
        mamba2_step(r, at, j, from + j * r.keys, to + j * r.keys);
    }
#if defined(PACELINE_AVX512)
  _mm_sfence();
#endif
}

}  // namespace
