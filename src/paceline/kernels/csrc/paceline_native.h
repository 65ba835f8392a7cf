// The C interface: plain structures that Python fills through ctypes (library.py reads them from this file).
//
// The library owns neither weights nor caches. They are torch's memory, which the caller keeps alive. "In dtype" means
// float32 or bf16 numbers, as the field `dtype` says. NULL is allowed only where it is mentioned. Functions that return
// int give 0, or 1: no memory, 2: a token id or a position is out of range.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum { PL_FLOAT32 = 0, PL_BFLOAT16 = 1 };  // dtypes
enum { PL_SCALE_FLOAT = 0, PL_SCALE_BFLOAT16 = 1, PL_SCALE_HALF = 2 };
// Kinds of offsets: codes of 4 bits are -8 to 7 with the first, 0 to 15 with the second.
enum { PL_OFFSETS_NONE = 0, PL_OFFSETS_SIGNED = 1, PL_OFFSETS_UNSIGNED = 2 };
// Zero points that rounding may choose, see rounding.py.
enum { PL_ZERO_POINT_NONE = 0, PL_ZERO_POINT_WHOLE = 1, PL_ZERO_POINT_FREE = 2 };
enum { PL_PLAIN = 0, PL_GATE = 1, PL_UP = 2 };  // parts of a packed matrix

// A packed weight matrix, see gemm.h.
typedef struct {
  const void* data;   // NULL: there is no matrix
  const float* bias;  // float32, one for each packed output, or NULL
  int64_t outputs, inputs;  // a gate and the output that it gates count as one
  // Quantised weights, see quantised.cpp. bits: 8, 4, or 0 if the weights are numbers in dtype; groups_per_scale:
  // how many groups of 32 inputs share a scale, 0 if each has two scales (8 bits only); scale_kind: PL_SCALE_...;
  // offset_kind: PL_OFFSETS_...; int16_activations: else int8 (8-bit weights with an even groups_per_scale only); e2m1:
  // 4-bit codes are floats, see E2M1.
  int64_t bits, groups_per_scale, scale_kind, offset_kind, int16_activations, e2m1;
} pl_weight;

// An RMSNorm.
typedef struct {
  const float* weight;  // float32 [width]; NULL: there is no norm
  float eps;
} pl_norm;

typedef struct {
  pl_weight qkv, out, gate_up, down;
  pl_norm attention_norm, mlp_norm;    // before attention and MLP
  pl_norm post_attention_norm, post_mlp_norm;  // after them (Gemma)
  pl_norm q_norm, k_norm;              // of each head, or of all heads together (pl_model.norms_all_heads)
  const float* sinks;  // [heads]: a further score of each row, which has no value (GPT-OSS); or NULL
  int64_t window;  // how many keys a row sees, its own included; 0: all
  int64_t rope;    // index into the tables of pl_batch
  // Mixture of experts: each row goes through `experts_per_row` of them. experts 0: the layer has gate_up and down.
  int64_t experts, experts_per_row;
  pl_weight router;
  const pl_weight *expert_gate_up, *expert_down;  // [experts], all with activations quantised in the same way
} pl_layer;

typedef struct {
  int64_t dtype, hidden, vocab, embedding_rows, layers, heads, kv_heads, head_dim, ffn, activation;
  float embedding_scale, scaling, attention_cap, logit_cap;  // scaling: of attention scores; a cap of 0: none
  float residual_scale;  // of what attention and MLP add to the residual stream (Granite); 0: 1
  int64_t norms_all_heads;  // q_norm and k_norm are over all heads (OLMo 2)
  const void* embedding;  // [embedding_rows, hidden] in dtype
  const pl_layer* layer;
  pl_norm final_norm, head_norm;  // head_norm: with the scale of the logits, or NULL: final_norm
  pl_weight head;
  // An EAGLE head, whose rows are made of an embedding and a hidden state; fuse.data NULL: a decoder. Version 3 fuses
  // features to a hidden state, and attends from [embedding, hidden state], both normalised. Version 1
  // (hidden_norm.weight NULL) fuses embedding and hidden state.
  pl_weight fuse;
  pl_norm hidden_norm;
  int64_t residual_normed;  // the residual stream begins after hidden_norm
  // A block drafter, 0: none, 1: its rows attend causally, 2: the nodes of a span also to those behind them. Its rows
  // are embeddings; fuse and hidden_norm turn features into what its layers take as context.
  int64_t block;
} pl_model;

// Medusa heads: residual blocks x + silu(W x + b), and a layer to the vocabulary after them.
typedef struct {
  int64_t dtype, width, vocab, heads, blocks, shared;
  float logit_cap;
  const pl_weight* block;  // [heads][blocks]
  const pl_weight* head;   // [heads], or one if `shared`
} pl_medusa;

// The rows of one sequence, a Span of core/batch.py. Row r is pending token r, or from `pending` on the tree's node
// r - pending + first_new; earlier nodes are in the cache already.
typedef struct {
  int32_t start, context, pending, nodes, first_new;
  int32_t table_start, parents_start;  // where its block table and the parents of its nodes begin in pl_batch
  int32_t rope;  // its rows take the table after a layer's `rope` by so many: 1: that of long texts
} pl_span;

// A LoRA adapter's matrices for one packed matrix, to which they add B A x. B has as many outputs as the packed matrix,
// padding included. a.data NULL: the adapter adds nothing.
typedef struct {
  pl_weight a, b;
} pl_lora;

// Neighbouring rows with the same adapter, and their rows of logits.
typedef struct {
  int64_t first, rows, first_logits, logit_rows;
  const pl_lora* pair;  // [4 layers + 1]: qkv, out, gate_up, down of each layer, then the head
} pl_adapter_rows;

// One forward.
typedef struct {
  int64_t rows, spans, logit_rows, features, block_size, threads;
  const int32_t *ids, *positions, *slots;  // [rows]: tokens, their positions, and their places in the cache
  const pl_span* span;
  const int32_t *tables, *parents;
  const int32_t* logit_row_indices;  // [logit_rows]: the rows that have logits; NULL: all
  void* logits;           // [logit_rows, columns] in dtype; NULL: only `greedy` is wanted
  int64_t columns;        // how many tokens of the vocabulary, from the first on, have logits; 0: all
  const int32_t* feature_layers;  // [features], ascending: layers whose inputs are wanted; `layers`: what the head sees
  void* const* feature;           // each [rows, hidden] in dtype
  // Caches of each layer, [slots, kv_heads, head_dim] in dtype. `int8_cache`: int8, with a float32 scale after each head's
  // numbers: [slots, kv_heads, head_dim + 4] bytes.
  void *const *keys, *const *values;
  int64_t int8_cache;
  const uint8_t* skipped;    // [layers]: whether a layer is left out; or NULL
  const float* const* rope;  // tables [positions, head_dim]: half of each row cosines, half sines
  const float* query_scale;  // [positions]: by what queries are multiplied in addition (Ministral 3), or NULL
  // An EAGLE head, in dtype: its features [rows, fuse.inputs], or hidden states [rows, hidden] if `fused`; and
  // outputs [logit_rows, hidden], the hidden states of the next level. A block drafter: its features; the forward then
  // writes their keys and values and does nothing else. NULL: the rows of blocks.
  const void* hidden;
  int64_t fused;
  void* outputs;
  // [logit_rows], or NULL: the column of each row's largest logit, the first of equals; -1 if that is not finite, or
  // any logit is NaN.
  int32_t* greedy;
  int64_t runs;
  const pl_adapter_rows* run;  // rows that have adapters
} pl_batch;

// A draft tree to grow after a committed token. Each expanded node gets its `width` likeliest tokens as candidates. The
// `width` likeliest candidates of a level are expanded, and in the end the `nodes` likeliest of all stay, without those
// whose log-probability is below `min_node_score` (the first stays, and so do all nodes of a chain). A width of 1 is a chain. There
// is no next level if the nodes to expand have a probability of less than `min_level_prob` together, where that of a path
// counts as p^power.
typedef struct {
  int32_t depth, width, nodes;
  int32_t cached, table_start;  // cached tokens before the tree; where its block table begins in pl_growth
  int32_t sampling;  // 0: greedy; 1: truncated; 2: truncated, with the noise of seed and position; 3: drawn
  int32_t top_k;
  float inverse_temperature;  // 1 / temperature: tokens are scored by softmax(inverse_temperature * logits)
  float top_p, min_p, power, min_level_prob, min_node_score;
  int32_t rope;      // as in pl_span
  int64_t position;  // of the first level, for the noise
  uint64_t seed;     // hashed once
  const pl_lora* pair;  // its adapter, as in pl_adapter_rows, or NULL
} pl_tree;

typedef struct {
  int64_t trees, block_size, threads;
  const pl_tree* tree;
  const int32_t* tables;
  const pl_batch* first;  // a forward that writes `logits` first; NULL: they are there already
  const void* logits;     // of the committed tokens, in dtype: [trees, columns], with `stride` numbers from row to row
  int64_t stride, columns;  // columns: how many tokens of the vocabulary, from the first on, may be drafted
  const int64_t* ids;       // [columns]: the token of each column, ascending; NULL: the column's number
  const uint64_t* hashes;   // of each token's id, see noise.h; NULL if no tree has the noise of a seed
  const void* outputs;      // an EAGLE head's, [trees, hidden] in dtype; else NULL
  void *const *keys, *const *values;  // these four: as in pl_batch
  int64_t int8_cache;
  const uint8_t* skipped;
  const float* const* rope;
  const float* query_scale;
  // Results: `counts` nodes of each tree, parents first, in rows of `max_nodes`. slots: the number of a node among the expanded
  // ones, which is its place after `base` in the cache, or -1; scores: log-probabilities of paths.
  int64_t max_nodes;
  int32_t *tokens, *parents, *slots, *counts;
  float* scores;
  float* q;  // distributions from which chains were drawn, [trees, most, q_width]; with `ids` zero before the call
  int64_t q_width;
} pl_growth;

const char* pl_instructions(void);           // name of the kernels in use
int pl_choose_kernels(const char* instructions);  // chooses the kernels; 1: this processor does not have the instructions

// Processors that the process may use: a container may grant the time of fewer than it shows.
void pl_limit_processors(int64_t most);
// How often one of `threads` threads looks at a barrier before it yields; 0: more threads than processors.
int64_t pl_spins_before_yield(int64_t threads);
// How many of `threads` threads the next forward has: fewer where other processes take processors.
int64_t pl_active_threads(int64_t threads);

// Bytes of a packed matrix. Packing puts the rows of a dense matrix [rows, inputs] into it as the outputs from `first` on;
// with `unpack` they are taken out again. part: PL_PLAIN, PL_GATE or PL_UP.
int64_t pl_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs);
void pl_copy_dense(int64_t unpack, int64_t dtype, int64_t part, void* dense, int64_t rows, int64_t inputs, int64_t first,
                   void* packed);

// The same for a quantised matrix: codes [rows, inputs], scales and offsets
// float32 [rows, inputs / 32 / groups_per_scale]. offsets: NULL if there are none.
int64_t pl_quantised_bytes(const pl_weight* w);
void pl_copy_quantised(int64_t unpack, int64_t part, int8_t* codes, float* scales, float* offsets, int64_t rows,
                       int64_t first, const pl_weight* w);

// Rounds a weight [rows, columns] in dtype to codes of 8 or 4 bits, with a scale for each `group` inputs (a multiple of
// 16), for pl_copy_quantised. zero: PL_ZERO_POINT_...; offsets: NULL with PL_ZERO_POINT_NONE.
int pl_quantise(int64_t dtype, const void* weight, int64_t rows, int64_t columns, int64_t group, int64_t bits, int64_t zero,
             int8_t* codes, float* scales, float* offsets, int64_t threads);

// y = x W^T + b: x [rows, inputs] and y [rows, outputs] in dtype, with the logits' cap. Measurements repeat it: pass n
// of `passes` reads the weights n * stride bytes behind the first.
int pl_product(int64_t dtype, const pl_weight* w, const void* x, int64_t rows, float cap, int64_t passes, int64_t stride,
               void* y, int64_t threads);

// Steps of a recurrent layer, one for each row in order, from a slot of its states to another. States and inputs [rows,
// heads, ...] are float32. Without beta it is Mamba-2's step, with states [slots, heads, values, keys]; with beta that of the
// gated delta rule, with states [slots, heads, keys, values]. The last dimension is a multiple of 32.
typedef struct {
  int64_t rows, heads, keys, values;
  const int64_t *read_slots, *write_slots;  // [rows]: slots read and written
  const float *decay, *beta, *query, *key, *value;
  float *states, *out;
} pl_recurrence;

int pl_run_recurrence(const pl_recurrence* rows, int64_t threads);

// Opens a model: its structure, which is copied, and buffers of its forwards. NULL: no memory.
void* pl_open(const pl_model* model);
void pl_close(void* opened);
int pl_forward(void* opened, const pl_batch* batch);
int pl_grow(void* opened, const pl_growth* growth);

// Logits [rows, count, vocab] of the first `count` Medusa heads for x [rows, width], both in dtype.
int pl_medusa_logits(const pl_medusa* heads, const void* x, int64_t rows, int64_t count, void* logits, int64_t threads);

// Verifies a sampled draft. Row 0 has the logits of the committed text, row n + 1 those of node n. A row's choice is the
// token sampled after it: by Gumbel-max with the noise of seed and position (row 0's is `position`), or by inversion of
// `uniforms`. It is -1 if the row has no distribution.
// Without q, choices are sampled from the root down as long as they are among the children, or after all rows if `all`.
// With q [rows - 1, q_width], the distributions from which a chain was drawn, block verification decides which nodes are
// accepted, by `thresholds`.
typedef struct {
  int64_t dtype, rows, width, stride, top_k, all, threads;
  const void* logits;  // [rows, width] in dtype, with `stride` numbers from row to row
  float inverse_temperature, top_p, min_p;  // inverse_temperature: 1 / temperature
  const int32_t *tokens, *parents;  // of the nodes
  int64_t position;
  uint64_t seed;  // hashed once
  const uint64_t* hashes;  // [width]: of each token's id, see noise.h; NULL without a seed
  const double *uniforms, *thresholds;  // for each row and each node; NULL with a seed, thresholds also without q
  const float* q;
  int64_t q_width;
  int32_t* choices;   // [rows]
  uint8_t* accepted;  // [rows - 1]
} pl_verification;

int pl_verify(const pl_verification* verdicts, int64_t count, int64_t threads);

// An index of texts (lookup.cpp). lengths: of its n-grams, ascending; first and stop: positions of a text between which
// a continuation may begin. The others are for suffixes: depth is the most tokens of a match that are compared, and the
// rest limits drafts as draft/text_index.py says.
typedef struct {
  const int32_t* lengths;
  int64_t count, first, stop, depth;
  double factor, offset, min_prob;
} pl_lookup;

void* pl_index_open(const pl_lookup* rule);  // the structure is copied; NULL: no memory
void pl_index_close(void* index);
int pl_index_extend(void* index, const int32_t* tokens, int64_t count);
int pl_index_end_text(void* index);            // ends the open text
int64_t pl_index_drop_oldest(void* index);   // drops the oldest finished text, which must exist; returns its tokens
int64_t pl_index_copy_texts(void* index, int32_t* out);  // copies all texts, with -1 after each finished one; returns the length
int64_t pl_index_bytes(void* index);                 // of memory

// Append tokens to the open text and draft its continuation. query: levels, most nodes, number of new tokens, number of
// tokens given as the text's end (0 unless the index lacks tokens before the new ones); then these tokens. draft: number
// of nodes, tokens of the match, then tokens and parents of the nodes.
int pl_draft_ngrams(void* index, const int32_t* query, int32_t* draft);
int pl_draft_suffixes(void* index, void* memory, const int32_t* query, int32_t* draft);  // memory: another index, or NULL

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
