#include "forward.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr long KEPT_FLOATS = 1 << 20;  // partial results of attention that stay allocated for the next forward

// LoRA matrices of pl_adapter_rows, four for each layer and then the head's.
enum { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_PER_LAYER };

}  // namespace

Forward::Forward(const pl_model& model) : m_(model), layers_(model.layer, model.layer + model.layers) {
  m_.layer = layers_.data();
  for (const pl_layer& l : layers_) {
    size_t n = 0;
    while (n < plans_.size() && plans_[n].window != l.window) n++;
    if (n == plans_.size()) plans_.push_back({l.window, 1, {}, {}});
    plan_of_layer_.push_back(n);
  }
}

void Forward::run(const Kernels& kernels, const QuantisedKernels& quantised, const pl_batch& batch) {
  std::lock_guard<std::mutex> lock(mutex_);
  k_ = kernels;
  quantised_ = &quantised;
  b_ = batch;
  long threads = ActiveThreads::of_process().count(b_.threads);
  resize_buffers(threads);
  resize_lora_buffers();
  locate_keys();
  plan_attention(threads);
  double began = wall_seconds(), cpu = 0;  // seconds; cpu: of all threads
#pragma omp parallel num_threads(static_cast<int>(threads)) reduction(+ : cpu)
  {
    double before = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
#pragma omp single
    barrier_.reset(omp_get_num_threads());
    FlushToZero flush;
    run_layers({omp_get_thread_num(), omp_get_num_threads()});
    cpu = clock_seconds(CLOCK_THREAD_CPUTIME_ID) - before;
  }
  ActiveThreads::of_process().report(static_cast<int>(threads), wall_seconds() - began, cpu);
  partial_results_.free_above(KEPT_FLOATS);
}

void Forward::resize_buffers(long threads) {
  long rows = b_.rows, hidden = m_.hidden, inner = m_.heads * m_.head_dim;
  long chosen = 1, experts = 0;  // the most of any layer
  for (const pl_layer& l : layers_) chosen = std::max<long>(chosen, l.experts_per_row), experts = std::max<long>(experts, l.experts);
  residual_.resize(rows, hidden);
  if (m_.fuse.data && (b_.hidden || !m_.block)) {
    eagle_features_.resize(b_.fused ? 0 : rows, m_.fuse.inputs);
    eagle_input_.resize(rows, 2 * hidden);
  }
  normed_.resize(rows, hidden);
  qkv_.resize(rows, inner + 2 * m_.kv_heads * m_.head_dim);
  attended_.resize(rows, inner);
  mlp_hidden_.resize(rows * chosen, m_.ffn);
  projected_.resize(rows * chosen, hidden);
  if (experts) {
    router_logits_.resize(rows, experts);
    sorted_rows_.resize(rows * chosen, hidden);
    expert_choices_.resize(rows * chosen);
  }
  head_input_.resize(b_.logit_rows, hidden);
  if (!b_.logits) {
    logits_.resize(static_cast<size_t>(b_.logit_rows * m_.head.outputs * dtype_bytes(m_.dtype)));
    b_.logits = logits_.data();
  }
  long widest = std::max({hidden, inner, static_cast<long>(m_.ffn)});
  if (m_.fuse.data) widest = std::max({widest, 2 * hidden, static_cast<long>(m_.fuse.inputs)});
  quantised_x_.resize(std::max<long>(rows * chosen, b_.logit_rows), widest);
  for (long r = 0; r < b_.runs; r++)
    for (long n = 0; n <= LORA_PER_LAYER * m_.layers; n++) widest = std::max<long>(widest, b_.run[r].pair[n].b.inputs);
  scratch_.resize(threads, std::max(attention_scratch(m_), gemm_scratch(rows * chosen, widest)));
}

// What each thread does.
void Forward::run_layers(const Worker& worker) {
  if (m_.block && b_.hidden) return write_context(worker);
  embed_rows(worker);
  for (long index = 0; index < m_.layers; index++) {
    store_features(worker, index);
    if (!b_.skipped || !b_.skipped[index]) run_layer(worker, index);
  }
  store_features(worker, m_.layers);
  compute_logits(worker);
}

// Begins the residual stream: with embeddings, or in an EAGLE head with what it makes of them and of the hidden states
// (draft/heads/eagle_head.py). eagle_input_ is [embedding, hidden state] of each row.
void Forward::embed_rows(const Worker& worker) {
  RowRange rows = worker.share(b_.rows);
  if (!m_.fuse.data || m_.block) {
    for (long r = rows.begin; r < rows.end; r++) k_.embed(m_, b_.ids[r], residual_.row(r));
    return;
  }
  bool version_3 = m_.hidden_norm.weight, fuses_features = version_3 && !b_.fused;
  long hidden = m_.hidden, width = fuses_features ? m_.fuse.inputs : hidden;
  for (long r = rows.begin; r < rows.end; r++) {
    const char* state = static_cast<const char*>(b_.hidden) + r * width * dtype_bytes(m_.dtype);
    float* to = fuses_features ? eagle_features_.row(r) : version_3 ? residual_.row(r) : eagle_input_.row(r) + hidden;
    k_.load_row(m_.dtype, state, width, to);
    k_.embed(m_, b_.ids[r], eagle_input_.row(r));
  }
  if (!version_3 || fuses_features) {
    barrier_.wait();
    multiply(worker, m_.fuse, fuses_features ? eagle_features_ : eagle_input_, b_.rows, STORE, residual_);
    barrier_.wait();
  }
  if (!version_3) return;
  for (long r = rows.begin; r < rows.end; r++) {
    float *embedding = eagle_input_.row(r), *state = embedding + hidden;
    k_.rms_norm(m_, m_.layer[0].attention_norm, embedding, embedding, hidden);
    k_.rms_norm(m_, m_.hidden_norm, residual_.row(r), state, hidden);
    if (m_.residual_normed) std::memcpy(residual_.row(r), state, static_cast<size_t>(hidden) * sizeof(float));
  }
}

// A thread always has the same rows, so that operations on rows that follow each other need no barrier.
void Forward::run_layer(const Worker& worker, long index) {
  const pl_layer& l = m_.layer[index];
  const long lora = LORA_PER_LAYER * index;
  const RowBuffer& input = m_.hidden_norm.weight && !m_.block && !index ? eagle_input_ : normed_;
  if (&input == &normed_) normalise_rows(worker, l.attention_norm, residual_, normed_);
  barrier_.wait();
  multiply(worker, l.qkv, input, b_.rows, STORE, qkv_, 0, lora_bias(worker, lora + LORA_QKV, input));
  barrier_.wait();
  write_kv(worker, index);
  attend(worker, index);
  barrier_.wait();
  add_projection(worker, l.out, attended_, l.post_attention_norm, lora + LORA_OUT);
  normalise_rows(worker, l.mlp_norm, residual_, normed_);
  barrier_.wait();
  if (l.experts) return run_experts(worker, l);
  multiply(worker, l.gate_up, normed_, b_.rows, GATED, mlp_hidden_, 0, lora_bias(worker, lora + LORA_GATE_UP, normed_));
  barrier_.wait();
  add_projection(worker, l.down, mlp_hidden_, l.post_mlp_norm, lora + LORA_DOWN);
}

// Turns queries and keys of all rows, and writes keys and values into the cache.
void Forward::write_kv(const Worker& worker, long index) {
  const pl_layer& l = m_.layer[index];
  const long slot_bytes = m_.kv_heads * kv_head_bytes(m_, b_.int8_cache);
  char *keys = static_cast<char*>(b_.keys[index]), *values = static_cast<char*>(b_.values[index]);
  RowRange rows = worker.share(b_.rows);
  for (long r = rows.begin; r < rows.end; r++) {
    const float* rope = b_.rope[l.rope + attention_rows_[r].rope] + b_.positions[r] * m_.head_dim;
    float scaling = b_.query_scale ? m_.scaling * b_.query_scale[b_.positions[r]] : m_.scaling;
    long offset = b_.slots[r] * slot_bytes;
    k_.rope_and_write_kv(m_, l, rope, scaling, qkv_.row(r), keys + offset, values + offset, b_.int8_cache);
  }
  barrier_.wait();
}

// A block drafter's context: every layer makes keys and values of the same fused features.
void Forward::write_context(const Worker& worker) {
  RowRange rows = worker.share(b_.rows);
  for (long r = rows.begin; r < rows.end; r++) {
    const char* features = static_cast<const char*>(b_.hidden) + r * m_.fuse.inputs * dtype_bytes(m_.dtype);
    k_.load_row(m_.dtype, features, m_.fuse.inputs, eagle_features_.row(r));
  }
  barrier_.wait();
  multiply(worker, m_.fuse, eagle_features_, b_.rows, STORE, residual_);
  barrier_.wait();
  normalise_rows(worker, m_.hidden_norm, residual_, normed_);
  barrier_.wait();
  for (long index = 0; index < m_.layers; index++) {
    multiply(worker, m_.layer[index].qkv, normed_, b_.rows, STORE, qkv_);
    barrier_.wait();
    write_kv(worker, index);
  }
}

// residual += x W^T, or its norm, or its multiple by the model's residual scale.
void Forward::add_projection(const Worker& worker, const pl_weight& w, const RowBuffer& x, const pl_norm& post_norm,
                             long matrix) {
  const float* const* row_bias = lora_bias(worker, matrix, x);
  bool directly = !post_norm.weight && !m_.residual_scale;
  multiply(worker, w, x, b_.rows, directly ? ADD : STORE, directly ? residual_ : projected_, 0, row_bias);
  barrier_.wait();
  if (directly) return;
  RowRange rows = worker.share(b_.rows);
  for (long r = rows.begin; r < rows.end; r++) {
    if (post_norm.weight) k_.add_rms_norm(m_, post_norm, residual_.row(r), projected_.row(r));
    else k_.add_scaled(residual_.row(r), projected_.row(r), m_.residual_scale, m_.hidden);
  }
}

void Forward::normalise_rows(const Worker& worker, const pl_norm& norm, const RowBuffer& x, RowBuffer& y) {
  RowRange rows = worker.share(b_.rows);
  for (long r = rows.begin; r < rows.end; r++) k_.rms_norm(m_, norm, x.row(r), y.row(r), m_.hidden);
}

void Forward::multiply(const Worker& worker, const pl_weight& w, const RowBuffer& x, long rows, Epilogue epilogue, RowBuffer& y,
                       long first, const float* const* row_bias) {
  multiply_quantised(worker, w, x, quantise_rows(worker, w, x, rows), rows, epilogue, y, first, row_bias);
}

void Forward::multiply_quantised(const Worker& worker, const pl_weight& w, const RowBuffer& x, const QuantisedRows& quantised_x,
                                 long rows, Epilogue epilogue, RowBuffer& y, long first, const float* const* row_bias) {
  Gemm p{&w,      m_.dtype, x.row(first), rows, x.stride, epilogue, y.row(first), y.stride, static_cast<int>(m_.activation), 0.0f,
         quantised_, quantised_x, row_bias};
  k_.gemm(p, worker.index, worker.count, scratch_.row(worker.index));
}

// The rows in the form in which they are multiplied by quantised weights; nothing for other weights.
QuantisedRows Forward::quantise_rows(const Worker& worker, const pl_weight& w, const RowBuffer& x, long rows) {
  if (!w.bits) return {};
  QuantisedRows quantised_x = quantised_x_.rows_for(w);
  RowRange share = worker.share(rows);
  for (long r = share.begin; r < share.end; r++) quantised_->quantise_row(x.row(r), quantised_x, r);
  barrier_.wait();
  return quantised_x;
}

void Forward::resize_lora_buffers() {
  long low = 0, width = 0, head = 0;  // outputs of A, and of B in layers and in the head
  const long head_matrix = LORA_PER_LAYER * m_.layers;
  for (long r = 0; r < b_.runs; r++) {
    const pl_lora* pair = b_.run[r].pair;
    for (long n = 0; n <= head_matrix; n++) low = std::max<long>(low, pair[n].a.outputs);
    for (long n = 0; n < head_matrix; n++) width = std::max<long>(width, pair[n].b.outputs);
    head = std::max<long>(head, pair[head_matrix].b.outputs);
  }
  lora_low_.resize(low ? std::max(b_.rows, b_.logit_rows) : 0, low);
  lora_sums_.resize(width ? b_.rows : 0, width, false);
  lora_logits_.resize(head ? b_.logit_rows : 0, head, false);
  row_bias_.resize(b_.runs ? std::max(b_.rows, b_.logit_rows) : 0);
}

// B A x for each row that has an adapter for this matrix; NULL if no row has. By now all threads must have read the
// result for the matrix before, which is overwritten.
const float* const* Forward::lora_bias(const Worker& worker, long matrix, const RowBuffer& x) {
  bool is_head = matrix == LORA_PER_LAYER * m_.layers, any = false;
  for (long r = 0; r < b_.runs; r++) any |= b_.run[r].pair[matrix].a.data != nullptr;
  if (!any) return nullptr;
  RowBuffer& y = is_head ? lora_logits_ : lora_sums_;
  if (worker.index == 0) std::fill(row_bias_.begin(), row_bias_.end(), nullptr);
  for (bool second : {false, true}) {
    for (long r = 0; r < b_.runs; r++) {
      const pl_adapter_rows& run = b_.run[r];
      const pl_lora& pair = run.pair[matrix];
      long first = is_head ? run.first_logits : run.first, rows = is_head ? run.logit_rows : run.rows;
      if (!pair.a.data) continue;
      if (second) multiply(worker, pair.b, lora_low_, rows, STORE, y, first);
      else multiply(worker, pair.a, x, rows, ROUND, lora_low_, first);
      for (long row = first; worker.index == 0 && row < first + rows; row++) row_bias_[row] = y.row(row);
    }
    barrier_.wait();
  }
  return row_bias_.data();
}

// Stores the inputs of a layer as features if they are asked for. After the last layer they are what the head sees.
void Forward::store_features(const Worker& worker, long layer) {
  for (long f = 0; f < b_.features; f++) {
    if (b_.feature_layers[f] != layer) continue;
    RowRange rows = worker.share(b_.rows);
    for (long r = rows.begin; r < rows.end; r++) {
      const float* x = residual_.row(r);
      if (layer == m_.layers) k_.rms_norm(m_, m_.final_norm, x, normed_.row(r), m_.hidden), x = normed_.row(r);
      k_.store_row(m_.dtype, x, m_.hidden, static_cast<char*>(b_.feature[f]) + r * m_.hidden * dtype_bytes(m_.dtype));
    }
  }
}

void Forward::compute_logits(const Worker& worker) {
  barrier_.wait();
  const long size = dtype_bytes(m_.dtype);
  RowRange rows = worker.share(b_.logit_rows);
  for (long r = rows.begin; r < rows.end; r++) {
    const float* x = residual_.row(b_.logit_row_indices ? b_.logit_row_indices[r] : r);
    k_.rms_norm(m_, m_.head_norm.weight ? m_.head_norm : m_.final_norm, x, head_input_.row(r), m_.hidden);
    if (b_.outputs) k_.store_row(m_.dtype, x, m_.hidden, static_cast<char*>(b_.outputs) + r * m_.hidden * size);
  }
  barrier_.wait();
  const float* const* row_bias = lora_bias(worker, LORA_PER_LAYER * m_.layers, head_input_);
  QuantisedRows quantised_x = quantise_rows(worker, m_.head, head_input_, b_.logit_rows);
  pl_weight head = m_.head;
  if (b_.columns) head.outputs = b_.columns;
  Gemm p{&head, m_.dtype, head_input_.row(0), b_.logit_rows, head_input_.stride, LOGITS, b_.logits, head.outputs, 0, m_.logit_cap,
         quantised_, quantised_x, row_bias};
  k_.gemm(p, worker.index, worker.count, scratch_.row(worker.index));
  if (!b_.greedy) return;
  barrier_.wait();
  for (long r = rows.begin; r < rows.end; r++)
    b_.greedy[r] = k_.argmax(m_.dtype, static_cast<const char*>(b_.logits) + r * head.outputs * size, head.outputs);
}
