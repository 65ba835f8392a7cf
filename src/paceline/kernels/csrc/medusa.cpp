// Medusa heads: from one hidden state per row, the logits of several positions (draft/heads/medusa_head.py).
//
// `stream` and `next` hold row r of head h at h * rows + r. The last block of heads that share one vocabulary layer
// writes it to r * count + h instead, the order in which logits are returned.
#include "forward.h"

void medusa_logits(const Kernels& k, const QuantisedKernels& quantised, const pl_medusa& m, const void* x, long rows,
                   long count, void* logits, long threads) {
  long width = m.width, all = rows * count, size = m.dtype == PL_BFLOAT16 ? 2 : 4;
  Rows stream, next, product, scratch;  // next: the stream in dtype, which the next block multiplies
  for (Rows* buffer : {&stream, &next, &product}) buffer->shape(all, width);
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
    int thread = omp_get_thread_num(), team = omp_get_num_threads();
    Share share(all, thread, team);
    // y = rows first .. first + number of `next` times w; threads quantise their share of them first.
    auto multiply = [&](const pl_weight& w, long first, long number, Epilogue epilogue, void* y, long ldy) {
      QuantisedRows quantised_x = w.bits ? codes.of(w) : QuantisedRows{};
      for (long r = first; w.bits && r < first + number; r++)
        if (r >= share.from && r < share.to) quantised.quantise_row(next.at(r), quantised_x, r - first);
      if (w.bits) barrier.wait();
      Gemm g{&w, m.dtype, next.at(first), number, next.ld, epilogue, y, ldy, 0, m.logit_cap, &quantised, quantised_x};
      k.gemm(g, thread, team, scratch.at(thread));
      if (w.bits) barrier.wait();
    };
    for (long r = share.from; r < share.to; r++) {
      long row = m.blocks || !m.shared ? r % rows : r / count;
      const char* hidden = static_cast<const char*>(x) + row * width * size;
      k.load_row(m.dtype, hidden, width, stream.at(r));
      k.load_row(m.dtype, hidden, width, next.at(r));
    }
    for (long block = 0; block < m.blocks; block++) {
      barrier.wait();
      for (long h = 0; h < count; h++)
        multiply(m.block[h * m.blocks + block], h * rows, rows, STORE, product.at(h * rows), product.ld);
      barrier.wait();
      for (long r = share.from; r < share.to; r++) {
        long to = m.shared && block == m.blocks - 1 ? r % rows * count + r / rows : r;
        k.add_silu(m.dtype, stream.at(r), product.at(r), next.at(to), width);
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
