// Products with weights of eight and four bits: what model/quantised/weights.py defines.
//
// Activations are whole numbers (QuantisedRows): of 8 bits with a scale for each group of 32 of a row, or,
// beside `wide` weights of 8 bits, whose groups divide into 64: of 16 bits with one scale for the row. A packed
// matrix is a row of panels of 32 outputs, read from end to end. Each group of a panel begins with its 32
// scales (and offsets), and goes on with codes, 32 inputs at a time; a line of 64 bytes has four inputs each of
// 16 outputs:
//
//   8 bits   line 0: inputs 0-3 of outputs 0-15 | of outputs 16-31 | line 1: inputs 4-7 ...       16 lines
//   4 bits   line 0: inputs 0-3 (low four bits) and 16-19 (high) of outputs 0-15 | of 16-31 | ...  8 lines
//
// Inputs are summed in spans that share a scale: 64 with wide activations, else 32, or 16 where groups are so
// small.
//
// A span's sum is exact; spans are added in order. Nothing depends on the number of rows.
//
// Tile instructions take the two bytes of a wide activation apart: a span is a tile, whose sums leave through
// memory before they are scaled. For spans of 32 (half a tile) that costs what the products save up to some rows:
// with four bits, at 7 to 48, they took as long as this or longer.
#include "ints.h"
#include "products.h"
#if defined(PACELINE_AMX)
#include "tiles.h"
#endif

namespace {

constexpr float WIDEST = 32512.0f;  // of wide codes, 127 * 256: either byte of them is a whole number of 8 bits

// 16 scales or offsets, of the panel's first or second half.
inline V head_number(const pl_weight& w, const uint8_t* at, int half) {
  if (w.scale_kind == PL_SCALE_FLOAT) return load(reinterpret_cast<const float*>(at) + 16 * half);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(at) + 16 * half;
  return w.scale_kind == PL_SCALE_HALF ? from_half(p) : load(p);
}

// Of W halves from `first` on.
template <int W>
struct Heads {
  V scale[W], offset[W];
  void read(const pl_weight& w, const uint8_t* line, int first) {
    for (int i = 0; i < W; i++) {
      scale[i] = head_number(w, line, first + i);
      offset[i] = w.offsets ? head_number(w, line + group_header_bytes(w) / 2, first + i) : zero();
    }
  }
};

// Inputs that are summed in whole numbers.
inline long span_of(const pl_weight& w) { return w.wide ? 2 * GROUP : w.repeat ? GROUP : GROUP / 2; }

// Panels come from memory, and the processor's own foresight ends at every page. So each span that is
// done (or, without BURSTS, each line) has an even share of the next panel fetched: in every one of a panel's
// tiles, as memory would rest in those that find the panel in the cache. Into the second cache: a panel is
// about as large as the first.
class Ahead {
 public:
  // Of a tile of `halves` from number `half` on, of all the halves that go over the panel; nothing if it is `left`
  // to the processor.
  Ahead(const pl_weight& w, const uint8_t* panel, long half, long all, long halves, bool left = false)
      : at_(reinterpret_cast<const char*>(panel) + panel_bytes(w) + panel_bytes(w) * half / all),
        share_(left     ? 0
               : BURSTS ? round_up(panel_bytes(w) * halves / (w.inputs / span_of(w)) / all, 64)
                        : 4 * PANEL * halves / all) {}
  void step() {
    for (long line = 0; BURSTS && line < share_; line += 64) __builtin_prefetch(at_ + line, 0, 2);
    at_ += BURSTS ? share_ : 0;
  }
  // Of W halves.
  template <int W>
  void line() {
    if (BURSTS || !share_) return;
    for (int i = 0; i < W; i++) __builtin_prefetch(at_ + 64 * i, 0, 2);
    at_ += share_;
  }

 private:
  const char* at_;
  long share_;
};

// Rows in tiles of sizes as even as possible.
struct Tiling {
  const long rows, tiles;
  Tiling(long rows, long most) : rows(rows), tiles((rows + most - 1) / most) {}
  long from(long tile) const { return rows * tile / tiles; }
};

// How codes lie in each span of a tile: as they are; in 16 bits, pairs of inputs (0, 2), (1, 3), (4, 6) ...
// of a row; or the upper bytes of all rows, then the lower ones.
enum Order { PLAIN, PAIRS, BYTES };

// Rows in the order in which tiles read them: of each tile, codes [span, row, inputs], scales [span, row]
// or [row], the others [span, row]. So one pointer leads to the numbers of all its rows.
struct Interleaved {
  int8_t* codes;
  float *scales, *sums;
  int32_t* starts;  // of a sum: less what makes codes of weights positive, times the row's sum; or its lower 16 bits
  long bytes, spans, scaled;  // of a row: bytes of codes, spans, scales
};

inline Interleaved from_row(const Interleaved& x, long row) {
  return {x.codes + row * x.bytes, x.scales + row * x.scaled, x.sums + row * x.spans, x.starts + row * x.spans,
          x.bytes, x.spans, x.scaled};
}

// What was added to codes of weights to make them positive.
inline int32_t added_to(const pl_weight& w) { return w.bits == 8 ? BYTES_OFFSET : w.offsets == PL_OFFSETS_LEAST ? 0 : 8; }

// One span of one row's codes to `to`; `apart`: bytes from upper to lower ones. Its sum.
template <long SPAN, class Code>
inline int32_t lay(const Code* from, Order order, int8_t* to, long apart) {
  int32_t sum = 0;
  for (long k = 0; k < SPAN; k++) sum += from[k];
  if (order == PLAIN) memcpy(to, from, SPAN);
  for (long k = 0; k < SPAN && order == BYTES; k++) {
    to[k] = static_cast<int8_t>((from[k] + 128) >> 8);
    to[apart + k] = static_cast<int8_t>(from[k]);
  }
  int16_t words[SPAN], pairs[SPAN];
  for (long k = 0; k < SPAN && order == PAIRS; k++) words[k] = from[k];
  for (long k = 0; k < SPAN && order == PAIRS; k += 4) {
    pairs[k] = words[k], pairs[k + 1] = words[k + 2];
    pairs[k + 2] = words[k + 1], pairs[k + 3] = words[k + 3];
  }
  if (order == PAIRS) memcpy(to, pairs, sizeof pairs);
  return sum;
}

// Into `memory`: at most three bytes for each input of a row.
inline Interleaved interleaved(const QuantisedRows& x, long first, long rows, const pl_weight& w, const Tiling& tiling,
                               Order order, float* memory) {
  long span = span_of(w), spans = x.inputs / span, bytes = x.inputs * (order == PLAIN ? 1 : 2), scaled = x.wide ? 1 : spans;
  float *scales = memory + rows * bytes / 4, *sums = scales + rows * scaled;
  Interleaved all{reinterpret_cast<int8_t*>(memory), scales, sums, reinterpret_cast<int32_t*>(sums + rows * spans),
                  bytes, spans, scaled};
  for (long t = 0; t < tiling.tiles; t++) {
    long begin = tiling.from(t), count = tiling.from(t + 1) - begin;
    Interleaved to = from_row(all, begin);
    for (long s = 0; s < spans; s++)
      for (long r = 0; r < count; r++) {
        long row = first + begin + r, place = s * count + r, at = row * x.inputs + s * span;
        int8_t* block = to.codes + s * count * span * (order == PLAIN ? 1 : 2) + r * span * (order == PAIRS ? 2 : 1);
        int32_t sum = x.wide ? lay<2 * GROUP>(static_cast<const int16_t*>(x.values) + at, order, block, count * span)
                      : span == GROUP ? lay<GROUP>(static_cast<const int8_t*>(x.values) + at, order, block, 0)
                                      : lay<GROUP / 2>(static_cast<const int8_t*>(x.values) + at, order, block, 0);
        if (s < scaled) to.scales[place] = x.scales[x.wide ? row : (row * x.inputs + s * span) / GROUP];
        to.sums[place] = static_cast<float>(sum);
        to.starts[place] = -added_to(w) * sum & (w.bits == 8 || BYTE_DOTS ? -1 : 0xffff);
      }
  }
  return all;
}

// Add one span's sums of R rows, scaled. Wide rows have their own scale at the end.
template <bool WIDE, int R, int W>
inline void add_span(const Heads<W>& head, bool offsets, const I (&s)[R][W], const float* sums, const float* scales,
                     V (&total)[R][W]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) {
      V sum = floats(s[r][i]);
      V term = WIDE ? fma(sum, head.scale[i], total[r][i]) : sum * head.scale[i];
      if (offsets) term = fma(set1(sums[r]), head.offset[i], term);
      total[r][i] = WIDE ? term : fma(term, set1(scales[r]), total[r][i]);
    }
}

template <bool WIDE, int R, int W>
inline void store_rows(const V (&total)[R][W], const float* scales, float* c) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) store(c + r * PANEL + 16 * i, WIDE ? total[r][i] * set1(scales[r]) : total[r][i]);
}

// Of R rows and W halves of a panel, from `half` on: c [rows, PANEL]. Inlined it would lose registers.
template <int BITS, int SPAN, int R, int W>
[[gnu::noinline]] void register_tile(const pl_weight& w, const uint8_t* panel, int half, const Interleaved& x, float* c,
                                     Ahead ahead) {
  constexpr bool WIDE = SPAN == 2 * GROUP;
  [[maybe_unused]] constexpr bool words = BITS == 8 && (WIDE || !BYTE_DOTS);
  V total[R][W];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < W; i++) total[r][i] = zero();
  const uint8_t* lines = panel + 64 * half;
  const int8_t* codes = x.codes;
  Heads<W> head;
  for (long n = 0; n < x.spans; n++) {
    ahead.step();
    if (n * SPAN % group_inputs(w) == 0) head.read(w, lines - 64 * half, half), lines += group_header_bytes(w);
    I s[R][W];
#if defined(PACELINE_NEON)
    span_sums<BITS, SPAN>(lines, codes, x.starts + n * R, s);
    lines += SPAN * BITS * 4;
    codes += R * SPAN * (WIDE ? 2 : 1);
#else
    for (int r = 0; r < R; r++)
      for (int i = 0; i < W; i++) s[r][i] = whole(x.starts[n * R + r]);
    auto add = [&](auto with, auto part, const B (&b)[W], long from, long stride) {
      B parts[W];
      for (int i = 0; i < W; i++) parts[i] = part(b[i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t few;
        memcpy(&few, codes + r * stride + from, 4);
        for (int i = 0; i < W; i++) s[r][i] = with(s[r][i], parts[i], few);
      }
    };
    // Few rows wait for memory: AMD's processors foresee what two instructions read in a loop, not what sixteen do.
    int steps = SPAN * BITS / 32;
    if (BITS == 8 && R <= 3) asm("" : "+r"(steps));  // not to be unrolled
    for (int j = 0; j < steps; j++, lines += 128) {
      ahead.line<W>();
      B b[W];
      for (int i = 0; i < W; i++) b[i] = line(lines + 64 * i);
      if (words) {
        add(dot_wide, evens, b, 8 * j, 2 * SPAN);
        add(dot_wide, odds, b, 8 * j + 4, 2 * SPAN);
      } else if (BITS == 8) {
        add(dot, [](B x) { return x; }, b, 4 * j, SPAN);
      } else {
        add(dot, low, b, 4 * j, SPAN);
        add(dot, high, b, 16 + 4 * j, SPAN);
      }
    }
    for (int r = 0; r < R && !words; r++)
      for (int i = 0; i < W; i++) s[r][i] = joined(s[r][i]);
    codes += R * SPAN * (words ? 2 : 1);
#endif
    add_span<WIDE>(head, w.offsets, s, x.sums + n * R, x.scales + n * R, total);
  }
  store_rows<WIDE>(total, x.scales, c + 16 * half);
}

template <int R>
struct Count {
  static constexpr int rows = R;
};

// f of a Count of so many rows, at most QUANTISED_ROWS.
template <int R = QUANTISED_ROWS, class F>
inline void with_rows(long rows, const F& f) {
  if (rows == R) return f(Count<R>());
  if constexpr (R > 1) with_rows<R - 1>(rows, f);
}

// All rows of one panel: c [rows, PANEL].
template <int BITS, int SPAN>
inline void panel_of(const pl_weight& w, const uint8_t* panel, const Interleaved& x, const Tiling& tiling, float* c) {
  for (long t = 0; t < tiling.tiles; t++) {
    long from = tiling.from(t);
    with_rows<SPAN == 2 * GROUP ? WIDE_ROWS : QUANTISED_ROWS>(tiling.from(t + 1) - from, [&](auto count) {
      constexpr int R = decltype(count)::rows, W = 2 * R <= QUANTISED_SUMS ? 2 : 1;
      // More rows take longer than it looks ahead.
      bool left = W == 2 && R <= (BURSTS ? 4 : 1) && tiling.tiles == 1 && prefetches_streams();
      for (int half = 0; half < 2; half += W)
        register_tile<BITS, SPAN, R, W>(w, panel, half, from_row(x, from), c + from * PANEL,
                                        Ahead(w, panel, 2 * t + half, 2 * tiling.tiles, W, left));
    });
  }
}

#if defined(PACELINE_AMX)
constexpr long SPANS = 4;  // whose sums are in memory at once

constexpr long NARROW_TILED = 16;  // narrow rows beside weights of 8 bits, from which on tiles are used

// Of up to 16 rows. Wide ones: tiles 0 and 1 sum upper bytes, 2 and 3 lower ones.
template <bool WIDE>
inline void amx_tile(const pl_weight& w, const uint8_t* panel, const Interleaved& x, long rows, float* c, Ahead ahead) {
  constexpr long SPAN = WIDE ? 2 * GROUP : GROUP;
  alignas(64) int32_t sums[SPANS][2 * TILE * PANEL];
  const uint8_t* lines = panel;
  const int8_t* codes = x.codes;
  for (long from = 0; from < x.spans; from += SPANS) {
    long some = x.spans - from < SPANS ? x.spans - from : SPANS;
    for (long n = 0; n < some; n++, lines += SPAN * PANEL, codes += rows * SPAN * (WIDE ? 2 : 1)) {
      ahead.step();
      if ((from + n) * SPAN % group_inputs(w) == 0) lines += group_header_bytes(w);
      int32_t *upper = sums[n], *lower = upper + TILE * PANEL;
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(6, lines, 4 * PANEL);
      _tile_loadd(7, lines + 64, 4 * PANEL);
      _tile_loadd(4, codes, SPAN);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      if (WIDE) {
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, codes + rows * SPAN, SPAN);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
        _tile_stored(2, lower, 4 * PANEL);
        _tile_stored(3, lower + 16, 4 * PANEL);
      }
      _tile_stored(0, upper, 4 * PANEL);
      _tile_stored(1, upper + 16, 4 * PANEL);
    }
    settle();
    for (long first = 0; first < rows; first += QUANTISED_ROWS)
      with_rows(rows - first < QUANTISED_ROWS ? rows - first : QUANTISED_ROWS, [&](auto count) {
        constexpr int R = decltype(count)::rows;
        V total[R][2];
        float* at = c + first * PANEL;
        for (int r = 0; r < R; r++)
          for (int i = 0; i < 2; i++) total[r][i] = from ? load(at + r * PANEL + 16 * i) : zero();
        Heads<2> head;
        for (long n = 0; n < some; n++) {
          head.read(w, panel + (from + n) * SPAN / group_inputs(w) * group_bytes(w), 0);
          long place = (from + n) * rows + first;
          I s[R][2];
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) {
              const int32_t* upper = sums[n] + (first + r) * PANEL + 16 * i;
              s[r][i] = WIDE ? of_bytes(upper, upper + TILE * PANEL, x.starts[place + r])
                             : of_sums(upper, x.starts[place + r]);
            }
          add_span<WIDE>(head, w.offsets, s, x.sums + place, x.scales + (WIDE ? 0 : place), total);
        }
        if (from + some < x.spans)
          store_rows<false>(total, nullptr, at);
        else
          store_rows<WIDE>(total, x.scales + first, at);
      });
  }
}

template <bool WIDE>
inline void amx_panel(const pl_weight& w, const uint8_t* panel, const Interleaved& x, const Tiling& tiling,
                      Shaped& shaped, float* c) {
  for (long t = 0; t < tiling.tiles; t++) {
    long from = tiling.from(t), rows = tiling.from(t + 1) - from;
    shaped.to(rows, rows, span_of(w));
    amx_tile<WIDE>(w, panel, from_row(x, from), rows, c + from * PANEL, Ahead(w, panel, 2 * t, 2 * tiling.tiles, 2));
  }
}
constexpr bool AMX = true;
#else
struct Shaped {};
constexpr long NARROW_TILED = 0;
template <bool WIDE>
inline void amx_panel(const pl_weight&, const uint8_t*, const Interleaved&, const Tiling&, Shaped&, float*) {}
constexpr bool AMX = false;
#endif

// One thread's panels, CHUNK rows in a pass over the weights.
void quantised_gemm(const Gemm& p, long part, long parts, float* scratch) {
  const pl_weight& w = *p.weight;
  long outputs = p.epilogue == GATED ? 16 : PANEL, panels = round_up(w.outputs, outputs) / outputs, span = span_of(w);
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  bool tiled = AMX && (w.wide ? p.rows > 1 : w.bits == 8 && span == GROUP && p.rows >= NARROW_TILED);
  Order order = tiled || WIDE_BY_BYTES ? w.wide ? BYTES : PLAIN : w.bits == 8 && (w.wide || !BYTE_DOTS) ? PAIRS : PLAIN;
  Shaped shaped;
  for (long first = 0; first < p.rows; first += ROWS_PER_PASS) {
    long rows = p.rows - first < ROWS_PER_PASS ? p.rows - first : ROWS_PER_PASS;
    Tiling tiling(rows, tiled ? 16 : w.wide ? WIDE_ROWS : QUANTISED_ROWS);
    Interleaved x = interleaved(p.quantised_x, first, rows, w, tiling, order, scratch + ROWS_PER_PASS * PANEL);
    for (long panel = from; panel < to; panel++) {
      const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
      if (tiled)
        (w.wide ? amx_panel<true> : amx_panel<false>)(w, data, x, tiling, shaped, scratch);
      else if (w.bits == 4)
        panel_of<4, 32>(w, data, x, tiling, scratch);
      else
        (span == 64 ? panel_of<8, 64> : span == 32 ? panel_of<8, 32> : panel_of<8, 16>)(w, data, x, tiling, scratch);
      for (long r = 0; r < rows; r++) apply_epilogue(p, first + r, panel, scratch + r * PANEL);
    }
  }
}

// Wide codes and the scale of one row of activations.
void quantise_wide(const float* x, const QuantisedRows& rows, long row) {
  V most = zero();
  for (long i = 0; i < rows.inputs; i += 16) most = larger(most, larger(load(x + i), zero() - load(x + i)));
  float scale = largest(most) / WIDEST;
  V inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), up = set1(WIDEST), down = set1(-WIDEST);
  for (long i = 0; i < rows.inputs; i += 16)
    store_words(static_cast<int16_t*>(rows.values) + row * rows.inputs + i,
                larger(down, smaller(up, nearest(load(x + i) * inverse))));
  rows.scales[row] = scale;
}

// Codes of one row, and the scale of each group, or wide ones. `inputs` is a multiple of GROUP.
void quantise_row(const float* x, const QuantisedRows& rows, long row) {
  if (rows.wide) return quantise_wide(x, rows, row);
  int8_t* codes = static_cast<int8_t*>(rows.values) + row * rows.inputs;
  float* scales = rows.scales + row * rows.inputs / GROUP;
  for (long g = 0; g < rows.inputs / GROUP; g++, x += GROUP, codes += GROUP) {
    V a = load(x), b = load(x + 16), none = zero();
    float scale = largest(larger(larger(a, none - a), larger(b, none - b))) / 127.0f;
    V inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), most = set1(127.0f), least = set1(-127.0f);
    a = larger(least, smaller(most, nearest(a * inverse)));
    b = larger(least, smaller(most, nearest(b * inverse)));
    store_bytes(codes, a, b);
    scales[g] = scale;
  }
}

}  // namespace

#if defined(PACELINE_AMX)
#define TABLE quantised_amx
#elif defined(PACELINE_AVX512)
#define TABLE quantised_vnni
#elif defined(PACELINE_AVX2)
#define TABLE quantised_avx2
#elif defined(PACELINE_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
#define TABLE quantised_i8mm
#elif defined(PACELINE_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define TABLE quantised_dotprod
#elif defined(PACELINE_NEON)
#define TABLE quantised_neon
#else
#define TABLE quantised_portable
#endif

extern const QuantisedKernels TABLE = {quantise_row, quantised_gemm};
