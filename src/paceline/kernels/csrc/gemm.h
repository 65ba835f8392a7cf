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
// Loops. gemm_with() takes at most 48 rows over all panels of its thread, stripe by stripe; stripe_rows() splits them
// into register tiles of R rows by W vectors, whose sums stay in registers for a stripe. So weights come from memory
// once, and a stripe of them from L1 for all but the first tile.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

inline F32x16 rounded(int64_t dtype, F32x16 a) { return dtype == PL_BFLOAT16 ? round_to_bf16(a) : a; }

// The hardware prefetcher stops at every page boundary. So for each line of weights that is read, the line FAR bytes
// ahead is prefetched into L2 and the one NEAR bytes ahead into L1. Prefetches of a whole stripe at once would fill
// the line buffers and stall loads (8 rows of bf16 on a Xeon with AVX512: 15.9 ms, one by one 12.7).
constexpr long FAR = 8192, NEAR = 2048;

inline void prefetch_ahead(const void* line) {
  __builtin_prefetch(static_cast<const char*>(line) + FAR, 0, 2);
  __builtin_prefetch(static_cast<const char*>(line) + NEAR, 0, 3);
}

// How the tiles read a panel and multiply. A step is INPUTS inputs, half of them even and half odd: STEP numbers in the
// panel, VECTOR numbers from one vector of outputs to the next. `load_weights` gives 16 outputs (vector i) of the even
// or the odd inputs of a step, `load_input` those inputs of a row. ROWS: rows of a tile, at most. PREFETCH: the panel
// comes from memory (attention's panels are in the cache), and `prefetches` says if that helps.
template <bool PREFETCH>
struct F32Panel {
  typedef float Weight, Input;
  static constexpr long INPUTS = 2, STEP = 2 * PANEL, VECTOR = 16, ROWS = MAX_TILE_ROWS;
  static bool prefetches(long) { return true; }
  static F32x16 load_weights(const float* w, int i, int odd) { return load(w + PANEL * odd + 16 * i); }
  static F32x16 load_input(const float* x, int odd) { return set1(x[odd]); }
  static F32x16 multiply_add(F32x16 weights, F32x16 input, F32x16 sum, int) { return fma(weights, input, sum); }
  static void prefetch(const float* w, int i) {
    if (!PREFETCH) return;
    prefetch_ahead(w + 16 * i);
    prefetch_ahead(w + PANEL + 16 * i);
  }
};

template <bool PREFETCH>
struct Bf16Panel : F32Panel<PREFETCH> {
  typedef uint16_t Weight;
  static constexpr long VECTOR = 32;
  static bool prefetches(long rows) { return rows > 1 || !prefetches_streams(); }
  static F32x16 load_weights(const uint16_t* w, int i, int odd) { return odd ? load_odd(w + 32 * i) : load_even(w + 32 * i); }
  static void prefetch(const uint16_t* w, int i) {
    if (PREFETCH) prefetch_ahead(w + 32 * i);
  }
};

// Rows in register tiles of sizes as even as possible.
struct RowTiles {
  const long rows, tiles;
  RowTiles(long rows, long most) : rows(rows), tiles((rows + most - 1) / most) {}
  long from(long tile) const { return rows * tile / tiles; }
};

template <int R>
struct Count {
  static constexpr int rows = R;
};

// Calls f(Count<rows>()): `rows`, at most R, as a constant.
template <int R, class F>
inline void with_rows(long rows, const F& f) {
  if (rows == R) return f(Count<R>());
  if constexpr (R > 1) with_rows<R - 1>(rows, f);
}

// sums[odd] = x times one stripe of weights, for COUNT parities of inputs from `ODD` on.
template <class Panel, int ODD, int COUNT, int R, int W>
inline void sum_stripe(const typename Panel::Weight* w, const typename Panel::Input* x, long ldx, F32x16 (&sums)[2][R][W]) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++)
      for (int odd = ODD; odd < ODD + COUNT; odd++) sums[odd][r][i] = zero();
#pragma GCC unroll 2
  for (int k = 0; k < STRIPE; k += Panel::INPUTS, w += Panel::STEP, x += Panel::INPUTS) {
    F32x16 weights[2][W];
    for (int i = 0; i < W; i++) {
      if (ODD == 0) Panel::prefetch(w, i);
      for (int odd = ODD; odd < ODD + COUNT; odd++) weights[odd][i] = Panel::load_weights(w, i, odd);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int odd = ODD; odd < ODD + COUNT; odd++) {
        F32x16 input = Panel::load_input(x + r * ldx, odd);
        for (int i = 0; i < W; i++) sums[odd][r][i] = Panel::multiply_add(weights[odd][i], input, sums[odd][r][i], odd);
      }
  }
}

// c [R, ldc] += one stripe of R rows by W vectors of outputs.
template <class Panel, int R, int W>
inline void register_tile(const typename Panel::Weight* w, const typename Panel::Input* x, long ldx, float* c, long ldc) {
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

// c [rows, ldc] += one stripe of all rows times a panel.
template <class Panel>
[[gnu::always_inline]] inline void stripe_rows(const typename Panel::Weight* w, const typename Panel::Input* x, long ldx, long rows, float* c, long ldc) {
  RowTiles tiles(rows, Panel::ROWS);
  for (long t = 0; t < tiles.tiles; t++) {
    long from = tiles.from(t);
    with_rows<Panel::ROWS>(tiles.from(t + 1) - from, [=](auto count) {  // by value: & made 6 rows of float32 19 % slower (GCC 12)
      constexpr int R = decltype(count)::rows, W = R <= MAX_WIDE_ROWS ? 2 : 1;
      for (int i = 0; i < PANEL / 16; i += W)
        register_tile<Panel, R, W>(w + Panel::VECTOR * i, x + from * ldx, ldx, c + from * ldc + 16 * i, ldc);
    });
  }
}

// c [rows, ldc] += x times a panel. x: rows of `ldx` numbers, whose stripes are `next` numbers apart; `inputs` is a multiple
// of 32.
template <class Panel>
inline void panel_product(const typename Panel::Weight* panel, const typename Panel::Input* x, long ldx, long next, long rows,
                          long inputs, float* c, long ldc) {
  for (long k = 0; k < inputs; k += STRIPE, panel += STRIPE * PANEL, x += next) stripe_rows<Panel>(panel, x, ldx, rows, c, ldc);
}

// Writes y from the 32 sums `c` of one row and panel: biases, then the epilogue.
inline void apply_epilogue(const Gemm& g, long row, long panel, const float* c) {
  F32x16 low = load(c), high = load(c + 16);
  const float* biases[] = {g.weight->bias, g.row_bias ? g.row_bias[row] : nullptr};
  for (const float* bias : biases)
    if (bias) low = low + load(bias + panel * PANEL), high = high + load(bias + panel * PANEL + 16);
  if (g.epilogue == GATED) {  // the panel is 16 gates, then the 16 up projections
    F32x16 h = rounded(g.dtype, gated(low, high, g.activation));
    return store(static_cast<float*>(g.y) + row * g.ldy + panel * 16, h);
  }
  const long at = row * g.ldy + panel * PANEL;
  if (g.epilogue != LOGITS) {
    float* y = static_cast<float*>(g.y) + at;
    if (g.epilogue == ADD) low = load(y) + low, high = load(y + 16) + high;
    if (g.epilogue == ROUND) low = rounded(g.dtype, low), high = rounded(g.dtype, high);
    store(y, low);
    return store(y + 16, high);
  }
  if (g.cap > 0) low = softcap(low, g.cap), high = softcap(high, g.cap);
  const long left = g.weight->outputs - panel * PANEL;
  auto write = [&](auto* y) {
    store_partial(y + at, left, low);
    if (left > 16) store_partial(y + at + 16, left - 16, high);
  };
  g.dtype == PL_BFLOAT16 ? write(static_cast<uint16_t*>(g.y)) : write(static_cast<float*>(g.y));
}

// One thread's share of a GEMM: pack(first, rows) for at most `most` rows at a time, then multiply(first, rows, panel) for
// each of the thread's panels.
template <class Pack, class Multiply>
inline void for_each_panel(const Gemm& g, long part, long parts, long most, const Pack& pack, const Multiply& multiply) {
  long outputs = g.epilogue == GATED ? 16 : PANEL, panels = round_up(g.weight->outputs, outputs) / outputs;
  for (long first = 0; first < g.rows; first += most) {
    long rows = g.rows - first < most ? g.rows - first : most;
    pack(first, rows);
    for (long panel = panels * part / parts; panel < panels * (part + 1) / parts; panel++) multiply(first, rows, panel);
  }
}

// The same for weights that are numbers. `scratch`: gemm_scratch() floats.
template <template <bool> class Panel>
inline void gemm_with(const Gemm& g, long part, long parts, float* scratch) {
  typedef typename Panel<true>::Input Input;
  const long inputs = round_up(g.weight->inputs, STRIPE);
  float* c = scratch;
  Input* x = reinterpret_cast<Input*>(c + ROWS_PER_PASS * PANEL);  // stripe by stripe: [stripes, rows, 32]
  auto pack = [&](long first, long rows) {
    for (long k = 0; k < inputs; k += 16)
      for (long r = 0; r < rows; r++)
        store(x + k / STRIPE * STRIPE * rows + r * STRIPE + k % STRIPE, load(g.x + (first + r) * g.ldx + k));
  };
  for_each_panel(g, part, parts, ROWS_PER_PASS, pack, [&](long first, long rows, long panel) {
    const auto* w = static_cast<const typename Panel<true>::Weight*>(g.weight->data) + panel * PANEL * inputs;
    memset(c, 0, static_cast<size_t>(rows * PANEL) * sizeof(float));
    if (Panel<true>::prefetches(rows))
      panel_product<Panel<true>>(w, x, STRIPE, STRIPE * rows, rows, inputs, c, PANEL);
    else
      panel_product<Panel<false>>(w, x, STRIPE, STRIPE * rows, rows, inputs, c, PANEL);
    for (long r = 0; r < rows; r++) apply_epilogue(g, first + r, panel, c + r * PANEL);
  });
}

}  // namespace
