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

// Rows of floats. Columns behind a row's numbers are zeros, and stay so as long as the width is the
// same: products read them. (What no product reads need not be `zeros`.)
class Rows {
 public:
  void shape(long rows, long width, bool zeros = true) {
    ld = round_up(width, PANEL);
    if (rows * ld <= size_) return;
    size_t bytes = static_cast<size_t>(rows * ld) * sizeof(float);
    data_.reset();
    size_ = 0;
    data_.reset(static_cast<float*>(std::aligned_alloc(64, round_up(static_cast<long>(bytes), 64))));
    if (!data_) throw std::bad_alloc();
    if (zeros) std::memset(data_.get(), 0, bytes);
    size_ = rows * ld;
  }
  float* at(long row) const { return data_.get() + row * ld; }
  // Gives the memory back if it is more than so many floats.
  void keep(long most) {
    if (size_ > most) data_.reset(), size_ = 0;
  }
  long ld = 0;

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
  long size_ = 0;
};

// Rows of activations in whole numbers.
class Codes {
 public:
  void shape(long rows, long inputs) {
    codes_.resize(static_cast<size_t>(rows * inputs));
    scales_.resize(static_cast<size_t>(rows * inputs / GROUP));
  }
  // As rows for these weights, of at most the inputs of shape().
  QuantisedRows of(const pl_weight& w) { return {codes_.data(), scales_.data(), w.inputs, w.wide != 0}; }

 private:
  std::vector<int16_t> codes_;
  std::vector<float> scales_;
};

// The part of `rows` that a thread does.
struct Share {
  long from, to;
  Share(long rows, int thread, int threads) : from(rows * thread / threads), to(rows * (thread + 1) / threads) {}
};

// Rows of one sequence.
struct RowTile {
  long first, rows;
};

// How attention of all layers with this window is divided: items in the order of rounds and, in a
// round, of parts, which take about as long as each other.
struct Division {
  long window, parts = 1;
  std::vector<AttentionItem> items;
  std::vector<size_t> borders;  // [rounds, parts + 1]

  AttentionItems of(long round, int thread, int threads) const {
    const size_t* border = borders.data() + round * (parts + 1);
    return {items.data() + border[parts * thread / threads], items.data() + border[parts * (thread + 1) / threads]};
  }
};

class Forward {
 public:
  explicit Forward(const pl_model& model);
  void run(const Kernels& kernels, const QuantisedKernels& quantised, const pl_batch& batch);
  const pl_model& model() const { return m_; }

 private:
  void lay_out();
  void divide(long threads);
  long read_by(long window, AttentionItem& item) const;
  void work(int thread, int threads);
  void begin(int thread, int threads);
  void layer(long index, int thread, int threads);
  void attention(long index, int thread, int threads);
  void keep_features(long layer, int thread, int threads);
  void logits(int thread, int threads);
  void multiply(const pl_weight& w, const Rows& x, long rows, Epilogue epilogue, Rows& y, int thread, int threads,
                long first = 0, const float* const* added = nullptr);
  void multiply_coded(const pl_weight& w, const Rows& x, const QuantisedRows& codes, long rows, Epilogue epilogue, Rows& y,
                      int thread, int threads, long first, const float* const* added = nullptr);
  void make_room();
  const float* const* adapt(long pair, const Rows& x, int thread, int threads);
  QuantisedRows coded(const pl_weight& w, const Rows& x, long rows, int thread, int threads);
  void experts(const pl_layer& l, int thread, int threads);
  void sort_by_expert(const pl_layer& l);
  void add_product(const pl_weight& w, const Rows& x, const pl_norm& after, long pair, int thread, int threads);
  void normalise(const pl_norm& norm, const Rows& x, Rows& y, int thread, int threads);

  pl_model m_;
  std::vector<pl_layer> layers_;
  std::mutex busy_;

  // Of the forward that is under way.
  Kernels k_;
  const QuantisedKernels* quantised_ = nullptr;
  pl_batch b_;
  Barrier barrier_;
  Codes codes_;
  Rows x_, given_, joined_, normed_, qkv_, attended_, hidden_, product_, last_, partial_, scratch_;
  std::vector<AttentionRow> row_;
  std::vector<int32_t> own_;
  std::vector<RowTile> tiles_;
  std::vector<Division> divisions_;
  std::vector<size_t> of_layer_;  // its division
  Rows routed_, sorted_;         // of experts: router logits, and each row once for each of its experts,
  std::vector<ExpertChoice> choices_;  // [rows, chosen]
  std::vector<long> begin_;      // where each expert's rows begin
  long blocks_ = 1, together_ = 1;  // of keys; and those of a round of attention
  bool divided_ = false;            // items take less than all of them, and give partial results
  std::vector<char> logits_;        // that nobody else wants
  Rows low_, added_, added_logits_;  // of adapters: A x, and B A x of a layer's products and of the head's
  std::vector<const float*> adapted_;  // B A x of each row, or NULL
};

// Grows drafts (grow.cpp); what it needs for a level stays for the next call.
class Growth {
 public:
  void run(Forward& forward, const Kernels& kernels, const QuantisedKernels& quantised, const pl_growth& growth);

 private:
  std::mutex busy_;
  std::vector<char> logits_, outputs_, hidden_;
};

struct Opened {
  explicit Opened(const pl_model& model) : forward(model) {}
  Forward forward;
  Growth growth;
};

// Of the first `count` Medusa heads, for x [rows, width]: see paceline_native.h.
void medusa_logits(const Kernels& kernels, const QuantisedKernels& quantised, const pl_medusa& heads, const void* x, long rows,
                   long count, void* logits, long threads);
