// Operations on one row: embedding, RMSNorm, RoPE and the cache entry, routing to experts, top-k of logits.
#pragma once
#include "gemm.h"
#include "kernels.h"
#include "vec.h"

namespace {

// f of x as a pointer to numbers of `dtype`.
template <class F>
inline auto with_dtype(int64_t dtype, const void* x, const F& f) {
  return dtype == PL_BFLOAT16 ? f(static_cast<const uint16_t*>(x)) : f(static_cast<const float*>(x));
}

// y[i .. i + 16] = f(i, width - i) for all of a row; f loads at most `left` = width - i numbers.
template <class T, class F>
inline void map_row(T* y, long width, const F& f) {
  for (long i = 0; i < width; i += 16) store_partial(y + i, width - i, f(i, width - i));
}

void load_row(int64_t dtype, const void* x, long width, float* y) {
  with_dtype(dtype, x, [&](auto* row) {
    map_row(y, width, [&](long i, long left) { return load_partial(row + i, left); });
  });
}

void store_row(int64_t dtype, const float* x, long width, void* y) {
  auto copy = [&](long i, long left) { return load_partial(x + i, left); };
  dtype == PL_BFLOAT16 ? map_row(static_cast<uint16_t*>(y), width, copy) : map_row(static_cast<float*>(y), width, copy);
}

void embed(const pl_model& m, int32_t id, float* x) {
  long size = dtype_bytes(m.dtype);
  load_row(m.dtype, static_cast<const char*>(m.embedding) + id * m.hidden * size, m.hidden, x);
  if (m.embedding_scale == 1.0f) return;
  map_row(x, m.hidden, [&](long i, long left) {
    return rounded(m.dtype, load_partial(x + i, left) * set1(m.embedding_scale));
  });
}

// 1 / sqrt(mean of squares + eps)
inline float inverse_rms(const float* x, long width, float eps) {
  F32x16 squares = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 a = load_partial(x + i, width - i);
    squares = fma(a, a, squares);
  }
  return 1.0f / __builtin_sqrtf(reduce_sum(squares) / static_cast<float>(width) + eps);
}

// y = norm(x), rounded to the dtype; without a norm only rounded.
void rms_norm(const pl_model& m, const pl_norm& norm, const float* x, float* y, long width) {
  if (!norm.weight) return map_row(y, width, [&](long i, long left) { return rounded(m.dtype, load_partial(x + i, left)); });
  F32x16 scale = set1(inverse_rms(x, width, norm.eps));
  map_row(y, width, [&](long i, long left) {
    return rounded(m.dtype, load_partial(x + i, left) * scale * load_partial(norm.weight + i, left));
  });
}

// x += norm(y)
void add_rms_norm(const pl_model& m, const pl_norm& norm, float* x, const float* y) {
  F32x16 scale = set1(inverse_rms(y, m.hidden, norm.eps));
  map_row(x, m.hidden, [&](long i, long left) {
    return load_partial(x + i, left) + load_partial(y + i, left) * scale * load_partial(norm.weight + i, left);
  });
}

// x += silu(y); `next` is x rounded to the dtype.
void add_silu(int64_t dtype, float* x, const float* y, float* next, long width) {
  for (long i = 0; i < width; i += 16) {
    F32x16 a = load_partial(x + i, width - i) + activate(load_partial(y + i, width - i), SILU);
    store_partial(x + i, width - i, a);
    store_partial(next + i, width - i, rounded(dtype, a));
  }
}

// x += scale * y
void add_scaled(float* x, const float* y, float scale, long width) {
  F32x16 by = set1(scale);
  map_row(x, width, [&](long i, long left) { return fma(load_partial(y + i, left), by, load_partial(x + i, left)); });
}

// The `count` largest router logits, largest first (of equal ones the lower index), weighted by their softmax.
void choose_experts(const float* logits, long experts, long count, ExpertChoice* chosen) {
  float sum = 0;
  for (long n = 0; n < count; n++) {
    int32_t best = -1;
    for (int32_t e = 0; e < experts; e++) {
      bool taken = false;
      for (long before = 0; before < n; before++) taken = taken || chosen[before].expert == e;
      if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
    }
    float lanes[16];
    store(lanes, exp(set1(logits[best] - logits[n ? chosen[0].expert : best])));
    chosen[n] = {best, 0, lanes[0]};
    sum = sum + lanes[0];
  }
  for (long n = 0; n < count; n++) chosen[n].weight = chosen[n].weight / sum;
}

// One head in place: its norm if there is one, RoPE by the row's cosines and sines (half a head each), then
// `scaling`.
inline void norm_and_rope(int64_t dtype, const pl_norm& norm, const float* rope, float* head, long width, float scaling) {
  if (norm.weight) {
    F32x16 scale = set1(inverse_rms(head, width, norm.eps));
    map_row(head, width, [&](long i, long left) {
      return load_partial(head + i, left) * scale * load_partial(norm.weight + i, left);
    });
  }
  long half = width / 2;
  for (long i = 0; i < half; i += 16) {
    long left = half - i;
    F32x16 a = load_partial(head + i, left), b = load_partial(head + half + i, left);
    F32x16 cosine = load_partial(rope + i, left), sine = load_partial(rope + half + i, left);
    F32x16 first = fma(a, cosine, zero() - b * sine), second = fma(b, cosine, a * sine);
    store_partial(head + i, left, rounded(dtype, first * set1(scaling)));
    store_partial(head + half + i, left, rounded(dtype, second * set1(scaling)));
  }
}

// Writes one head to the int8 cache: values, then their scale. The scale is NaN if a number is not finite, which no
// int8 value could express.
inline void write_int8_head(const float* x, long width, int8_t* y) {
  F32x16 most = zero(), nan = zero();
  for (long i = 0; i < width; i += 16) {
    F32x16 a = load_partial(x + i, width - i);
    most = max(max(a, zero() - a), most);
    nan = fma(a, zero(), nan);  // 0, or NaN if a is not finite
  }
  float scale = reduce_max(most) / 127.0f + reduce_sum(nan), inverse = scale > 0 ? 1.0f / scale : 0.0f, values[16];
  for (long i = 0; i < width; i += 16) {
    store(values, min(nearest(load_partial(x + i, width - i) * set1(inverse)), set1(127.0f)));
    for (long j = 0; j < 16 && i + j < width; j++) y[i + j] = static_cast<int8_t>(values[j]);
  }
  memcpy(y + width, &scale, sizeof(scale));
}

// Writes the key or the value of a row, all KV heads, to the cache.
inline void write_kv(const pl_model& m, const float* x, void* to, bool int8_kv) {
  if (!int8_kv) return store_row(m.dtype, x, m.kv_heads * m.head_dim, to);
  for (long h = 0; h < m.kv_heads; h++)
    write_int8_head(x + h * m.head_dim, m.head_dim, static_cast<int8_t*>(to) + h * kv_head_bytes(m, true));
}

// Queries stay in qkv, multiplied by `scaling`; `key` and `value` are the row's entries in the cache.
void rope_and_write_kv(const pl_model& m, const pl_layer& layer, const float* rope, float scaling, float* qkv, void* key, void* value,
                       bool int8_kv) {
  long d = m.head_dim;
  float* k = qkv + m.heads * d;
  pl_norm q_norm = layer.q_norm, k_norm = layer.k_norm;
  if (m.norms_all_heads) {
    rms_norm(m, q_norm, qkv, qkv, m.heads * d), rms_norm(m, k_norm, k, k, m.kv_heads * d);
    q_norm = k_norm = {};
  }
  for (long h = 0; h < m.heads; h++) norm_and_rope(m.dtype, q_norm, rope, qkv + h * d, d, scaling);
  for (long h = 0; h < m.kv_heads; h++) norm_and_rope(m.dtype, k_norm, rope, k + h * d, d, 1.0f);
  write_kv(m, k, key, int8_kv);
  write_kv(m, k + m.kv_heads * d, value, int8_kv);
}

// f(column, logit) for all logits of a row, but not for those of a chunk that are all less than `least`, which f may raise.
template <class T, class F>
inline void scan_logits(const T* x, long width, const float& least, const F& f) {
  for (long i = 0; i < width; i += LOGIT_CHUNK) {
    long left = width - i < LOGIT_CHUNK ? width - i : LOGIT_CHUNK;
    F32x16 all = load_partial(x + i, left);
    for (long j = 16; j < left; j += 16) all = max(all, load_partial(x + i + j, left - j));
    if (reduce_max(all) < least) continue;  // the zeros behind the end of a row can only fail to skip
    for (long j = 0; j < left; j += 16) {
      float lane[16];
      store(lane, load_partial(x + i + j, left - j));
      for (long l = 0; l < 16 && j + l < left; l++) f(i + j + l, lane[l]);
    }
  }
}

// Insertion into a short sorted list.
template <class T>
float top_k_of(const T* x, long width, long count, float inverse_temperature, int32_t* ids, float* values) {
  for (long n = 0; n < count; n++) ids[n] = 0, values[n] = -__builtin_inff();
  scan_logits(x, width, values[count - 1], [=](long column, float logit) {
    if (!(logit > values[count - 1])) return;
    long n = count - 1;
    for (; n > 0 && values[n - 1] < logit; n--) ids[n] = ids[n - 1], values[n] = values[n - 1];
    ids[n] = static_cast<int32_t>(column), values[n] = logit;
  });
  if (inverse_temperature == 0) return 1.0f;
  F32x16 total = zero(), best = set1(values[0]), by = set1(inverse_temperature);
  long whole = width / 16 * 16;
  for (long i = 0; i < whole; i += 16) total = total + exp((load(x + i) - best) * by);
  float lane[16], rest = 0;
  if (whole < width) store(lane, exp((load_partial(x + whole, width - whole) - best) * by));
  for (long l = 0; l < width - whole; l++) rest = rest + lane[l];
  return reduce_sum(total) + rest;
}

float top_k(int64_t dtype, const void* x, long width, long count, float inverse_temperature, int32_t* ids, float* values) {
  return with_dtype(dtype, x, [&](auto* row) { return top_k_of(row, width, count, inverse_temperature, ids, values); });
}

// Infinities are clamped to finite numbers first.
template <class T>
bool has_nan(const T* x, long width) {
  F32x16 nan = zero(), most = set1(3e38f), least = set1(-3e38f);
  for (long i = 0; i < width; i += 16)
    nan = fma(min(most, max(least, load_partial(x + i, width - i))), zero(), nan);
  return reduce_sum(nan) != 0;
}

int32_t argmax(int64_t dtype, const void* x, long width) {
  return with_dtype(dtype, x, [&](auto* row) {
    int32_t id;
    float value;
    top_k_of(row, width, 1, 0.0f, &id, &value);
    bool finite = value - value == 0;
    return finite && !has_nan(row, width) ? id : -1;
  });
}

}  // namespace
