// Products with weights of eight and four bits: what model/quantised/weights.py defines.
//
// Activations are whole numbers (QuantisedRows): of 8 bits with a scale for each group of 32 of a row for
// weights of four bits, of 16 bits with a scale for each row for those of eight. A packed matrix is a row
// of panels of 32 outputs. A panel begins with its scales (and offsets), one line of 32 for each group of
// the weights, and goes on with its codes in groups of 32 inputs; a line of 64 bytes has four inputs each
// of 16 outputs:
//
//   8 bits   line 0: inputs 0-3 of outputs 0-15 | of outputs 16-31 | line 1: inputs 4-7 ...       16 lines
//   4 bits   line 0: inputs 0-3 (low four bits) and 16-19 (high) of outputs 0-15 | of 16-31 | ...  8 lines
//
// Inputs are summed in spans that share a scale: 32, and with weights of eight bits 64 where their groups
// allow it, or 16 where these are so small.
//
// A span's sum is exact; spans are added in order. Nothing depends on the number of rows.
//
// Tile instructions take the two bytes of an activation apart: with weights of eight bits a span is a tile,
// whose sums leave through memory before they are scaled. For spans of 32 that costs what the products
// save: with four bits, at 7 to 48 rows, they took as long as this or longer.
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

struct Heads {
  V scale[2], offset[2];
  void read(const pl_weight& w, const uint8_t* line) {
    for (int i = 0; i < 2; i++) {
      scale[i] = head_number(w, line, i);
      offset[i] = w.offsets ? head_number(w, line + head_line(w) / 2, i) : zero();
    }
  }
};

// Inputs that share a scale, and of these those that are summed in whole numbers.
inline long group_of(const pl_weight& w) { return w.repeat ? w.repeat * GROUP : GROUP / 2; }
inline long span_of(const pl_weight& w) { return w.bits == 4 || w.repeat % 2 ? GROUP : w.repeat ? 2 * GROUP : GROUP / 2; }

// Panels come from memory, and the processor's own foresight ends at every page. So each span that is
// done has an even share of the next panel fetched: in every one of a panel's tiles, as memory would
// rest in those that find the panel in the cache.
class Ahead {
 public:
  Ahead(const pl_weight& w, const uint8_t* panel, long tile, long tiles)
      : at_(reinterpret_cast<const char*>(panel) + panel_bytes(w) + panel_bytes(w) * tile / tiles),
        share_(round_up(panel_bytes(w) / (w.inputs / span_of(w)) / tiles, 64)) {}
  void step() {
    for (long line = 0; line < share_; line += 64) __builtin_prefetch(at_ + line);
    at_ += share_;
  }

 private:
  const char* at_;
  long share_;
};

// Rows in tiles of sizes as even as possible.
class Tiling {
 public:
  Tiling(long rows, long most) : tiles((rows + most - 1) / most), rows_(rows) {}
  long from(long tile) const { return rows_ * tile / tiles; }
  const long tiles;

 private:
  long rows_;
};

// How wide codes lie in each span of a tile: pairs of inputs (0, 2), (1, 3), (4, 6) ... of a row, or the
// upper bytes of all rows, then the lower ones.
enum Order { PAIRS, BYTES };

// Rows in the order in which tiles read them: of each tile, codes [span, row, inputs], scales [span, row]
// or [row], the others [span, row]. So one pointer leads to the numbers of all its rows.
struct Interleaved {
  int8_t* codes;
  float *scales, *sums;
  int32_t* starts;  // of a sum: less what makes codes of weights positive, times the row's sum
  long bytes, spans, scaled;  // of a row: bytes of codes, spans, scales
};

inline Interleaved from_row(const Interleaved& x, long row) {
  return {x.codes + row * x.bytes, x.scales + row * x.scaled, x.sums + row * x.spans, x.starts + row * x.spans,
          x.bytes, x.spans, x.scaled};
}

// What was added to codes of weights to make them positive.
inline int32_t added_to(const pl_weight& w) { return w.bits == 8 ? 128 : w.offsets == PL_OFFSETS_LEAST ? 0 : 8; }

// One span of one row's wide codes to `to`; `apart`: bytes from upper to lower ones. Its sum.
inline int32_t lay_wide(const int16_t* from, long span, Order order, int8_t* to, long apart) {
  int32_t sum = 0;
  for (long k = 0; k < span; k++) sum += from[k];
  if (order == BYTES) {
    for (long k = 0; k < span; k++) to[k] = static_cast<int8_t>((from[k] + 128) >> 8);
    for (long k = 0; k < span; k++) to[apart + k] = static_cast<int8_t>(from[k]);
    return sum;
  }
  for (long k = 0; k < span; k += 4) {
    int16_t four[4] = {from[k], from[k + 2], from[k + 1], from[k + 3]};
    memcpy(to + 2 * k, four, sizeof four);
  }
  return sum;
}

inline int32_t lay_narrow(const int8_t* from, int8_t* to) {
  int32_t sum = 0;
  for (long k = 0; k < GROUP; k++) sum += from[k];
  memcpy(to, from, GROUP);
  return sum;
}

// Into `memory`: at most three bytes for each input of a row.
inline Interleaved interleaved(const QuantisedRows& x, long first, long rows, const pl_weight& w, const Tiling& tiling,
                               Order order, float* memory) {
  long span = span_of(w), spans = x.inputs / span, bytes = x.inputs * (x.wide ? 2 : 1), scaled = x.wide ? 1 : spans;
  float *scales = memory + rows * bytes / 4, *sums = scales + rows * scaled;
  Interleaved all{reinterpret_cast<int8_t*>(memory), scales, sums, reinterpret_cast<int32_t*>(sums + rows * spans),
                  bytes, spans, scaled};
  for (long t = 0; t < tiling.tiles; t++) {
    long begin = tiling.from(t), count = tiling.from(t + 1) - begin;
    Interleaved to = from_row(all, begin);
    for (long s = 0; s < spans; s++)
      for (long r = 0; r < count; r++) {
        long row = first + begin + r, place = s * count + r, at = row * x.inputs + s * span;
        const int16_t* wide = static_cast<const int16_t*>(x.codes) + at;
        int8_t* block = to.codes + s * count * span * (x.wide ? 2 : 1);
        int32_t sum = !x.wide ? lay_narrow(static_cast<const int8_t*>(x.codes) + at, block + r * span)
                      : lay_wide(wide, span, order, block + r * span * (order == PAIRS ? 2 : 1), count * span);
        if (s < scaled) to.scales[place] = x.scales[row * scaled + s];
        to.sums[place] = static_cast<float>(sum);
        to.starts[place] = -added_to(w) * sum;
      }
  }
  return all;
}

// Add one span's sums of R rows, scaled. Of weights of eight bits rows are scaled at the end.
template <int BITS, int R>
inline void add_span(const Heads& head, bool offsets, const I (&s)[R][2], const float* sums, const float* scales,
                     V (&total)[R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) {
      V sum = floats(s[r][i]);
      V term = BITS == 8 ? fma(sum, head.scale[i], total[r][i]) : sum * head.scale[i];
      if (offsets) term = fma(set1(sums[r]), head.offset[i], term);
      total[r][i] = BITS == 8 ? term : fma(term, set1(scales[r]), total[r][i]);
    }
}

template <int BITS, int R>
inline void store_rows(const V (&total)[R][2], const float* scales, float* c) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) store(c + r * PANEL + 16 * i, BITS == 8 ? total[r][i] * set1(scales[r]) : total[r][i]);
}

// Of R rows and the 32 outputs of a panel: c [rows, PANEL].
template <int BITS, int SPAN, int R>
inline void register_tile(const pl_weight& w, const uint8_t* panel, const Interleaved& x, float* c, Ahead ahead) {
  V total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = zero();
  const uint8_t *lines = panel + panel_head(w), *next = panel;
  const int8_t* codes = x.codes;
  Heads head;
  for (long n = 0; n < x.spans; n++) {
    ahead.step();
    if (n * SPAN % group_of(w) == 0) head.read(w, next), next += head_line(w);
    I s[R][2];
    for (int r = 0; r < R; r++) s[r][0] = s[r][1] = whole(x.starts[n * R + r]);
    auto add = [&](auto with, const B first, const B second, long from, long stride) {
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t few;
        memcpy(&few, codes + r * stride + from, 4);
        s[r][0] = with(s[r][0], first, few);
        s[r][1] = with(s[r][1], second, few);
      }
    };
    for (int j = 0; j < SPAN * BITS / 32; j++, lines += 128) {
      B a = line(lines), b = line(lines + 64);
      if (BITS == 8) {
        add(dot_wide, evens(a), evens(b), 8 * j, 2 * SPAN);
        add(dot_wide, odds(a), odds(b), 8 * j + 4, 2 * SPAN);
      } else {
        add(dot, low(a), low(b), 4 * j, SPAN);
        add(dot, high(a), high(b), 16 + 4 * j, SPAN);
      }
    }
    codes += R * SPAN * (BITS == 8 ? 2 : 1);
    add_span<BITS, R>(head, w.offsets, s, x.sums + n * R, x.scales + n * R, total);
  }
  store_rows<BITS, R>(total, x.scales, c);
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
    with_rows(tiling.from(t + 1) - from, [&](auto count) {
      register_tile<BITS, SPAN, decltype(count)::rows>(w, panel, from_row(x, from), c + from * PANEL,
                                                       Ahead(w, panel, t, tiling.tiles));
    });
  }
}

#if defined(PACELINE_AMX)
constexpr long SPANS = 4;  // whose sums are in memory at once

// Of up to 16 rows, with weights of eight bits: tiles 0 and 1 sum upper bytes, 2 and 3 lower ones.
template <int SPAN>
inline void amx_tile(const pl_weight& w, const uint8_t* panel, const Interleaved& x, long rows, float* c, Ahead ahead) {
  alignas(64) int32_t sums[SPANS][2 * TILE * PANEL];
  const uint8_t *lines = panel + panel_head(w);
  const int8_t* codes = x.codes;
  for (long from = 0; from < x.spans; from += SPANS) {
    long some = x.spans - from < SPANS ? x.spans - from : SPANS;
    for (long n = 0; n < some; n++, lines += SPAN * PANEL, codes += 2 * rows * SPAN) {
      ahead.step();
      int32_t *upper = sums[n], *lower = upper + TILE * PANEL;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(6, lines, 4 * PANEL);
      _tile_loadd(7, lines + 64, 4 * PANEL);
      _tile_loadd(4, codes, SPAN);
      _tile_loadd(5, codes + rows * SPAN, SPAN);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
      _tile_stored(0, upper, 4 * PANEL);
      _tile_stored(1, upper + 16, 4 * PANEL);
      _tile_stored(2, lower, 4 * PANEL);
      _tile_stored(3, lower + 16, 4 * PANEL);
    }
    settle();
    for (long first = 0; first < rows; first += QUANTISED_ROWS)
      with_rows(rows - first < QUANTISED_ROWS ? rows - first : QUANTISED_ROWS, [&](auto count) {
        constexpr int R = decltype(count)::rows;
        V total[R][2];
        float* at = c + first * PANEL;
        for (int r = 0; r < R; r++)
          for (int i = 0; i < 2; i++) total[r][i] = from ? load(at + r * PANEL + 16 * i) : zero();
        Heads head;
        for (long n = 0; n < some; n++) {
          head.read(w, panel + (from + n) * SPAN / group_of(w) * head_line(w));
          long place = (from + n) * rows + first;
          I s[R][2];
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) {
              const int32_t* upper = sums[n] + (first + r) * PANEL + 16 * i;
              s[r][i] = of_bytes(upper, upper + TILE * PANEL, x.starts[place + r]);
            }
          add_span<8, R>(head, w.offsets, s, x.sums + place, nullptr, total);
        }
        if (from + some < x.spans)
          store_rows<4, R>(total, nullptr, at);
        else
          store_rows<8, R>(total, x.scales + first, at);
      });
  }
}

inline void amx_panel(const pl_weight& w, const uint8_t* panel, const Interleaved& x, const Tiling& tiling,
                      Shaped& shaped, float* c) {
  for (long t = 0; t < tiling.tiles; t++) {
    long from = tiling.from(t), rows = tiling.from(t + 1) - from;
    shaped.to(rows, rows, span_of(w));
    auto tile = span_of(w) == GROUP ? amx_tile<GROUP> : amx_tile<2 * GROUP>;
    tile(w, panel, from_row(x, from), rows, c + from * PANEL, Ahead(w, panel, t, tiling.tiles));
  }
}
constexpr bool AMX = true;
#else
struct Shaped {};
inline void amx_panel(const pl_weight&, const uint8_t*, const Interleaved&, const Tiling&, Shaped&, float*) {}
constexpr bool AMX = false;
#endif

// One thread's panels, CHUNK rows in a pass over the weights.
void quantised_product(const Product& p, long part, long parts, float* scratch) {
  const pl_weight& w = *p.weight;
  long outputs = p.ending == GATED ? 16 : PANEL, panels = round_up(w.outputs, outputs) / outputs, span = span_of(w);
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  bool tiled = AMX && w.bits == 8 && span >= GROUP && p.rows > 1;
  Shaped shaped;
  for (long first = 0; first < p.rows; first += CHUNK) {
    long rows = p.rows - first < CHUNK ? p.rows - first : CHUNK;
    Tiling tiling(rows, tiled ? 16 : QUANTISED_ROWS);
    Interleaved x = interleaved(p.codes, first, rows, w, tiling, tiled ? BYTES : PAIRS, scratch + CHUNK * PANEL);
    for (long panel = from; panel < to; panel++) {
      const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
      if (tiled)
        amx_panel(w, data, x, tiling, shaped, scratch);
      else if (w.bits == 4)
        panel_of<4, 32>(w, data, x, tiling, scratch);
      else
        (span == 64 ? panel_of<8, 64> : span == 32 ? panel_of<8, 32> : panel_of<8, 16>)(w, data, x, tiling, scratch);
      for (long r = 0; r < rows; r++) finish(p, first + r, panel, scratch + r * PANEL);
    }
  }
}

// Codes and scale of one row of activations for weights of eight bits.
void quantise_wide(const float* x, const QuantisedRows& rows, long row) {
  V most = zero();
  for (long i = 0; i < rows.inputs; i += 16) most = larger(most, larger(load(x + i), zero() - load(x + i)));
  float scale = largest(most) / WIDEST;
  V inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), up = set1(WIDEST), down = set1(-WIDEST);
  for (long i = 0; i < rows.inputs; i += 16)
    store_words(static_cast<int16_t*>(rows.codes) + row * rows.inputs + i,
                larger(down, smaller(up, nearest(load(x + i) * inverse))));
  rows.scales[row] = scale;
}

// The same for weights of four bits: of each group. `inputs` is a multiple of GROUP.
void quantise_row(const float* x, const QuantisedRows& rows, long row) {
  if (rows.wide) return quantise_wide(x, rows, row);
  int8_t* codes = static_cast<int8_t*>(rows.codes) + row * rows.inputs;
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
#else
#define TABLE quantised_portable
#endif

extern const Quantised TABLE = {quantise_row, quantised_product};
