// The layout of quantised weights and activations, and what the GEMMs of quantised.cpp and quantised_amx.h share.
//
// Activations (QuantisedRows) are int8 with a scale per group of 32 inputs. With `int16_activations`, 8-bit weights
// whose groups divide into 64 inputs, they are int16 with one scale per row.
//
// Layout. A packed weight is a sequence of panels of 32 outputs, each read from end to end. A panel is a sequence of
// groups, the inputs that share a scale; a line holds four inputs (8 bits) or eight (4 bits) of 16 outputs each:
//
//   panel    | group 0: 32 scales | 32 offsets, if there are zero points | lines of 64 bytes | group 1: 32 scales | ...
//
//   8 bits   inputs 0-3 of outputs 0-15 | of outputs 16-31 | inputs 4-7 of outputs 0-15 | ...     16 lines for 32 inputs
//   4 bits   inputs 0-3 (low nibbles) and 16-19 (high) of outputs 0-15 | of outputs 16-31 | ...    8 lines for 32 inputs
//
// Weights are stored with a bias that makes them unsigned, as the dot product instructions want them. Each integer
// sum starts at minus the bias times the sum of the row's inputs, which takes it out again.
#pragma once
#include "gemm.h"
#include "ints.h"

namespace {

// 16 scales or offsets of a group header, for half 0 or 1 of the panel.
inline F32x16 load_header(const pl_weight& w, const uint8_t* header, int half) {
  if (w.scale_kind == PL_SCALE_FLOAT) return load(reinterpret_cast<const float*>(header) + 16 * half);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(header) + 16 * half;
  return w.scale_kind == PL_SCALE_HALF ? load_half(p) : load(p);
}

// Scales and offsets of W half panels (16 outputs each), starting at half `first`.
template <int W>
struct GroupHeader {
  F32x16 scale[W], offset[W];
  void read(const pl_weight& w, const uint8_t* header, int first) {
    for (int i = 0; i < W; i++) {
      scale[i] = load_header(w, header, first + i);
      offset[i] = w.offset_kind ? load_header(w, header + group_header_bytes(w) / 2, first + i) : zero();
    }
  }
};

// Inputs that are summed as integers before they are scaled.
inline long span_inputs(const pl_weight& w) {
  return w.int16_activations ? 2 * GROUP : w.groups_per_scale ? GROUP : GROUP / 2;
}

// Prefetches the next panel while this one is multiplied: the hardware prefetcher stops at every page boundary.
// After each span (or, without PREFETCH_IN_BURSTS, with each line) an even share of the next panel is prefetched.
// All register tiles of a panel take part: otherwise memory would idle during those that find the panel in the
// cache. It goes to L2, as a panel is about as large as L1.
class PanelPrefetcher {
 public:
  // For a tile of `halves` half panels, which are number `half` and the following of the `all` that the tiles of this
  // panel have together. `off`: leave it to the hardware prefetcher.
  PanelPrefetcher(const pl_weight& w, const uint8_t* panel, long half, long all, long halves, bool off = false)
      : next_(reinterpret_cast<const char*>(panel) + panel_bytes(w) + panel_bytes(w) * half / all),
        share_(off                  ? 0
               : PREFETCH_IN_BURSTS ? round_up(panel_bytes(w) * halves / (w.inputs / span_inputs(w)) / all, 64)
                                    : 4 * PANEL * halves / all) {}
  void after_span() {
    for (long line = 0; PREFETCH_IN_BURSTS && line < share_; line += 64) __builtin_prefetch(next_ + line, 0, 2);
    next_ += PREFETCH_IN_BURSTS ? share_ : 0;
  }
  // For a line of each of W half panels.
  template <int W>
  void after_line() {
    if (PREFETCH_IN_BURSTS || !share_) return;
    for (int i = 0; i < W; i++) __builtin_prefetch(next_ + 64 * i, 0, 2);
    next_ += share_;
  }

 private:
  const char* next_;
  long share_;
};

// How a span of a tile's activations is laid out: row by row as int8; row by row as int16, with inputs in the order
// 0 2, 1 3, 4 6 ... in which dot2() wants them; or the upper bytes of all rows, then the lower bytes.
enum ActivationOrder { PLAIN, PAIRS, BYTES };

// Activations in the order in which register tiles read them: for each tile, values [span, row, inputs], scales
// [span, row] or [row], sums and starts [span, row]. So one pointer reaches the values of all rows of a tile.
struct TiledRows {
  int8_t* values;
  float *scales, *sums;  // sums: of a row's values in a span, which the offsets multiply
  int32_t* starts;       // what an integer sum starts from: minus the weights' bias times `sums`; without BYTE_DOTS in 16-bit halves
  long row_bytes, spans, row_scales;  // per row
};

inline TiledRows from_row(const TiledRows& x, long row) {
  return {x.values + row * x.row_bytes, x.scales + row * x.row_scales, x.sums + row * x.spans, x.starts + row * x.spans,
          x.row_bytes, x.spans, x.row_scales};
}

// What packing added to the weights' values to make them unsigned.
inline int32_t weight_bias(const pl_weight& w) {
  return w.bits == 8 ? INT8_BIAS : w.e2m1 ? E2M1_BIAS : w.offset_kind == PL_OFFSETS_UNSIGNED ? 0 : 8;
}

// The sums of a span's values: of inputs 0, 1, 4, 5, 8, 9 ... and of the others; with BYTE_DOTS of all, and 0.
struct SpanSums {
  int32_t lower, upper;
};

// Writes one span of one row and returns the sums of its values. `plane`: bytes from the upper bytes to the lower
// ones.
template <long SPAN, class Number>
inline SpanSums write_span(const Number* from, ActivationOrder order, int8_t* to, long plane) {
  SpanSums sums{};
  for (long k = 0; k < SPAN; k++) (BYTE_DOTS || k % 4 < 2 ? sums.lower : sums.upper) += from[k];
  if (order == PLAIN) memcpy(to, from, SPAN);
  for (long k = 0; k < SPAN && order == BYTES; k++) {
    to[k] = static_cast<int8_t>((from[k] + 128) >> 8);
    to[plane + k] = static_cast<int8_t>(from[k]);
  }
  int16_t words[SPAN], pairs[SPAN];
  for (long k = 0; k < SPAN && order == PAIRS; k++) words[k] = from[k];
  for (long k = 0; k < SPAN && order == PAIRS; k += 4) {
    pairs[k] = words[k], pairs[k + 1] = words[k + 2];
    pairs[k + 2] = words[k + 1], pairs[k + 3] = words[k + 3];
  }
  if (order == PAIRS) memcpy(to, pairs, sizeof pairs);
  return sums;
}

// Rows first .. first + rows for the tiles, in `memory`: at most three bytes per input.
inline TiledRows tile_rows(const QuantisedRows& x, long first, long rows, const pl_weight& w, const RowTiles& tiles,
                           ActivationOrder order, float* memory) {
  long span = span_inputs(w), spans = x.inputs / span, bytes = x.inputs * (order == PLAIN ? 1 : 2), row_scales = x.int16 ? 1 : spans;
  float *scales = memory + rows * bytes / 4, *sums = scales + rows * row_scales;
  TiledRows all{reinterpret_cast<int8_t*>(memory), scales, sums, reinterpret_cast<int32_t*>(sums + rows * spans),
                bytes, spans, row_scales};
  const int32_t bias = weight_bias(w);
  const bool whole = w.bits == 8 || BYTE_DOTS;  // a start is one number
  for (long t = 0; t < tiles.tiles; t++) {
    long begin = tiles.from(t), count = tiles.from(t + 1) - begin;
    TiledRows to = from_row(all, begin);
    for (long s = 0; s < spans; s++)
      for (long r = 0; r < count; r++) {
        long row = first + begin + r, at = s * count + r, from = row * x.inputs + s * span;
        int8_t* block = to.values + s * count * span * (order == PLAIN ? 1 : 2) + r * span * (order == PAIRS ? 2 : 1);
        SpanSums sums = x.int16 ? write_span<2 * GROUP>(static_cast<const int16_t*>(x.values) + from, order, block, count * span)
                        : span == GROUP ? write_span<GROUP>(static_cast<const int8_t*>(x.values) + from, order, block, 0)
                                        : write_span<GROUP / 2>(static_cast<const int8_t*>(x.values) + from, order, block, 0);
        if (s < row_scales) to.scales[at] = x.scales[x.int16 ? row : (row * x.inputs + s * span) / GROUP];
        to.sums[at] = static_cast<float>(sums.lower + sums.upper);
        int32_t lower = -bias * sums.lower, upper = -bias * sums.upper;
        to.starts[at] = whole ? lower + upper : (lower & 0xffff) | upper * 65536;
      }
  }
  return all;
}

// total += one span's integer sums of R rows, scaled. With INT16 activations the row's scale is applied at the end.
template <bool INT16, int R, int W>
inline void add_span(const GroupHeader<W>& header, bool offsets, const I32x16 (&s)[R][W], const float* sums,
                     const float* scales, F32x16 (&total)[R][W]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) {
      F32x16 sum = to_float(s[r][i]);
      F32x16 term = INT16 ? fma(sum, header.scale[i], total[r][i]) : sum * header.scale[i];
      if (offsets) term = fma(set1(sums[r]), header.offset[i], term);
      total[r][i] = INT16 ? term : fma(term, set1(scales[r]), total[r][i]);
    }
}

template <bool INT16, int R, int W>
inline void store_totals(const F32x16 (&total)[R][W], const float* scales, float* c) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) store(c + r * PANEL + 16 * i, INT16 ? total[r][i] * set1(scales[r]) : total[r][i]);
}

}  // namespace
