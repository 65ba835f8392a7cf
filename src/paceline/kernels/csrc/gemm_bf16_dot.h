// GEMM of bf16 weights by instructions that multiply bf16 numbers directly: VDPBF16PS on x86 (used on AMD's
// processors, where it is fast and there are no tiles), BFMLALB and BFMLALT on ARM.
//
// VDPBF16PS multiplies pairs of bf16 numbers and adds both products to a float, rounding in between in its own
// way. So its bits are not those of gemm.h, but depend as little on other rows: in a stripe of 32 inputs the even
// and the odd pairs are summed separately and in order; then total += even + odd.
// BFMLALB and BFMLALT are FMAs of the even and the odd members of pairs, and give the bits of gemm.h.
// (BFDOT and BFMMLA round in between, in yet another way, and are not used.)
#pragma once
#include "gemm.h"

namespace {

#if defined(PACELINE_NEON)
constexpr long DOT_ROWS = 3;  // rows of a register tile, at most

// c [R, ldc] += one stripe of R rows by 32 outputs. PREFETCH: the weights come from memory.
template <bool PREFETCH, int R>
inline void dot_tile(const uint16_t* w, const uint16_t* x, long ldx, float* c, long ldc) {
  for (const float* end = c + PANEL; c < end; c += 16, w += 32) {
    F32x16 even[R], odd[R];
    for (int r = 0; r < R; r++) even[r] = odd[r] = zero();
    for (int pair = 0; pair < STRIPE / 2; pair++) {
      const uint16_t* line = w + 2 * PANEL * pair;
      if (PREFETCH) prefetch_ahead(line);
      bfloat16x8_t weights[4];
      for (int i = 0; i < 4; i++) weights[i] = vreinterpretq_bf16_u16(vld1q_u16(line + 8 * i));
#pragma GCC unroll 3
      for (int r = 0; r < R; r++) {
        uint32_t inputs;
        memcpy(&inputs, x + r * ldx + 2 * pair, sizeof inputs);
        bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(inputs));
        even[r] = map([&](int i) { return vbfmlalbq_f32(even[r].v[i], weights[i], both); });
        odd[r] = map([&](int i) { return vbfmlaltq_f32(odd[r].v[i], weights[i], both); });
      }
    }
    for (int r = 0; r < R; r++) store(c + r * ldc, load(c + r * ldc) + (even[r] + odd[r]));
  }
}
#else
constexpr long DOT_ROWS = 6;  // rows of a register tile, at most

// sum + 16 outputs of a pair of inputs
inline F32x16 dot_pair(F32x16 sum, const uint16_t* weights, const uint16_t* inputs) {
  int32_t pair;
  memcpy(&pair, inputs, sizeof(pair));
  __m512bh w = (__m512bh)_mm512_loadu_si512(weights), x = (__m512bh)_mm512_set1_epi32(pair);
  return {_mm512_dpbf16_ps(sum.v, w, x)};
}

// c [R, ldc] += one stripe of R rows by 32 outputs. PREFETCH: the weights come from memory.
template <bool PREFETCH, int R>
inline void dot_tile(const uint16_t* w, const uint16_t* x, long ldx, float* c, long ldc) {
  F32x16 even[R][2], odd[R][2];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) even[r][i] = odd[r][i] = zero();
  for (int pair = 0; pair < STRIPE / 2; pair += 2, w += 4 * PANEL, x += 4) {
    for (int i = 0; i < 4 && PREFETCH; i++) prefetch_ahead(w + 32 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) {
        even[r][i] = dot_pair(even[r][i], w + 32 * i, x + r * ldx);
        odd[r][i] = dot_pair(odd[r][i], w + 2 * PANEL + 32 * i, x + r * ldx + 2);
      }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) {
      float* total = c + r * ldc + 16 * i;
      store(total, load(total) + (even[r][i] + odd[r][i]));
    }
}
#endif

template <bool PREFETCH, int R = DOT_ROWS>
inline void dot_tile_of(const uint16_t* w, const uint16_t* x, long ldx, long rows, float* c, long ldc) {
  if (rows == R) return dot_tile<PREFETCH, R>(w, x, ldx, c, ldc);
  if constexpr (R > 1) dot_tile_of<PREFETCH, R - 1>(w, x, ldx, rows, c, ldc);
}

// The same for any number of rows, in tiles of sizes as even as possible.
template <bool PREFETCH>
inline void dot_rows(const uint16_t* w, const uint16_t* x, long ldx, long rows, float* c, long ldc) {
  long tiles = (rows + DOT_ROWS - 1) / DOT_ROWS;
  for (long tile = 0; tile < tiles; tile++) {
    long from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
    dot_tile_of<PREFETCH>(w, x + from * ldx, ldx, to - from, c + from * ldc, ldc);
  }
}

void gemm_bf16_dot(const Gemm& g, long part, long parts, float* scratch) {
  if (g.weight->bits || g.dtype != PL_BFLOAT16) return gemm(g, part, parts, scratch);
  PanelShare share(g, part, parts);
  const long inputs = share.inputs;
  float* c = scratch;
  uint16_t* x = reinterpret_cast<uint16_t*>(c + ROWS_PER_PASS * PANEL);
  for (long first = 0; first < g.rows; first += ROWS_PER_PASS) {
    long rows = g.rows - first < ROWS_PER_PASS ? g.rows - first : ROWS_PER_PASS;
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < inputs; i += 16) store(x + r * inputs + i, load(g.x + (first + r) * g.ldx + i));
    bool prefetch = rows == 1 || rows > DOT_ROWS || !prefetches_streams();
    for (long panel = share.first; panel < share.end; panel++) {
      const uint16_t* w = static_cast<const uint16_t*>(g.weight->data) + panel * PANEL * inputs;
      memset(c, 0, static_cast<size_t>(rows * PANEL) * sizeof(float));
      for (long k = 0; k < inputs; k += STRIPE, w += STRIPE * PANEL)
        (prefetch ? dot_rows<true> : dot_rows<false>)(w, x + k, inputs, rows, c, PANEL);
      for (long r = 0; r < rows; r++) apply_epilogue(g, first + r, panel, c + r * PANEL);
    }
  }
}

}  // namespace
