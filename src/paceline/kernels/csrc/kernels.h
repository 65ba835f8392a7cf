// The table of kernels through which the forward (forward.cpp) reaches one instruction set.
//
// Each instruction set fills one `Kernels` table (kernels.cpp) and, for quantised weights, one
// `QuantisedKernels` table (quantised.cpp). A kernel does one thread's share of an operation. Each number it
// computes depends on its own row alone, never on the other rows of the batch.
#pragma once
#include "paceline_native.h"

// The names of the tables that a compilation fills: PACELINE_TABLE behind `prefix`, and as text.
#if !defined(PACELINE_TABLE)
#define PACELINE_TABLE portable
#endif
#define PACELINE_JOIN(prefix, name) prefix##name
#define PACELINE_EXPAND(macro, ...) macro(__VA_ARGS__)
#define PACELINE_NAME(prefix) PACELINE_EXPAND(PACELINE_JOIN, prefix, PACELINE_TABLE)
#define PACELINE_TEXT(name) #name
#define PACELINE_QUOTED PACELINE_EXPAND(PACELINE_TEXT, PACELINE_TABLE)

constexpr long PANEL = 32;       // outputs of a packed weight that are interleaved
constexpr long STRIPE = 32;      // inputs that are summed from zero before their sum is added to the total
constexpr long KEY_BLOCK = 256;  // keys of one block of attention; blocks begin at multiples of 256 positions
constexpr long GROUP = 32;       // int8 activations that share a scale

constexpr long round_up(long n, long to) { return (n + to - 1) / to * to; }
constexpr long dtype_bytes(int64_t dtype) { return dtype == PL_BFLOAT16 ? 2 : 4; }

// Bytes of one KV head at one position of the cache. With int8 a float32 scale follows the values.
inline long kv_head_bytes(const pl_model& m, bool int8_kv) {
  return int8_kv ? m.head_dim + 4 : m.head_dim * dtype_bytes(m.dtype);
}

// What a GEMM does with its sums c.
enum Epilogue {
  STORE,   // y = c
  ADD,     // y += c
  ROUND,   // y = c, rounded to the dtype
  GATED,   // y = activation(gate) * up, rounded to the dtype
  LOGITS,  // y = softcap(c), stored in the dtype; rows are exactly `outputs` numbers long
};

// Quantised activations: int8 with a scale per group of 32 or, if `int16`, int16 with one scale per row.
struct QuantisedRows {
  void* values;   // [rows, inputs]
  float* scales;  // [rows, groups], or [rows] if int16
  long inputs;
  bool int16;
  // The rows from `row` on.
  QuantisedRows from_row(long row) const {
    if (!values) return *this;
    return {static_cast<char*>(values) + row * inputs * (int16 ? 2 : 1), scales + row * (int16 ? 1 : inputs / GROUP), inputs, int16};
  }
};

// The kernels of quantised.cpp for one instruction set.
struct QuantisedKernels {
  void (*quantise_row)(const float* x, const QuantisedRows&, long row);
  void (*gemm)(const struct Gemm&, long part, long parts, float* scratch);
};
extern const QuantisedKernels quantised_portable, quantised_avx2, quantised_vnni, quantised_neon;
extern __attribute__((weak)) const QuantisedKernels quantised_amx, quantised_dotprod, quantised_i8mm;

// Sizes in a panel of quantised weights (quantised.cpp draws the layout). A group is the inputs that share a
// scale. Its header holds 32 scales and, if there are zero points, 32 offsets.
inline long group_inputs(const pl_weight& w) { return w.groups_per_scale ? w.groups_per_scale * GROUP : GROUP / 2; }
inline long group_header_bytes(const pl_weight& w) {
  return PANEL * (w.scale_kind == PL_SCALE_FLOAT ? 4 : 2) * (w.offset_kind ? 2 : 1);
}
inline long group_bytes(const pl_weight& w) { return group_header_bytes(w) + PANEL * group_inputs(w) * w.bits / 8; }
inline long panel_bytes(const pl_weight& w) { return w.inputs / group_inputs(w) * group_bytes(w); }

// The values of the 4-bit floats of MXFP4, twice as large, so that they are integers; and what makes them unsigned.
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int32_t E2M1_BIAS = 12;

// Whether the hardware prefetcher follows a stream in huge pages by itself, so that software prefetches only
// disturb it. AMD's processors do (Zen 4).
inline bool prefetches_streams() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// y = epilogue(x W^T + bias + row_bias)
struct Gemm {
  const pl_weight* weight;
  int64_t dtype;
  const float* x;  // [rows, ldx]; ldx is a multiple of STRIPE, and columns from `inputs` on are zero
  long rows, ldx;
  Epilogue epilogue;
  void* y;  // [rows, ldy], float except for LOGITS
  long ldy;
  int activation;
  float cap;
  const QuantisedKernels* quantised;  // for quantised weights: their kernels
  QuantisedRows quantised_x;          // and the quantised x
  const float* const* row_bias = nullptr;  // for each row what LoRA adds to it, padded to panels, or NULL
};

// Where attention finds the keys and values of one row of the step.
struct AttentionRow {
  int32_t position;
  int32_t table_end;  // positions below it are in the block table, those from it on in `tree_slots`
  const int32_t* tree_slots;  // slots of the positions table_end .. position: the row's path in the draft tree
  const int32_t* block_table;
  int32_t rope;  // as in pl_span
};

// One layer's attention for all rows of the step.
struct Attention {
  const pl_model* model;
  const void *keys, *values;
  bool int8_kv;
  long block_size, window;
  const float* sinks;  // as in pl_layer
  const float* q;  // [rows, ldq], scaled
  long ldq;
  float* out;  // [rows, ldo]
  long ldo;
  const AttentionRow* rows;
  float* scratch;  // of this thread: attention_scratch() floats
};

// Floats of one row's partial result over one block of keys: value sums, l and m of all query heads (attention.h).
inline long partial_result_size(const pl_model& m) {
  return m.heads * round_up(m.head_dim, STRIPE) + 2 * round_up(m.heads, 16);
}

// The partial results of all rows over the key blocks first_block .. end_block, one per block, and the
// results over all blocks up to there.
struct PartialResults {
  float *blocks, *merged;
  long rows, first_block, end_block;
  float* at(long block, long row, const pl_model& m) const {
    return blocks + ((block - first_block) * rows + row) * partial_result_size(m);
  }
};

// A work item of attention: some rows of one sequence, some KV heads, some blocks of keys. It covers all blocks
// that its rows see and writes `out` if `partial` is NULL; otherwise it writes one partial result per block.
struct AttentionItem {
  long first_row, rows, kv_head, kv_heads, first_block, end_block;
  long table_begin, table_end;  // positions of the block table that it reads, for the prefetcher
  const PartialResults* partial;
};

struct AttentionItems {
  const AttentionItem *first, *last;
  const AttentionItem* begin() const { return first; }
  const AttentionItem* end() const { return last; }
};

// Prefetches the keys and values of a thread's items into L2, a fixed distance before they are used. The hardware
// prefetcher can predict neither the next cache block nor the next head.
class KvPrefetcher {
 public:
  KvPrefetcher(const Attention& a, AttentionItems items);
  // Prefetches the next `count` keys and values of one KV head.
  void advance(long count);

 private:
  void skip_empty_items();
  const Attention& a_;
  const long head_bytes_;
  const AttentionItem *item_, *end_;
  long position_ = 0, head_ = 0;
};

// One of the experts that a row is routed to.
struct ExpertChoice {
  int32_t expert;
  int32_t sorted_row;  // the row's index among all rows sorted by expert
  float weight;
};

// A weight [rows, columns] to quantise, see rounding.h.
struct WeightRounding {
  int64_t dtype;
  const void* weight;
  long columns, group, bits, zero;  // group: inputs that share a scale; zero: PL_ZERO_POINT_...
  int8_t* codes;
  float *scales, *offsets;  // offsets: NULL without zero points
};

// Rows that are quantised together. With free zero points best_grid() of rounding.py decides for them together
// whether scales are fp16. Otherwise they are at least enough to fill 16 lanes.
inline long rounded_rows(const WeightRounding& r) {
  long rows = (1 << 16) / r.columns, least = r.zero == PL_ZERO_POINT_FREE ? 1 : 16;
  return rows > least ? rows : least;
}
inline long rounding_scratch(const WeightRounding& r) {
  return round_up(rounded_rows(r) * (r.columns / r.group), 16) * (r.group + 2);
}

// The distribution of a row of logits x after truncation: p = e^(inverse_temperature * (x - largest)) / mass where x >= cutoff,
// else 0.
struct Distribution {
  float inverse_temperature, largest, cutoff;  // inverse_temperature: 1 / temperature
  double mass;
};
constexpr long LOGIT_CHUNK = 64;  // logits that the kernels of sampling take at once

struct Kernels {
  const char* name;
  void (*gemm)(const Gemm&, long part, long parts, float* scratch);
  void (*attend)(const Attention&, const AttentionItem&, KvPrefetcher&);
  void (*merge_partials)(const Attention&, const PartialResults&, long row);

  // Operations on one row (rows.h).
  void (*embed)(const pl_model&, int32_t id, float* x);
  void (*rms_norm)(const pl_model&, const pl_norm&, const float* x, float* y, long width);
  void (*add_rms_norm)(const pl_model&, const pl_norm&, float* x, const float* y);
  void (*add_silu)(int64_t dtype, float* x, const float* y, float* next, long width);
  void (*add_scaled)(float* x, const float* y, float scale, long width);
  // The `count` largest router logits, largest first, weighted by their softmax.
  void (*choose_experts)(const float* logits, long experts, long count, ExpertChoice* chosen);
  // Norms and rotates q and k of a row of qkv, scales q, and writes k and v to the cache.
  void (*rope_and_write_kv)(const pl_model&, const pl_layer&, const float* rope, float scaling, float* qkv, void* key, void* value, bool int8_kv);
  void (*load_row)(int64_t dtype, const void* x, long width, float* y);
  void (*store_row)(int64_t dtype, const float* x, long width, void* y);

  // The `count` largest of a row of logits, largest first. Returns the sum of e^(inverse_temperature * (logit - largest)), or
  // 1 without computing it if inverse_temperature is 0.
  float (*top_k)(int64_t dtype, const void* x, long width, long count, float inverse_temperature, int32_t* ids, float* values);
  int32_t (*argmax)(int64_t dtype, const void* x, long width);  // -1 if a logit is NaN or the largest is not finite
  // Sampling (sampling_kernels.h). For at most LOGIT_CHUNK logits: y = max(e^(...) * scale - q, 0). Returns the sum. q and y
  // may be NULL.
  float (*residual_weights)(int64_t dtype, const void* x, long width, const Distribution&, float scale, const float* q,
                            float* y);
  // The columns, of at most LOGIT_CHUNK, whose Gumbel-max score may exceed `best`, with the noise of `key` for tokens
  // with these hashes (noise.h). Returns how many. `rest`, unless NULL, grows by the sum of weight / noise of all
  // others, to a relative error of 1e-3.
  long (*gumbel_candidates)(int64_t dtype, const void* x, long width, const Distribution&, float best, uint64_t key,
                            const uint64_t* hashes, int32_t* candidates, float* rest);
  // How many logits of a row are at least `least`; y, unless NULL, gets them.
  long (*collect_at_least)(int64_t dtype, const void* x, long width, float least, float* y);

  void (*round_weight_rows)(const WeightRounding&, long first, long rows, float* scratch);
  void (*recurrent_steps)(const pl_recurrence&, long head);
};

constexpr long ROWS_PER_PASS = 48;       // rows of a GEMM that go over the weights together
constexpr long AMX_ROWS_PER_PASS = 256;  // the same with tile instructions
inline long gemm_scratch(long rows, long inputs) {
  long few = rows < ROWS_PER_PASS ? rows : ROWS_PER_PASS, many = rows < AMX_ROWS_PER_PASS ? rows : AMX_ROWS_PER_PASS;
  long bf16_rows = (many + 1) / 2;  // in floats
  return ROWS_PER_PASS * PANEL + round_up(inputs, STRIPE) * (few > bf16_rows ? few : bf16_rows);
}

constexpr long ATTENTION_HEADS = 96;  // query heads (rows times heads of a KV head) of an attention item, at most
inline long attention_scratch(const pl_model& m) {
  long group = m.heads / m.kv_heads, heads = ATTENTION_HEADS > group ? ATTENTION_HEADS : group;
  long width = round_up(m.head_dim, STRIPE), panels = (KEY_BLOCK + PANEL) * width;
  return heads * (3 * width + KEY_BLOCK * 3 / 2) + 4 * round_up(heads, 16) + panels;
}

// Whether GEMMs with and without tiles give the same bits: with bf16 weights, and with 8-bit weights and int16 or
// int8 activations (amx_trial.cpp). `memory` has TRIAL_FLOATS.
constexpr long TRIAL_FLOATS = 40000;
bool same_gemms(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
                const QuantisedKernels& quantised_plain, float* memory);
// Whether the AMX kernels run here and give the bits of the plain ones, tried in a child process.
bool amx_works(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
               const QuantisedKernels& quantised_plain);

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_neon;
extern __attribute__((weak)) const Kernels kernels_amx, kernels_dpbf16, kernels_i8mm;  // not every compiler can
