// F32x16 in four registers: NEON of 64-bit ARM. vec.h says what each function does.
#pragma once
#include <arm_neon.h>

struct F32x16 {
  float32x4_t v[4];
};

// A vector (F32x16 or I32x16) whose register i is f(i).
template <class T = F32x16, class F>
static inline T map(F f) {
  return {{f(0), f(1), f(2), f(3)}};
}

static inline uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
static inline float32x4_t float_of(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }

static inline F32x16 load(const float* p) {  // by bytes, as cache entries may be unaligned
  return map([&](int i) { return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p + 4 * i))); });
}
static inline void store(float* p, F32x16 a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline F32x16 set1(float x) { return map([&](int) { return vdupq_n_f32(x); }); }
static inline F32x16 zero() { return set1(0.0f); }
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return map([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); }); }
static inline F32x16 operator+(F32x16 a, F32x16 b) { return map([&](int i) { return vaddq_f32(a.v[i], b.v[i]); }); }
static inline F32x16 operator-(F32x16 a, F32x16 b) { return map([&](int i) { return vsubq_f32(a.v[i], b.v[i]); }); }
static inline F32x16 operator*(F32x16 a, F32x16 b) { return map([&](int i) { return vmulq_f32(a.v[i], b.v[i]); }); }
static inline F32x16 operator/(F32x16 a, F32x16 b) { return map([&](int i) { return vdivq_f32(a.v[i], b.v[i]); }); }
static inline F32x16 max(F32x16 a, F32x16 b) {  // FMAX and FMAXNM treat NaN in other ways than vec.h asks
  return map([&](int i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
static inline F32x16 min(F32x16 a, F32x16 b) {
  return map([&](int i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
static inline F32x16 nearest(F32x16 a) { return map([&](int i) { return vrndnq_f32(a.v[i]); }); }
static inline F32x16 exp2_of_magic(F32x16 x) {
  return map([&](int i) { return float_of(vshlq_n_u32(bits_of(x.v[i]), 23)); });
}
static inline F32x16 zero_where_less(F32x16 x, float limit, F32x16 y) {
  return map([&](int i) { return float_of(vbicq_u32(bits_of(y.v[i]), vcltq_f32(x.v[i], vdupq_n_f32(limit)))); });
}

static inline uint32x4_t high_half(uint32x4_t bits) { return vandq_u32(bits, vdupq_n_u32(0xffff0000u)); }
static inline uint32x4_t pairs(const uint16_t* p) { return vreinterpretq_u32_u16(vld1q_u16(p)); }

static inline F32x16 load_even(const uint16_t* p) {
  return map([&](int i) { return float_of(vshlq_n_u32(pairs(p + 8 * i), 16)); });
}
static inline F32x16 load_odd(const uint16_t* p) { return map([&](int i) { return float_of(high_half(pairs(p + 8 * i))); }); }
static inline F32x16 load(const uint16_t* p) {
  return map([&](int i) { return float_of(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}
static inline F32x16 load(const int8_t* p) {
  int8x16_t all = vld1q_s8(p);
  int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_high_s8(all);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}

// What rounding adds to the bits of a float before the lower 16 are cut off.
static inline uint32x4_t rounding_of(uint32x4_t bits) {
  return vaddq_u32(vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)), vdupq_n_u32(0x7fff));
}
static inline F32x16 round_to_bf16(F32x16 a) {
  return map([&](int i) { return float_of(high_half(vaddq_u32(bits_of(a.v[i]), rounding_of(bits_of(a.v[i]))))); });
}
static inline void store(uint16_t* p, F32x16 a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vaddhn_u32(bits_of(a.v[i]), rounding_of(bits_of(a.v[i]))));
}

// Transposes a 4 x 4 tile: register i of four vectors at `from` into register j of four vectors at `to`.
static inline void transpose4(const F32x16* from, int i, F32x16* to, int j) {
  float32x4_t a = from[0].v[i], b = from[1].v[i], c = from[2].v[i], d = from[3].v[i];
  float32x4_t low = vzip1q_f32(a, c), high = vzip2q_f32(a, c), other_low = vzip1q_f32(b, d), other_high = vzip2q_f32(b, d);
  to[0].v[j] = vzip1q_f32(low, other_low);
  to[1].v[j] = vzip2q_f32(low, other_low);
  to[2].v[j] = vzip1q_f32(high, other_high);
  to[3].v[j] = vzip2q_f32(high, other_high);
}
static inline void transpose(F32x16 t[16]) {
  F32x16 r[16];
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++) transpose4(t + 4 * i, j, r + 4 * j, i);
  for (int i = 0; i < 16; i++) t[i] = r[i];
}

constexpr int MAX_TILE_ROWS = 3;
constexpr int MAX_ACCUMULATORS = 6;
constexpr int MAX_WIDE_ROWS = 1;
