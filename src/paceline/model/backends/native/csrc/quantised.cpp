// Products with weights of eight and four bits: what model/quantised/weights.py defines.
//
// Activations are whole numbers with a scale for each group of 32 of a row (QuantisedRows). A packed
// matrix is a row of panels of 32 outputs. A panel begins with its scales (and offsets), one line of
// 32 for each group of the weights, and goes on with its codes in groups of 32 inputs; a line of 64
// bytes has four inputs each of 16 outputs:
//
//   8 bits   line 0: inputs 0-3 of outputs 0-15 | of outputs 16-31 | line 1: inputs 4-7 ...       16 lines
//   4 bits   line 0: inputs 0-3 (low four bits) and 16-19 (high) of outputs 0-15 | of 16-31 | ...  8 lines
//
// Weights of eight bits may have two scales for the 32 inputs: the sums of 16 are then scaled apart.
//
// A group's sum is exact; groups are added in order. Nothing depends on the number of rows.
//
// Tile instructions (TDPBSSD) were tried and give the same bits, but no speed: the sums of every 32
// inputs have to leave the tiles through memory before they are scaled, which costs what the products
// save. At 7 to 48 rows they took as long as this or longer.
#include "ints.h"
#include "products.h"

namespace {

// 16 scales or offsets, of the panel's first or second half.
inline V head_number(const pl_weight& w, const uint8_t* at, int half) {
  if (w.scale_kind == PL_SCALE_FLOAT) return load(reinterpret_cast<const float*>(at) + 16 * half);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(at) + 16 * half;
  return w.scale_kind == PL_SCALE_HALF ? from_half(p) : load(p);
}

// Panels come from memory, and the processor's own foresight ends at every page. So each group that is
// done has an even share of the next panel fetched: in every one of a panel's tiles, as memory would
// rest in those that find the panel in the cache.
class Ahead {
 public:
  Ahead(const pl_weight& w, const uint8_t* panel, long tile, long tiles)
      : at_(reinterpret_cast<const char*>(panel) + panel_bytes(w) + panel_bytes(w) * tile / tiles),
        share_(round_up(panel_bytes(w) / (w.inputs / GROUP) / tiles, 64)) {}
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
  explicit Tiling(long rows) : tiles((rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS), rows_(rows) {}
  long from(long tile) const { return rows_ * tile / tiles; }
  const long tiles;

 private:
  long rows_;
};

// Rows in the order in which register tiles read them: of each tile, codes [group, row, 32], scales
// [group, row], the others [group, part, row]. So one pointer leads to the numbers of all its rows.
struct Interleaved {
  int8_t* codes;
  float *scales, *sums;
  int32_t* starts;  // of a sum: less what makes codes of weights positive, times the row's sum
  long parts;       // of a group, whose sums are scaled apart: 1 or 2
};

inline Interleaved from_row(const Interleaved& x, long inputs, long row) {
  long groups = row * inputs / GROUP;
  return {x.codes + row * inputs, x.scales + groups, x.sums + groups * x.parts, x.starts + groups * x.parts, x.parts};
}

// What was added to codes of weights to make them positive.
inline int32_t added_to(const pl_weight& w) { return w.bits == 8 ? 128 : w.offsets == PL_OFFSETS_LEAST ? 0 : 8; }

// Into `memory`: at most 1.625 bytes for each input of a row.
inline Interleaved interleaved(const QuantisedRows& x, long first, long rows, const pl_weight& w, float* memory) {
  long groups = rows * x.groups, parts = w.repeat ? 1 : 2;
  float *scales = memory + rows * x.inputs / 4, *sums = scales + groups;
  Interleaved all{reinterpret_cast<int8_t*>(memory), scales, sums, reinterpret_cast<int32_t*>(sums + groups * parts),
                  parts};
  Tiling tiling(rows);
  for (long t = 0; t < tiling.tiles; t++) {
    long begin = tiling.from(t), end = tiling.from(t + 1), at = 0;
    Interleaved to = from_row(all, x.inputs, begin);
    for (long g = 0; g < x.groups; g++)
      for (long r = first + begin; r < first + end; r++, at++) {
        const int8_t* codes = x.codes + r * x.inputs + g * GROUP;
        memcpy(to.codes + at * GROUP, codes, GROUP);
        to.scales[at] = x.scales[r * x.groups + g];
        int32_t left = static_cast<int32_t>(x.sums[r * x.groups + g]);
        for (long part = parts - 1; part >= 0; part--) {
          int32_t sum = left;
          for (int k = 0; k < 16 && part; k++) sum -= codes[k];
          left -= sum;
          long place = (g * parts + part) * (end - begin) + r - first - begin;
          to.sums[place] = static_cast<float>(sum);
          to.starts[place] = -added_to(w) * sum;
        }
      }
  }
  return all;
}

// Of R rows and the 32 outputs of a panel: c [rows, PANEL].
template <int BITS, int PARTS, int R>
inline void quantised_tile(const pl_weight& w, const uint8_t* panel, const Interleaved& x, float* c, Ahead ahead) {
  V total[R][2], scale[2] = {zero(), zero()}, offset[2] = {zero(), zero()};
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = zero();
  const uint8_t* lines = panel + panel_head(w);
  const int8_t* codes = x.codes;
  const float* sums = x.sums;
  const int32_t* starts = x.starts;
  long groups = w.inputs / GROUP;
  for (long g = 0; g < groups; g++, codes += R * GROUP) {
    ahead.step();
    V term[R][2];
    for (int part = 0; part < PARTS; part++, sums += R, starts += R) {
      if (PARTS == 2 || g % w.repeat == 0) {
        const uint8_t* head = panel + (PARTS == 2 ? 2 * g + part : g / w.repeat) * head_line(w);
        for (int i = 0; i < 2; i++) {
          scale[i] = head_number(w, head, i);
          if (w.offsets) offset[i] = head_number(w, head + head_line(w) / 2, i);
        }
      }
      I s[R][2];
      for (int r = 0; r < R; r++) s[r][0] = s[r][1] = whole(starts[r]);
      auto add = [&](const B* weights, int from) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int32_t four;
          memcpy(&four, codes + r * GROUP + from, 4);
          s[r][0] = dot(s[r][0], weights[0], four);
          s[r][1] = dot(s[r][1], weights[1], four);
        }
      };
      for (int j = 0; j < BITS / PARTS; j++, lines += 128) {
        B both[2] = {line(lines), line(lines + 64)};
        if (BITS == 8) {
          add(both, 16 * part + 4 * j);
        } else {
          B first[2] = {low(both[0]), low(both[1])}, second[2] = {high(both[0]), high(both[1])};
          add(first, 4 * j);
          add(second, 16 + 4 * j);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int i = 0; i < 2; i++) {
          V sum = floats(s[r][i]);
          term[r][i] = part ? fma(sum, scale[i], term[r][i]) : sum * scale[i];
          if (w.offsets) term[r][i] = fma(set1(sums[r]), offset[i], term[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int i = 0; i < 2; i++) total[r][i] = fma(term[r][i], set1(x.scales[g * R + r]), total[r][i]);
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) store(c + r * PANEL + 16 * i, total[r][i]);
}

template <int BITS, int PARTS, int R = QUANTISED_ROWS>
inline void quantised_rows_of(const pl_weight& w, const uint8_t* panel, const Interleaved& x, long rows, float* c,
                              Ahead ahead) {
  if (rows == R) return quantised_tile<BITS, PARTS, R>(w, panel, x, c, ahead);
  if constexpr (R > 1) quantised_rows_of<BITS, PARTS, R - 1>(w, panel, x, rows, c, ahead);
}

// All rows of one panel: c [rows, PANEL].
template <int BITS, int PARTS>
inline void panel_of(const pl_weight& w, const uint8_t* panel, const Interleaved& x, long rows, float* c) {
  Tiling tiling(rows);
  for (long t = 0; t < tiling.tiles; t++) {
    long from = tiling.from(t);
    quantised_rows_of<BITS, PARTS>(w, panel, from_row(x, w.inputs, from), tiling.from(t + 1) - from,
                                   c + from * PANEL, Ahead(w, panel, t, tiling.tiles));
  }
}

// One thread's panels, CHUNK rows in a pass over the weights.
void quantised_product(const Product& p, long part, long parts, float* scratch) {
  const pl_weight& w = *p.weight;
  long outputs = p.ending == GATED ? 16 : PANEL, panels = round_up(w.outputs, outputs) / outputs;
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  for (long first = 0; first < p.rows; first += CHUNK) {
    long rows = p.rows - first < CHUNK ? p.rows - first : CHUNK;
    Interleaved x = interleaved(p.codes, first, rows, w, scratch + CHUNK * PANEL);
    for (long panel = from; panel < to; panel++) {
      const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
      if (w.bits == 4)
        panel_of<4, 1>(w, data, x, rows, scratch);
      else if (w.repeat)
        panel_of<8, 1>(w, data, x, rows, scratch);
      else
        panel_of<8, 2>(w, data, x, rows, scratch);
      for (long r = 0; r < rows; r++) finish(p, first + r, panel, scratch + r * PANEL);
    }
  }
}

// Codes, scales and sums of one row of activations; `inputs` is a multiple of GROUP.
void quantise_row(const float* x, const QuantisedRows& rows, long row) {
  int8_t* codes = rows.codes + row * rows.inputs;
  float *scales = rows.scales + row * rows.groups, *sums = rows.sums + row * rows.groups;
  for (long g = 0; g < rows.groups; g++, x += GROUP, codes += GROUP) {
    V a = load(x), b = load(x + 16), none = zero();
    float scale = largest(larger(larger(a, none - a), larger(b, none - b))) / 127.0f;
    V inverse = set1(scale > 0 ? 1.0f / scale : 0.0f), most = set1(127.0f), least = set1(-127.0f);
    a = larger(least, smaller(most, nearest(a * inverse)));
    b = larger(least, smaller(most, nearest(b * inverse)));
    store_bytes(codes, a, b);
    scales[g] = scale;
    sums[g] = sum(a + b);  // whole numbers: exact
  }
}

}  // namespace

#if defined(PACELINE_AVX512)
#define TABLE quantised_vnni
#elif defined(PACELINE_AVX2)
#define TABLE quantised_avx2
#else
#define TABLE quantised_portable
#endif

extern const Quantised TABLE = {quantise_row, quantised_product};
