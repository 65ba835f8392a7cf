// A whole forward of a decoder, from token ids to logits.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels.h"
#include "threads.h"

// A matrix of floats, one row for each row of the step. Rows are padded to whole panels. Products read the padding, so
// it is zero, and stays zero as long as the width does (unless `zeros` is false: no product reads the matrix).
class RowBuffer {
 public:
  void resize(long rows, long width, bool zeros = true) {
    stride = round_up(width, PANEL);
    if (rows * stride <= size_) return;
    size_t bytes = static_cast<size_t>(rows * stride) * sizeof(float);
    data_.reset();  // first, so that both are never held at once
    size_ = 0;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(static_cast<long>(bytes), 64))));
    if (!data_) throw std::bad_alloc();
    if (zeros) std::memset(data_.get(), 0, bytes);
    size_ = rows * stride;
  }
  float* row(long r) const { return data_.get() + r * stride; }
  // Frees the memory if it is more than so many floats.
  void free_above(long floats) {
    if (size_ > floats) data_.reset(), size_ = 0;
  }
  long stride = 0;

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  long size_ = 0;
};

// Memory for quantised activations.
class QuantisedBuffer {
 public:
  void resize(long rows, long inputs) {
    values_.resize(static_cast<size_t>(rows * inputs));
    scales_.resize(static_cast<size_t>(rows * inputs / GROUP));
  }
  // Rows in the form in which they are multiplied by `w`, which has at most the inputs of resize().
  QuantisedRows rows_for(const pl_weight& w) { return {values_.data(), scales_.data(), w.inputs, w.int16_activations != 0}; }

 private:
  std::vector<int16_t> values_;
  std::vector<float> scales_;
};

struct RowRange {
  long begin, end;
};

// One of the threads of a parallel region.
struct Worker {
  int index, count;
  // The rows that are this thread's. They are the same in every operation on as many rows.
  RowRange share(long rows) const { return {rows * index / count, rows * (index + 1) / count}; }
};

// How attention is divided among threads in all layers with this window. Items are sorted by rounds of key blocks,
// and in a round into as many parts as there are threads, which take about as long as each other.
struct AttentionPlan {
  long window, parts = 1;
  std::vector<AttentionItem> items;
  std::vector<size_t> borders;  // [rounds, parts + 1]: where the parts begin and end

  AttentionItems items_of(long round, const Worker& worker) const {
    const size_t* border = borders.data() + round * (parts + 1);
    return {items.data() + border[parts * worker.index / worker.count],
            items.data() + border[parts * (worker.index + 1) / worker.count]};
  }
};

class Forward {
 public:
  explicit Forward(const pl_model& model);
  void run(const Kernels& kernels, const QuantisedKernels& quantised, const pl_batch& batch);
  const pl_model& model() const { return m_; }

 private:
  void resize_buffers(long threads);
  void resize_lora_buffers();
  void run_layers(const Worker& worker);
  void embed_rows(const Worker& worker);
  void run_layer(const Worker& worker, long index);
  void write_kv(const Worker& worker, long index);
  void write_context(const Worker& worker);
  void store_features(const Worker& worker, long layer);
  void compute_logits(const Worker& worker);
  void normalise_rows(const Worker& worker, const pl_norm& norm, const RowBuffer& x, RowBuffer& y);
  // y = epilogue(x W^T + bias + row_bias), for `rows` rows from `first` on.
  void multiply(const Worker& worker, const pl_weight& w, const RowBuffer& x, long rows, Epilogue epilogue, RowBuffer& y,
                long first = 0, const float* const* row_bias = nullptr);
  // The same where the rows from `first` on are quantised already.
  void multiply_quantised(const Worker& worker, const pl_weight& w, const RowBuffer& x, const QuantisedRows& quantised_x,
                          long rows, Epilogue epilogue, RowBuffer& y, long first, const float* const* row_bias);
  QuantisedRows quantise_rows(const Worker& worker, const pl_weight& w, const RowBuffer& x, long rows);
  void add_projection(const Worker& worker, const pl_weight& w, const RowBuffer& x, const pl_norm& post_norm, long matrix);
  const float* const* lora_bias(const Worker& worker, long matrix, const RowBuffer& x);
  // attention_plan.cpp
  void locate_keys();
  void locate_keys(const pl_span& span);
  void plan_attention(long threads);
  void plan_round(AttentionPlan& plan, long first_block, long end_block, long item_blocks, long item_heads);
  long set_positions_read(long window, AttentionItem& item) const;
  void attend(const Worker& worker, long index);
  // experts.cpp
  void run_experts(const Worker& worker, const pl_layer& l);
  void sort_by_expert(const pl_layer& l);

  pl_model m_;
  std::vector<pl_layer> layers_;
  std::mutex mutex_;

  // The forward that is under way.
  Kernels k_;
  const QuantisedKernels* quantised_ = nullptr;
  pl_batch b_;
  Barrier barrier_;
  // Activations, [rows, ...]. eagle_features_, eagle_input_: of draft heads.
  RowBuffer residual_, eagle_features_, eagle_input_, normed_, qkv_, attended_, mlp_hidden_, projected_, head_input_;
  QuantisedBuffer quantised_x_;
  RowBuffer scratch_;              // [threads, ...]
  std::vector<char> logits_;       // if the caller wants none
  // Attention.
  std::vector<AttentionRow> attention_rows_;
  std::vector<int32_t> tree_slots_;
  std::vector<RowRange> tiles_;      // rows of one sequence that an item may take
  std::vector<AttentionPlan> plans_;  // one for each window
  std::vector<size_t> plan_of_layer_;
  long key_blocks_ = 1, round_blocks_ = 1;  // blocks of keys in all, and of a round
  bool has_partials_ = false;               // an item takes fewer than all blocks and gives partial results
  RowBuffer partial_results_;
  // Experts.
  RowBuffer router_logits_, sorted_rows_;      // sorted_rows_: each row once for each of its experts
  std::vector<ExpertChoice> expert_choices_;  // [rows, chosen]
  std::vector<long> expert_begin_;            // where each expert's rows begin among sorted_rows_
  // LoRA adapters: A x, and B A x of a packed matrix of a layer, or of the head.
  RowBuffer lora_low_, lora_sums_, lora_logits_;
  std::vector<const float*> row_bias_;  // B A x of each row, or NULL
};

// Grows drafts (grow.cpp). Its buffers stay for the next call.
class Growth {
 public:
  void run(Forward& forward, const Kernels& kernels, const QuantisedKernels& quantised, const pl_growth& growth);

 private:
  std::mutex mutex_;
  std::vector<char> logits_, outputs_, hidden_;
};

// What pl_open returns.
struct ModelContext {
  explicit ModelContext(const pl_model& model) : forward(model) {}
  Forward forward;
  Growth growth;
};

// Logits of the first `count` Medusa heads for x [rows, width], see paceline_native.h.
void medusa_logits(const Kernels& kernels, const QuantisedKernels& quantised, const pl_medusa& heads, const void* x, long rows,
                   long count, void* logits, long threads);
