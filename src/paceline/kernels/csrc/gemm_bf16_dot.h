// Panels of bf16 weights that instructions for bf16 numbers multiply: VDPBF16PS on x86 (used on AMD's processors, where it
// is fast and there are no tiles), BFMLALB and BFMLALT on ARM.
//
// VDPBF16PS multiplies pairs of bf16 numbers and adds both products to a float, rounding in between in its own
// way. So its bits are not those of gemm.h, but depend as little on other rows: in a stripe of 32 inputs the even
// and the odd pairs are summed separately and in order; then total += even + odd.
// BFMLALB and BFMLALT are FMAs of the even and the odd members of pairs, and give the bits of gemm.h.
// (BFDOT and BFMMLA round in between, in yet another way, and are not used.)
#pragma once
#include "gemm.h"

namespace {

template <bool PREFETCH>
struct DotPanel {
  typedef uint16_t Weight, Input;
  static constexpr long VECTOR = 32;
  // A pair of inputs for all lanes.
  static F32x16 load_pair(const uint16_t* x) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return map([=](int) { return (Floats)(pair - Ints{}); });
  }
#if defined(PACELINE_NEON)
  static constexpr long INPUTS = 2, STEP = 2 * PANEL, ROWS = 3;
  static F32x16 load_weights(const uint16_t* w, int i, int) { return load(reinterpret_cast<const float*>(w + 32 * i)); }
  static F32x16 load_input(const uint16_t* x, int) { return load_pair(x); }
  static F32x16 multiply_add(F32x16 weights, F32x16 input, F32x16 sum, int odd) {
    return each([=](Floats w, Floats x, Floats s) {
      bfloat16x8_t a = (bfloat16x8_t)w, b = (bfloat16x8_t)x;
      return (Floats)(odd ? vbfmlaltq_f32(s, a, b) : vbfmlalbq_f32(s, a, b));
    }, weights, input, sum);
  }
  static void prefetch(const uint16_t* w, int i) {
    if (PREFETCH) prefetch_ahead(w + 32 * i);
  }
#else
  static constexpr long INPUTS = 4, STEP = 4 * PANEL, ROWS = 6;
  static F32x16 load_weights(const uint16_t* w, int i, int odd) {
    return load(reinterpret_cast<const float*>(w + 2 * PANEL * odd + 32 * i));
  }
  static F32x16 load_input(const uint16_t* x, int odd) { return load_pair(x + 2 * odd); }
  static F32x16 multiply_add(F32x16 weights, F32x16 input, F32x16 sum, int) {
    return {_mm512_dpbf16_ps(sum.a, (__m512bh)weights.a, (__m512bh)input.a)};
  }
  static void prefetch(const uint16_t* w, int i) {
    if (!PREFETCH) return;
    prefetch_ahead(w + 32 * i);
    prefetch_ahead(w + 2 * PANEL + 32 * i);
  }
#endif
  static bool prefetches(long rows) { return rows == 1 || rows > ROWS || !prefetches_streams(); }
};

}  // namespace
