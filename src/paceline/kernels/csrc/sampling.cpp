// Sampling from rows of logits, by inversion and by Gumbel-max with seeded noise, and the verification of a draft's
// rows: the fast form, on a processor, of verify/verifier.py.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "noise.h"
#include "threads.h"

namespace {

constexpr float NEVER = -INFINITY;

// Exponential noise of a token, as core/noise.py has it, but with its logarithm in doubles.
double exponential_noise(uint64_t key, uint64_t hash) {
  float v = static_cast<float>(static_cast<int64_t>(random_bits(key, hash))) * 0x1p-63f;
  return -std::log1p(-static_cast<double>(std::min(std::max(v, 0x1p-63f), 1.0f - 0x1p-24f)));
}

double weight_of(const Distribution& p, float logit) {
  double distance = static_cast<double>(logit) - p.largest;
  return logit >= p.cutoff ? std::exp(static_cast<double>(p.inverse_temperature) * distance) : 0.0;
}

size_t chunks(const LogitRow& row) { return static_cast<size_t>((row.width + LOGIT_CHUNK - 1) / LOGIT_CHUNK); }
long chunk_width(const LogitRow& row, long first) { return std::min(LOGIT_CHUNK, row.width - first); }

// Of the chunk from column `first` on, as residual_mass.
float chunk_mass(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual, long first,
                 float* weights) {
  long width = chunk_width(row, first), left = residual.q_width - first;
  const float* q = residual.q && left > 0 ? residual.q + first : nullptr;
  float padded[LOGIT_CHUNK] = {};
  if (q && left < width) q = static_cast<const float*>(memcpy(padded, q, static_cast<size_t>(left) * sizeof(float)));
  float scale = static_cast<float>(residual.scale / p.mass);
  return k.residual_weights(row.dtype, row.at(first), width, p, scale, q, weights);
}

void compute_mass(const Kernels& k, const LogitRow& row, Distribution* p, float* chunk_sums) {
  p->mass = 1;
  p->mass = residual_mass(k, row, *p, {}, nullptr, chunk_sums);
}

// Raises the cutoff to what top_k and then top_p leave; tokens as likely as the last one that stays do, too. Only the
// largest logits are sorted: those at most `span` (in units of the temperature) below the largest, and then of twice
// that span until they are enough.
void truncate(const Kernels& k, const LogitRow& row, const SamplingParams& params, Distribution* p) {
  std::vector<float> head;
  double mass = p->mass;
  size_t top_k = params.top_k < row.width ? static_cast<size_t>(params.top_k) : 0;
  for (float span = 4;; span *= 2) {
    float least = std::max(p->cutoff, p->largest - span / p->inverse_temperature);
    bool all = least == p->cutoff || span > 87;  // smaller logits have a weight of 0 in float32
    head.resize(static_cast<size_t>(k.collect_at_least(row.dtype, row.data, row.width, least, nullptr)));
    if (head.size() < top_k && !all) continue;
    k.collect_at_least(row.dtype, row.data, row.width, least, head.data());
    std::sort(head.begin(), head.end(), std::greater<float>());
    float cutoff = p->cutoff;
    if (top_k && head.size() >= top_k) {
      cutoff = head[top_k - 1];
      head.erase(std::upper_bound(head.begin(), head.end(), cutoff, std::greater<float>()), head.end());
      mass = 0;
      for (float logit : head) mass += weight_of(*p, logit);
      all = true;
    }
    double sum = 0;
    size_t n = 0;
    while (n < head.size() && (n == 0 || sum < params.top_p * mass)) sum += weight_of(*p, head[n++]);
    if (params.top_p < 1.0f && sum < params.top_p * mass && !all) continue;
    p->cutoff = params.top_p < 1.0f ? std::max(cutoff, head[n - 1]) : cutoff;
    break;
  }
}

// Inverts the cumulative sum of a residual, whose mass and chunk sums are known; -1 if it has no mass.
long invert(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual, double uniform,
            double mass, const std::vector<float>& chunk_sums) {
  if (!(mass > 0 && mass < INFINITY)) return -1;
  double target = uniform * (1.0 - 0x1p-50) * mass, sum = 0;
  long chunk = 0, last = static_cast<long>(chunk_sums.size()) - 1, token = -1;
  while (chunk < last && sum + chunk_sums[chunk] <= target) sum += chunk_sums[chunk++];
  // If rounding differed between the sums, the chunk may have no weight: then the last weight before it is taken.
  for (; token < 0 && chunk >= 0; chunk--, sum = -INFINITY) {
    float weights[LOGIT_CHUNK];
    long first = chunk * LOGIT_CHUNK;
    chunk_mass(k, row, p, residual, first, weights);
    for (long j = 0; j < chunk_width(row, first); j++) {
      if (!(weights[j] > 0)) continue;
      token = first + j;
      if ((sum += weights[j]) > target) break;
    }
  }
  return token;
}

// The rows of logits of one draft (pl_verification), whose distributions are computed when they are first needed.
struct DraftRows {
  const Kernels& k;
  const pl_verification& v;
  std::vector<Distribution> p;
  std::vector<std::vector<float>> chunk_sums;  // of each row, if it is sampled by inversion
  std::vector<char> computed, valid;           // valid: the row has a distribution
  std::vector<float> uniform_logits;           // zeros, which stand for the logits of rows that are not valid

  DraftRows(const Kernels& kernels, const pl_verification& verdict)
      : k(kernels), v(verdict), p(static_cast<size_t>(v.rows)), chunk_sums(p.size()), computed(p.size()), valid(p.size()) {}

  LogitRow row(long r) const {
    if (computed[r] && !valid[r]) return {PL_FLOAT32, reinterpret_cast<const char*>(uniform_logits.data()), v.width};
    return {v.dtype, static_cast<const char*>(v.logits) + r * v.stride * dtype_bytes(v.dtype), v.width};
  }

  void compute(long r) {
    if (computed[r]) return;
    chunk_sums[r].resize(v.uniforms ? chunks(row(r)) : 0);
    float* sums = v.uniforms ? chunk_sums[r].data() : nullptr;
    SamplingParams params{v.inverse_temperature, v.top_p, v.min_p, v.top_k};
    valid[r] = compute_distribution(k, row(r), params, v.uniforms, &p[r], sums);
    computed[r] = 1;
  }

  // Block verification looks at later rows, too, and a row without a distribution must not decide about an earlier one.
  void replace_invalid_by_uniform() {
    uniform_logits.resize(static_cast<size_t>(v.width));
    for (size_t r = 0; r < p.size(); r++)
      if (!valid[r]) p[r] = {1, 0, NEVER, static_cast<double>(v.width)};
  }

  // The token after row r, from a residual of its distribution; -1 if it has none.
  int32_t sample(long r, const Residual& residual = {}) {
    compute(r);
    if (!valid[r]) return -1;
    if (!v.uniforms) {
      int32_t token = 0;
      int64_t position = v.position;
      for (long n = r - 1; n >= 0; n = v.parents[n]) position++;
      uint64_t key = splitmix(v.seed ^ static_cast<uint64_t>(position));
      gumbel_top(k, row(r), p[r], key, v.hashes, nullptr, 1, &token, nullptr);
      return token;
    }
    long token = residual.q ? sample_residual(k, row(r), p[r], residual, v.uniforms[r], nullptr) : -1;
    if (token >= 0) return static_cast<int32_t>(token);
    Distribution weights = p[r];  // there is no q, or p equals q: sample from p
    weights.mass = 1;
    return static_cast<int32_t>(invert(k, row(r), weights, {}, v.uniforms[r], p[r].mass, chunk_sums[r]));
  }
};

// Goes down from the root as long as the token sampled after a row is one of its children.
void match_tree(DraftRows& draft) {
  const pl_verification& v = draft.v;
  for (long r = 0; r >= 0;) {
    int32_t child = -1;
    v.choices[r] = draft.sample(r);
    for (int32_t n = 0; n < v.rows - 1 && child < 0; n++)
      if (v.parents[n] == r - 1 && v.tokens[n] == v.choices[r]) child = n;
    r = child < 0 ? -1 : child + 1;
  }
}

// Block verification of a chain; verify/rules.py has the formulas.
void verify_block(DraftRows& draft) {
  const pl_verification& v = draft.v;
  long nodes = v.rows - 1;
  std::vector<double> prefix(static_cast<size_t>(v.rows), 1.0), mass(static_cast<size_t>(v.rows), 0.0);
  auto residual = [&](long n) { return Residual{prefix[n], v.q + n * v.q_width, static_cast<long>(v.q_width)}; };
  int threads = ActiveThreads::of_process().count(v.threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long r = 0; r < v.rows; r++) draft.compute(r);
  draft.replace_invalid_by_uniform();
  for (long n = 0; n < nodes; n++) {
    long token = v.tokens[n];
    double q = token < v.q_width ? v.q[n * v.q_width + token] : 0.0;
    prefix[n + 1] = q > 0 ? std::min(1.0, prefix[n] * probability(draft.p[n], draft.row(n), token) / q) : 0.0;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long n = 1; n < nodes; n++)
    mass[n] = residual_mass(draft.k, draft.row(n), draft.p[n], residual(n), nullptr, nullptr);
  long accepted = 0;
  for (long n = 1; n <= nodes; n++) {
    double left = mass[n] + (1.0 - prefix[n]);
    double chance = n == nodes ? prefix[n] : left > 0 ? mass[n] / left : 1.0;
    v.accepted[n - 1] = v.thresholds[n - 1] < chance;
    if (v.accepted[n - 1]) accepted = n;
  }
  for (long r = 0; r < accepted; r++) v.choices[r] = draft.valid[r] ? v.tokens[r] : -1;
  v.choices[accepted] = draft.sample(accepted, accepted < nodes ? residual(accepted) : Residual{});
}

}  // namespace

float LogitRow::operator[](long i) const {
  if (dtype == PL_FLOAT32) return reinterpret_cast<const float*>(data)[i];
  uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(data)[i]) << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

bool compute_distribution(const Kernels& k, const LogitRow& row, const SamplingParams& params, bool needs_mass,
                          Distribution* p, float* chunk_sums) {
  int32_t best = k.argmax(row.dtype, row.data, row.width);
  if (best < 0) return false;
  *p = {params.inverse_temperature, row[best], NEVER, 0};
  if (params.min_p > 0) p->cutoff = p->largest + std::log(params.min_p) / params.inverse_temperature;
  bool truncates = params.top_p < 1.0f || params.top_k < row.width;
  if (params.top_p < 1.0f) compute_mass(k, row, p, nullptr);
  if (truncates) truncate(k, row, params, p);
  if (needs_mass) compute_mass(k, row, p, chunk_sums);
  return true;
}

double probability(const Distribution& p, const LogitRow& row, long token) {
  return token < row.width ? weight_of(p, row[token]) / p.mass : 0.0;
}

double residual_mass(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual,
                     float* weights, float* chunk_sums) {
  double sum = 0;
  for (long first = 0; first < row.width; first += LOGIT_CHUNK) {
    float mass = chunk_mass(k, row, p, residual, first, weights ? weights + first : nullptr);
    if (chunk_sums) chunk_sums[first / LOGIT_CHUNK] = mass;
    sum += mass;
  }
  return sum;
}

long sample_residual(const Kernels& k, const LogitRow& row, const Distribution& p, const Residual& residual,
                     double uniform, float* weights) {
  std::vector<float> chunk_sums(chunks(row));
  double mass = residual_mass(k, row, p, residual, weights, chunk_sums.data());
  return invert(k, row, p, residual, uniform, mass, chunk_sums);
}

void gumbel_top(const Kernels& k, const LogitRow& row, const Distribution& p, uint64_t key, const uint64_t* hashes,
                const int64_t* ids, long count, int32_t* columns, float* log_shares) {
  std::vector<double> scores(static_cast<size_t>(count), NEVER);
  std::fill(columns, columns + count, 0);
  int32_t candidates[LOGIT_CHUNK];
  uint64_t gathered[LOGIT_CHUNK];
  float rest = 0;
  double sum = 0;
  for (long first = 0; first < row.width; first += LOGIT_CHUNK) {
    long width = chunk_width(row, first);
    const uint64_t* hash = ids ? gathered : hashes + first;
    for (long j = 0; ids && j < width; j++) gathered[j] = hashes[ids[first + j]];
    long found = k.gumbel_candidates(row.dtype, row.at(first), width, p, static_cast<float>(scores.back()), key, hash,
                                     candidates, log_shares ? &rest : nullptr);
    for (long c = 0; c < found; c++) {
      long column = first + candidates[c];
      double log_weight = static_cast<double>(p.inverse_temperature) * (static_cast<double>(row[column]) - p.largest);
      double score = log_weight - std::log(exponential_noise(key, hash[candidates[c]]));
      sum += std::exp(score);
      if (!(score > scores.back())) continue;
      long n = count - 1;
      for (; n > 0 && scores[n - 1] < score; n--) scores[n] = scores[n - 1], columns[n] = columns[n - 1];
      scores[n] = score, columns[n] = static_cast<int32_t>(column);
    }
  }
  for (long n = 0; log_shares && n < count; n++) log_shares[n] = static_cast<float>(scores[n] - std::log(sum + rest));
}

void verify_draft(const Kernels& k, const pl_verification& v) {
  DraftRows draft(k, v);
  if (v.q) return verify_block(draft);
  if (!v.all) return match_tree(draft);
  for (long r = 0; r < v.rows; r++) v.choices[r] = draft.sample(r);
}
