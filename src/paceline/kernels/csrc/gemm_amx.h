// GEMM of bf16 weights by AMX tile instructions, with the bits of gemm.h.
//
//   A: 16 rows x 32 inputs, bf16      B: 16 pairs of inputs x 16 outputs, as they lie in a panel
//   C: 16 rows x 16 outputs, float    TDPBF16PS: C += A B, one stripe of gemm.h
//
// Four C tiles (32 rows by the 32 outputs of a panel) stay in registers for all inputs. These kernels are used only
// if a trial in a child process has survived and given the right bits (amx_trial.cpp), or if they are asked for
// (api.cpp).
#pragma once
#include "amx_tiles.h"

namespace {

inline void gemm_amx(const Gemm& g, long part, long parts, float* scratch) {
  const long inputs = round_up(g.weight->inputs, STRIPE);
  float* c = scratch;
  uint16_t* a = reinterpret_cast<uint16_t*>(scratch + ROWS_PER_PASS * PANEL);
  TileConfig config;
  auto pack = [&](long first, long rows) {
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < inputs; i += 16) store(a + r * inputs + i, load(g.x + (first + r) * g.ldx + i));
  };
  for_each_panel(g, part, parts, AMX_ROWS_PER_PASS, pack, [&](long first, long rows, long panel) {
    const uint16_t* weights = static_cast<const uint16_t*>(g.weight->data) + panel * PANEL * inputs;
    for (long r = 0; r < rows; r += 2 * TILE) {
      long count = rows - r < 2 * TILE ? rows - r : 2 * TILE;
      config.set_rows(count);
      tile_product<true, true>(weights, a + r * inputs, inputs, count, inputs, c, PANEL);
      for (long i = 0; i < count; i++) apply_epilogue(g, first + r + i, panel, c + i * PANEL);
    }
  });
}

}  // namespace
