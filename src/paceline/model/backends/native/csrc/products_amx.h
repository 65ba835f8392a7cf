// Products of several rows by the tile instructions, bit for bit those of products.h.
//
//   A: 16 rows x 32 inputs, bf16      B: 16 pairs of inputs x 16 outputs, as a panel has them
//   C: 16 rows x 16 outputs, float    TDPBF16PS: C += A B, which is one stripe of products.h
//
// Four C tiles (32 rows by a panel) stay in registers for all inputs. Only used where a trial in a
// process of its own has survived and given the right bits, and where it is asked for: see api.cpp.
#pragma once
#include <immintrin.h>

#include "products.h"

namespace {

constexpr long TILE = 16;
constexpr long TILED_FROM = 4;  // rows: fewer stream the weights as fast without

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 to 3: C; 4 and 5: A; 6 and 7: B.
  TileShapes(long upper, long lower) {
    for (int t = 0; t < 8; t++) bytes[t] = 64;
    rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(upper);
    rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(lower > 0 ? lower : 1);
    rows[6] = rows[7] = TILE;
  }
};

// What was stored is in memory: GCC's intrinsics do not say that tiles are loaded from there.
inline void settle() { asm volatile("" ::: "memory"); }

// c [rows, 32] = a [rows, inputs] times the panel, for up to 32 rows.
inline void tiles(const uint16_t* panel, const uint16_t* a, long rows, long inputs, float* c) {
  long step = inputs * 2;  // bytes from row to row
  bool both = rows > TILE;
  _tile_zero(0);
  _tile_zero(1);
  if (both) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (long k = 0; k < inputs; k += STRIPE, panel += STRIPE * PANEL, a += STRIPE) {
    fetch_ahead(panel);
    _tile_loadd(6, panel, 4 * PANEL);
    _tile_loadd(7, panel + PANEL, 4 * PANEL);
    _tile_loadd(4, a, step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, a + TILE * inputs, step);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 4 * PANEL);
  _tile_stored(1, c + TILE, 4 * PANEL);
  if (both) {
    _tile_stored(2, c + TILE * PANEL, 4 * PANEL);
    _tile_stored(3, c + TILE * PANEL + TILE, 4 * PANEL);
  }
}

void product_by_tiles(const Product& p, long part, long parts, float* scratch) {
  if (p.weight->bits || p.dtype != PL_BFLOAT16 || p.rows < TILED_FROM) return product(p, part, parts, scratch);
  long outputs = p.ending == GATED ? 16 : PANEL;
  long panels = round_up(p.weight->outputs, outputs) / outputs, inputs = round_up(p.weight->inputs, STRIPE);
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  float* c = scratch + STRIPE * PANEL;
  uint16_t* a = reinterpret_cast<uint16_t*>(scratch + STRIPE * PANEL + CHUNK * PANEL);
  long shaped = -1;
  for (long first = 0; first < p.rows; first += TILED_ROWS) {
    long rows = p.rows - first < TILED_ROWS ? p.rows - first : TILED_ROWS;
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < inputs; i += 16) store(a + r * inputs + i, load(p.x + (first + r) * p.ldx + i));
    settle();
    for (long panel = from; panel < to; panel++)
      for (long r = 0; r < rows; r += 2 * TILE) {
        long count = rows - r < 2 * TILE ? rows - r : 2 * TILE;
        if (shaped != count) {
          TileShapes shapes(count < TILE ? count : TILE, count - TILE);
          settle();
          _tile_loadconfig(&shapes);
          shaped = count;
        }
        tiles(static_cast<const uint16_t*>(p.weight->data) + panel * PANEL * inputs, a + r * inputs, count, inputs, c);
        for (long i = 0; i < count; i++) finish(p, first + r + i, panel, c + i * PANEL);
      }
  }
  _tile_release();
}

}  // namespace
