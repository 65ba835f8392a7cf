// Draws from rows of logits: by inversion, by a race of seeded noise, and what verification decides of
// the rows of a draft (verify/verifier.py, of which this is the fast form on a processor).
#include "draws.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "noise.h"
#include "threads.h"

namespace {

constexpr float NEVER = -INFINITY;

long stretch(const LogitRow& row, long i) { return std::min(STRETCH, row.width - i); }

// Seeded noise of an id, as core/noise.py has it, but its logarithm in doubles.
double noise(uint64_t key, int64_t id) {
  float v = static_cast<float>(static_cast<int64_t>(random_bits(key, id))) * 0x1p-63f;
  return -std::log1p(-static_cast<double>(std::min(std::max(v, 0x1p-63f), 1.0f - 0x1p-24f)));
}

double weight(const Law& law, float x) {
  return x >= law.cut ? std::exp(static_cast<double>(law.sharpness) * (static_cast<double>(x) - law.first)) : 0.0;
}

void weigh_all(const Kernels& k, const LogitRow& row, Law* law, float* parts) {
  law->mass = 1;
  law->mass = mass_of(k, row, *law, 1.0, nullptr, 0, nullptr, parts);
}

// As mass_of, of the stretch from i on.
float weigh(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, long i, float* y) {
  long n = stretch(row, i);
  const float* less = q && i < q_width ? q + i : nullptr;
  float padded[STRETCH] = {};
  if (less && q_width - i < n) less = static_cast<const float*>(memcpy(padded, less, static_cast<size_t>(q_width - i) * sizeof(float)));
  return k.weigh(row.dtype, row.at(i), n, law, static_cast<float>(scale / law.mass), less, y);
}

// Where top_k and top_p cut, in this order: all as likely as the last that stays do.
void truncate(const Kernels& k, const LogitRow& row, const Sampling& how, Law* law, float* parts) {
  std::vector<float> head;
  double mass = law->mass;
  size_t most = how.top_k < row.width ? static_cast<size_t>(how.top_k) : 0;
  for (float span = 4;; span *= 2) {
    float bar = std::max(law->cut, law->first - span / law->sharpness);
    bool all = bar == law->cut || span > 87;  // what is less likely has no weight
    head.resize(static_cast<size_t>(k.collect(row.dtype, row.x, row.width, bar, nullptr)));
    if (head.size() < most && !all) continue;
    k.collect(row.dtype, row.x, row.width, bar, head.data());
    std::sort(head.begin(), head.end(), std::greater<float>());
    float cut = law->cut;
    if (most && head.size() >= most) {
      cut = head[most - 1];
      head.erase(std::upper_bound(head.begin(), head.end(), cut, std::greater<float>()), head.end());
      mass = 0;
      for (float x : head) mass += weight(*law, x);
      all = true;
    }
    double sum = 0;
    size_t n = 0;
    while (n < head.size() && (n == 0 || sum < how.top_p * mass)) sum += weight(*law, head[n++]);
    if (how.top_p < 1.0f && sum < how.top_p * mass && !all) continue;
    law->cut = how.top_p < 1.0f ? std::max(cut, head[n - 1]) : cut;
    break;
  }
  weigh_all(k, row, law, parts);
}

size_t stretches(const LogitRow& row) { return static_cast<size_t>((row.width + STRETCH - 1) / STRETCH); }

// By inversion, from what mass_of summed, in parts, to `mass`.
long inverted(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, double uniform, double mass, const std::vector<float>& parts) {
  if (!(mass > 0 && mass < INFINITY)) return -1;
  double point = uniform * (1.0 - 0x1p-50) * mass, sum = 0;
  long part = 0, last = static_cast<long>(parts.size()) - 1, found = -1;
  while (part < last && sum + parts[part] <= point) sum += parts[part++];
  // Where sums were rounded otherwise, what is sought may stand before.
  for (; found < 0 && part >= 0; part--, sum = -INFINITY) {
    float w[STRETCH];
    long first = part * STRETCH;
    weigh(k, row, law, scale, q, q_width, first, w);
    for (long j = 0; j < stretch(row, first); j++) {
      if (!(w[j] > 0)) continue;
      found = first + j;
      if ((sum += w[j]) > point) break;
    }
  }
  return found;
}

// A draft's rows of logits, in turn.
struct Draft {
  const Kernels& k;
  const pl_verdict& v;
  std::vector<Law> laws;
  std::vector<std::vector<float>> parts;  // of the rows' masses, by stretch, of rows drawn by inversion
  std::vector<char> known, sound;
  std::vector<float> even;  // a row of zeros, for those that are no distribution

  Draft(const Kernels& kernels, const pl_verdict& verdict) : k(kernels), v(verdict), laws(static_cast<size_t>(v.rows)), parts(laws.size()), known(laws.size()), sound(laws.size()) {}

  LogitRow row(long r) const {
    if (known[r] && !sound[r]) return {PL_FLOAT32, reinterpret_cast<const char*>(even.data()), v.width};
    return {v.dtype, static_cast<const char*>(v.logits) + r * v.stride * (v.dtype == PL_BFLOAT16 ? 2 : 4), v.width};
  }

  void look(long r) {
    if (known[r]) return;
    parts[r].resize(v.uniforms ? stretches(row(r)) : 0);
    sound[r] = law_of(k, row(r), {v.sharpness, v.top_p, v.min_p, v.top_k}, &laws[r], v.uniforms ? parts[r].data() : nullptr);
    known[r] = 1;
  }

  // Block verification looks ahead, and must not judge a path by a row that is no distribution.
  void even_out() {
    even.resize(static_cast<size_t>(v.width));
    for (size_t r = 0; r < laws.size(); r++)
      if (!sound[r]) laws[r] = {1, 0, NEVER, static_cast<double>(v.width)};
  }

  // The token after row r, where `scale` times its distribution stays beyond q.
  int32_t choice(long r, double scale = 1.0, const float* q = nullptr) {
    look(r);
    if (!sound[r]) return -1;
    int32_t token = 0;
    if (!v.uniforms) {
      int64_t position = v.position;
      for (long n = r - 1; n >= 0; n = v.parents[n]) position++;
      raced(k, row(r), laws[r], splitmix(v.seed ^ static_cast<uint64_t>(position)), nullptr, 1, &token, nullptr);
      return token;
    }
    long at = q ? drawn(k, row(r), laws[r], scale, q, v.q_width, v.uniforms[r], nullptr) : -1;
    if (at >= 0) return static_cast<int32_t>(at);
    Law summed = laws[r];  // no q, or p is q
    summed.mass = 1;
    return static_cast<int32_t>(inverted(k, row(r), summed, 1.0, nullptr, 0, v.uniforms[r], laws[r].mass, parts[r]));
  }
};

// Down from the root, as long as a row's choice is among its children.
void match(Draft& draft) {
  const pl_verdict& v = draft.v;
  for (long r = 0; r >= 0;) {
    int32_t next = -1;
    v.choices[r] = draft.choice(r);
    for (int32_t n = 0; n < v.rows - 1 && next < 0; n++)
      if (v.parents[n] == r - 1 && v.tokens[n] == v.choices[r]) next = n;
    r = next < 0 ? -1 : next + 1;
  }
}

// Block verification of a chain: verify/rules.py has the formulas.
void verify_block(Draft& draft) {
  const pl_verdict& v = draft.v;
  long nodes = v.rows - 1;
  std::vector<double> prefix(static_cast<size_t>(v.rows), 1.0), mass(static_cast<size_t>(v.rows), 0.0);
  int threads = ActiveThreads::of_process().count(v.threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long r = 0; r < v.rows; r++) draft.look(r);
  draft.even_out();
  for (long n = 0; n < nodes; n++) {
    long token = v.tokens[n];
    double q = token < v.q_width ? v.q[n * v.q_width + token] : 0.0;
    prefix[n + 1] = q > 0 ? std::min(1.0, prefix[n] * chance(draft.laws[n], draft.row(n), token) / q) : 0.0;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (long n = 1; n < nodes; n++)
    mass[n] = mass_of(draft.k, draft.row(n), draft.laws[n], prefix[n], v.q + n * v.q_width, v.q_width, nullptr, nullptr);
  long end = 0;
  for (long n = 1; n <= nodes; n++) {
    double left = mass[n] + (1.0 - prefix[n]);
    double accept = n == nodes ? prefix[n] : left > 0 ? mass[n] / left : 1.0;
    v.accepted[n - 1] = v.thresholds[n - 1] < accept;
    if (v.accepted[n - 1]) end = n;
  }
  for (long r = 0; r < end; r++) v.choices[r] = draft.sound[r] ? v.tokens[r] : -1;
  v.choices[end] = draft.choice(end, prefix[end], end < nodes ? v.q + end * v.q_width : nullptr);
}

}  // namespace

float LogitRow::operator[](long i) const {
  if (dtype == PL_FLOAT32) return reinterpret_cast<const float*>(x)[i];
  uint32_t bits = static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(x)[i]) << 16;
  float y;
  memcpy(&y, &bits, sizeof y);
  return y;
}

bool law_of(const Kernels& k, const LogitRow& row, const Sampling& how, Law* law, float* parts) {
  int32_t best = k.argmax(row.dtype, row.x, row.width);
  if (best < 0) return false;
  *law = {how.sharpness, row[best], NEVER, 0};
  if (how.min_p > 0) law->cut = law->first + std::log(how.min_p) / how.sharpness;
  weigh_all(k, row, law, parts);
  if (how.top_p < 1.0f || how.top_k < row.width) truncate(k, row, how, law, parts);
  return true;
}

double chance(const Law& law, const LogitRow& row, long token) {
  return token < row.width ? weight(law, row[token]) / law.mass : 0.0;
}

double mass_of(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, float* y, float* parts) {
  double sum = 0;
  for (long i = 0; i < row.width; i += STRETCH) {
    float part = weigh(k, row, law, scale, q, q_width, i, y ? y + i : nullptr);
    if (parts) parts[i / STRETCH] = part;
    sum += part;
  }
  return sum;
}

long drawn(const Kernels& k, const LogitRow& row, const Law& law, double scale, const float* q, long q_width, double uniform, float* y) {
  std::vector<float> parts(stretches(row));
  double mass = mass_of(k, row, law, scale, q, q_width, y, parts.data());
  return inverted(k, row, law, scale, q, q_width, uniform, mass, parts);
}

void raced(const Kernels& k, const LogitRow& row, const Law& law, uint64_t key, const int64_t* ids, long count, int32_t* places, float* shares) {
  std::vector<double> scores(static_cast<size_t>(count), NEVER);
  std::fill(places, places + count, 0);
  int32_t ahead[STRETCH];
  float rest = 0;
  double sum = 0;
  for (long i = 0; i < row.width; i += STRETCH) {
    long n = k.contend(row.dtype, row.at(i), stretch(row, i), law, static_cast<float>(scores.back()), key,
                       ids ? ids + i : nullptr, i, ahead, shares ? &rest : nullptr);
    for (long c = 0; c < n; c++) {
      long place = i + ahead[c];
      double depth = static_cast<double>(law.sharpness) * (static_cast<double>(row[place]) - law.first);
      double score = depth - std::log(noise(key, ids ? ids[place] : place));
      sum += std::exp(score);
      if (!(score > scores.back())) continue;
      long at = count - 1;
      for (; at > 0 && scores[at - 1] < score; at--) scores[at] = scores[at - 1], places[at] = places[at - 1];
      scores[at] = score, places[at] = static_cast<int32_t>(place);
    }
  }
  for (long n = 0; shares && n < count; n++) shares[n] = static_cast<float>(scores[n] - std::log(sum + rest));
}

void decide(const Kernels& k, const pl_verdict& v) {
  Draft draft(k, v);
  if (v.q) return verify_block(draft);
  if (!v.all) return match(draft);
  for (long r = 0; r < v.rows; r++) v.choices[r] = draft.choice(r);
}
