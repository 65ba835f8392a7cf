// Sixteen floats in four registers: NEON of 64-bit ARM. See vec.h for what each function means.
#pragma once
#include <arm_neon.h>

struct V {
  float32x4_t v[4];
};

// The four registers of a V, an I or a B.
template <class T = V, class F>
static inline T each(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

static inline uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
static inline float32x4_t float_of(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }

static inline V load(const float* p) {  // entries of the cache are at any address
  return each([&](int i) { return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 4 * i))); });
}
static inline void store(float* p, V a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline V set1(float x) { return each([&](int) { return vdupq_n_f32(x); }); }
static inline V zero() { return set1(0.0f); }
static inline V fma(V a, V b, V c) { return each([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
static inline V operator+(V a, V b) { return each([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
static inline V operator-(V a, V b) { return each([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
static inline V operator*(V a, V b) { return each([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
static inline V operator/(V a, V b) { return each([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
static inline V larger(V a, V b) {  // FMAX and FMAXNM choose otherwise where one is NaN
  return each([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
static inline V smaller(V a, V b) {
  return each([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
static inline V nearest(V a) { return each([&](int i) { return vrndnq_f32(a.v[i]); }); }
static inline V power_of(V whole) {
  return each([&](int i) { return float_of(vshlq_n_u32(bits_of(whole.v[i]), 23)); });
}
static inline V zero_below(V x, float limit, V y) {
  return each([&](int i) { return float_of(vbicq_u32(bits_of(y.v[i]), vcltq_f32(x.v[i], vdupq_n_f32(limit)))); });
}

static inline uint32x4_t high_half(uint32x4_t bits) { return vandq_u32(bits, vdupq_n_u32(0xffff0000u)); }
static inline uint32x4_t pairs(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }

static inline V even_of(const uint16_t* p) {
  return each([&](int i) { return float_of(vshlq_n_u32(pairs(p + 8 * i), 16)); });
}
static inline V odd_of(const uint16_t* p) { return each([&](int i) { return float_of(high_half(pairs(p + 8 * i))); }); }
static inline V load(const uint16_t* p) {
  return each([&](int i) { return float_of(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
static inline V load(const int8_t* p) {
  int8x16_t all = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}

// What is added to a float's bits before the lower half is cut off.
static inline uint32x4_t rounding_of(uint32x4_t bits) {
  return vaddq_u32(vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
}
static inline V as_bf16(V a) {
  return each([&](int i) { return float_of(high_half(vaddq_u32(bits_of(a.v[i]), rounding_of(bits_of(a.v[i]))))); });
}
static inline void store(uint16_t* p, V a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vaddhn_u32(bits_of(a.v[i]), rounding_of(bits_of(a.v[i]))));
}

// 4 x 4 numbers, from `from` on, turned to `to`; each row's are register i of a vector.
static inline void transpose4(const V* from, int i, V* to, int j) {
  float32x4_t a = from[0].v[i], b = from[1].v[i], c = from[2].v[i], d = from[3].v[i];
  float32x4_t low = vzip1q_f32(a, c), high = vzip2q_f32(a, c), other_low = vzip1q_f32(b, d), other_high = vzip2q_f32(b, d);
  to[0].v[j] = vzip1q_f32(low, other_low);
  to[1].v[j] = vzip2q_f32(low, other_low);
  to[2].v[j] = vzip1q_f32(high, other_high);
  to[3].v[j] = vzip2q_f32(high, other_high);
}
static inline void transpose(V t[16]) {
  V r[16];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) transpose4(t + 4 * i, j, r + 4 * j, i);
  for (int i = 0; i < 16; i++) t[i] = r[i];
}

constexpr int ROWS = 3;
constexpr int SUMS = 6;
constexpr int BROAD_ROWS = 1;
