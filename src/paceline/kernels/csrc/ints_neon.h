// The integer sums of a span on ARM, for which there are three instructions:
//
//   USMMLA  2 outputs x 8 inputs times 2 rows x 8 inputs     i8mm; the bytes of an int16 row count as two rows
//   SDOT    4 outputs x 4 inputs times 4 inputs of a row     dotprod
//   SMULL   16-bit products, which are added to sums in pairs
//
// SDOT and SMULL multiply signed numbers, so the bias of 128 is taken out of 8-bit weights first. int16 activations
// come as the upper bytes of all rows, then the lower bytes; a sum is 256 * upper + lower.
#pragma once
struct I32x16 {
  Ints v[4];
};
static inline F32x16 to_float(I32x16 s) { return map([&](int i) { return vcvtq_f32_s32(s.v[i]); }); }
constexpr bool BYTE_DOTS = true, INT16_AS_BYTES = true;

static inline int8x16_t broadcast4(const int8_t* four) {
  int32_t number;
  memcpy(&number, four, sizeof number);
  return vreinterpretq_s8_s32(vdupq_n_s32(number));
}
// 16 weights of a line: its bytes, or their low or high nibbles, or the 4-bit floats that these are.
template <int BITS, bool FLOATS>
static inline uint8x16_t unpack(const uint8_t* p, int upper) {
  uint8x16_t bytes = vld1q_u8(p), codes = BITS == 8 ? bytes : upper ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
  return FLOATS ? vqtbl1q_u8(vld1q_u8(E2M1_UNSIGNED.data()), codes) : codes;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int32_t INT8_BIAS = 128;
constexpr int MAX_QUANTISED_ROWS = 6, MAX_INT16_ROWS = 3;
constexpr int MAX_QUANTISED_ACCUMULATORS = 2;

// s = starts + one span of R rows times W halves of a panel.
template <int BITS, int SPAN, bool FLOATS, int R, int W>
static inline void span_sums(const uint8_t* lines, const int8_t* values, const int32_t* starts, I32x16 (&s)[R][W]) {
  constexpr bool INT16 = SPAN == 64;
  constexpr int PAIRS = INT16 ? R : (R + 1) / 2;  // of rows; an odd last row is paired with itself
  auto second = [&](int r) { return INT16 ? R + r : r + 1 < R ? r + 1 : r; };
  int32x4_t sums[PAIRS][W][8];
  for (auto& pair : sums)
    for (auto& half : pair)
      for (int32x4_t& sum : half) sum = vdupq_n_s32(0);
#pragma GCC unroll 1
  for (int j = 0; j < SPAN * BITS / 32; j += 2, lines += 256)
    for (int upper = 0; upper < 8 / BITS; upper++) {
      int8x16_t x[PAIRS];
      for (int p = 0; p < PAIRS; p++) {
        int r = INT16 ? p : 2 * p, at = 4 * j + 16 * upper;
        x[p] = vcombine_s8(vld1_s8(values + r * SPAN + at), vld1_s8(values + second(r) * SPAN + at));
      }
#pragma GCC unroll 8
      for (int q = 0; q < 4 * W; q++) {
        uint32x4_t left = vreinterpretq_u32_u8(unpack<BITS, FLOATS>(lines + 16 * q, upper));
        uint32x4_t right = vreinterpretq_u32_u8(unpack<BITS, FLOATS>(lines + 128 + 16 * q, upper));
        uint8x16_t a = vreinterpretq_u8_u32(vzip1q_u32(left, right)), b = vreinterpretq_u8_u32(vzip2q_u32(left, right));
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; p++) {
          int32x4_t* to = &sums[p][q / 4][q % 4 * 2];
          to[0] = vusmmlaq_s32(to[0], a, x[p]);
          to[1] = vusmmlaq_s32(to[1], b, x[p]);
        }
      }
    }
  for (int p = 0; p < PAIRS; p++)
    for (int i = 0; i < W; i++)
      for (int q = 0; q < 4; q++) {
        int32x4_t a = sums[p][i][2 * q], b = sums[p][i][2 * q + 1], first = vuzp1q_s32(a, b), other = vuzp2q_s32(a, b);
        int r = INT16 ? p : 2 * p;
        if (INT16) first = vaddq_s32(vshlq_n_s32(first, 8), other);
        s[r][i].v[q] = vaddq_s32(first, vdupq_n_s32(starts[r]));
        if (!INT16 && r + 1 < R) s[r + 1][i].v[q] = vaddq_s32(other, vdupq_n_s32(starts[r + 1]));
      }
}
#else
constexpr int32_t INT8_BIAS = 0;
constexpr int MAX_QUANTISED_ROWS = 6, MAX_INT16_ROWS = 6;
constexpr int MAX_QUANTISED_ACCUMULATORS = 4;

template <bool INT16>
static inline int32x4_t dot(int32x4_t s, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(s, w, x);
#else  // 16 bits hold 2 * 128 * 127, but not twice -128 * -128, which lower bytes of int16 may give
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  if (INT16) return vaddq_s32(s, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
  return vpadalq_s16(s, vpaddq_s16(low, high));
#endif
}

template <int BITS, int SPAN, bool FLOATS, int R, int W>
static inline void span_sums(const uint8_t* lines, const int8_t* values, const int32_t* starts, I32x16 (&s)[R][W]) {
  constexpr bool INT16 = SPAN == 64;
  for (int lower = INT16 ? 0 : 1; lower < 2; lower++, values += R * SPAN) {
    for (int r = 0; r < R; r++)
      for (int q = 0; q < 4 * W; q++) {
        Ints &sum = s[r][q / 4].v[q % 4], start = (lower ? starts[r] : 0) - Ints{};
        sum = INT16 && lower ? 256 * sum + start : start;
      }
#pragma GCC unroll 1
    for (int j = 0; j < SPAN * BITS / 32; j++)
      for (int upper = 0; upper < 8 / BITS; upper++) {
        int8x16_t w[4 * W];
        for (int q = 0; q < 4 * W; q++) {
          uint8x16_t part = unpack<BITS, FLOATS>(lines + 128 * j + 16 * q, upper);
          w[q] = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(part, vdupq_n_u8(128)) : part);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          int8x16_t x = broadcast4(values + r * SPAN + 4 * j + 16 * upper);
          for (int q = 0; q < 4 * W; q++) s[r][q / 4].v[q % 4] = dot<INT16>(s[r][q / 4].v[q % 4], w[q], x);
        }
      }
  }
}
#endif
