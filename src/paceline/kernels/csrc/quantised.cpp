// GEMM with 8-bit and 4-bit weights (model/quantised/weights.py defines the formats), and the quantisation of
// activations.
//
// Order of sums. Inputs are summed as integers over a span, which shares its scales: 64 inputs with int16
// activations, else 32, or 16 with groups of 16. A span's sum is exact. Spans are scaled and added in order, so
// that nothing depends on the number of rows.
//
// Loops. quantised_gemm() takes at most 48 rows over all panels of its thread; quantised_panel() splits them into
// register tiles of R rows by W halves of a panel; quantised_tile() keeps the R x W float totals in registers over
// all spans.
#include "quantised.h"
#if defined(PACELINE_AMX)
#include "quantised_amx.h"
#endif

namespace {

constexpr float INT16_MAX_VALUE = 32512.0f;  // of int16 activations: 127 * 256, so that both bytes fit into int8

// c [R, PANEL] = R rows times W halves of a panel, starting at `half`. FLOATS: the codes are E2M1. Inlined it would spill
// registers.
template <int BITS, int SPAN, bool FLOATS, int R, int W>
[[gnu::noinline]] void quantised_tile(const pl_weight& w, const uint8_t* panel, int half, const TiledRows& x, float* c,
                                      PanelPrefetcher prefetcher) {
  constexpr bool INT16 = SPAN == 2 * GROUP;
  [[maybe_unused]] constexpr bool pairs = BITS == 8 && (INT16 || !BYTE_DOTS);  // order PAIRS
  F32x16 total[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) total[r][i] = zero();
  const uint8_t* lines = panel + 64 * half;
  const int8_t* values = x.values;
  GroupHeader<W> header;
  for (long n = 0; n < x.spans; n++) {
    prefetcher.after_span();
    if (n * SPAN % group_inputs(w) == 0) header.read(w, lines - 64 * half, half), lines += group_header_bytes(w);
    I32x16 s[R][W];
#if defined(PACELINE_NEON)
    span_sums<BITS, SPAN, FLOATS>(lines, values, x.starts + n * R, s);
    lines += SPAN * BITS * 4;
    values += R * SPAN * (INT16 ? 2 : 1);
#else
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int i = 0; i < W; i++) s[r][i] = set1_i32(x.starts[n * R + r]);
    // s += dot(part(line), 4 bytes of each row: those at `from` of rows that are `stride` bytes apart)
    auto add = [&](auto dot, auto part, const U8x64 (&line)[W], long from, long stride) {
      U8x64 weights[W];
      for (int i = 0; i < W; i++) weights[i] = part(line[i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t inputs;
        memcpy(&inputs, values + r * stride + from, 4);
        for (int i = 0; i < W; i++) s[r][i] = dot(s[r][i], weights[i], inputs);
      }
    };
    // Few rows wait for memory, and AMD's prefetcher follows the addresses of two load instructions in a loop, but
    // not those of sixteen: so this loop must not be unrolled.
    int steps = SPAN * BITS / 32;
    if (BITS == 8 && R <= 3) asm("" : "+r"(steps));
    for (int j = 0; j < steps; j++, lines += 128) {
      prefetcher.after_line<W>();
      U8x64 line[W];
      for (int i = 0; i < W; i++) line[i] = load_line(lines + 64 * i);
      if (pairs) {
        add(dot2, even_bytes, line, 8 * j, 2 * SPAN);
        add(dot2, odd_bytes, line, 8 * j + 4, 2 * SPAN);
      } else if (BITS == 8) {
        add(dot4, [](U8x64 x) { return x; }, line, 4 * j, SPAN);
      } else {
        auto values = [](U8x64 x) { return FLOATS ? e2m1_values(x) : x; };
        add(dot4, [=](U8x64 x) { return values(low_nibbles(x)); }, line, 4 * j, SPAN);
        add(dot4, [=](U8x64 x) { return values(high_nibbles(x)); }, line, 16 + 4 * j, SPAN);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R && !pairs; r++)
      for (int i = 0; i < W; i++) s[r][i] = widen_sums(s[r][i]);
    values += R * SPAN * (pairs ? 2 : 1);
#endif
    add_span<INT16>(header, w.offset_kind, s, x.sums + n * R, x.scales + n * R, total);
  }
  store_totals<INT16>(total, x.scales, c + 16 * half);
}

// c [rows, PANEL] = all rows times one panel.
template <int BITS, int SPAN, bool FLOATS = false>
inline void quantised_panel(const pl_weight& w, const uint8_t* panel, const TiledRows& x, const RowTiles& tiles, float* c) {
  for (long t = 0; t < tiles.tiles; t++) {
    long from = tiles.from(t);
    with_rows<SPAN == 2 * GROUP ? MAX_INT16_ROWS : MAX_QUANTISED_ROWS>(tiles.from(t + 1) - from, [&](auto count) {
      constexpr int R = decltype(count)::rows, W = 2 * R <= MAX_QUANTISED_ACCUMULATORS ? 2 : 1;
      // With more rows, a tile takes longer than the hardware prefetcher looks ahead.
      bool hardware = W == 2 && R <= (PREFETCH_IN_BURSTS ? 4 : 1) && tiles.tiles == 1 && prefetches_streams();
      for (int half = 0; half < 2; half += W)
        quantised_tile<BITS, SPAN, FLOATS, R, W>(w, panel, half, from_row(x, from), c + from * PANEL,
                                         PanelPrefetcher(w, panel, 2 * t + half, 2 * tiles.tiles, W, hardware));
    });
  }
}

#if !defined(PACELINE_AMX)
constexpr bool AMX = false;
constexpr long AMX_INT8_ROWS = 0, AMX_INT16_ROWS = 0;
struct TileConfig {};
template <bool INT16>
inline void amx_panel(const pl_weight&, const uint8_t*, const TiledRows&, const RowTiles&, TileConfig&, float*) {}
#endif

// One thread's share of a GEMM, at most ROWS_PER_PASS rows in a pass over the weights.
void quantised_gemm(const Gemm& g, long part, long parts, float* scratch) {
  const pl_weight& w = *g.weight;
  long span = span_inputs(w);
  bool tiled = AMX && (w.int16_activations ? g.rows >= AMX_INT16_ROWS
                                           : w.bits == 8 && span == GROUP && g.rows >= AMX_INT8_ROWS);
  ActivationOrder order = tiled || INT16_AS_BYTES                              ? w.int16_activations ? BYTES : PLAIN
                          : w.bits == 8 && (w.int16_activations || !BYTE_DOTS) ? PAIRS
                                                                               : PLAIN;
  TileConfig config;
  TiledRows x;
  auto tiles_of = [&](long rows) { return RowTiles(rows, tiled ? 16 : w.int16_activations ? MAX_INT16_ROWS : MAX_QUANTISED_ROWS); };
  auto pack = [&](long first, long rows) {
    x = tile_rows(g.quantised_x, first, rows, w, tiles_of(rows), order, scratch + ROWS_PER_PASS * PANEL);
  };
  for_each_panel(g, part, parts, ROWS_PER_PASS, pack, [&](long first, long rows, long panel) {
    const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
    const RowTiles tiles = tiles_of(rows);
    if (tiled)
      (w.int16_activations ? amx_panel<true> : amx_panel<false>)(w, data, x, tiles, config, scratch);
    else if (w.bits == 4 && !w.e2m1)
      quantised_panel<4, 32>(w, data, x, tiles, scratch);
    else if (w.bits == 4)
      quantised_panel<4, 32, true>(w, data, x, tiles, scratch);
    else if (span == 64)
      quantised_panel<8, 64>(w, data, x, tiles, scratch);
    else if (span == 32)
      quantised_panel<8, 32>(w, data, x, tiles, scratch);
    else
      quantised_panel<8, 16>(w, data, x, tiles, scratch);
    for (long r = 0; r < rows; r++) apply_epilogue(g, first + r, panel, scratch + r * PANEL);
  });
}

// int16 values and the scale of one row of activations.
void quantise_row_int16(const float* x, const QuantisedRows& rows, long row) {
  F32x16 most = zero();
  for (long i = 0; i < rows.inputs; i += 16) most = max(most, max(load(x + i), zero() - load(x + i)));
  float scale = reduce_max(most) / INT16_MAX_VALUE;
  F32x16 inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), up = set1(INT16_MAX_VALUE), down = set1(-INT16_MAX_VALUE);
  for (long i = 0; i < rows.inputs; i += 16)
    store(static_cast<int16_t*>(rows.values) + row * rows.inputs + i, max(down, min(up, nearest(load(x + i) * inverse))));
  rows.scales[row] = scale;
}

// int8 values of one row and the scale of each group; int16 if `rows.int16`. Inputs are a multiple of GROUP.
void quantise_row(const float* x, const QuantisedRows& rows, long row) {
  if (rows.int16) return quantise_row_int16(x, rows, row);
  int8_t* values = static_cast<int8_t*>(rows.values) + row * rows.inputs;
  float* scales = rows.scales + row * rows.inputs / GROUP;
  for (long g = 0; g < rows.inputs / GROUP; g++, x += GROUP, values += GROUP) {
    F32x16 a = load(x), b = load(x + 16), none = zero();
    float scale = reduce_max(max(max(a, none - a), max(b, none - b))) / 127.0f;
    F32x16 inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), most = set1(127.0f), least = set1(-127.0f);
    a = max(least, min(most, nearest(a * inverse)));
    b = max(least, min(most, nearest(b * inverse)));
    store(values, a);
    store(values + 16, b);
    scales[g] = scale;
  }
}

}  // namespace

extern const QuantisedKernels PACELINE_NAME(quantised_) = {quantise_row, quantised_gemm};
