// Kernels of several tables beside the portable ones: the same bits, in every form and number of rows. On x86-64 with
// emulated tiles (test_avx512.py), on ARM by qemu (test_arm.py).
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

extern const Kernels kernels_avx512, kernels_amx;
extern const QuantisedKernels quantised_vnni;

namespace {

std::mt19937 rng(11);
float number() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(rng); }

struct Table {
  const char* name;
  const Kernels& kernels;
  const QuantisedKernels& quantised;
};

std::vector<Table> tables() {
#if defined(__aarch64__)
  std::vector<Table> all{{"portable", kernels_portable, quantised_portable}, {"neon", kernels_neon, quantised_neon}};
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) all.push_back({"dotprod", kernels_neon, quantised_dotprod});
  if (!pl_choose_kernels("i8mm")) all.push_back({"i8mm", kernels_i8mm, quantised_i8mm});
  return all;
#else
  return {{"portable", kernels_portable, quantised_portable}, {"avx2", kernels_avx2, quantised_avx2},
          {"avx512", kernels_avx512, quantised_vnni}, {"amx", kernels_amx, quantised_amx}};
#endif
}

struct Form {
  const char* name;
  int64_t bits, groups_per_scale, offset_kind, int16, dtype = PL_BFLOAT16, scale = PL_SCALE_FLOAT, e2m1 = 0;
};
constexpr Form FORMS[] = {
    {"bf16", 0, 0, 0, 0},         {"8 bits wide", 8, 2, 0, 1},   {"8 bits wide, offsets", 8, 4, PL_OFFSETS_SIGNED, 1},
    {"8 bits narrow", 8, 2, 0, 0}, {"8 bits, groups of 32", 8, 1, PL_OFFSETS_SIGNED, 0},
    {"8 bits, groups of 16", 8, 0, 0, 0}, {"4 bits", 4, 1, PL_OFFSETS_UNSIGNED, 0},
    {"float32", 0, 0, 0, 0, PL_FLOAT32}, {"8 bits, halves", 8, 2, PL_OFFSETS_SIGNED, 1, PL_FLOAT32, PL_SCALE_HALF},
    {"4 bits, bf16", 4, 1, 0, 0, PL_FLOAT32, PL_SCALE_BFLOAT16},
    {"4-bit floats", 4, 1, 0, 0, PL_BFLOAT16, PL_SCALE_BFLOAT16, 1},
};

// The results, and behind them the rows in whole numbers.
std::vector<float> product(const Table& t, const Form& form, const pl_weight& w, const std::vector<float>& x, long rows) {
  std::vector<float> y(rows * w.outputs), scratch(gemm_scratch(rows, w.inputs)), scales(rows * w.inputs / 16);
  std::vector<float> memory((rows * w.inputs + 1) / 2);
  QuantisedRows quantised_x{memory.data(), scales.data(), w.inputs, w.int16_activations != 0};
  for (long r = 0; r < rows && w.bits; r++) t.quantised.quantise_row(x.data() + r * w.inputs, quantised_x, r);
  Gemm p{&w, form.dtype, x.data(), rows, w.inputs, STORE, y.data(), w.outputs, 0, 0, &t.quantised, quantised_x};
  t.kernels.gemm(p, 0, 1, scratch.data());
  y.insert(y.end(), scales.begin(), scales.end());
  y.insert(y.end(), memory.begin(), memory.end());
  return y;
}

float as_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits &= 0xffff0000u;
  memcpy(&value, &bits, 4);
  return value;
}

bool same_products(const std::vector<Table>& all, const Form& form, long inputs, long rows) {
  pl_weight w{};
  w.outputs = 96, w.inputs = inputs, w.bits = form.bits, w.groups_per_scale = form.groups_per_scale;
  w.scale_kind = form.scale, w.offset_kind = form.offset_kind, w.int16_activations = form.int16, w.e2m1 = form.e2m1;
  if (form.groups_per_scale > 1 && inputs % (form.groups_per_scale * GROUP)) return true;
  std::vector<float> memory(form.bits ? (3 * panel_bytes(w) + 3) / 4 : 96 * inputs);
  uint8_t* data = reinterpret_cast<uint8_t*>(memory.data());
  for (size_t i = 0; i < 4 * memory.size(); i++) data[i] = static_cast<uint8_t>(rng());
  for (long panel = 0; panel < 3 && form.bits; panel++)
    for (long i = 0; i < panel_bytes(w); i += form.scale == PL_SCALE_FLOAT ? 4 : 2) {
      if (i % group_bytes(w) >= group_header_bytes(w)) continue;
      float scale = number();
      uint16_t half = static_cast<uint16_t>(form.scale == PL_SCALE_HALF ? rng() & 0xbbff : rng() & 0xbfff);
      if (form.scale == PL_SCALE_FLOAT)
        memcpy(data + panel * panel_bytes(w) + i, &scale, 4);
      else
        memcpy(data + panel * panel_bytes(w) + i, &half, 2);
    }
  for (size_t i = 1; i < 4 * memory.size() && !form.bits; i += 2)
    data[i] = static_cast<uint8_t>(0x3e + 0x80 * (rng() % 2));
  w.data = data;  // panels behind the last are fetched, not read
  std::vector<float> x(rows * inputs);
  for (float& value : x) value = form.dtype == PL_BFLOAT16 ? as_bf16(number()) : number();
  std::vector<float> wanted = product(all[0], form, w, x, rows);
  for (const Table& t : all) {
    std::vector<float> got = product(t, form, w, x, rows);
    if (memcmp(wanted.data(), got.data(), 4 * wanted.size()))
      return printf("%s, %s: %ld rows of %ld inputs differ\n", t.name, form.name, rows, inputs), false;
  }
  return true;
}

// Numbers at which functions change, or that are none, through activations, norms, rounding and the choice of a token.
bool same_rows(const std::vector<Table>& all) {
  const float strange[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 1.2e-38f, 86.9f, 87.1f, -87.0f, -87.1f, 88.5f, 3e38f, -3e38f,
                           1e-7f, HUGE_VALF, -HUGE_VALF, NAN, 1.00390625f, 1.01171875f};
  for (long width : {1L, 15L, 16L, 33L, 67L, 300L})
    for (int64_t dtype : {PL_FLOAT32, PL_BFLOAT16}) {
      std::vector<float> x(width), y(width), weight(width, 0.75f), wanted;
      for (long i = 0; i < width; i++) x[i] = 4 * number(), y[i] = rng() % 4 ? 60 * number() : strange[rng() % 18];
      pl_model m{};
      m.dtype = dtype, m.hidden = width;
      for (const Table& t : all) {
        std::vector<float> got = x, next(width), back(width), normed(width);
        std::vector<uint16_t> stored(2 * width);
        std::vector<int32_t> places(3);
        std::vector<float> values(3);
        t.kernels.add_silu(dtype, got.data(), y.data(), next.data(), width);
        t.kernels.rms_norm(m, {weight.data(), 1e-5f}, x.data(), normed.data(), width);
        t.kernels.add_rms_norm(m, {weight.data(), 1e-5f}, normed.data(), y.data());
        t.kernels.store_row(dtype, y.data(), width, stored.data());
        t.kernels.load_row(dtype, stored.data(), width, back.data());
        values.push_back(t.kernels.top_k(dtype, stored.data(), width, 3, 1.5f, places.data(), values.data()));
        places.push_back(t.kernels.argmax(dtype, stored.data(), width));
        for (const auto* part : {&next, &normed, &back, &values}) got.insert(got.end(), part->begin(), part->end());
        for (int32_t place : places) got.push_back(static_cast<float>(place));
        for (float& value : got) value = std::isnan(value) ? NAN : value;  // of one kind
        if (wanted.empty()) wanted = got;
        if (memcmp(wanted.data(), got.data(), 4 * got.size()))
          return printf("%s: a row of %ld numbers differs\n", t.name, width), false;
      }
    }
  return true;
}

// Weights that are rounded to codes.
bool same_rounding(const std::vector<Table>& all) {
  const long rows = 5, columns = 192;
  for (long bits : {4L, 8L})
    for (long zero : {PL_ZERO_POINT_NONE, PL_ZERO_POINT_WHOLE, PL_ZERO_POINT_FREE}) {
      std::vector<float> w(rows * columns), wanted;
      for (float& value : w) value = number();
      for (const Table& t : all) {
        std::vector<float> codes(rows * columns / 4), scales(rows * columns / 32), offsets(scales.size());
        WeightRounding r{PL_FLOAT32, w.data(), columns, 32, bits, zero, reinterpret_cast<int8_t*>(codes.data()), scales.data(),
                   offsets.data()};
        std::vector<float> scratch(rounding_scratch(r));
        t.kernels.round_weight_rows(r, 0, rows, scratch.data());
        for (const auto* part : {&scales, &offsets}) codes.insert(codes.end(), part->begin(), part->end());
        if (wanted.empty()) wanted = codes;
        if (memcmp(wanted.data(), codes.data(), 4 * codes.size()))
          return printf("%s: weights are rounded otherwise to %ld bits\n", t.name, bits), false;
      }
    }
  return true;
}

// Steps of recurrent layers: two rows from slot 0 to slot 1.
bool same_recurrences(const std::vector<Table>& all) {
  const long keys = 64, values = 32;  // or the other way round
  const int64_t before[] = {0, 1}, behind[] = {1, 1};
  std::vector<float> begin(2 * keys * values), rows(2 * (2 * keys + values)), factors{0.9f, 0.5f, 0.7f, 0.3f};
  for (float& value : begin) value = number();
  for (float& value : rows) value = number();
  for (bool delta : {false, true}) {
    std::vector<float> wanted;
    for (const Table& t : all) {
      std::vector<float> states = begin, out(2 * values);
      const float *query = rows.data(), *key = query + 2 * keys, *value = key + 2 * keys;
      pl_recurrence r{2, 1, keys, values, before, behind, factors.data(), delta ? factors.data() + 2 : nullptr,
                      query, key, value, states.data(), out.data()};
      t.kernels.recurrent_steps(r, 0);
      states.insert(states.end(), out.begin(), out.end());
      if (wanted.empty()) wanted = states;
      if (memcmp(wanted.data(), states.data(), 4 * states.size())) return printf("%s: a state differs\n", t.name), false;
    }
  }
  return true;
}

}  // namespace

int main() {
  std::vector<Table> all = tables();
#if defined(__x86_64__)
  std::vector<float> memory(TRIAL_FLOATS);
  if (!same_gemms(kernels_amx, quantised_amx, kernels_avx512, quantised_vnni, memory.data()))
    return puts("the trial finds a difference"), 1;
#endif
  for (const Form& form : FORMS)
    for (long inputs : {64L, 192L, 576L})
      for (long rows : {1L, 2L, 3L, 4L, 5L, 6L, 7L, 15L, 16L, 17L, 32L, 33L, 49L, 100L})
        if (!same_products(all, form, inputs, rows)) return 1;
  if (!same_rows(all) || !same_rounding(all) || !same_recurrences(all)) return 1;
  for (const Table& t : all) printf("%s ", t.name);
  puts("give the same bits");
}
