// Sixteen sums in an array, for every processor.
#pragma once
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};
static inline I whole(int32_t x) {
  I r;
  for (int i = 0; i < 16; i++) r.v[i] = x;
  return r;
}
static inline B line(const uint8_t* p) {
  B r;
  memcpy(r.v, p, 64);
  return r;
}
static inline B low(B b) {
  for (int i = 0; i < 64; i++) b.v[i] &= 15;
  return b;
}
static inline B high(B b) {
  for (int i = 0; i < 64; i++) b.v[i] >>= 4;
  return b;
}
constexpr bool BYTE_DOTS = true;
static inline I joined(I s) { return s; }
static inline I dot(I s, B w, int32_t x) {
  int8_t four[4];
  memcpy(four, &x, 4);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) s.v[i] += w.v[4 * i + j] * four[j];
  return s;
}
static inline B evens(B b) {
  for (int i = 1; i < 64; i += 2) b.v[i] = 0;
  return b;
}
static inline B odds(B b) {
  for (int i = 0; i < 64; i += 2) b.v[i] = b.v[i + 1], b.v[i + 1] = 0;
  return b;
}
static inline I dot_wide(I s, B w, int32_t x) {  // the upper halves of w are zeros
  int16_t two[2];
  memcpy(two, &x, 4);
  for (int i = 0; i < 16; i++) s.v[i] += w.v[4 * i] * two[0] + w.v[4 * i + 2] * two[1];
  return s;
}
static inline V floats(I s) {
  return each([&](int i) { return static_cast<float>(s.v[i]); });
}
static inline V from_half(const uint16_t* p) {
  return each([&](int i) {
    uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16, rest = p[i] & 0x7fff;
    if (rest >= 0x0400) return float_of(sign | ((rest + 0x1c000) << 13));  // infinities are refused when packed
    float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24: subnormal, exact
    return sign ? -small : small;
  });
}
static inline void store_bytes(int8_t* p, V a, V b) {  // 32 whole numbers
  float t[32];
  store(t, a);
  store(t + 16, b);
  for (int i = 0; i < 32; i++) p[i] = static_cast<int8_t>(t[i]);
}
static inline void store_words(int16_t* p, V a) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(t[i]);
}

constexpr int QUANTISED_ROWS = 2;
constexpr int QUANTISED_SUMS = 4;
