// Products by instructions that take bf16 numbers as they are: VDPBF16PS, for processors that have it and no
// tiles, and where it is fast (AMD's); ARM's BFMLALB and BFMLALT.
//
// VDPBF16PS multiplies pairs of bf16 numbers and adds both products to a float, rounding in between as the
// instruction does: other bits than those of products.h, but as little dependent on other rows. In
// a stripe of 32 inputs the even and the odd pairs are summed each in order; then sum += even + odd.
// BFMLALB and BFMLALT are fused multiply-adds of the even and the odd members of pairs: the bits of products.h.
// (BFDOT and BFMMLA round in between in a way of their own.)
#pragma once
#include "products.h"

namespace {

#if defined(PACELINE_NEON)
// Add one stripe of R rows by 32 outputs to c [R, ldc]; `far`: the weights come from memory.
template <bool far, int R>
inline void dp_stripe(const uint16_t* w, const uint16_t* x, long ldx, float* c, long ldc) {
  for (const float* end = c + PANEL; c < end; c += 16, w += 32) {
    V even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = zero();
    for (int pair = 0; pair < STRIPE / 2; pair++) {
      const uint16_t* line = w + 2 * PANEL * pair;
      if (far) fetch(line);
      bfloat16x8_t weights[4];
      for (int i = 0; i < 4; i++) weights[i] = vreinterpretq_bf16_u16(vld1q_u16(line + 8 * i));
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) {
        uint32_t numbers;
        memcpy(&numbers, x + r * ldx + 2 * pair, sizeof numbers);
        bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(numbers));
        even[r] = each([&](int i) { return vbfmlalbq_f32(even[r].v[i], weights[i], both); });
        odd[r] = each([&](int i) { return vbfmlaltq_f32(odd[r].v[i], weights[i], both); });
      }
    }
    for (int r = 0; r < R; r++) store(c + r * ldc, load(c + r * ldc) + (even[r] + odd[r]));
  }
}

constexpr long DOT_ROWS = 3;  // of a register tile
#else
inline V dot_pairs(V sum, const uint16_t* weights, const uint16_t* inputs) {
  int32_t pair;
  memcpy(&pair, inputs, sizeof(pair));
  __m512bh w = (__m512bh)_mm512_loadu_si512(weights), x = (__m512bh)_mm512_set1_epi32(pair);
  return {_mm512_dpbf16_ps(sum.v, w, x)};
}

// Add one stripe of R rows by 32 outputs to c [R, ldc]; `far`: the weights come from memory.
template <bool far, int R>
inline void dp_stripe(const uint16_t* w, const uint16_t* x, long ldx, float* c, long ldc) {
  V even[R][2], odd[R][2];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) even[r][i] = odd[r][i] = zero();
  for (int pair = 0; pair < STRIPE / 2; pair += 2, w += 4 * PANEL, x += 4) {
    for (int i = 0; i < 4 && far; i++) fetch(w + 32 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) {
        even[r][i] = dot_pairs(even[r][i], w + 32 * i, x + r * ldx);
        odd[r][i] = dot_pairs(odd[r][i], w + 2 * PANEL + 32 * i, x + r * ldx + 2);
      }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) {
      float* at = c + r * ldc + 16 * i;
      store(at, load(at) + (even[r][i] + odd[r][i]));
    }
}

constexpr long DOT_ROWS = 6;  // of a register tile
#endif

template <bool far, int R = DOT_ROWS>
inline void dp_rows(const uint16_t* w, const uint16_t* x, long ldx, long rows, float* c, long ldc) {
  if (rows == R) return dp_stripe<far, R>(w, x, ldx, c, ldc);
  if constexpr (R > 1) dp_rows<far, R - 1>(w, x, ldx, rows, c, ldc);
}

// Rows in tiles of sizes as even as possible.
template <bool far>
inline void dp_all_rows(const uint16_t* w, const uint16_t* x, long ldx, long rows, float* c, long ldc) {
  long tiles = (rows + DOT_ROWS - 1) / DOT_ROWS;
  for (long tile = 0; tile < tiles; tile++) {
    long from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
    dp_rows<far>(w, x + from * ldx, ldx, to - from, c + from * ldc, ldc);
  }
}

void gemm_bf16_dot(const Gemm& p, long part, long parts, float* scratch) {
  if (p.weight->bits || p.dtype != PL_BFLOAT16) return gemm(p, part, parts, scratch);
  long outputs = p.epilogue == GATED ? 16 : PANEL;
  long panels = round_up(p.weight->outputs, outputs) / outputs, inputs = round_up(p.weight->inputs, STRIPE);
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  float* c = scratch;
  uint16_t* x = reinterpret_cast<uint16_t*>(c + ROWS_PER_PASS * PANEL);
  for (long first = 0; first < p.rows; first += ROWS_PER_PASS) {
    long rows = p.rows - first < ROWS_PER_PASS ? p.rows - first : ROWS_PER_PASS;
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < inputs; i += 16) store(x + r * inputs + i, load(p.x + (first + r) * p.ldx + i));
    bool fetched = rows == 1 || rows > DOT_ROWS || !prefetches_streams();
    for (long panel = from; panel < to; panel++) {
      const uint16_t* w = static_cast<const uint16_t*>(p.weight->data) + panel * PANEL * inputs;
      memset(c, 0, static_cast<size_t>(rows * PANEL) * sizeof(float));
      for (long k = 0; k < inputs; k += STRIPE, w += STRIPE * PANEL)
        (fetched ? dp_all_rows<true> : dp_all_rows<false>)(w, x + k, inputs, rows, c, PANEL);
      for (long r = 0; r < rows; r++) apply_epilogue(p, first + r, panel, c + r * PANEL);
    }
  }
}

}  // namespace
