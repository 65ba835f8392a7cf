// Medusa heads: logits of several positions from one hidden state each (draft/heads/medusa_head.py).
//
// Row r of head h is row h * rows + r of what lies in `stream` and `next`; behind the last block a
// head that all share sees row r * count + h, so that its logits lie as they are wanted.
#include "forward.h"

void medusa_logits(const Kernels& k, const QuantisedKernels& quantised, const pl_medusa& m, const void* x, long rows,
                   long count, void* logits, long threads) {
  long width = m.width, all = rows * count, size = m.dtype == PL_BFLOAT16 ? 2 : 4;
  Rows stream, next, product, scratch;
  for (Rows* each : {&stream, &next, &product}) each->shape(all, width);
  threads = ActiveThreads::of_process().count(threads);
  scratch.shape(threads, gemm_scratch(all, width));
  Codes codes;
  codes.shape(all, width);
  Barrier barrier;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
#pragma omp single
    barrier.reset(omp_get_num_threads());
    FlushToZero flush;
    int thread = omp_get_thread_num(), of = omp_get_num_threads();
    long from = all * thread / of, to = all * (thread + 1) / of;
    auto multiply = [&](const pl_weight& w, long first, long number, Epilogue epilogue, void* y, long ldy) {
      QuantisedRows coded = w.bits ? codes.of(w) : QuantisedRows{};
      for (long r = first; w.bits && r < first + number; r++)
        if (r >= from && r < to) quantised.quantise_row(next.at(r), coded, r - first);
      if (w.bits) barrier.wait();
      Gemm p{&w,  m.dtype, next.at(first), number,      next.ld, epilogue,
                y,   ldy,     0,              m.logit_cap, &quantised, coded};
      k.gemm(p, thread, of, scratch.at(thread));
      if (w.bits) barrier.wait();
    };
    for (long r = from; r < to; r++) {
      long row = m.blocks || !m.shared ? r % rows : r / count;
      const char* given = static_cast<const char*>(x) + row * width * size;
      k.load_row(m.dtype, given, width, stream.at(r));
      k.load_row(m.dtype, given, width, next.at(r));
    }
    for (long block = 0; block < m.blocks; block++) {
      barrier.wait();
      for (long h = 0; h < count; h++)
        multiply(m.block[h * m.blocks + block], h * rows, rows, STORE, product.at(h * rows), product.ld);
      barrier.wait();
      for (long r = from; r < to; r++) {
        long into = m.shared && block == m.blocks - 1 ? r % rows * count + r / rows : r;
        k.add_silu(m.dtype, stream.at(r), product.at(r), next.at(into), width);
      }
    }
    barrier.wait();
    if (m.shared) {
      multiply(m.head[0], 0, all, LOGITS, logits, m.vocab);
    } else {
      for (long h = 0; h < count; h++)
        multiply(m.head[h], h * rows, rows, LOGITS, static_cast<char*>(logits) + h * m.vocab * size, count * m.vocab);
    }
  }
}
