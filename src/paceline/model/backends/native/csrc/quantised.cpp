// Products with weights of eight and four bits: what model/quantised/weights.py defines.
//
// Activations are whole numbers with a scale for each group of 32 of a row (QuantisedRows). A packed
// matrix is a row of panels of 32 outputs. A panel begins with its scales (and offsets), one line of
// 32 for each group of the weights, and goes on with its codes, made positive, in groups of 32
// inputs; a line of 64 bytes has four inputs each of 16 outputs:
//
//   8 bits   line 0: inputs 0-3 of outputs 0-15 | of outputs 16-31 | line 1: inputs 4-7 ...       16 lines
//   4 bits   line 0: inputs 0-3 (low four bits) and 16-19 (high) of outputs 0-15 | of 16-31 | ...  8 lines
//
// A group's sum is exact; groups are added in order. Nothing depends on the number of rows.
#include "ints.h"
#include "kernels.h"

namespace {

// 16 scales or offsets, of the panel's first or second half.
inline V head_number(const pl_weight& w, const uint8_t* at, int half) {
  if (w.scale_kind == PL_SCALE_FLOAT) return load(reinterpret_cast<const float*>(at) + 16 * half);
  const uint16_t* p = reinterpret_cast<const uint16_t*>(at) + 16 * half;
  return w.scale_kind == PL_SCALE_HALF ? from_half(p) : load(p);
}

// Of R rows and the 32 outputs of a panel: c [rows, PANEL] floats.
template <int BITS, int R>
inline void quantised_tile(const pl_weight& w, const uint8_t* panel, const QuantisedRows& x, long row, float* c) {
  const int8_t* codes[R];
  const float *scales[R], *sums[R];
  V total[R][2];
  for (int r = 0; r < R; r++) {
    codes[r] = x.codes + (row + r) * x.inputs;
    scales[r] = x.scales + (row + r) * x.groups;
    sums[r] = x.sums + (row + r) * x.groups;
    total[r][0] = total[r][1] = zero();
  }
  const uint8_t* lines = panel + panel_head(w);
  V scale[2] = {zero(), zero()}, offset[2] = {zero(), zero()};
  for (long g = 0; g < x.groups; g++) {
    if (g % w.repeat == 0) {
      const uint8_t* head = panel + g / w.repeat * head_line(w);
      for (int i = 0; i < 2; i++) {
        scale[i] = head_number(w, head, i);
        if (w.offsets) offset[i] = head_number(w, head + head_line(w) / 2, i);
      }
    }
    I s[R][2];
    for (int r = 0; r < R; r++) s[r][0] = s[r][1] = whole(static_cast<int32_t>(sums[r][g]) * (BITS == 8 ? -128 : -8));
    for (int j = 0; j < BITS; j++, lines += 128) {
      B both[2] = {line(lines), line(lines + 64)};
      B first[2] = {BITS == 8 ? both[0] : low(both[0]), BITS == 8 ? both[1] : low(both[1])};
      for (int r = 0; r < R; r++) {
        int32_t four;
        memcpy(&four, codes[r] + g * GROUP + 4 * j, 4);
        s[r][0] = dot(s[r][0], first[0], four);
        s[r][1] = dot(s[r][1], first[1], four);
      }
      if (BITS == 8) continue;
      B second[2] = {high(both[0]), high(both[1])};
      for (int r = 0; r < R; r++) {
        int32_t four;
        memcpy(&four, codes[r] + g * GROUP + 16 + 4 * j, 4);
        s[r][0] = dot(s[r][0], second[0], four);
        s[r][1] = dot(s[r][1], second[1], four);
      }
    }
    for (int r = 0; r < R; r++) {
      V x_scale = set1(scales[r][g]);
      for (int i = 0; i < 2; i++) {
        V term = floats(s[r][i]) * scale[i];
        if (w.offsets) term = fma(set1(sums[r][g]), offset[i], term);
        total[r][i] = fma(term, x_scale, total[r][i]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    store(c + r * PANEL, total[r][0]);
    store(c + r * PANEL + 16, total[r][1]);
  }
}

template <int BITS, int R = QUANTISED_ROWS>
inline void quantised_rows_of(const pl_weight& w, const uint8_t* panel, const QuantisedRows& x, long row,
                              long rows, float* c) {
  if (rows == R) return quantised_tile<BITS, R>(w, panel, x, row, c);
  if constexpr (R > 1) quantised_rows_of<BITS, R - 1>(w, panel, x, row, rows, c);
}

// All rows of one panel, in tiles of sizes as even as possible.
template <int BITS>
inline void panel_of(const pl_weight& w, const uint8_t* panel, const QuantisedRows& x, long first, long rows,
                     float* c) {
  long tiles = (rows + QUANTISED_ROWS - 1) / QUANTISED_ROWS;
  for (long t = 0; t < tiles; t++) {
    long from = rows * t / tiles, to = rows * (t + 1) / tiles;
    quantised_rows_of<BITS>(w, panel, x, first + from, to - from, c + from * PANEL);
  }
}

void quantised_panel(const pl_weight& w, long panel, const QuantisedRows& x, long first, long rows, float* c) {
  const uint8_t* data = static_cast<const uint8_t*>(w.data) + panel * panel_bytes(w);
  if (w.bits == 8)
    panel_of<8>(w, data, x, first, rows, c);
  else
    panel_of<4>(w, data, x, first, rows, c);
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

extern const Quantised TABLE = {quantise_row, quantised_panel};
