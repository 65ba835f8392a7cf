// Products by the tile instructions, bit for bit those of products.h.
//
//   A: 16 rows x 32 inputs, bf16      B: 16 pairs of inputs x 16 outputs, as a panel has them
//   C: 16 rows x 16 outputs, float    TDPBF16PS: C += A B, which is one stripe of products.h
//
// Four C tiles (32 rows by a panel) stay in registers for all inputs. Only used where a trial in a
// process of its own has survived and given the right bits, and where it is asked for: see api.cpp.
#pragma once
#include "products.h"
#include "tiles.h"

namespace {

void gemm_amx(const Gemm& p, long part, long parts, float* scratch) {
  if (p.weight->bits || p.dtype != PL_BFLOAT16) return gemm(p, part, parts, scratch);
  long outputs = p.epilogue == GATED ? 16 : PANEL;
  long panels = round_up(p.weight->outputs, outputs) / outputs, inputs = round_up(p.weight->inputs, STRIPE);
  long from = panels * part / parts, to = panels * (part + 1) / parts;
  float* c = scratch;
  uint16_t* a = reinterpret_cast<uint16_t*>(scratch + ROWS_PER_PASS * PANEL);
  Shaped shaped;
  for (long first = 0; first < p.rows; first += AMX_ROWS_PER_PASS) {
    long rows = p.rows - first < AMX_ROWS_PER_PASS ? p.rows - first : AMX_ROWS_PER_PASS;
    for (long r = 0; r < rows; r++)
      for (long i = 0; i < inputs; i += 16) store(a + r * inputs + i, load(p.x + (first + r) * p.ldx + i));
    for (long panel = from; panel < to; panel++)
      for (long r = 0; r < rows; r += 2 * TILE) {
        long count = rows - r < 2 * TILE ? rows - r : 2 * TILE;
        shaped.to(count);
        const uint16_t* weights = static_cast<const uint16_t*>(p.weight->data) + panel * PANEL * inputs;
        tiles<true, true>(weights, a + r * inputs, inputs, count, inputs, c, PANEL);
        for (long i = 0; i < count; i++) apply_epilogue(p, first + r + i, panel, c + i * PANEL);
      }
  }
}

}  // namespace
