// Sixteen floats in an array, for every processor; the compiler makes of it what it can.
#pragma once

struct V {
  float v[16];
};

template <class F>
static inline V each(F f) {
  V r;
  for (int i = 0; i < 16; i++) r.v[i] = f(i);
  return r;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static inline uint32_t rounded_bits(float x) { return bits_of(x) + 0x7fff + ((bits_of(x) >> 16) & 1); }

static inline V load(const float* p) {
  V r;
  memcpy(r.v, p, 64);
  return r;
}
static inline void store(float* p, V a) { memcpy(p, a.v, 64); }
static inline V set1(float x) { return each([&](int) { return x; }); }
static inline V zero() { return set1(0.0f); }
static inline V fma(V a, V b, V c) { return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); }); }
static inline V operator+(V a, V b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
static inline V operator-(V a, V b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
static inline V operator*(V a, V b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
static inline V operator/(V a, V b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
static inline V larger(V a, V b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline V smaller(V a, V b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline V nearest(V a) { return each([&](int i) { return __builtin_rintf(a.v[i]); }); }
static inline V power_of(V whole) {
  return each([&](int i) { return float_of(bits_of(whole.v[i]) << 23); });
}
static inline V zero_below(V x, float limit, V y) {
  return each([&](int i) { return x.v[i] < limit ? 0.0f : y.v[i]; });
}
static inline V even_of(const uint16_t* p) {
  return each([&](int i) { return float_of(static_cast<uint32_t>(p[2 * i]) << 16); });
}
static inline V odd_of(const uint16_t* p) {
  return each([&](int i) { return float_of(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}
static inline V load(const uint16_t* p) {
  return each([&](int i) { return float_of(static_cast<uint32_t>(p[i]) << 16); });
}
static inline V load(const int8_t* p) {
  return each([&](int i) { return static_cast<float>(p[i]); });
}
static inline V as_bf16(V a) {
  return each([&](int i) { return float_of(rounded_bits(a.v[i]) & 0xffff0000u); });
}
static inline void store(uint16_t* p, V a) {
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint16_t>(rounded_bits(a.v[i]) >> 16);
}
static inline void transpose(V t[16]) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < i; j++) {
      float x = t[i].v[j];
      t[i].v[j] = t[j].v[i];
      t[j].v[i] = x;
    }
}

constexpr int ROWS = 2;
constexpr int SUMS = 4;
constexpr int BROAD_ROWS = 2;
