// One head's steps of a recurrent layer with a matrix-valued state: Mamba-2, or the gated delta rule (if there is
// beta).
//
//   gated delta rule   S [keys, values]:  S = decay S;  S += k (beta (v - k^T S));  out = q^T S
//   Mamba-2            S [values, keys]:  S = decay S + v k^T;                      out = S q
#pragma once
#include <stdlib.h>

#include "kernels.h"
#include "vec.h"

namespace {

// A step of the delta rule for the values j .. j + 32 of one head and row (`at`). `to`, with rows of `ld_to` numbers,
// becomes the state after `from`, with rows of `ld_from`; both may be the same memory. `stream`, if any, gets a
// copy past the caches, which the states of a chain would fill.
inline void delta_step(const pl_recurrence& r, long at, long j, const float* from, long ld_from, float* to, long ld_to,
                       [[maybe_unused]] float* stream) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys, *v = r.value + at * r.values;
  F32x16 decay = set1(r.decay[at]), beta = set1(r.beta[at]);
  F32x16 read[2] = {zero(), zero()}, out[2] = {zero(), zero()}, error[2];
  for (long i = 0; i < r.keys; i++)
    for (int c = 0; c < 2; c++) read[c] = fma(set1(k[i]), decay * load(from + i * ld_from + 16 * c), read[c]);
  for (int c = 0; c < 2; c++) error[c] = (load(v + j + 16 * c) - read[c]) * beta;
  for (long i = 0; i < r.keys; i++)
    for (int c = 0; c < 2; c++) {
      F32x16 state = fma(set1(k[i]), error[c], decay * load(from + i * ld_from + 16 * c));
      store(to + i * ld_to + 16 * c, state);
#if defined(PACELINE_AVX512)
      if (stream) _mm512_stream_ps(stream + i * r.values + 16 * c, state.a);
#endif
      out[c] = fma(set1(q[i]), state, out[c]);
    }
  for (int c = 0; c < 2; c++) store(r.out + at * r.values + j + 16 * c, out[c]);
}

// A step of Mamba-2 for value j of one head and row (`at`), whose state is [keys].
inline void mamba2_step(const pl_recurrence& r, long at, long j, const float* from, float* to) {
  const float *q = r.query + at * r.keys, *k = r.key + at * r.keys;
  F32x16 decay = set1(r.decay[at]), v = set1(r.value[at * r.values + j]), out = zero();
  for (long i = 0; i < r.keys; i += 16) {
    F32x16 state = fma(v, load(k + i), decay * load(from + i));
    store(to + i, state);
    out = fma(load(q + i), state, out);
  }
  r.out[at * r.values + j] = reduce_sum(out);
}

// All rows of one head. The outer loop is over values, so that each row of a chain reads the part of the state that
// the row before has just written, out of the cache.
void recurrent_steps(const pl_recurrence& r, long head) {
  auto state = [&](long slot) { return r.states + (slot * r.heads + head) * r.keys * r.values; };
  float* held = nullptr;  // [keys, PANEL]: the current part of a chain's state, when states are streamed to memory
#if defined(PACELINE_AVX512)
  if (r.beta && reinterpret_cast<uintptr_t>(r.states) % 64 == 0)
    held = static_cast<float*>(malloc(static_cast<size_t>(r.keys * PANEL) * sizeof(float)));
#endif
  for (long j = 0; j < r.values; j += r.beta ? PANEL : 1)
    for (long row = 0, at = head; row < r.rows; row++, at += r.heads) {
      float *from = state(r.read_slots[row]), *to = state(r.write_slots[row]);
      bool chain = held && row && r.read_slots[row] == r.write_slots[row - 1];
      if (r.beta)
        delta_step(r, at, j, chain ? held : from + j, chain ? PANEL : r.values, held ? held : to + j,
                   held ? PANEL : r.values, held ? to + j : nullptr);
      else
        mamba2_step(r, at, j, from + j * r.keys, to + j * r.keys);
    }
#if defined(PACELINE_AVX512)
  free(held);
  _mm_sfence();
#endif
}

}  // namespace
