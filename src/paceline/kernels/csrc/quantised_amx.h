// GEMM of 8-bit weights by AMX tile instructions, with the bits of quantised.cpp.
//
// AMX multiplies the two bytes of an int16 activation separately. A span is one tile, whose integer sums leave
// through memory to be scaled. For spans of 32 (half a tile) that costs what the products save up to some rows: with
// 4-bit weights, 7 to 48 rows took as long as without tiles, or longer.
#pragma once
#include "amx_tiles.h"
#include "quantised.h"

namespace {

constexpr bool AMX = true;
constexpr long SPANS = 4;           // spans whose sums are in memory at once
// Tiles are used from so many rows on, with int8 activations (and 8-bit weights) and with int16 ones. A tile of few
// rows takes as long as a full one.
constexpr long AMX_INT8_ROWS = 16, AMX_INT16_ROWS = 7;

// Stores the integer sums of one span, of up to 16 rows: [row, PANEL]. With INT16 those of the upper bytes (tiles 0
// and 1), then those of the lower bytes (tiles 2 and 3).
template <bool INT16>
inline void amx_span(const uint8_t* lines, const int8_t* values, long rows, int32_t* sums) {
  constexpr long SPAN = INT16 ? 2 * GROUP : GROUP;
  int32_t *upper = sums, *lower = upper + TILE * PANEL;
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(6, lines, 4 * PANEL);
  _tile_loadd(7, lines + 64, 4 * PANEL);
  _tile_loadd(4, values, SPAN);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  if (INT16) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, values + rows * SPAN, SPAN);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
    _tile_stored(2, lower, 4 * PANEL);
    _tile_stored(3, lower + 16, 4 * PANEL);
  }
  _tile_stored(0, upper, 4 * PANEL);
  _tile_stored(1, upper + 16, 4 * PANEL);
}

// c [rows, PANEL] = up to 16 rows times a panel, SPANS spans at a time.
template <bool INT16>
inline void amx_tile(const pl_weight& w, const uint8_t* panel, const TiledRows& x, long rows, float* c,
                     PanelPrefetcher prefetcher) {
  constexpr long SPAN = INT16 ? 2 * GROUP : GROUP;
  alignas(64) int32_t sums[SPANS][2 * TILE * PANEL];
  const uint8_t* lines = panel;
  const int8_t* values = x.values;
  for (long from = 0; from < x.spans; from += SPANS) {
    long spans = x.spans - from < SPANS ? x.spans - from : SPANS;
    for (long n = 0; n < spans; n++, lines += SPAN * PANEL, values += rows * SPAN * (INT16 ? 2 : 1)) {
      prefetcher.after_span();
      if ((from + n) * SPAN % group_inputs(w) == 0) lines += group_header_bytes(w);
      amx_span<INT16>(lines, values, rows, sums[n]);
    }
    flush_stores();
    for (long first = 0; first < rows; first += MAX_QUANTISED_ROWS)
      with_rows<MAX_QUANTISED_ROWS>(rows - first < MAX_QUANTISED_ROWS ? rows - first : MAX_QUANTISED_ROWS, [&](auto count) {
        constexpr int R = decltype(count)::rows;
        F32x16 total[R][2];
        float* to = c + first * PANEL;
        for (int r = 0; r < R; r++)
          for (int i = 0; i < 2; i++) total[r][i] = from ? load(to + r * PANEL + 16 * i) : zero();
        GroupHeader<2> header;
        for (long n = 0; n < spans; n++) {
          header.read(w, panel + (from + n) * SPAN / group_inputs(w) * group_bytes(w), 0);
          long at = (from + n) * rows + first;
          I32x16 s[R][2];
          for (int r = 0; r < R; r++)
            for (int i = 0; i < 2; i++) {
              const int32_t* upper = sums[n] + (first + r) * PANEL + 16 * i;
              Ints sum = load_register<Ints>(upper, 0);
              if (INT16) sum = 256 * sum + load_register<Ints>(upper + TILE * PANEL, 0);
              s[r][i] = {sum + x.starts[at + r]};
            }
          add_span<INT16>(header, w.offset_kind, s, x.sums + at, x.scales + (INT16 ? 0 : at), total);
        }
        if (from + spans < x.spans)
          store_totals<false>(total, nullptr, to);
        else
          store_totals<INT16>(total, x.scales + first, to);
      });
  }
}

template <bool INT16>
inline void amx_panel(const pl_weight& w, const uint8_t* panel, const TiledRows& x, const RowTiles& tiles,
                      TileConfig& config, float* c) {
  for (long t = 0; t < tiles.tiles; t++) {
    long from = tiles.from(t), rows = tiles.from(t + 1) - from;
    config.set(rows, rows, span_inputs(w));
    amx_tile<INT16>(w, panel, from_row(x, from), rows, c + from * PANEL, PanelPrefetcher(w, panel, 2 * t, 2 * tiles.tiles, 2));
  }
}

}  // namespace
