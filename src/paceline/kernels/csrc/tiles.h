// Tile instructions: shapes, and the product of up to 32 rows by a panel. See products_amx.h.
#pragma once
#include <immintrin.h>

#include "kernels.h"
#include "products.h"
#include "vec.h"

namespace {

constexpr long TILE = 16;

struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  // Tiles 0 to 3: C; 4 and 5: A, `wide` bytes a row; 6 and 7: B.
  TileShapes(long upper, long lower, long wide) {
    for (int t = 0; t < 8; t++) bytes[t] = 64;
    rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(upper);
    rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(lower > 0 ? lower : 1);
    bytes[4] = bytes[5] = static_cast<uint16_t>(wide);
    rows[6] = rows[7] = static_cast<uint8_t>(wide / 4);
  }
};

// What was stored is in memory: GCC's intrinsics do not say that tiles are loaded from there.
inline void settle() { asm volatile("" ::: "memory"); }

// The shape that is configured in this thread; given back at the end.
class Shaped {
 public:
  ~Shaped() {
    if (upper_) _tile_release();
  }
  void to(long rows) { to(rows < TILE ? rows : TILE, rows - TILE); }
  void to(long upper, long lower, long wide = 64) {
    settle();
    if (upper == upper_ && lower == lower_ && wide == wide_) return;
    TileShapes shapes(upper, lower, wide);
    settle();
    _tile_loadconfig(&shapes);
    upper_ = upper, lower_ = lower, wide_ = wide;
  }

 private:
  long upper_ = 0, lower_ = 0, wide_ = 0;
};

// c [rows, ldc] += a [rows, lda] times a bf16 panel of so many inputs, for up to 32 rows; `far`: the
// panel comes from memory; `fresh`: c = instead.
template <bool far, bool fresh = false>
inline void tiles(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
  bool both = rows > TILE;
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, 4 * ldc);
    _tile_loadd(1, c + TILE, 4 * ldc);
  }
  if (both && !fresh) {
    _tile_loadd(2, c + TILE * ldc, 4 * ldc);
    _tile_loadd(3, c + TILE * ldc + TILE, 4 * ldc);
  }
  for (long k = 0; k < inputs; k += STRIPE, panel += STRIPE * PANEL, a += STRIPE) {
    for (long i = 0; i < STRIPE * PANEL && far; i += 32) fetch(panel + i);
    _tile_loadd(6, panel, 4 * PANEL);
    _tile_loadd(7, panel + PANEL, 4 * PANEL);
    _tile_loadd(4, a, 2 * lda);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (both) {
      _tile_loadd(5, a + TILE * lda, 2 * lda);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 4 * ldc);
  _tile_stored(1, c + TILE, 4 * ldc);
  if (both) {
    _tile_stored(2, c + TILE * ldc, 4 * ldc);
    _tile_stored(3, c + TILE * ldc + TILE, 4 * ldc);
  }
}

}  // namespace
