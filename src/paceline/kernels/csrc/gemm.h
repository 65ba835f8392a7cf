// GEMM of a few rows of activations with packed bf16 or float32 weights: y = x W^T.
//
// Layout. A packed weight is a sequence of panels of 32 outputs. A panel interleaves its outputs by pairs of inputs:
//
//   bf16     pair 0: | o0 i0 i1 | o1 i0 i1 | ... | o31 i0 i1 |   pair 1: | o0 i2 i3 | ...
//   float32  pair 0: | o0 i0 | o1 i0 | ... | o31 i0 | o0 i1 | ... | o31 i1 |   pair 1: ...
//
// so a panel is read from end to end, 128 or 256 bytes per pair, and one vector load gives 16 outputs of an input.
// Inputs are padded to a multiple of 32 with zeros.
//
// Order of sums. It is the same for every number of rows and every register tile: inputs come in stripes of 32.
// Within a stripe the even and the odd inputs are summed separately and in order, by FMAs from zero; then total +=
// even + odd. (For bf16 the tile instruction TDPBF16PS computes exactly this, bit for bit.)
//
// Loops. gemm() takes at most 48 rows over all panels of its thread; gemm_panel() takes them through one panel,
// stripe by stripe; stripe_rows() splits them into register tiles of R rows by W vectors, whose sums stay in
// registers for a stripe. So weights come from memory once, and a stripe of them from L1 for all but the first
// tile.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

// The hardware prefetcher stops at every page boundary. So for each line of weights that is read, the line FAR bytes
// ahead is prefetched into L2 and the one NEAR bytes ahead into L1. Prefetches of a whole stripe at once would fill
// the line buffers and stall loads (8 rows of bf16 on a Xeon with AVX512: 15.9 ms, one by one 12.7).
constexpr long FAR = 8192, NEAR = 2048;

inline void prefetch_ahead(const void* line) {
  __builtin_prefetch(static_cast<const char*>(line) + FAR, 0, 2);
  __builtin_prefetch(static_cast<const char*>(line) + NEAR, 0, 3);
}

// How the tiles read a panel: `load_weights` gives 16 outputs (vector i) of the even or odd input of a pair. STEP:
// numbers from one vector of outputs to the next; PAIR: from one pair of inputs to
// the next. PREFETCH: the panel comes from memory (attention's panels are in the cache).
template <bool PREFETCH>
struct F32Panel {
  typedef float Number;
  static constexpr long STEP = 16, PAIR = 2 * PANEL;
  static F32x16 load_weights(const float* pair, int i, int odd) { return load(pair + PANEL * odd + 16 * i); }
  static void prefetch(const float* pair, int i) {
    if (!PREFETCH) return;
    prefetch_ahead(pair + 16 * i);
    prefetch_ahead(pair + PANEL + 16 * i);
  }
};

template <bool PREFETCH>
struct Bf16Panel {
  typedef uint16_t Number;
  static constexpr long STEP = 32, PAIR = 2 * PANEL;
  static F32x16 load_weights(const uint16_t* pair, int i, int odd) {
    return odd ? load_odd(pair + 32 * i) : load_even(pair + 32 * i);
  }
  static void prefetch(const uint16_t* pair, int i) {
    if (PREFETCH) prefetch_ahead(pair + 32 * i);
  }
};

// sums[odd] = x times one stripe of weights, for COUNT parities of inputs from `ODD` on.
template <class Panel, int ODD, int COUNT, int R, int W>
inline void sum_stripe(const typename Panel::Number* w, const float* x, long ldx, F32x16 (&sums)[2][R][W]) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++)
      for (int odd = ODD; odd < ODD + COUNT; odd++) sums[odd][r][i] = zero();
#pragma GCC unroll 2
  for (int pair = 0; pair < STRIPE / 2; pair++, w += Panel::PAIR, x += 2) {
    F32x16 weights[2][W];
    for (int i = 0; i < W; i++) {
      if (ODD == 0) Panel::prefetch(w, i);
      for (int odd = ODD; odd < ODD + COUNT; odd++) weights[odd][i] = Panel::load_weights(w, i, odd);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int odd = ODD; odd < ODD + COUNT; odd++) {
        F32x16 input = set1(x[r * ldx + odd]);
        for (int i = 0; i < W; i++) sums[odd][r][i] = fma(weights[odd][i], input, sums[odd][r][i]);
      }
  }
}

// c [R, ldc] += one stripe of R rows by W vectors of outputs.
template <class Panel, int R, int W>
inline void register_tile(const typename Panel::Number* w, const float* x, long ldx, float* c, long ldc) {
  F32x16 sums[2][R][W];
  if constexpr (2 * R * W <= MAX_ACCUMULATORS) {
    sum_stripe<Panel, 0, 2>(w, x, ldx, sums);
  } else {  // registers do not hold both parities at once
    sum_stripe<Panel, 0, 1>(w, x, ldx, sums);
    sum_stripe<Panel, 1, 1>(w, x, ldx, sums);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) {
      float* total = c + r * ldc + 16 * i;
      store(total, load(total) + (sums[0][r][i] + sums[1][r][i]));
    }
}

// The same for all 32 outputs of a panel.
template <class Panel, int R>
inline void stripe_tile(const typename Panel::Number* w, const float* x, long ldx, float* c, long ldc) {
  constexpr int W = R <= MAX_WIDE_ROWS ? 2 : 1;
  for (int i = 0; i < PANEL / 16; i += W) register_tile<Panel, R, W>(w + Panel::STEP * i, x, ldx, c + 16 * i, ldc);
}

template <class Panel, int R = MAX_TILE_ROWS>
inline void stripe_tile_of(const typename Panel::Number* w, const float* x, long ldx, long rows, float* c, long ldc) {
  if (rows == R) return stripe_tile<Panel, R>(w, x, ldx, c, ldc);
  if constexpr (R > 1) stripe_tile_of<Panel, R - 1>(w, x, ldx, rows, c, ldc);
}

// The same for any number of rows, in tiles of sizes as even as possible.
template <class Panel>
inline void stripe_rows(const typename Panel::Number* w, const float* x, long ldx, long rows, float* c, long ldc) {
  long tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  for (long tile = 0; tile < tiles; tile++) {
    long from = rows * tile / tiles, to = rows * (tile + 1) / tiles;
    stripe_tile_of<Panel>(w, x + from * ldx, ldx, to - from, c + from * ldc, ldc);
  }
}

// c [rows, ldc] += x [rows, ldx] times a panel; `inputs` is a multiple of 32.
template <class Panel>
inline void panel_product(const typename Panel::Number* panel, const float* x, long ldx, long rows, long inputs, float* c, long ldc) {
  for (long k = 0; k < inputs; k += STRIPE) stripe_rows<Panel>(panel + k * PANEL, x + k, ldx, rows, c, ldc);
}

// c [rows, 32] += x times a panel, with x laid out stripe by stripe: [stripes, rows, 32].
template <class Panel>
inline void gemm_panel(const typename Panel::Number* panel, const float* x, long rows, long inputs, float* c) {
  for (long k = 0; k < inputs; k += STRIPE) stripe_rows<Panel>(panel + k * PANEL, x + k * rows, STRIPE, rows, c, PANEL);
}

// Writes y from the 32 sums `c` of one row and panel: biases, then the epilogue.
inline void apply_epilogue(const Gemm& g, long row, long panel, const float* c) {
  F32x16 low = load(c), high = load(c + 16);
  if (g.weight->bias) {
    low = low + load(g.weight->bias + panel * PANEL);
    high = high + load(g.weight->bias + panel * PANEL + 16);
  }
  if (g.row_bias && g.row_bias[row]) {
    low = low + load(g.row_bias[row] + panel * PANEL);
    high = high + load(g.row_bias[row] + panel * PANEL + 16);
  }
  if (g.epilogue == GATED) {  // the panel is 16 gates, then the 16 up projections
    F32x16 h = activate(low, g.activation) * high;
    store(static_cast<float*>(g.y) + row * g.ldy + panel * 16, g.dtype == PL_BFLOAT16 ? round_to_bf16(h) : h);
    return;
  }
  if (g.epilogue != LOGITS) {
    float* y = static_cast<float*>(g.y) + row * g.ldy + panel * PANEL;
    if (g.epilogue == ADD) low = load(y) + low, high = load(y + 16) + high;
    if (g.epilogue == ROUND && g.dtype == PL_BFLOAT16) low = round_to_bf16(low), high = round_to_bf16(high);
    store(y, low);
    store(y + 16, high);
    return;
  }
  if (g.cap > 0) low = softcap(low, g.cap), high = softcap(high, g.cap);
  long left = g.weight->outputs - panel * PANEL;
  auto write = [&](auto* y) {
    y += row * g.ldy + panel * PANEL;
    store_partial(y, left, low);
    if (left > 16) store_partial(y + 16, left - 16, high);
  };
  g.dtype == PL_BFLOAT16 ? write(static_cast<uint16_t*>(g.y)) : write(static_cast<float*>(g.y));
}

// The panels first .. end that one thread multiplies, and the padded inputs of a panel.
struct PanelShare {
  long inputs, first, end;
  PanelShare(const Gemm& g, long part, long parts) : inputs(round_up(g.weight->inputs, STRIPE)) {
    long outputs = g.epilogue == GATED ? 16 : PANEL, panels = round_up(g.weight->outputs, outputs) / outputs;
    first = panels * part / parts, end = panels * (part + 1) / parts;
  }
};

// One thread's share of a GEMM. `scratch`: gemm_scratch() floats.
inline void gemm(const Gemm& g, long part, long parts, float* scratch) {
  if (g.weight->bits) return g.quantised->gemm(g, part, parts, scratch);
  PanelShare share(g, part, parts);
  const long inputs = share.inputs;
  float *c = scratch, *x = c + ROWS_PER_PASS * PANEL;
  for (long first = 0; first < g.rows; first += ROWS_PER_PASS) {
    long rows = g.rows - first < ROWS_PER_PASS ? g.rows - first : ROWS_PER_PASS;
    for (long k = 0; k < inputs; k += STRIPE)
      for (long r = 0; r < rows; r++) memcpy(x + k * rows + r * STRIPE, g.x + (first + r) * g.ldx + k, sizeof(float) * STRIPE);
    for (long panel = share.first; panel < share.end; panel++) {
      memset(c, 0, static_cast<size_t>(rows * PANEL) * sizeof(float));
      long begin = panel * PANEL * inputs;
      const uint16_t* pairs = static_cast<const uint16_t*>(g.weight->data) + begin;
      if (g.dtype != PL_BFLOAT16)
        gemm_panel<F32Panel<true>>(static_cast<const float*>(g.weight->data) + begin, x, rows, inputs, c);
      else if (rows == 1 && prefetches_streams())
        gemm_panel<Bf16Panel<false>>(pairs, x, rows, inputs, c);
      else
        gemm_panel<Bf16Panel<true>>(pairs, x, rows, inputs, c);
      for (long r = 0; r < rows; r++) apply_epilogue(g, first + r, panel, c + r * PANEL);
    }
  }
}

}  // namespace
