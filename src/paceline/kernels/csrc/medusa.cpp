// Medusa heads: logits of several positions from one hidden state each (draft/heads/medusa_head.py).
//
// Row r of head h is row h * rows + r of `residual` and `input`. If all heads share the vocabulary layer, the last block
// puts it into row r * count + h of `input`, so that the logits lie as the caller wants them.
#include "forward.h"

void medusa_logits(const Kernels& k, const QuantisedKernels& quantised, const pl_medusa& m, const void* x, long rows,
                   long count, void* logits, long threads) {
  const long width = m.width, all = rows * count, size = dtype_bytes(m.dtype);
  RowBuffer residual, input, product, scratch;
  for (RowBuffer* buffer : {&residual, &input, &product}) buffer->resize(all, width);
  threads = ActiveThreads::of_process().count(threads);
  scratch.resize(threads, gemm_scratch(all, width));
  QuantisedBuffer buffer;
  buffer.resize(all, width);
  Barrier barrier;
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
#pragma omp single
    barrier.reset(omp_get_num_threads());
    FlushToZero flush;
    const Worker worker{omp_get_thread_num(), omp_get_num_threads()};
    const RowRange share = worker.share(all);
    // y = the product of `number` rows of `input` from `first` on.
    auto multiply = [&](const pl_weight& w, long first, long number, Epilogue epilogue, void* y, long ldy) {
      QuantisedRows quantised_x = w.bits ? buffer.rows_for(w) : QuantisedRows{};
      for (long r = first; w.bits && r < first + number; r++)
        if (r >= share.begin && r < share.end) quantised.quantise_row(input.row(r), quantised_x, r - first);
      if (w.bits) barrier.wait();
      Gemm p{&w, m.dtype, input.row(first), number, input.stride, epilogue, y, ldy, 0, m.logit_cap, &quantised, quantised_x};
      k.gemm(p, worker.index, worker.count, scratch.row(worker.index));
      if (w.bits) barrier.wait();
    };
    for (long r = share.begin; r < share.end; r++) {
      long row = m.blocks || !m.shared ? r % rows : r / count;
      const char* hidden_state = static_cast<const char*>(x) + row * width * size;
      k.load_row(m.dtype, hidden_state, width, residual.row(r));
      k.load_row(m.dtype, hidden_state, width, input.row(r));
    }
    for (long block = 0; block < m.blocks; block++) {
      barrier.wait();
      for (long h = 0; h < count; h++)
        multiply(m.block[h * m.blocks + block], h * rows, rows, STORE, product.row(h * rows), product.stride);
      barrier.wait();
      for (long r = share.begin; r < share.end; r++) {
        long next_row = m.shared && block == m.blocks - 1 ? r % rows * count + r / rows : r;
        k.add_silu(m.dtype, residual.row(r), product.row(r), input.row(next_row), width);
      }
    }
    barrier.wait();
    if (m.shared) multiply(m.head[0], 0, all, LOGITS, logits, m.vocab);
    for (long h = 0; !m.shared && h < count; h++)
      multiply(m.head[h], h * rows, rows, LOGITS, static_cast<char*>(logits) + h * m.vocab * size, count * m.vocab);
  }
}
