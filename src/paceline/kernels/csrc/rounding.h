// Quantises a weight to the grid (scale and offset of each group) with the least squared error. It repeats
// model/quantised/rounding.py operation for operation, so that scales, offsets and codes have the same bits.
//
// Sixteen groups are processed together, one per lane: values are transposed to [group, 16], and what is chosen per
// group is chosen per lane. Errors are summed in the order of _sum() in rounding.py: input k goes to sum k mod 16.
#pragma once
#include "kernels.h"
#include "vec.h"

namespace {

// Rounded to fp16, ties to even; infinite from 65520 on.
inline float round_to_half(float x) {
  uint32_t sign = bits_of(x) & 0x80000000u, size = bits_of(x) & 0x7fffffffu;
  uint32_t normal = (size + 0xfffu + ((size >> 13) & 1)) & ~0x1fffu;
  uint32_t subnormal = bits_of((float_of(size) + 0.75f) - 0.75f);  // the last bit of a float from 1/2 to 1 is 2^-24
  uint32_t rounded = size < bits_of(0x1p-14f) ? subnormal : normal;
  return float_of((rounded < bits_of(65536.0f) ? rounded : bits_of(__builtin_inff())) | sign);
}

// The grids of sixteen groups: code c stands for scale * c + offset.
struct Grids {
  float scale[16], offset[16];
};

// The range of codes.
struct CodeRange {
  float least, most;
  explicit CodeRange(const WeightRounding& r)
      : least(r.bits == 4 ? (r.zero == PL_ZERO_POINT_FREE ? 0.0f : -8.0f) : -127.0f), most(r.bits == 4 ? least + 15 : 127.0f) {}
  F32x16 clamp(F32x16 codes) const { return min(set1(most), max(set1(least), codes)); }
};

// The grids of groups whose ranges lows .. highs are shrunk by a factor. `exact`: a free zero point and its scale
// stay float32, because fp16 cannot express them.
inline void make_grids(const WeightRounding& r, const float* lows, const float* highs, float shrink, bool exact, Grids& g) {
  float steps = static_cast<float>((1 << r.bits) - 1), most = static_cast<float>((1 << (r.bits - 1)) - 1);
  float least = r.bits == 4 ? -8.0f : -127.0f;
  for (int i = 0; i < 16; i++) {
    float low = lows[i] * shrink, high = highs[i] * shrink, scale;
    if (r.zero != PL_ZERO_POINT_NONE)
      scale = (high - low) / steps;
    else if (r.bits == 8)
      scale = (-low > high ? -low : high) / most;
    else
      scale = (-low > high ? -low : -high) / (most + 1);
    g.scale[i] = scale == 0 ? 1.0f : scale;
    g.offset[i] = low;
  }
  if (r.zero == PL_ZERO_POINT_FREE) {
    float first = r.bits == 4 ? 0.0f : least;
    for (int i = 0; i < 16; i++) {
      float scale = exact ? g.scale[i] : round_to_half(g.scale[i]), offset = g.offset[i] - first * scale;
      g.scale[i] = scale;
      g.offset[i] = exact ? offset : round_to_half(offset);
    }
    return;
  }
  for (int i = 0; i < 16; i++) g.scale[i] = round_to_bf16(g.scale[i]);
  F32x16 scale = load(g.scale), zero_points = nearest(set1(least) - load(g.offset) / scale);
  zero_points = min(set1(most), max(set1(least), zero_points));
  store(g.offset, r.zero == PL_ZERO_POINT_NONE ? zero() : (zero() - zero_points) * scale);
}

// Whether fp16 can express these grids: scales are normal numbers, offsets are finite.
inline bool fits_half(const WeightRounding& r, const float* lows, const float* highs, float shrink) {
  Grids exact, half;
  make_grids(r, lows, highs, shrink, true, exact);
  make_grids(r, lows, highs, shrink, false, half);
  int bad = 0;
  for (int i = 0; i < 16; i++) bad += !(exact.scale[i] >= 0x1p-14f) + !(half.offset[i] - half.offset[i] == 0);
  return !bad;
}

// The squared error of rounding `values` [group, 16] to the nearest codes.
inline F32x16 squared_error(const CodeRange& range, const Grids& g, const float* values, long group) {
  F32x16 scale = load(g.scale), offset = load(g.offset), inverse = set1(1.0f) / scale, sums[16];
  for (F32x16& sum : sums) sum = zero();
  for (long k = 0; k < group; k += 16, values += 256)
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      F32x16 wanted = load(values + 16 * i) - offset;
      F32x16 error = range.clamp(nearest(wanted * inverse)) * scale - wanted;
      sums[i] = sums[i] + error * error;
    }
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) sums[i] = sums[i] + sums[i + width];
  return sums[0];
}

// Transposes the groups first .. first + 16 to values [group, 16], with the least and the largest of each. Behind the
// last group it is repeated.
inline void load_groups(const WeightRounding& r, long begin, long first, long groups, float* values, float* low, float* high) {
  F32x16 least = set1(__builtin_inff()), most = zero() - least;
  for (long k = 0; k < r.group; k += 16) {
    F32x16 t[16];
    for (long j = 0; j < 16; j++) {
      long group = first + j < groups ? first + j : groups - 1, i = begin + group * r.group + k;
      t[j] = r.dtype == PL_BFLOAT16 ? load(static_cast<const uint16_t*>(r.weight) + i)
                                    : load(static_cast<const float*>(r.weight) + i);
    }
    transpose(t);
    for (long j = 0; j < 16; j++) {
      least = min(t[j], least), most = max(t[j], most);
      store(values + (k + j) * 16, t[j]);
    }
  }
  store(low, least);
  store(high, most);
}

// Writes scales, offsets and codes of the `count` groups from `group` on.
inline void write_codes(const WeightRounding& r, const CodeRange& range, const Grids& grids, const float* values, long group, long count) {
  memcpy(r.scales + group, grids.scale, static_cast<size_t>(count) * sizeof(float));
  if (r.offsets) memcpy(r.offsets + group, grids.offset, static_cast<size_t>(count) * sizeof(float));
  F32x16 scale = load(grids.scale), offset = load(grids.offset);
  for (long k = 0; k < r.group; k += 16) {
    F32x16 t[16];
    for (long j = 0; j < 16; j++) t[j] = range.clamp(nearest((load(values + (k + j) * 16) - offset) / scale));
    transpose(t);
    for (long j = 0; j < count; j++) {
      float codes[16];
      store(codes, t[j]);
      for (int i = 0; i < 16; i++) r.codes[(group + j) * r.group + k + i] = static_cast<int8_t>(codes[i]);
    }
  }
}

// Rows first .. first + rows of the weight, by one thread. `scratch`: rounding_scratch() floats.
void round_weight_rows(const WeightRounding& r, long first, long rows, float* scratch) {
  constexpr int MAX_SHRINKS = 17;  // of a group's range: 1, 0.975, 0.95 ...
  long groups = rows * (r.columns / r.group), batches = round_up(groups, 16) / 16, size = 16 * r.group;
  int shrinks = r.bits == 4 ? MAX_SHRINKS : 5;
  float *values = scratch, *low = values + batches * size, *high = low + batches * 16, shrink[MAX_SHRINKS];
  bool exact[MAX_SHRINKS] = {};  // whether some group of these rows does not fit fp16
  for (int s = 0; s < shrinks; s++) shrink[s] = static_cast<float>(1 - 0.025 * s);
  long begin = first * r.columns;  // index of the rows' first weight
  for (long batch = 0; batch < batches; batch++) {
    load_groups(r, begin, batch * 16, groups, values + batch * size, low + batch * 16, high + batch * 16);
    for (int s = 0; s < shrinks && r.zero == PL_ZERO_POINT_FREE; s++)
      exact[s] = exact[s] || !fits_half(r, low + batch * 16, high + batch * 16, shrink[s]);
  }
  CodeRange range(r);
  for (long batch = 0; batch < batches; batch++, values += size, low += 16, high += 16) {
    Grids best, grids;
    float least[16], errors[16];
    for (int s = 0; s < shrinks; s++) {
      make_grids(r, low, high, shrink[s], exact[s], grids);
      store(errors, squared_error(range, grids, values, r.group));
      if (!s) best = grids;
      for (int i = 0; i < 16; i++) {
        bool better = errors[i] < (s ? least[i] : __builtin_inff());
        best.scale[i] = better ? grids.scale[i] : best.scale[i];
        best.offset[i] = better ? grids.offset[i] : best.offset[i];
        least[i] = better ? errors[i] : s ? least[i] : __builtin_inff();
      }
    }
    long count = groups - batch * 16 < 16 ? groups - batch * 16 : 16;
    write_codes(r, range, best, values, begin / r.group + batch * 16, count);
  }
}

}  // namespace
