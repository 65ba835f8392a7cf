// The table of kernels for one instruction set: compile.py compiles this file once for each.
//
// Do not include headers of the C++ standard library here. Their inline functions would be compiled for this
// instruction set, and the linker might use them everywhere.
#include "attention.h"
#include "gemm.h"
#include "recurrence.h"
#include "rounding.h"
#include "rows.h"
#include "sampling_kernels.h"

#if defined(PACELINE_AMX)
#include "gemm_amx.h"
#elif defined(PACELINE_DPBF16) || defined(PACELINE_I8MM)
#include "gemm_bf16_dot.h"
#endif

namespace {

void gemm(const Gemm& g, long part, long parts, float* scratch) {
  if (g.weight->bits) return g.quantised->gemm(g, part, parts, scratch);
  if (g.dtype != PL_BFLOAT16) return gemm_with<F32Panel>(g, part, parts, scratch);
#if defined(PACELINE_AMX)
  gemm_amx(g, part, parts, scratch);
#elif defined(PACELINE_DPBF16) || defined(PACELINE_I8MM)
  gemm_with<DotPanel>(g, part, parts, scratch);
#else
  gemm_with<Bf16Panel>(g, part, parts, scratch);
#endif
}

}  // namespace

extern const Kernels PACELINE_NAME(kernels_) = {PACELINE_QUOTED, gemm, attend, merge_partials, embed, rms_norm, add_rms_norm, add_silu, add_scaled, choose_experts,
                              rope_and_write_kv, load_row, store_row, top_k, argmax, residual_weights, gumbel_candidates, collect_at_least,
                              round_weight_rows, recurrent_steps};
