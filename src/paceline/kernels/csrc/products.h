// Linear products of few rows: packed weights, and sums whose order is fixed by the inputs alone.
//
// A packed matrix is a row of panels of 32 outputs; a panel holds its weights by pairs of inputs:
//
//   bf16     pair 0: | o0 i0 i1 | o1 i0 i1 | ... | o31 i0 i1 |   pair 1: | o0 i2 i3 | ...
//   float32  pair 0: | o0 i0 | o1 i0 | ... | o31 i0 | o0 i1 | ... | o31 i1 |   pair 1: ...
//
// so a panel is read from its beginning to its end, 128 or 256 bytes at a time, and its numbers lie
// beside those that they are multiplied with. Inputs are padded to 32 with zeros.
//
// The sum of one output over its inputs is the same for every number of rows, in every register
// tile: inputs come in stripes of 32; within a stripe the even and the odd ones are summed each in
// order, by fused multiply-adds from zero; then sum += even + odd. (For bf16 that is, bit for bit,
// what the tile instruction TDPBF16PS does.)
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

// Weights come from memory, and the hardware's prefetcher ends at every page: as each line is read,
// the one FAR bytes behind it is fetched into the second cache, and the one NEAR bytes behind it into
// the first. In one burst a stripe, fetches fill the line buffers and loads wait (8 rows of bf16 on a
// Xeon with AVX512: 15.9 ms, 12.7 one by one).
constexpr long FAR = 8192, NEAR = 2048;

inline void fetch(const void* line) {
  __builtin_prefetch(static_cast<const char*>(line) + FAR, 0, 2);
  __builtin_prefetch(static_cast<const char*>(line) + NEAR, 0, 3);
}

// What products read: numbers from vector to vector of outputs (STEP), from pair to pair of inputs (PAIR).
// Of the cache they need no fetching.
struct Floats {
  typedef float Number;
  static constexpr long STEP = 16, PAIR = 2 * PANEL;
  static V weights(const float* pair, int i, int odd) { return load(pair + PANEL * odd + 16 * i); }
  static void ahead(const float*, int) {}
};

struct FloatWeights : Floats {
  static void ahead(const float* pair, int i) {
    fetch(pair + 16 * i);
    fetch(pair + PANEL + 16 * i);
  }
};

template <bool FETCHED>
struct Bf16Weights {
  typedef uint16_t Number;
  static constexpr long STEP = 32, PAIR = 2 * PANEL;
  static V weights(const uint16_t* pair, int i, int odd) { return odd ? odd_of(pair + 32 * i) : even_of(pair + 32 * i); }
  static void ahead(const uint16_t* pair, int i) {
    if (FETCHED) fetch(pair + 32 * i);
  }
};

// The sums of a stripe's inputs of one parity, ODD, or of both (COUNT 2).
template <class Kind, int ODD, int COUNT, int R, int W>
inline void sum_stripe(const typename Kind::Number* w, const float* x, long ldx, V (&sums)[2][R][W]) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++)
      for (int odd = ODD; odd < ODD + COUNT; odd++) sums[odd][r][i] = zero();
#pragma GCC unroll 2
  for (int pair = 0; pair < STRIPE / 2; pair++, w += Kind::PAIR, x += 2) {
    V weights[2][W];
    for (int i = 0; i < W; i++) {
      if (ODD == 0) Kind::ahead(w, i);
      for (int odd = ODD; odd < ODD + COUNT; odd++) weights[odd][i] = Kind::weights(w, i, odd);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int odd = ODD; odd < ODD + COUNT; odd++) {
        V number = set1(x[r * ldx + odd]);
        for (int i = 0; i < W; i++) sums[odd][r][i] = fma(weights[odd][i], number, sums[odd][r][i]);
      }
  }
}

// Add one stripe of R rows times W vectors of outputs to c [R, ldc].
template <class Kind, int R, int W>
inline void stripe(const typename Kind::Number* w, const float* x, long ldx, float* c, long ldc) {
  V sums[2][R][W];
  if constexpr (2 * R * W <= SUMS) {
    sum_stripe<Kind, 0, 2>(w, x, ldx, sums);
  } else {  // one after the other, as registers do not hold both
    sum_stripe<Kind, 0, 1>(w, x, ldx, sums);
    sum_stripe<Kind, 1, 1>(w, x, ldx, sums);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) {
      float* at = c + r * ldc + 16 * i;
      store(at, load(at) + (sums[0][r][i] + sums[1][r][i]));
    }
}

// All 32 outputs of a stripe, for R rows.
template <class Kind, int R>
inline void across(const typename Kind::Number* w, const float* x, long ldx, float* c, long ldc) {
  constexpr int wide = R <= BROAD_ROWS ? 2 : 1;
  for (int i = 0; i < PANEL / 16; i += wide) stripe<Kind, R, wide>(w + Kind::STEP * i, x, ldx, c + 16 * i, ldc);
}

template <class Kind, int R = ROWS>
inline void few_rows(const typename Kind::Number* w, const float* x, long ldx, long rows, float* c, long ldc) {
  if (rows == R) return across<Kind, R>(w, x, ldx, c, ldc);
  if constexpr (R > 1) few_rows<Kind, R - 1>(w, x, ldx, rows, c, ldc);
}

// Rows in tiles of sizes as even as possible.
template <class Kind>
inline void all_rows(const typename Kind::Number* w, const float* x, long ldx, long rows, float* c, long ldc) {
  long tiles = (rows + ROWS - 1) / ROWS;
  for (long tile = 0; tile < tiles; tile++) {
    long from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
    few_rows<Kind>(w, x + from * ldx, ldx, to - from, c + from * ldc, ldc);
  }
}

// c [rows, ldc] += x times the panel, whose inputs are `inputs`, a multiple of 32.
template <class Kind>
inline void panel_product(const typename Kind::Number* panel, const float* x, long ldx, long rows, long inputs, float* c, long ldc) {
  for (long k = 0; k < inputs; k += STRIPE) all_rows<Kind>(panel + k * PANEL, x + k, ldx, rows, c, ldc);
}

// The same with weights that come from memory, and rows stripe by stripe: x [stripes, rows, 32].
template <class Kind>
inline void weights_product(const typename Kind::Number* panel, const float* x, long rows, long inputs, float* c) {
  for (long k = 0; k < inputs; k += STRIPE) all_rows<Kind>(panel + k * PANEL, x + k * rows, STRIPE, rows, c, PANEL);
}

// What becomes of the sums of one row and panel. `c` is a row of the tile.
inline void apply_epilogue(const Gemm& p, long row, long panel, const float* c) {
  V low = load(c), high = load(c + 16);
  if (p.weight->bias) {
    low = low + load(p.weight->bias + panel * PANEL);
    high = high + load(p.weight->bias + panel * PANEL + 16);
  }
  if (p.row_bias && p.row_bias[row]) {
    low = low + load(p.row_bias[row] + panel * PANEL);
    high = high + load(p.row_bias[row] + panel * PANEL + 16);
  }
  if (p.epilogue == GATED) {
    V h = activated(low, p.activation) * high;
    store(static_cast<float*>(p.y) + row * p.ldy + panel * 16, p.dtype == PL_BFLOAT16 ? as_bf16(h) : h);
    return;
  }
  if (p.epilogue != LOGITS) {
    float* y = static_cast<float*>(p.y) + row * p.ldy + panel * PANEL;
    if (p.epilogue == ADD) low = load(y) + low, high = load(y + 16) + high;
    if (p.epilogue == ROUND && p.dtype == PL_BFLOAT16) low = as_bf16(low), high = as_bf16(high);
    store(y, low);
    store(y + 16, high);
    return;
  }
  if (p.cap > 0) low = capped(low, p.cap), high = capped(high, p.cap);
  long left = p.weight->outputs - panel * PANEL;
  auto put = [&](auto* y) {
    y += row * p.ldy + panel * PANEL;
    store_first(y, left, low);
    if (left > 16) store_first(y + 16, left - 16, high);
  };
  p.dtype == PL_BFLOAT16 ? put(static_cast<uint16_t*>(p.y)) : put(static_cast<float*>(p.y));
}

// One thread's panels; `scratch` has product_scratch() floats.
inline void gemm(const Gemm& p, long part, long parts, float* scratch) {
  if (p.weight->bits) return p.quantised->gemm(p, part, parts, scratch);
  long panels = round_up(p.weight->outputs, p.epilogue == GATED ? 16 : PANEL) / (p.epilogue == GATED ? 16 : PANEL);
  long inputs = round_up(p.weight->inputs, STRIPE), from = panels * part / parts, to = panels * (part + 1) / parts;
  float *c = scratch, *x = c + ROWS_PER_PASS * PANEL;
  for (long first = 0; first < p.rows; first += ROWS_PER_PASS) {
    long rows = p.rows - first < ROWS_PER_PASS ? p.rows - first : ROWS_PER_PASS;
    for (long k = 0; k < inputs; k += STRIPE)
      for (long r = 0; r < rows; r++) memcpy(x + k * rows + r * STRIPE, p.x + (first + r) * p.ldx + k, sizeof(float) * STRIPE);
    for (long panel = from; panel < to; panel++) {
      memset(c, 0, static_cast<size_t>(rows * PANEL) * sizeof(float));
      long at = panel * PANEL * inputs;
      const uint16_t* pairs = static_cast<const uint16_t*>(p.weight->data) + at;
      if (p.dtype != PL_BFLOAT16)
        weights_product<FloatWeights>(static_cast<const float*>(p.weight->data) + at, x, rows, inputs, c);
      else if (rows == 1 && prefetches_streams())
        weights_product<Bf16Weights<false>>(pairs, x, rows, inputs, c);
      else
        weights_product<Bf16Weights<true>>(pairs, x, rows, inputs, c);
      for (long r = 0; r < rows; r++) apply_epilogue(p, first + r, panel, c + r * PANEL);
    }
  }
}

}  // namespace
