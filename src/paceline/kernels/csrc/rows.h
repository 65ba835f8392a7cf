// What is done to one row at a time: embedding, norms, rotary embedding, the cache's new entries.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

inline V rounded(int64_t dtype, V a) { return dtype == PL_BFLOAT16 ? as_bf16(a) : a; }

// `width` numbers of `dtype` from x, and to y.
void load_row(int64_t dtype, const void* x, long width, float* y) {
  for (long i = 0; i < width; i += 16)
    store_first(y + i, width - i,
                dtype == PL_BFLOAT16 ? load_first(static_cast<const uint16_t*>(x) + i, width - i)
                                     : load_first(static_cast<const float*>(x) + i, width - i));
}

void store_row(int64_t dtype, const float* x, long width, void* y) {
  for (long i = 0; i < width; i += 16) {
    V a = load_first(x + i, width - i);
    if (dtype == PL_BFLOAT16)
      store_first(static_cast<uint16_t*>(y) + i, width - i, a);
    else
      store_first(static_cast<float*>(y) + i, width - i, a);
  }
}

void embed(const pl_model& m, int32_t id, float* x) {
  long size = m.dtype == PL_BFLOAT16 ? 2 : 4;
  load_row(m.dtype, static_cast<const char*>(m.embedding) + id * m.hidden * size, m.hidden, x);
  if (m.embedding_scale == 1.0f) return;
  for (long i = 0; i < m.hidden; i += 16)
    store_first(x + i, m.hidden - i, rounded(m.dtype, load_first(x + i, m.hidden - i) * set1(m.embedding_scale)));
}

// 1 / sqrt(mean of squares + eps)
inline float scale_of(const float* x, long width, float eps) {
  V squares = zero();
  for (long i = 0; i < width; i += 16) {
    V a = load_first(x + i, width - i);
    squares = fma(a, a, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
}

// Without a norm it is rounded only.
void rms_norm(const pl_model& m, const pl_norm& norm, const float* x, float* y, long width) {
  if (!norm.weight) {
    for (long i = 0; i < width; i += 16) store_first(y + i, width - i, rounded(m.dtype, load_first(x + i, width - i)));
    return;
  }
  V scale = set1(scale_of(x, width, norm.eps));
  for (long i = 0; i < width; i += 16) {
    V a = load_first(x + i, width - i) * scale * load_first(norm.weight + i, width - i);
    store_first(y + i, width - i, rounded(m.dtype, a));
  }
}

void add_rms_norm(const pl_model& m, const pl_norm& norm, float* x, const float* y) {
  V scale = set1(scale_of(y, m.hidden, norm.eps));
  for (long i = 0; i < m.hidden; i += 16) {
    V a = load_first(y + i, m.hidden - i) * scale * load_first(norm.weight + i, m.hidden - i);
    store_first(x + i, m.hidden - i, load_first(x + i, m.hidden - i) + a);
  }
}

void add_silu(int64_t dtype, float* x, const float* y, float* next, long width) {
  for (long i = 0; i < width; i += 16) {
    V a = load_first(x + i, width - i) + activated(load_first(y + i, width - i), SILU);
    store_first(x + i, width - i, a);
    store_first(next + i, width - i, rounded(dtype, a));
  }
}

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
    store(lanes, exponential(set1(logits[best] - logits[n ? chosen[0].expert : best])));
    chosen[n] = {best, 0, lanes[0]};
    sum = sum + lanes[0];
  }
  for (long n = 0; n < count; n++) chosen[n].weight = chosen[n].weight / sum;
}

void add_scaled(float* x, const float* y, float w, long width) {
  for (long i = 0; i < width; i += 16)
    store_first(x + i, width - i, fma(load_first(y + i, width - i), set1(w), load_first(x + i, width - i)));
}

// One head in place: its norm, then the rotation by the row's cosines and sines.
inline void apply_rope(int64_t dtype, const pl_norm& norm, const float* rope, float* head, long width, float scaling) {
  if (norm.weight) {
    V scale = set1(scale_of(head, width, norm.eps));
    for (long i = 0; i < width; i += 16)
      store_first(head + i, width - i,
                  load_first(head + i, width - i) * scale * load_first(norm.weight + i, width - i));
  }
  long half = width / 2;
  for (long i = 0; i < half; i += 16) {
    long left = half - i;
    V a = load_first(head + i, left), b = load_first(head + half + i, left);
    V cosine = load_first(rope + i, left), sine = load_first(rope + half + i, left);
    V first = fma(a, cosine, zero() - b * sine), second = fma(b, cosine, a * sine);
    store_first(head + i, left, rounded(dtype, first * set1(scaling)));
    store_first(head + half + i, left, rounded(dtype, second * set1(scaling)));
  }
}

// A head's numbers as codes of 8 bits, and the scale behind them. What is not finite makes the scale
// NaN: no code could say it.
inline void store_int8_head(const float* x, long width, int8_t* y) {
  V most = zero(), strange = zero();
  for (long i = 0; i < width; i += 16) {
    V a = load_first(x + i, width - i);
    most = larger(larger(a, zero() - a), most);
    strange = fma(a, zero(), strange);
  }
  float scale = largest(most) / 127.0f + sum(strange), inverse = scale > 0 ? 1.0f / scale : 0.0f, codes[16];
  for (long i = 0; i < width; i += 16) {
    store(codes, smaller(nearest(load_first(x + i, width - i) * set1(inverse)), set1(127.0f)));
    for (long j = 0; j < 16 && i + j < width; j++) y[i + j] = static_cast<int8_t>(codes[j]);
  }
  memcpy(y + width, &scale, sizeof(scale));
}

// The key or the value of a row.
inline void write_kv(const pl_model& m, const float* x, void* to, bool coded) {
  if (!coded) return store_row(m.dtype, x, m.kv_heads * m.head_dim, to);
  for (long h = 0; h < m.kv_heads; h++)
    store_int8_head(x + h * m.head_dim, m.head_dim, static_cast<int8_t*>(to) + h * kv_head_bytes(m, true));
}

// Queries stay in qkv, scaled; the key and the value go to their places in the cache.
void rope_and_write_kv(const pl_model& m, const pl_layer& layer, const float* rope, float* qkv, void* key, void* value, bool coded) {
  long d = m.head_dim;
  for (long h = 0; h < m.heads; h++) apply_rope(m.dtype, layer.q_norm, rope, qkv + h * d, d, m.scaling);
  float* k = qkv + m.heads * d;
  for (long h = 0; h < m.kv_heads; h++) apply_rope(m.dtype, layer.k_norm, rope, k + h * d, d, 1.0f);
  write_kv(m, k, key, coded);
  write_kv(m, k + m.kv_heads * d, value, coded);
}

template <class T>
float top_k_of(const T* x, long width, long count, float sharpness, int32_t* places, float* values) {
  for (long n = 0; n < count; n++) places[n] = 0, values[n] = -__builtin_inff();
  for (long i = 0; i < width; i += 64) {
    long left = width - i < 64 ? width - i : 64;
    V all = load_first(x + i, left);
    for (long j = 16; j < left; j += 16) all = larger(all, load_first(x + i + j, left - j));
    // Behind the end stand zeros: that one looks in vain costs nothing.
    if (largest(all) <= values[count - 1]) continue;
    for (long j = 0; j < left; j += 16) {
      float lane[16];
      store(lane, load_first(x + i + j, left - j));
      for (long l = 0; l < 16 && j + l < left; l++) {
        if (!(lane[l] > values[count - 1])) continue;
        long n = count - 1;
        for (; n > 0 && values[n - 1] < lane[l]; n--) places[n] = places[n - 1], values[n] = values[n - 1];
        places[n] = static_cast<int32_t>(i + j + l), values[n] = lane[l];
      }
    }
  }
  if (sharpness == 0) return 1.0f;
  V total = zero(), best = set1(values[0]), by = set1(sharpness);
  long whole = width / 16 * 16;
  for (long i = 0; i < whole; i += 16) total = total + exponential((load(x + i) - best) * by);
  float lane[16], rest = 0;
  if (whole < width) store(lane, exponential((load_first(x + whole, width - whole) - best) * by));
  for (long l = 0; l < width - whole; l++) rest = rest + lane[l];
  return sum(total) + rest;
}

float top_k(int64_t dtype, const void* x, long width, long count, float sharpness, int32_t* places, float* values) {
  if (dtype == PL_BFLOAT16) return top_k_of(static_cast<const uint16_t*>(x), width, count, sharpness, places, values);
  return top_k_of(static_cast<const float*>(x), width, count, sharpness, places, values);
}

// Zero unless one is not a number: what is infinite is cut to what is not.
template <class T>
float nan_trace(const T* x, long width) {
  V strange = zero(), most = set1(3e38f), least = set1(-3e38f);
  for (long i = 0; i < width; i += 16)
    strange = fma(smaller(most, larger(least, load_first(x + i, width - i))), zero(), strange);
  return sum(strange);
}

int32_t argmax(int64_t dtype, const void* x, long width) {
  int32_t place;
  float value;
  top_k(dtype, x, width, 1, 0.0f, &place, &value);
  float strange = dtype == PL_BFLOAT16 ? nan_trace(static_cast<const uint16_t*>(x), width)
                                       : nan_trace(static_cast<const float*>(x), width);
  return value - value == 0 && strange == 0 ? place : -1;
}

}  // namespace
