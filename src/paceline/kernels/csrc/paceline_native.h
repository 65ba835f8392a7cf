// The C interface: plain structures that Python fills through ctypes (library.py mirrors them).
//
// Nothing here owns weights or caches: they are torch's memory, and the caller keeps them alive.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum { PL_FLOAT32 = 0, PL_BFLOAT16 = 1 };
enum { PL_SCALE_FLOAT = 0, PL_SCALE_BFLOAT16 = 1, PL_SCALE_HALF = 2 };
enum { PL_OFFSETS_NONE = 0, PL_OFFSETS_MIDDLE = 1, PL_OFFSETS_LEAST = 2 };  // LEAST: codes of 4 bits are 0 to 15
enum { PL_ZERO_NONE = 0, PL_ZERO_WHOLE = 1, PL_ZERO_FREE = 2 };  // where codes may stand, see rounding.py
enum { PL_PLAIN = 0, PL_GATE = 1, PL_UP = 2 };  // places of a matrix in a packed one

// A packed matrix of a linear product, see gemm.h. bias: float32, one per packed output.
typedef struct {
  const void* data;  // NULL: there is none
  const float* bias;  // or NULL
  int64_t outputs, inputs;  // outputs as packed: a gated pair counts once
  // Of quantised weights, see quantised.cpp. bits: 8 or 4, 0 if these are plain numbers; repeat:
  // groups of 32 inputs that share a scale, 0 if each has two (8 bits only); scale_kind: PL_SCALE_...;
  // offsets: PL_OFFSETS_..., whether there are any, and to which code they belong; wide: activations
  // beside it have 16 bits (8 bits and an even repeat only).
  int64_t bits, repeat, scale_kind, offsets, wide;
} pl_weight;

typedef struct {
  const float* weight;  // float32 [width]; NULL: no norm here
  float eps;
} pl_norm;

typedef struct {
  pl_weight qkv, out, gate_up, down;
  pl_norm attention_norm, mlp_norm;  // of what goes into attention and MLP
  pl_norm attention_after, mlp_after;  // of what comes out of them (Gemma)
  pl_norm q_norm, k_norm;  // of each head
  int64_t window;  // keys that a row sees, itself included; 0: all
  int64_t rope;  // which table of cosines and sines
  // Of a layer with experts, of which each row goes through `chosen`; 0: gate_up and down are there.
  int64_t experts, chosen;
  pl_weight router;
  const pl_weight *expert_gate_up, *expert_down;  // [experts]; all are read with activations of one kind
} pl_layer;

typedef struct {
  int64_t dtype, hidden, vocab, words, layers, heads, kv_heads, head_dim, ffn, activation;
  float embedding_scale, scaling, attention_cap, logit_cap;  // caps: 0 is none
  float residual_scale;  // of what attention and MLP add (Granite); 0: 1
  const void* embedding;  // [words, hidden] in dtype
  const pl_layer* layer;
  pl_norm final_norm, head_norm;  // head_norm: with the scale of logits; NULL: final_norm
  pl_weight head;
  // Of an EAGLE head, whose rows are made of an embedding and a hidden state; fuse.data NULL: of a
  // decoder. Version 3 fuses features to a hidden state, and attends from both, normalised; version
  // 1 (hidden_norm.weight NULL) fuses the two.
  pl_weight fuse;
  pl_norm hidden_norm;
  int64_t residual_normed;  // the residual stream begins behind hidden_norm
} pl_model;

// Medusa: heads of residual blocks x + silu(W x + b), and a layer to the vocabulary behind each.
typedef struct {
  int64_t dtype, width, vocab, heads, blocks, shared;
  float logit_cap;
  const pl_weight* block;  // [heads][blocks]
  const pl_weight* head;  // [heads]; shared: the one of all
} pl_medusa;

// Rows of one sequence, as core/batch.py's Span. Row r of the span is its pending token r, or
// node r - pending + first_new of its tree.
typedef struct {
  int32_t start, context, pending, nodes, first_new;
  int32_t table, parents;  // where its block table and its nodes' parents begin
} pl_span;

// What an adapter adds to a packed product: B A x, B with as many outputs as the matrix, padding
// included. a.data NULL: nothing.
typedef struct {
  pl_weight a, b;
} pl_pair;

// Neighbouring rows with one adapter, and their rows of logits.
typedef struct {
  int64_t first, rows, first_logits, logit_rows;
  const pl_pair* pair;  // [4 layers + 1]: of a layer's qkv, out, gate_up, down; of the head
} pl_run;

typedef struct {
  int64_t rows, spans, logit_rows, features, block_size, threads;
  const int32_t *ids, *positions, *slots;  // [rows]
  const pl_span* span;
  const int32_t *tables, *parents;
  const int32_t* wanted;  // [logit_rows]: rows whose logits are wanted; NULL: all
  void* logits;  // [logit_rows, columns] in dtype; NULL: nobody wants them beside `greedy`
  int64_t columns;  // of the vocabulary, the first ones; 0: all
  const int32_t* feature_layers;  // [features], ascending
  void* const* feature;  // each [rows, hidden] in dtype
  // Per layer, [slots, kv_heads, head_dim] in dtype; `coded`: each head's numbers are codes of 8 bits
  // with their scale, a float, behind them: [slots, kv_heads, head_dim + 4] bytes.
  void *const *keys, *const *values;
  int64_t coded;
  const uint8_t* skipped;  // per layer, or NULL
  const float* const* rope;  // tables [positions, head_dim]: cosines, then sines, half of each
  // Of an EAGLE head, in dtype: features [rows, fuse.inputs], or [rows, hidden] if `fused` already;
  // and what the next step takes in, [logit_rows, hidden].
  const void* hidden;
  int64_t fused;
  void* outputs;
  // Of each row of logits, where the largest is, the first of several; -1 where that is not finite, or
  // any is not a number. [logit_rows], or NULL.
  int32_t* greedy;
  int64_t runs;
  const pl_run* run;  // rows with adapters
} pl_batch;

// A tree below a committed token: after each expanded node its `width` likeliest tokens, of which
// the `width` likeliest of a level are expanded; in the end the `nodes` likeliest stay, but for those
// of a log-probability below `least` (all but the first; a chain keeps what it has). A path of
// probability p counts as p^power; where the expanded nodes of a level have less than `stop` together,
// there is no other level. A width of 1 is a chain.
typedef struct {
  int32_t depth, width, nodes;
  int32_t base, table;  // rows of the cache in front of the nodes; where its block table begins
  int32_t sampled;  // 0: greedy; 1: truncated as asked for; 2: and by the noise of seed and position; 3: drawn
  int32_t top_k;
  float sharpness;  // what is scored is softmax(sharpness * logits)
  float top_p, min_p, power, stop, least;
  int64_t position;  // of the tree's first tokens
  uint64_t seed;  // hashed once
  const pl_pair* pair;  // of its adapter, as of a run; NULL: none
} pl_tree;

typedef struct {
  int64_t trees, block_size, threads;
  const pl_tree* tree;
  const int32_t* tables;
  // What has to be run before the first level: its logits are those after the committed tokens.
  const pl_batch* first;  // NULL: they are here already
  const void* logits;  // after the committed tokens, in dtype: [trees], `stride` numbers apart
  int64_t stride, columns;  // columns: the first ones, that are tokens; no others are computed
  const int64_t* ids;  // [columns]: tokens, ascending; NULL: the columns' numbers
  const void* outputs;  // of an EAGLE head, [trees, hidden] in dtype; else NULL
  void *const *keys, *const *values;
  int64_t coded;  // as of a batch, and so is
  const uint8_t* skipped;
  const float* const* rope;
  // Of each tree `counts` nodes in order, in lines of `most`: tokens, their parents, which expanded
  // node each is, or -1, and the log-probabilities of their paths.
  int64_t most;
  int32_t *tokens, *parents, *slots, *counts;
  float* scores;
  float* q;  // of drawn chains, [trees, most, q_width], with ids zero before: the distributions of their tokens
  int64_t q_width;
} pl_growth;

const char* pl_instructions(void);  // of the kernels in use
int pl_choose(const char* instructions);  // 0: chosen; else this processor does not have them

// Processors that the process may use: a container may grant the time of fewer than it shows.
void pl_limit_processors(int64_t most);
// How often one of `threads` threads looks at a barrier before it yields; 0: more threads than processors.
int64_t pl_spins_before_yield(int64_t threads);
// How many of `threads` threads the next forward has: fewer where other processes take processors.
int64_t pl_active_threads(int64_t threads);

int64_t pl_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs);
// Put a dense matrix [rows, inputs] into a packed one, from its output `first` on; and get it out.
void pl_pack(int64_t dtype, int64_t place, const void* dense, int64_t rows, int64_t inputs, int64_t first, void* packed);
void pl_unpack(int64_t dtype, int64_t place, void* dense, int64_t rows, int64_t inputs, int64_t first, const void* packed);

// The same of a quantised matrix, into the packed one or `out` of it: codes [rows, inputs], scales
// and offsets (NULL if there are none) float32 [rows, inputs / 32 / repeat].
int64_t pl_quantised_bytes(const pl_weight* w);
void pl_copy_quantised(int64_t out, int64_t place, int8_t* codes, float* scales, float* offsets, int64_t rows,
                       int64_t first, const pl_weight* w);

// Round a weight [rows, columns] in dtype to codes of 8 or 4 bits, `group` inputs (a multiple of 16)
// to a scale: what pl_copy_quantised takes. offsets: NULL without a zero of its own.
int pl_round(int64_t dtype, const void* weight, int64_t rows, int64_t columns, int64_t group, int64_t bits, int64_t zero,
             int8_t* codes, float* scales, float* offsets, int64_t threads);

// y = x W^T + b: x [rows, inputs] and y [rows, outputs] in dtype. cap as of the logits. For measuring: `passes` times,
// each over weights `apart` bytes behind the last's; else once.
int pl_product(int64_t dtype, const pl_weight* w, const void* x, int64_t rows, float cap, int64_t passes, int64_t apart,
               void* y, int64_t threads);

// Rows of a recurrent layer from slot to slot of its states, float32, in order; all others [rows,
// heads, ...] in float32. Without beta Mamba-2's step: states [slots, heads, values, keys]; with it the
// gated delta rule's: [slots, heads, keys, values]. The last one is a multiple of 32.
typedef struct {
  int64_t rows, heads, keys, values;
  const int64_t *before, *behind;  // [rows]
  const float *decay, *beta, *query, *key, *value;
  float *states, *out;
} pl_recurrence;

int pl_recur(const pl_recurrence* rows, int64_t threads);

// A model with the memory that its forwards work in; the structure is copied. NULL: no memory.
void* pl_open(const pl_model* model);
void pl_close(void* opened);
int pl_forward(void* opened, const pl_batch* batch);  // 0, or 1: no memory, 2: an id or a position out of range
int pl_grow(void* opened, const pl_growth* growth);  // the same

// Logits [rows, count, vocab] of the first `count` heads, from x [rows, width]; both in dtype.
int pl_medusa_logits(const pl_medusa* heads, const void* x, int64_t rows, int64_t count, void* logits, int64_t threads);

// What follows the rows of a sampled draft: row 0 the committed text, row n + 1 node n. choices [rows]:
// the token after each row that is looked at, -1 if that is no distribution: by the noise of the seed
// (hashed once) and the position, row 0's, or by uniforms. Without q: rows from the root down, as long as
// a choice is among the children; `all`: each row. With q [rows - 1, q_width], from which a chain was
// drawn: block verification, which says which nodes are accepted. uniforms: of each row, for its choice;
// thresholds: of each node.
typedef struct {
  int64_t dtype, rows, width, stride, top_k, all, threads;
  const void* logits;
  float sharpness, top_p, min_p;
  const int32_t *tokens, *parents;
  int64_t position;
  uint64_t seed;
  const double *uniforms, *thresholds;  // NULL with a seed, and without q
  const float* q;
  int64_t q_width;
  int32_t* choices;
  uint8_t* accepted;
} pl_verdict;

int pl_decide(const pl_verdict* verdicts, int64_t count, int64_t threads);  // 0, or 1: no memory

// An index of texts (lookup.cpp), and what it is asked for: lengths of the strings that it knows,
// ascending; `first` and `stop`: places of a text at which a continuation may begin. The others are of
// suffixes: tokens of a match at most, and what a draft may hold, as draft/text_index.py says.
typedef struct {
  const int32_t* lengths;
  int64_t count, first, stop, depth;
  double factor, offset, min_prob;
} pl_lookup;

void* pl_index_open(const pl_lookup* rule);  // the structure is copied. NULL: no memory
void pl_index_close(void* index);
int pl_index_extend(void* index, const int32_t* tokens, int64_t count);  // 0, or 1: no memory
int pl_index_finish(void* index);  // the same; the next tokens are of another text
int64_t pl_index_drop_oldest(void* index);  // a finished text: its tokens; there must be one
int64_t pl_index_stream(void* index, int32_t* out);  // how many: all texts, -1 behind each finished one
int64_t pl_index_bytes(void* index);  // of memory

// Take tokens in, and draft. ask: levels, most nodes, how many tokens are new, how many of the text's
// end are given because the index lacks others before them, else 0; then these tokens. out: nodes,
// tokens of the match, then tokens and parents of the nodes. 0, or 1: no memory.
int pl_ngrams(void* index, const int32_t* ask, int32_t* out);
int pl_suffixes(void* index, void* memory, const int32_t* ask, int32_t* out);  // memory: another or NULL

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
