// F32x16 as an array, for every processor: the compiler vectorises what it can. vec.h says what each function does.
#pragma once

struct F32x16 {
  float v[16];
};

// A vector whose lane i is f(i).
template <class F>
static inline F32x16 map(F f) {
  F32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = f(i);
  return r;
}

static inline F32x16 load(const float* p) {
  F32x16 r;
  memcpy(r.v, p, 64);
  return r;
}
static inline void store(float* p, F32x16 a) { memcpy(p, a.v, 64); }
static inline F32x16 set1(float x) { return map([&](int) { return x; }); }
static inline F32x16 zero() { return set1(0.0f); }
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return map([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
static inline F32x16 operator+(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] + b.v[i]; }); }
static inline F32x16 operator-(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] - b.v[i]; }); }
static inline F32x16 operator*(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] * b.v[i]; }); }
static inline F32x16 operator/(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] / b.v[i]; }); }
static inline F32x16 max(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline F32x16 min(F32x16 a, F32x16 b) { return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline F32x16 nearest(F32x16 a) { return map([&](int i) { return __builtin_rintf(a.v[i]); }); }
static inline F32x16 exp2_of_magic(F32x16 x) {
  return map([&](int i) { return float_of(bits_of(x.v[i]) << 23); });
}
static inline F32x16 zero_where_less(F32x16 x, float limit, F32x16 y) {
  return map([&](int i) { return x.v[i] < limit ? 0.0f : y.v[i]; });
}
static inline F32x16 load_even(const uint16_t* p) {
  return map([&](int i) { return float_of(static_cast<uint32_t>(p[2 * i]) << 16); });
}
static inline F32x16 load_odd(const uint16_t* p) {
  return map([&](int i) { return float_of(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}
static inline F32x16 load(const uint16_t* p) {
  return map([&](int i) { return float_of(static_cast<uint32_t>(p[i]) << 16); });
}
static inline F32x16 load(const int8_t* p) {
  return map([&](int i) { return static_cast<float>(p[i]); });
}
static inline F32x16 round_to_bf16(F32x16 a) {
  return map([&](int i) { return round_to_bf16(a.v[i]); });
}
static inline void store(uint16_t* p, F32x16 a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(bf16_bits(a.v[i]) >> 16);
}
static inline void transpose(F32x16 t[16]) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      float x = t[i].v[j];
      t[i].v[j] = t[j].v[i];
      t[j].v[i] = x;
    }
}

constexpr int MAX_TILE_ROWS = 2;
constexpr int MAX_ACCUMULATORS = 4;
constexpr int MAX_WIDE_ROWS = 2;
