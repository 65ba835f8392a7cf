// The kernels under the sanitizers: `make native-check`.
//
// Random decoders of unusual sizes, in exactly as much memory as they need. Sequences are decoded one row
// at a time, then in chunks, with trees and in batches, on several threads, with every instruction set of
// this processor; all logits must be equal bit for bit. The buffer for partial results of attention is small
// here (PACELINE_PARTIAL): a single row processes its blocks of keys at once, chunks process them in rounds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "noise.h"
#include "paceline_native.h"

namespace {

std::mt19937 rng(7);

// Threads of a call, at most as OMP_NUM_THREADS says: on one processor threads that wait for each other take long.
int at_most(int threads) {
  const char* given = std::getenv("OMP_NUM_THREADS");
  return given ? std::min(threads, std::atoi(given)) : threads;
}

float number() { return std::uniform_real_distribution<float>(-0.5f, 0.5f)(rng); }
int below(int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng); }

typedef std::vector<char> Bytes;

Bytes numbers(int64_t dtype, int64_t count) {
  Bytes bytes(count * (dtype == PL_BFLOAT16 ? 2 : 4));
  for (int64_t i = 0; i < count; i++) {
    float x = number();
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint16_t half = bits >> 16;
    if (dtype == PL_BFLOAT16)
      memcpy(&bytes[2 * i], &half, 2);
    else
      memcpy(&bytes[4 * i], &x, 4);
  }
  return bytes;
}

struct Sizes {
  int64_t dtype, hidden, heads, kv_heads, head_dim, ffn, window;
  bool gemma;
  int eagle = 0, experts = 0;  // version of the EAGLE head (0: none); experts per layer
  bool coded = false;          // 8-bit keys and values
  int length = 80;             // tokens of the text; a block of keys has 256
};

constexpr int LAYERS = 2, VOCAB = 61, LONGEST = 620, BLOCK = 4;

// Owns the memory that a pl_model points to.
class Model {
 public:
  explicit Model(const Sizes& s) : size(s), rope(LONGEST * s.head_dim), layers(LAYERS) {
    for (float& x : rope) x = number();
    states = numbers(s.dtype, VOCAB * state_width());
    for (pl_layer& l : layers) {
      l = pl_layer{};
      int64_t inner = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
      l.qkv = weight(inner + 2 * kv, s.eagle == 3 ? 2 * s.hidden : s.hidden, PL_PLAIN, true);
      l.out = weight(s.hidden, inner, PL_PLAIN, false);
      l.gate_up = weight(s.ffn, s.hidden, PL_GATE, true);
      l.down = weight(s.hidden, s.ffn, PL_PLAIN, true);
      for (int e = 0; e < s.experts; e++) {
        gate_up.push_back(weight(s.ffn, s.hidden, PL_GATE, true));
        down.push_back(weight(s.hidden, s.ffn, PL_PLAIN, true));
      }
      l.experts = s.experts, l.experts_per_row = s.experts / 2;
      if (s.experts) l.router = weight(s.experts, s.hidden, PL_PLAIN, true), l.sinks = norm(s.heads).weight;  // as GPT-OSS
      if (s.eagle != 1) l.attention_norm = norm(s.hidden);
      l.mlp_norm = norm(s.hidden);
      if (s.gemma) l.post_attention_norm = norm(s.hidden), l.post_mlp_norm = norm(s.hidden);
      l.q_norm = norm(s.head_dim);
      l.k_norm = norm(s.head_dim);
      l.window = &l == &layers[0] ? s.window : 0;
    }
    for (size_t i = 0; s.experts && i < LAYERS; i++) {
      layers[i].expert_gate_up = gate_up.data() + i * s.experts;
      layers[i].expert_down = down.data() + i * s.experts;
    }
    embedding = numbers(s.dtype, VOCAB * s.hidden);
    model = pl_model{};
    model.dtype = s.dtype, model.hidden = s.hidden, model.vocab = model.embedding_rows = VOCAB, model.layers = LAYERS;
    model.heads = s.heads, model.kv_heads = s.kv_heads, model.head_dim = s.head_dim, model.ffn = s.ffn;
    model.activation = s.experts ? 2 : s.gemma, model.embedding_scale = s.gemma ? 3.0f : 1.0f, model.scaling = 0.4f;
    model.attention_cap = s.gemma ? 2.0f : 0.0f, model.logit_cap = s.gemma ? 4.0f : 0.0f;
    model.embedding = embedding.data(), model.layer = layers.data(), model.final_norm = norm(s.hidden);
    if (s.eagle) {
      model.layers = 1;
      model.fuse = weight(s.hidden, s.eagle == 3 ? 3 * s.hidden : 2 * s.hidden, PL_PLAIN, true);
      if (s.eagle == 3) model.hidden_norm = norm(s.hidden);
      if (s.eagle == 1) model.final_norm = pl_norm{};
    }
    model.head = weight(VOCAB, s.hidden, PL_PLAIN, false);
    opened = pl_open(&model);
  }
  ~Model() { pl_close(opened); }

  int64_t state_width() const { return size.eagle == 3 ? 3 * size.hidden : size.hidden; }

  Sizes size;
  Bytes states;  // an EAGLE head's hidden state for each token
  std::vector<pl_weight> gate_up, down;
  std::vector<float> rope;
  std::vector<pl_layer> layers;
  Bytes embedding;
  pl_model model;
  void* opened;

  pl_norm norm(int64_t width) {
    floats.emplace_back(new std::vector<float>(width));
    for (float& x : *floats.back()) x = 1.0f + number();
    return {floats.back()->data(), 1e-5f};
  }

  pl_weight weight(int64_t outputs, int64_t inputs, int64_t place, bool bias) {
    int64_t padded = place == PL_PLAIN ? (outputs + 31) / 32 * 32 : (outputs + 15) / 16 * 32;
    packed.emplace_back(new Bytes(pl_packed_bytes(size.dtype, padded, inputs)));
    for (int64_t p : {place, int64_t{PL_UP}}) {
      if (p == PL_UP && place == PL_PLAIN) break;
      Bytes dense = numbers(size.dtype, outputs * inputs), back(dense.size());
      pl_copy_dense(0, size.dtype, p, dense.data(), outputs, inputs, 0, packed.back()->data());
      pl_copy_dense(1, size.dtype, p, back.data(), outputs, inputs, 0, packed.back()->data());
      if (dense != back) printf("packing changes a weight\n"), exit(1);
    }
    floats.emplace_back(new std::vector<float>(padded));
    for (int64_t i = 0; i < outputs && place == PL_PLAIN; i++) (*floats.back())[i] = number();
    pl_weight w{};
    w.data = packed.back()->data(), w.outputs = outputs, w.inputs = inputs;
    w.bias = bias ? floats.back()->data() : nullptr;
    return w;
  }

  // The memory that the structures point to.
  std::vector<std::unique_ptr<std::vector<float>>> floats;
  std::vector<std::unique_ptr<Bytes>> packed;
};

struct Cache {
  explicit Cache(const Sizes& s) : parts(2 * LAYERS), table(LONGEST / BLOCK + 1) {
    size_t entries = table.size() * BLOCK * s.kv_heads;
    for (Bytes& part : parts)
      part = s.coded ? Bytes(entries * (s.head_dim + 4), char(-1)) : numbers(s.dtype, entries * s.head_dim);  // NaN
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  }
  int32_t slot(int32_t index) const { return table[index / BLOCK] * BLOCK + index % BLOCK; }
  std::vector<Bytes> parts;
  std::vector<int32_t> table;
};

// Logits and features of pending tokens and tree nodes after `context` cached tokens.
Bytes forward(Model& m, Cache& cache, const std::vector<int32_t>& ids, int context,
              const std::vector<int32_t>& parents, int threads) {
  int nodes = static_cast<int>(parents.size()), rows = static_cast<int>(ids.size()), pending = rows - nodes;
  std::vector<int32_t> positions, slots, wanted, depth;
  for (int r = 0; r < rows; r++) {
    int node = r - pending;
    if (node >= 0) depth.push_back(parents[node] < 0 ? 0 : depth[parents[node]] + 1);
    positions.push_back(node < 0 ? context + r : context + pending + depth[node]);
    slots.push_back(cache.slot(context + r));
    wanted.push_back(r);
  }
  pl_span span{0, context, pending, nodes, 0, 0, 0};
  size_t each = m.size.dtype == PL_BFLOAT16 ? 2 : 4;
  Bytes logits(rows * VOCAB * each), feature(rows * m.size.hidden * each), last(feature.size());
  std::vector<void*> keys, values, features{feature.data(), last.data()};
  for (int layer = 0; layer < LAYERS; layer++) {
    keys.push_back(cache.parts[2 * layer].data());
    values.push_back(cache.parts[2 * layer + 1].data());
  }
  int32_t feature_layers[] = {1, LAYERS};
  const float* ropes[] = {m.rope.data()};
  pl_batch b{};
  b.rows = rows, b.spans = 1, b.logit_rows = rows, b.features = 2, b.block_size = BLOCK, b.threads = at_most(threads);
  b.ids = ids.data(), b.positions = positions.data(), b.slots = slots.data(), b.span = &span;
  b.tables = cache.table.data(), b.parents = parents.data(), b.logit_row_indices = wanted.data(), b.logits = logits.data();
  b.feature_layers = feature_layers, b.feature = features.data();
  b.keys = keys.data(), b.values = values.data(), b.int8_cache = m.size.coded, b.rope = ropes;
  Bytes states, outputs(rows * m.size.hidden * each);
  size_t width = m.state_width() * each;
  for (int32_t id : ids) states.insert(states.end(), m.states.begin() + id * width, m.states.begin() + (id + 1) * width);
  if (m.size.eagle) b.hidden = states.data(), b.outputs = outputs.data();
  if (pl_forward(m.opened, &b)) printf("no memory\n"), exit(1);
  logits.insert(logits.end(), feature.begin(), feature.end());
  return logits;
}

// The logits of row `row` of a forward of `rows`.
Bytes row_of(const Model& m, const Bytes& out, int row) {
  size_t each = VOCAB * (m.size.dtype == PL_BFLOAT16 ? 2 : 4);
  return Bytes(out.begin() + static_cast<long>(row * each), out.begin() + static_cast<long>((row + 1) * each));
}

void expect(bool same, const char* what) {
  if (same) return;
  printf("%s: %s gives different bits\n", pl_instructions(), what);
  exit(1);
}

std::vector<Bytes> run(Model& m) {
  const int length = m.size.length;
  std::vector<int32_t> text(length + 10);
  for (int32_t& id : text) id = below(VOCAB);
  Cache cache(m.size);
  std::vector<Bytes> expected;
  for (int at = 0; at < length + 10; at++) expected.push_back(row_of(m, forward(m, cache, {text[at]}, at, {}, 1), 0));
  for (int threads : {1, 3, 2}) {
    Cache other(m.size);
    for (int at = 0, rows; at < length; at += rows) {
      rows = threads == 2 ? length : std::min(1 + below(90), length - at);
      std::vector<int32_t> part(text.begin() + at, text.begin() + at + rows);
      Bytes out = forward(m, other, part, at, {}, threads);
      for (int r = 0; r < rows; r++) expect(row_of(m, out, r) == expected[at + r], "a chunk");
    }
    // A tree whose nodes 0, 2, 5 and 8 continue the text; the others are random tokens.
    std::vector<int32_t> ids{text[length]}, parents{-1, -1, 0, 0, 1, 2, -1, 3, 5};
    for (int node = 0, depth = 0; node < 9; node++)
      ids.push_back(node == 0 || node == 2 || node == 5 || node == 8 ? text[length + 1 + depth++] : below(VOCAB));
    Bytes out = forward(m, other, ids, length, parents, threads);
    int rows[] = {0, 1, 3, 6, 9};
    for (int depth = 0; depth < 5; depth++) expect(row_of(m, out, rows[depth]) == expected[length + depth], "a tree");
  }
  return expected;
}

std::vector<uint64_t> id_hashes(int64_t count) {
  std::vector<uint64_t> hashes;
  for (int64_t id = 0; id < count; id++) hashes.push_back(splitmix(static_cast<uint64_t>(id) * GOLDEN));
  return hashes;
}

// The nodes grown from `trees`: for each tree their count, then tokens, parents and slots.
std::vector<std::vector<int32_t>> grown(Model& m, Cache& cache, const std::vector<pl_tree>& trees, const Bytes& logits,
                                        const Bytes& outputs, int threads) {
  const int64_t most = 9;
  size_t count = trees.size();
  std::vector<int32_t> tokens(count * most), parents(count * most), slots(count * most), counts(count);
  std::vector<float> scores(count * most);
  std::vector<void*> keys, values;
  for (int layer = 0; layer < LAYERS; layer++) {
    keys.push_back(cache.parts[2 * layer].data());
    values.push_back(cache.parts[2 * layer + 1].data());
  }
  const float* ropes[] = {m.rope.data()};
  std::vector<uint64_t> hashes = id_hashes(VOCAB);
  pl_growth g{};
  g.trees = static_cast<int64_t>(count), g.block_size = BLOCK, g.threads = at_most(threads), g.tree = trees.data();
  g.tables = cache.table.data(), g.logits = logits.data(), g.stride = g.columns = VOCAB;
  g.hashes = hashes.data();
  g.outputs = m.size.eagle ? outputs.data() : nullptr;
  g.keys = keys.data(), g.values = values.data(), g.int8_cache = m.size.coded, g.rope = ropes, g.max_nodes = most;
  g.tokens = tokens.data(), g.parents = parents.data(), g.slots = slots.data(), g.counts = counts.data();
  g.scores = scores.data();
  if (pl_grow(m.opened, &g)) printf("no memory\n"), exit(1);
  std::vector<std::vector<int32_t>> nodes_of;
  for (size_t n = 0; n < count; n++) {
    nodes_of.push_back({counts[n]});
    for (const auto* part : {&tokens, &parents, &slots})
      nodes_of.back().insert(nodes_of.back().end(), part->begin() + n * most, part->begin() + n * most + counts[n]);
  }
  return nodes_of;
}

// Drafts grown in one call equal those grown one by one.
void growth(Model& m) {
  std::vector<pl_tree> trees{{4, 3, 9, 5, 0}, {5, 1, 5, 2, 20}, {1, 2, 2, 7, 40}, {3, 2, 4, 3, 60}};
  for (size_t n = 0; n < trees.size(); n++) {
    pl_tree& tree = trees[n];
    tree.cached = m.size.coded ? 0 : tree.cached;  // int8 values that were never written are not numbers
    tree.sampling = static_cast<int32_t>(n % 3), tree.top_k = 1 << 30, tree.inverse_temperature = 1.75f;
    tree.top_p = 1.0f, tree.position = 7, tree.seed = n, tree.power = 1.0f;
    tree.min_level_prob = n == 1 ? 0.05f : 0.0f, tree.min_node_score = n == 3 ? -1.0f : -INFINITY;
  }
  Bytes logits = numbers(m.size.dtype, trees.size() * VOCAB), outputs = numbers(m.size.dtype, trees.size() * m.size.hidden);
  size_t row = logits.size() / trees.size(), state = outputs.size() / trees.size();
  Cache cache(m.size);
  std::vector<std::vector<int32_t>> all = grown(m, cache, trees, logits, outputs, 3);
  for (size_t n = 0; n < trees.size(); n++) {
    Bytes own_logits(logits.begin() + n * row, logits.begin() + (n + 1) * row);
    Bytes own_outputs(outputs.begin() + n * state, outputs.begin() + (n + 1) * state);
    expect(grown(m, cache, {trees[n]}, own_logits, own_outputs, 1)[0] == all[n], "a draft among others");
    bool whole = n != 1 && n != 3;  // the others end early or omit unlikely nodes
    expect(whole ? all[n][0] == trees[n].nodes : all[n][0] > 0 && all[n][0] < trees[n].nodes, "the number of a draft's nodes");
  }
}

// The Medusa logits of several rows equal those of each row alone.
void medusa(int64_t dtype, int64_t width, int64_t blocks, bool shared) {
  Model owner({dtype, width, 1, 1, 8, 16, 0, false});
  std::vector<pl_weight> block(3 * blocks), head(shared ? 1 : 3);
  for (pl_weight& w : block) w = owner.weight(width, width, PL_PLAIN, true);
  for (pl_weight& w : head) w = owner.weight(VOCAB, width, PL_PLAIN, false);
  pl_medusa heads{dtype, width, VOCAB, 3, blocks, shared, 0.0f, block.data(), head.data()};
  const int64_t rows = 7, each = dtype == PL_BFLOAT16 ? 2 : 4, row = 3 * VOCAB * each;
  Bytes x = numbers(dtype, rows * width), all(rows * row), one(row);
  pl_medusa_logits(&heads, x.data(), rows, 3, all.data(), at_most(3));
  for (int64_t r = 0; r < rows; r++) {
    Bytes alone(x.begin() + r * width * each, x.begin() + (r + 1) * width * each);
    pl_medusa_logits(&heads, alone.data(), 1, 3, one.data(), 1);
    expect(!memcmp(one.data(), all.data() + r * row, row), "a row of Medusa heads");
  }
}

// Decisions on a draft of three tokens, for each kind of draw: every instruction set gives the same ones.
std::vector<int32_t> decisions(int64_t dtype, int64_t width) {
  const int64_t rows = 4, narrow = width - 3;
  Bytes logits = numbers(dtype, rows * width);
  std::vector<float> q(static_cast<size_t>(3 * narrow), 1.0f / static_cast<float>(narrow));
  std::vector<int32_t> tokens{0, 1, 2}, parents{-1, 0, 1}, decided;
  std::vector<uint64_t> hashes = id_hashes(width);
  std::vector<double> uniforms{0.1, 0.6, 0.3, 0.999}, thresholds{0.2, 0.1, 0.9};
  for (int64_t kind = 0; kind < 4; kind++)
    for (float top_p : {1.0f, 0.7f}) {
      std::vector<int32_t> choices(4);
      std::vector<uint8_t> accepted(3);
      pl_verification v{};
      v.dtype = dtype, v.rows = rows, v.width = v.stride = width, v.top_k = top_p < 1 ? 9 : 1 << 30, v.all = kind == 3;
      v.threads = at_most(3), v.logits = logits.data(), v.inverse_temperature = 2, v.top_p = top_p, v.min_p = top_p < 1 ? 0.01f : 0;
      v.tokens = tokens.data(), v.parents = parents.data(), v.position = 5, v.seed = 77;
      if (kind) v.uniforms = uniforms.data();
      if (!kind) v.hashes = hashes.data();
      if (kind == 2) v.q = q.data(), v.q_width = narrow, v.thresholds = thresholds.data();
      v.choices = choices.data(), v.accepted = accepted.data();
      if (pl_verify(&v, 1, v.threads)) printf("no memory\n"), exit(1);
      for (int32_t token : choices) expect(token >= 0 && token < width, "a choice");
      decided.insert(decided.end(), choices.begin(), choices.end());
      decided.insert(decided.end(), accepted.begin(), accepted.end());
    }
  return decided;
}

}  // namespace

int main() {
  const Sizes all[] = {
      {PL_BFLOAT16, 40, 8, 2, 8, 56, 0, false, 0, 0, false, 270},  {PL_FLOAT32, 40, 4, 2, 8, 56, 0, false},
      {PL_FLOAT32, 33, 3, 1, 24, 47, 50, true},  {PL_BFLOAT16, 70, 6, 1, 20, 47, 50, true},
      {PL_BFLOAT16, 64, 2, 2, 64, 96, 0, false}, {PL_BFLOAT16, 32, 1, 1, 16, 700, 0, false},
      {PL_BFLOAT16, 32, 1, 1, 16, 2000, 0, false, 0, 0, false, 97},  // its products need the most memory
      {PL_BFLOAT16, 40, 3, 1, 16, 56, 0, false, 3}, {PL_FLOAT32, 33, 3, 1, 24, 47, 0, false, 3},
      {PL_BFLOAT16, 33, 3, 1, 16, 56, 0, false, 1}, {PL_BFLOAT16, 40, 3, 1, 16, 47, 0, false, 0, 5},
      {PL_BFLOAT16, 40, 8, 2, 70, 56, 50, true, 0, 0, true}, {PL_FLOAT32, 33, 3, 1, 22, 47, 0, false, 0, 0, true},
      // Windows that cross blocks of keys: a wide one and a narrow one.
      {PL_BFLOAT16, 40, 4, 2, 8, 56, 300, false, 0, 0, false, 600}, {PL_FLOAT32, 33, 3, 1, 24, 47, 40, true, 0, 0, true, 290},
  };
  std::string checked;
  for (const Sizes& size : all) {
    Model m(size);
    checked.clear();
    std::vector<Bytes> first;
    std::vector<int32_t> decided;
    unsigned seed = rng();
    for (const char* name : {"portable", "avx2", "avx512", "amx", "dpbf16", "neon", "i8mm"}) {
      if (pl_choose_kernels(name)) continue;
      checked += std::string(" ") + name;
      rng.seed(seed);
      std::vector<Bytes> expected = run(m);
      if (first.empty()) first = expected;
      growth(m);
      medusa(size.dtype, size.hidden, size.ffn % 3, size.gemma);
      std::vector<int32_t> choices = decisions(size.dtype, 3 * size.hidden + 1);
      if (decided.empty()) decided = choices;
      expect(choices == decided, "a decision");
      expect(expected == first || !strcmp(name, "dpbf16"), "this instruction set");
    }
  }
  printf("the kernels%s: equal bits, and no errors of the sanitizers\n", checked.c_str());
  return 0;
}
