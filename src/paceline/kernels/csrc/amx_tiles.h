// AMX tile registers: their configuration, and the product of up to 32 rows with a bf16 panel. See gemm_amx.h.
//
//   tiles 0, 1   C of rows 0-15, outputs 0-15 and 16-31      tile 4   A, rows 0-15       tile 6   B, outputs 0-15
//   tiles 2, 3   C of rows 16-31, the same                   tile 5   A, rows 16-31      tile 7   B, outputs 16-31
#pragma once
#include <immintrin.h>

#include "gemm.h"
#include "kernels.h"
#include "vec.h"

namespace {

constexpr long TILE = 16;  // rows of a tile

// The 64 bytes that LDTILECFG reads. `row_bytes`: bytes of a row of A, which are 4 times the rows of B.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileShapes(long upper, long lower, long row_bytes) {
    for (int t = 0; t < 8; t++) bytes[t] = 64;
    rows[0] = rows[1] = rows[4] = static_cast<uint8_t>(upper);
    rows[2] = rows[3] = rows[5] = static_cast<uint8_t>(lower > 0 ? lower : 1);
    bytes[4] = bytes[5] = static_cast<uint16_t>(row_bytes);
    rows[6] = rows[7] = static_cast<uint8_t>(row_bytes / 4);
  }
};

// A compiler barrier: GCC's tile intrinsics do not tell it that they read memory.
inline void flush_stores() { asm volatile("" ::: "memory"); }

// The tile configuration of this thread, released at the end.
class TileConfig {
 public:
  ~TileConfig() {
    if (upper_) _tile_release();
  }
  void set_rows(long rows) { set(rows < TILE ? rows : TILE, rows - TILE); }
  // `upper`: rows of tiles 0, 1 and 4; `lower`: of tiles 2, 3 and 5.
  void set(long upper, long lower, long row_bytes = 64) {
    flush_stores();
    if (upper == upper_ && lower == lower_ && row_bytes == row_bytes_) return;
    TileShapes shapes(upper, lower, row_bytes);
    flush_stores();
    _tile_loadconfig(&shapes);
    upper_ = upper, lower_ = lower, row_bytes_ = row_bytes;
  }

 private:
  long upper_ = 0, lower_ = 0, row_bytes_ = 0;
};

// c [rows, ldc] += a [rows, lda] times a bf16 panel, for up to 32 rows. PREFETCH: the panel comes from memory;
// OVERWRITE: c = instead of c +=.
template <bool PREFETCH, bool OVERWRITE = false>
inline void tile_product(const uint16_t* panel, const uint16_t* a, long lda, long rows, long inputs, float* c, long ldc) {
  bool both = rows > TILE;
  if (OVERWRITE) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, 4 * ldc);
    _tile_loadd(1, c + TILE, 4 * ldc);
  }
  if (both && !OVERWRITE) {
    _tile_loadd(2, c + TILE * ldc, 4 * ldc);
    _tile_loadd(3, c + TILE * ldc + TILE, 4 * ldc);
  }
  for (long k = 0; k < inputs; k += STRIPE, panel += STRIPE * PANEL, a += STRIPE) {
    for (long i = 0; i < STRIPE * PANEL && PREFETCH; i += 32) prefetch_ahead(panel + i);
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
