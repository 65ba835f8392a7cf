// Rounding a weight to codes on the grid that loses least: model/quantised/rounding.py, operation by
// operation, so that scales, offsets and codes have the same bits.
//
// Sixteen groups go side by side, one in each lane: what is chosen per group is chosen per lane, and
// a group's error is summed as _sum() of rounding.py says, input k into the (k mod 16)-th of 16 sums.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

inline uint32_t word_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

inline float number_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Rounded to half precision, ties to even; infinite from 65520 on.
inline float as_half(float x) {
  uint32_t sign = word_of(x) & 0x80000000u, size = word_of(x) & 0x7fffffffu;
  uint32_t normal = (size + 0xfffu + ((size >> 13) & 1)) & ~0x1fffu;
  uint32_t small = word_of((number_of(size) + 0.75f) - 0.75f);  // between 1/2 and 1 a float's last place is 2^-24
  uint32_t found = size < word_of(0x1p-14f) ? small : normal;
  return number_of((found < word_of(65536.0f) ? found : word_of(__builtin_inff())) | sign);
}

// Codes of sixteen groups stand for scale * code + offset.
struct Grids {
  float scale[16], offset[16];
};

struct Limits {
  float least, most;  // of codes
  explicit Limits(const WeightRounding& r)
      : least(r.bits == 4 ? (r.zero == PL_ZERO_FREE ? 0.0f : -8.0f) : -127.0f), most(r.bits == 4 ? least + 15 : 127.0f) {}
  V clamp(V codes) const { return smaller(set1(most), larger(set1(least), codes)); }
};

// Of ranges shrunk to low .. high. `exact`: a free grid in float32, where halves do not do.
inline void grids_of(const WeightRounding& r, const float* lows, const float* highs, float shrink, bool exact, Grids& g) {
  float steps = static_cast<float>((1 << r.bits) - 1), most = static_cast<float>((1 << (r.bits - 1)) - 1);
  float least = r.bits == 4 ? -8.0f : -127.0f;
  for (int i = 0; i < 16; i++) {
    float low = lows[i] * shrink, high = highs[i] * shrink, scale;
    if (r.zero != PL_ZERO_NONE)
      scale = (high - low) / steps;
    else if (r.bits == 8)
      scale = (-low > high ? -low : high) / most;
    else
      scale = (-low > high ? -low : -high) / (most + 1);
    g.scale[i] = scale == 0 ? 1.0f : scale;
    g.offset[i] = low;
  }
  if (r.zero == PL_ZERO_FREE) {
    float first = r.bits == 4 ? 0.0f : least;
    for (int i = 0; i < 16; i++) {
      float scale = exact ? g.scale[i] : as_half(g.scale[i]), offset = g.offset[i] - first * scale;
      g.scale[i] = scale;
      g.offset[i] = exact ? offset : as_half(offset);
    }
    return;
  }
  for (int i = 0; i < 16; i++) g.scale[i] = as_bf16(g.scale[i]);
  V scale = load(g.scale), points = nearest(set1(least) - load(g.offset) / scale);
  points = smaller(set1(most), larger(set1(least), points));
  store(g.offset, r.zero == PL_ZERO_NONE ? zero() : (zero() - points) * scale);
}

// Whether halves do for these, of which `scale` is not rounded yet.
inline bool halves_do(const WeightRounding& r, const float* lows, const float* highs, float shrink) {
  Grids raw, halves;
  grids_of(r, lows, highs, shrink, true, raw);
  grids_of(r, lows, highs, shrink, false, halves);
  int bad = 0;
  for (int i = 0; i < 16; i++) bad += !(raw.scale[i] >= 0x1p-14f) + !(halves.offset[i] - halves.offset[i] == 0);
  return !bad;
}

// Squares of what nearest codes of `values` [group, 16] leave.
inline V error_of(const Limits& limits, const Grids& g, const float* values, long group) {
  V scale = load(g.scale), offset = load(g.offset), inverse = set1(1.0f) / scale, sums[16];
  for (V& sum : sums) sum = zero();
  for (long k = 0; k < group; k += 16, values += 256)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      V wanted = load(values + 16 * i) - offset;
      V left = limits.clamp(nearest(wanted * inverse)) * scale - wanted;
      sums[i] = sums[i] + left * left;
    }
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] = sums[i] + sums[i + width];
  return sums[0];
}

// Some rows of the weight, by one thread. scratch: rounding_scratch() floats.
void round_weight_rows(const WeightRounding& r, long first, long rows, float* scratch) {
  static constexpr int kShrinks = 17;
  long groups = rows * (r.columns / r.group), batches = round_up(groups, 16) / 16, size = 16 * r.group;
  int shrinks = r.bits == 4 ? kShrinks : 5;
  float *values = scratch, *low = values + batches * size, *high = low + batches * 16, shrink[kShrinks];
  bool exact[kShrinks] = {};
  for (int s = 0; s < shrinks; s++) shrink[s] = static_cast<float>(1 - 0.025 * s);
  long at = first * r.columns;  // of the weight's numbers
  for (long batch = 0; batch < batches; batch++) {
    V least = set1(__builtin_inff()), most = zero() - least;
    for (long k = 0; k < r.group; k += 16) {
      V t[16];
      for (long j = 0; j < 16; j++) {  // a group that is not there is the last one once more
        long group = batch * 16 + j < groups ? batch * 16 + j : groups - 1, i = at + group * r.group + k;
        t[j] = r.dtype == PL_BFLOAT16 ? load(static_cast<const uint16_t*>(r.weight) + i)
                                      : load(static_cast<const float*>(r.weight) + i);
      }
      transpose(t);
      for (long j = 0; j < 16; j++) {
        least = smaller(t[j], least), most = larger(t[j], most);
        store(values + batch * size + (k + j) * 16, t[j]);
      }
    }
    store(low + batch * 16, least);
    store(high + batch * 16, most);
    for (int s = 0; s < shrinks && r.zero == PL_ZERO_FREE; s++)
      exact[s] = exact[s] || !halves_do(r, low + batch * 16, high + batch * 16, shrink[s]);
  }
  Limits limits(r);
  for (long batch = 0; batch < batches; batch++, values += size, low += 16, high += 16) {
    Grids best, grids;
    float fewest[16], errors[16];
    for (int s = 0; s < shrinks; s++) {
      grids_of(r, low, high, shrink[s], exact[s], grids);
      store(errors, error_of(limits, grids, values, r.group));
      if (!s) best = grids;
      for (int i = 0; i < 16; i++) {
        bool better = errors[i] < (s ? fewest[i] : __builtin_inff());
        best.scale[i] = better ? grids.scale[i] : best.scale[i];
        best.offset[i] = better ? grids.offset[i] : best.offset[i];
        fewest[i] = better ? errors[i] : s ? fewest[i] : __builtin_inff();
      }
    }
    long group = at / r.group + batch * 16, count = groups - batch * 16 < 16 ? groups - batch * 16 : 16;
    memcpy(r.scales + group, best.scale, static_cast<size_t>(count) * sizeof(float));
    if (r.offsets) memcpy(r.offsets + group, best.offset, static_cast<size_t>(count) * sizeof(float));
    V scale = load(best.scale), offset = load(best.offset);
    for (long k = 0; k < r.group; k += 16) {
      V t[16];
      for (long j = 0; j < 16; j++) t[j] = limits.clamp(nearest((load(values + (k + j) * 16) - offset) / scale));
      transpose(t);
      for (long j = 0; j < count; j++) {
        float codes[16];
        store(codes, t[j]);
        for (int i = 0; i < 16; i++) r.codes[(group + j) * r.group + k + i] = static_cast<int8_t>(codes[i]);
      }
    }
  }
}

}  // namespace
