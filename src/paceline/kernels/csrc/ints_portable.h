// I32x16 as an array, for every processor. ints.h says what each function does.
#pragma once
struct I32x16 {
  int32_t v[16];
};
struct U8x64 {
  uint8_t v[64];
};
static inline I32x16 set1_i32(int32_t x) {
  I32x16 r;
  for (int i = 0; i < 16; i++) r.v[i] = x;
  return r;
}
static inline U8x64 load_line(const uint8_t* p) {
  U8x64 r;
  memcpy(r.v, p, 64);
  return r;
}
static inline U8x64 low_nibbles(U8x64 b) {
  for (int i = 0; i < 64; i++) b.v[i] &= 15;
  return b;
}
static inline U8x64 high_nibbles(U8x64 b) {
  for (int i = 0; i < 64; i++) b.v[i] >>= 4;
  return b;
}
constexpr bool BYTE_DOTS = true;
static inline I32x16 widen_sums(I32x16 s) { return s; }
static inline I32x16 dot4(I32x16 s, U8x64 w, int32_t x) {
  int8_t four[4];
  memcpy(four, &x, 4);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) s.v[i] += w.v[4 * i + j] * four[j];
  return s;
}
static inline U8x64 even_bytes(U8x64 b) {
  for (int i = 1; i < 64; i += 2) b.v[i] = 0;
  return b;
}
static inline U8x64 odd_bytes(U8x64 b) {
  for (int i = 0; i < 64; i += 2) b.v[i] = b.v[i + 1], b.v[i + 1] = 0;
  return b;
}
static inline I32x16 dot2(I32x16 s, U8x64 w, int32_t x) {  // the upper byte of each 16-bit number of w is zero
  int16_t two[2];
  memcpy(two, &x, 4);
  for (int i = 0; i < 16; i++) s.v[i] += w.v[4 * i] * two[0] + w.v[4 * i + 2] * two[1];
  return s;
}
static inline F32x16 to_float(I32x16 s) {
  return map([&](int i) { return static_cast<float>(s.v[i]); });
}
static inline F32x16 load_half(const uint16_t* p) {
  return map([&](int i) {
    uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16, rest = p[i] & 0x7fff;
    if (rest >= 0x0400) return float_of(sign | ((rest + 0x1c000) << 13));  // infinities are refused when weights are packed
    float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24: subnormal, exact
    return sign ? -small : small;
  });
}
static inline void store_i8(int8_t* p, F32x16 a, F32x16 b) {
  float t[32];
  store(t, a);
  store(t + 16, b);
  for (int i = 0; i < 32; i++) p[i] = static_cast<int8_t>(t[i]);
}
static inline void store_i16(int16_t* p, F32x16 a) {
  float t[16];
  store(t, a);
  for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(t[i]);
}

constexpr int MAX_QUANTISED_ROWS = 2;
constexpr int MAX_QUANTISED_ACCUMULATORS = 4;
