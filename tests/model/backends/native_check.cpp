// The kernels under the sanitizers: `make native-check`.
//
// Random decoders of odd sizes in exactly as much memory as they need. Sequences are decoded one row
// at a time, then again in chunks, with trees and neighbours, on several threads, by every
// instruction set of this processor; all logits must be the same, bit for bit.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "paceline_native.h"

namespace {

std::mt19937 rng(7);

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
};

constexpr int LAYERS = 2, VOCAB = 61, LONGEST = 300, BLOCK = 4;

// Owns all that a pl_model points to.
class Model {
 public:
  explicit Model(const Sizes& s) : size(s), rope(LONGEST * s.head_dim), layers(LAYERS) {
    for (float& x : rope) x = number();
    for (pl_layer& l : layers) {
      l = pl_layer{};
      int64_t inner = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim;
      l.qkv = weight(inner + 2 * kv, s.hidden, PL_PLAIN, true);
      l.out = weight(s.hidden, inner, PL_PLAIN, false);
      l.gate_up = weight(s.ffn, s.hidden, PL_GATE, true);
      l.down = weight(s.hidden, s.ffn, PL_PLAIN, true);
      l.attention_norm = norm(s.hidden);
      l.mlp_norm = norm(s.hidden);
      if (s.gemma) l.attention_after = norm(s.hidden), l.mlp_after = norm(s.hidden);
      l.q_norm = norm(s.head_dim);
      l.k_norm = norm(s.head_dim);
      l.window = &l == &layers[0] ? s.window : 0;
    }
    embedding = numbers(s.dtype, VOCAB * s.hidden);
    model = pl_model{};
    model.dtype = s.dtype, model.hidden = s.hidden, model.vocab = VOCAB, model.layers = LAYERS;
    model.heads = s.heads, model.kv_heads = s.kv_heads, model.head_dim = s.head_dim, model.ffn = s.ffn;
    model.activation = s.gemma, model.embedding_scale = s.gemma ? 3.0f : 1.0f, model.scaling = 0.4f;
    model.attention_cap = s.gemma ? 2.0f : 0.0f, model.logit_cap = s.gemma ? 4.0f : 0.0f;
    model.embedding = embedding.data(), model.layer = layers.data(), model.final_norm = norm(s.hidden);
    model.head = weight(VOCAB, s.hidden, PL_PLAIN, false);
    opened = pl_open(&model);
  }
  ~Model() { pl_close(opened); }

  Sizes size;
  std::vector<float> rope;
  std::vector<pl_layer> layers;
  Bytes embedding;
  pl_model model;
  void* opened;

 private:
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
      pl_pack(size.dtype, p, dense.data(), outputs, inputs, 0, packed.back()->data());
      pl_unpack(size.dtype, p, back.data(), outputs, inputs, 0, packed.back()->data());
      if (dense != back) printf("packing changes a weight\n"), exit(1);
    }
    floats.emplace_back(new std::vector<float>(padded));
    for (int64_t i = 0; i < outputs && place == PL_PLAIN; i++) (*floats.back())[i] = number();
    pl_weight w{};
    w.data = packed.back()->data(), w.outputs = outputs, w.inputs = inputs;
    w.bias = bias ? floats.back()->data() : nullptr;
    return w;
  }

  std::vector<std::unique_ptr<std::vector<float>>> floats;
  std::vector<std::unique_ptr<Bytes>> packed;
};

struct Cache {
  explicit Cache(const Sizes& s) : parts(2 * LAYERS), table(LONGEST / BLOCK + 1) {
    for (Bytes& part : parts) part = numbers(s.dtype, table.size() * BLOCK * s.kv_heads * s.head_dim);
    for (size_t i = 0; i < table.size(); i++) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  }
  int32_t slot(int32_t index) const { return table[index / BLOCK] * BLOCK + index % BLOCK; }
  std::vector<Bytes> parts;
  std::vector<int32_t> table;
};

// Logits and features of pending tokens and tree nodes behind `context`.
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
  b.rows = rows, b.spans = 1, b.logit_rows = rows, b.features = 2, b.block_size = BLOCK, b.threads = threads;
  b.ids = ids.data(), b.positions = positions.data(), b.slots = slots.data(), b.span = &span;
  b.tables = cache.table.data(), b.parents = parents.data(), b.wanted = wanted.data(), b.logits = logits.data();
  b.feature_layers = feature_layers, b.feature = features.data();
  b.keys = keys.data(), b.values = values.data(), b.rope = ropes;
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
  printf("%s: %s gives other bits\n", pl_instructions(), what);
  exit(1);
}

std::vector<Bytes> run(Model& m, int length) {
  std::vector<int32_t> text(length + 10);
  for (int32_t& id : text) id = below(VOCAB);
  Cache cache(m.size);
  std::vector<Bytes> truth;
  for (int at = 0; at < length + 10; at++) truth.push_back(row_of(m, forward(m, cache, {text[at]}, at, {}, 1), 0));
  for (int threads : {1, 3, 2}) {
    Cache other(m.size);
    for (int at = 0, rows; at < length; at += rows) {
      rows = threads == 2 ? length : std::min(1 + below(90), length - at);
      std::vector<int32_t> part(text.begin() + at, text.begin() + at + rows);
      Bytes out = forward(m, other, part, at, {}, threads);
      for (int r = 0; r < rows; r++) expect(row_of(m, out, r) == truth[at + r], "a chunk");
    }
    // A tree whose nodes 0, 2, 5, 8 continue the text; the others are strangers.
    std::vector<int32_t> ids{text[length]}, parents{-1, -1, 0, 0, 1, 2, -1, 3, 5};
    for (int node = 0, depth = 0; node < 9; node++)
      ids.push_back(node == 0 || node == 2 || node == 5 || node == 8 ? text[length + 1 + depth++] : below(VOCAB));
    Bytes out = forward(m, other, ids, length, parents, threads);
    int rows[] = {0, 1, 3, 6, 9};
    for (int depth = 0; depth < 5; depth++) expect(row_of(m, out, rows[depth]) == truth[length + depth], "a tree");
  }
  return truth;
}

}  // namespace

int main() {
  const Sizes all[] = {
      {PL_BFLOAT16, 40, 8, 2, 8, 56, 0, false},  {PL_FLOAT32, 40, 4, 2, 8, 56, 0, false},
      {PL_FLOAT32, 33, 3, 1, 24, 47, 50, true},  {PL_BFLOAT16, 70, 6, 1, 20, 47, 50, true},
      {PL_BFLOAT16, 64, 2, 2, 64, 96, 0, false}, {PL_BFLOAT16, 32, 1, 1, 16, 700, 0, false},
  };
  for (const Sizes& size : all) {
    Model m(size);
    std::vector<Bytes> first;
    unsigned seed = rng();
    for (const char* name : {"portable", "avx2", "avx512", "amx"}) {
      if (pl_choose(name)) continue;
      rng.seed(seed);
      std::vector<Bytes> truth = run(m, &size == all ? 270 : 80);  // two blocks of keys, or one
      if (first.empty()) first = truth;
      expect(truth == first, "this instruction set");
    }
  }
  printf("the kernels: the same bits, and nothing for the sanitizers\n");
  return 0;
}
