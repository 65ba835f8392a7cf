// What forward.cpp asks of the kernels. Each instruction set fills one table; a kernel does one
// thread's share of its work, and every number that it makes depends on its own row alone.
#pragma once
#include "paceline_native.h"

constexpr long PANEL = 32;    // outputs packed side by side
constexpr long STRIPE = 32;   // inputs summed before they are added to the rest
constexpr long BLOCK = 256;   // keys of a block of attention, from a position divisible by it

constexpr long GROUP = 32;    // activations that share a scale

constexpr long round_up(long n, long to) { return (n + to - 1) / to * to; }

// What the cache has of one head at one position.
inline long entry_bytes(const pl_model& m, bool coded) {
  return coded ? m.head_dim + 4 : m.head_dim * (m.dtype == PL_BFLOAT16 ? 2 : 4);
}

// What happens to a product's sums.
enum Ending {
  STORE,  // y = c
  ADD,    // y += c
  ROUND,  // y = c, rounded to the dtype
  GATED,  // y = activation(gate) * up, rounded to the dtype
  LOGITS, // y = c, capped, in the dtype; rows of exactly `outputs` numbers
};

// Rows of activations in whole numbers: of 8 bits with a scale for each group, or `wide`, of 16 bits
// with one scale for the row.
struct QuantisedRows {
  void* codes;    // [rows, inputs]
  float* scales;  // [rows, groups] or [rows]
  long inputs;
  bool wide;
  // Those from this row on.
  QuantisedRows from(long row) const {
    if (!codes) return *this;
    return {static_cast<char*>(codes) + row * inputs * (wide ? 2 : 1), scales + row * (wide ? 1 : inputs / GROUP), inputs, wide};
  }
};

// The kernels of quantised.cpp for one instruction set.
struct Quantised {
  void (*row)(const float* x, const QuantisedRows&, long row);
  void (*product)(const struct Product&, long part, long parts, float* scratch);
};
extern const Quantised quantised_portable, quantised_avx2, quantised_vnni, quantised_neon;
extern __attribute__((weak)) const Quantised quantised_amx, quantised_dotprod, quantised_i8mm;

// Of a quantised panel, see quantised.cpp: inputs that share a scale, the bytes of 32 scales and offsets, and
// those with the codes behind them.
inline long group_of(const pl_weight& w) { return w.repeat ? w.repeat * GROUP : GROUP / 2; }
inline long head_line(const pl_weight& w) {
  return PANEL * (w.scale_kind == PL_SCALE_FLOAT ? 4 : 2) * (w.offsets ? 2 : 1);
}
inline long group_bytes(const pl_weight& w) { return head_line(w) + PANEL * group_of(w) * w.bits / 8; }
inline long panel_bytes(const pl_weight& w) { return w.inputs / group_of(w) * group_bytes(w); }

// Whether the processor itself fetches what is read once from end to end, and is only disturbed by being asked:
// AMD's do where pages are huge (Zen 4).
inline bool foresees() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

struct Product {
  const pl_weight* weight;
  int64_t dtype;
  const float* x;  // [rows, ldx], ldx a multiple of STRIPE; zeros behind the inputs
  long rows, ldx;
  Ending ending;
  void* y;  // [rows, ldy]; float but for LOGITS
  long ldy;
  int activation;
  float cap;
  const Quantised* quantised;  // of quantised weights: the kernels,
  QuantisedRows codes;         // and x
  const float* const* added = nullptr;  // what c is increased by: a row of panels, or NULL, for each row
};

// One row of the step as attention sees it.
struct Row {
  int32_t position;
  int32_t shared;  // positions below are in the block table, those from it on in `own`
  const int32_t* own;  // slots of the positions shared .. position
  const int32_t* table;
};

// Attention of rows.
struct Attention {
  const pl_model* model;
  const void *keys, *values;
  bool coded;
  long block_size, window;
  const float* q;  // [rows, ldq], scaled
  long ldq;
  float* out;  // [rows, ldo]
  long ldo;
  const Row* row;  // of the whole step
  float* scratch;  // of this thread: attention_scratch() floats
};

// Floats of all heads' results of a row.
inline long result_size(const pl_model& m) {
  return m.heads * round_up(m.head_dim, STRIPE) + 2 * round_up(m.heads, 16);
}

// Results of all rows over each of the blocks `from .. to`, and over all blocks before those.
struct Partial {
  float *results, *folded;
  long rows, from, to;
  float* at(long block, long row, const pl_model& m) const {
    return results + ((block - from) * rows + row) * result_size(m);
  }
};

// Rows `first .. first + rows` and blocks `from .. to` of some KV heads. Partial results of a row and
// query head are folded in the order of blocks; `partial` NULL: here, and `out` is written. Else
// each block's results go there: see attention.h. Of the block table it reads the positions
// `begin .. end`.
struct AttentionItem {
  long first, rows, kv_head, kv_heads, from, to, begin, end;
  const Partial* partial;
};

class AttentionItems {
 public:
  AttentionItems(const AttentionItem* from, const AttentionItem* to) : from_(from), to_(to) {}
  const AttentionItem* begin() const { return from_; }
  const AttentionItem* end() const { return to_; }

 private:
  const AttentionItem *from_, *to_;
};

// Fetches the keys and values of a thread's items into the second cache, a distance before they are used:
// the processor foresees neither the cache's blocks nor the next head.
class Ahead {
 public:
  Ahead(const Attention& a, AttentionItems items);
  // As much as so many keys and values of one KV head take.
  void step(long count);

 private:
  void open();
  const Attention& a_;
  const long head_bytes_;
  const AttentionItem *item_, *end_;
  long at_ = 0, head_ = 0;
};

// One of the experts that a row goes through; `place`: its row among all that do.
struct Choice {
  int32_t expert, place;
  float weight;
};

// A weight [rows, columns] that is rounded to codes, see rounding.h.
struct Rounding {
  int64_t dtype;
  const void* weight;
  long columns, group, bits, zero;  // inputs that share a scale; PL_ZERO_...
  int8_t* codes;
  float *scales, *offsets;  // offsets: NULL if there are none
};

// Rows that are rounded together: whether a free grid is in half precision is decided for all of
// them (best_grid() of rounding.py). Else they fill the sixteen lanes.
inline long rounded_rows(const Rounding& r) {
  long rows = (1 << 16) / r.columns, least = r.zero == PL_ZERO_FREE ? 1 : 16;
  return rows > least ? rows : least;
}
inline long rounding_scratch(const Rounding& r) {
  return round_up(rounded_rows(r) * (r.columns / r.group), 16) * (r.group + 2);
}

// The distribution of a row of logits: of those that are at least `cut`, e^(sharpness * (logit - first)) by their sum, `mass`.
struct Law {
  float sharpness, first, cut;
  double mass;
};
constexpr long STRETCH = 64;  // logits of a row that are looked at together

struct Kernels {
  const char* name;
  void (*product)(const Product&, long part, long parts, float* scratch);
  void (*attend)(const Attention&, const AttentionItem&, Ahead&);
  void (*fold)(const Attention&, const Partial&, long row);
  void (*embed)(const pl_model&, int32_t id, float* x);
  // Of one row: y = rounded(norm(x)); x += norm(y); q, k and v of a row of qkv.
  void (*normalise)(const pl_model&, const pl_norm&, const float* x, float* y, long width);
  void (*add_normalised)(const pl_model&, const pl_norm&, float* x, const float* y);
  // x += silu(y), and rounded to `next`
  void (*add_silu)(int64_t dtype, float* x, const float* y, float* next, long width);
  // The largest of a row's router logits, the largest first, weighted by their softmax; x += w y.
  void (*choose)(const float* logits, long experts, long count, Choice* chosen);
  void (*add_scaled)(float* x, const float* y, float w, long width);
  void (*place)(const pl_model&, const pl_layer&, const float* rope, float* qkv, void* key, void* value, bool coded);
  // The largest of a row's logits, the largest first, and the sum of e^(sharpness * (logit - largest));
  // without the sum (1) for a sharpness of 0.
  float (*likeliest)(int64_t dtype, const void* x, long width, long count, float sharpness, int32_t* places, float* values);
  // See pl_batch.
  int32_t (*greedy)(int64_t dtype, const void* x, long width);
  // Of a stretch of a row, or a shorter one: weights e^(...) * scale, less those of `less`, but none below
  // zero, into y; returns their sum. Neither `less` nor y need be there.
  float (*weigh)(int64_t dtype, const void* x, long width, const Law&, float scale, const float* less, float* y);
  // Those that may win a race against e^-best, as noise under `key` of ids[n], or of `id` and those behind
  // it; returns how many. `rest`: unless NULL, the sum of weight by noise of the others is added, to 1e-3.
  long (*contend)(int64_t dtype, const void* x, long width, const Law&, float best, uint64_t key, const int64_t* ids,
                  int64_t id, int32_t* places, float* rest);
  // How many of a row are at least `cut`; these into y, where that is not NULL.
  long (*collect)(int64_t dtype, const void* x, long width, float cut, float* y);
  void (*give)(int64_t dtype, const float* x, long width, void* y);
  void (*take)(int64_t dtype, const void* x, long width, float* y);
  void (*round_rows)(const Rounding&, long first, long rows, float* scratch);
  void (*recur)(const pl_recurrence&, long head);
};

constexpr long CHUNK = 48;  // rows of a product per pass over the weights
constexpr long TILED_ROWS = 256;  // as many where tile instructions are used
inline long product_scratch(long rows, long inputs) {
  long few = rows < CHUNK ? rows : CHUNK, many = rows < TILED_ROWS ? rows : TILED_ROWS;
  long halves = (many + 1) / 2;  // rows of bf16 in floats
  return CHUNK * PANEL + round_up(inputs, STRIPE) * (few > halves ? few : halves);
}

// Query rows (rows times the heads that share a KV head) of an attention item, and its scratch.
constexpr long ATTEND_TILE = 96;
inline long attention_scratch(const pl_model& m) {
  long group = m.heads / m.kv_heads, tile = ATTEND_TILE > group ? ATTEND_TILE : group;
  long width = round_up(m.head_dim, STRIPE), panels = (BLOCK + PANEL) * width;
  return tile * (3 * width + BLOCK * 3 / 2) + 4 * round_up(tile, 16) + panels;
}

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_neon;
extern __attribute__((weak)) const Kernels kernels_amx, kernels_dpbf16, kernels_i8mm;  // not every compiler can
