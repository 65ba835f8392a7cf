// Products by emulated tiles beside those without: the same bits, in every form and number of rows.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "amx_trial.h"
#include "kernels.h"

extern const Kernels kernels_avx512, kernels_amx;
extern const Quantised quantised_vnni;

namespace {

std::mt19937 rng(11);
float number() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(rng); }

struct Form {
  const char* name;
  int64_t bits, repeat, offsets, wide;
};
constexpr Form FORMS[] = {
    {"bf16", 0, 0, 0, 0},         {"8 bits wide", 8, 2, 0, 1},   {"8 bits wide, offsets", 8, 4, PL_OFFSETS_MIDDLE, 1},
    {"8 bits narrow", 8, 2, 0, 0}, {"8 bits, groups of 32", 8, 1, PL_OFFSETS_MIDDLE, 0},
    {"8 bits, groups of 16", 8, 0, 0, 0}, {"4 bits", 4, 1, PL_OFFSETS_LEAST, 0},
};

std::vector<float> product(const Kernels& k, const Quantised& q, const pl_weight& w, const std::vector<float>& x,
                           long rows) {
  std::vector<float> y(rows * w.outputs), scratch(product_scratch(rows, w.inputs)), scales(rows * w.inputs / 16);
  std::vector<int16_t> codes(rows * w.inputs);
  QuantisedRows coded{codes.data(), scales.data(), w.inputs, w.wide != 0};
  for (long r = 0; r < rows && w.bits; r++) q.row(x.data() + r * w.inputs, coded, r);
  Product p{&w, PL_BFLOAT16, x.data(), rows, w.inputs, STORE, y.data(), w.outputs, 0, 0, &q, coded};
  k.product(p, 0, 1, scratch.data());
  return y;
}

}  // namespace

int main() {
  std::vector<float> memory(TRIAL_FLOATS);
  if (!agree(kernels_amx, quantised_amx, kernels_avx512, quantised_vnni, memory))
    return puts("the trial finds a difference"), 1;
  for (const Form& form : FORMS)
    for (long inputs : {64L, 192L, 576L})
      for (long rows : {1L, 2L, 7L, 15L, 16L, 17L, 32L, 33L, 49L, 100L}) {
        pl_weight w{};
        w.outputs = 96, w.inputs = inputs, w.bits = form.bits, w.repeat = form.repeat;
        w.scale_kind = PL_SCALE_FLOAT, w.offsets = form.offsets, w.wide = form.wide;
        if (form.repeat > 1 && inputs % (form.repeat * GROUP)) continue;
        std::vector<uint8_t> data(form.bits ? 3 * panel_bytes(w) : 96 * inputs * 2);
        for (uint8_t& byte : data) byte = static_cast<uint8_t>(rng());
        for (long panel = 0; panel < 3 && form.bits; panel++)
          for (long i = 0; i < panel_head(w) / 4; i++) {
            float scale = number();
            memcpy(data.data() + panel * panel_bytes(w) + 4 * i, &scale, 4);
          }
        for (size_t i = 1; i < data.size() && !form.bits; i += 2) data[i] = static_cast<uint8_t>(0x3e + 0x80 * (rng() % 2));
        // Panels behind the last are fetched, not read.
        w.data = data.data();
        std::vector<float> x(rows * inputs);
        for (float& value : x) {
          value = number();
          uint32_t bits;
          memcpy(&bits, &value, 4);
          bits &= 0xffff0000u;
          memcpy(&value, &bits, 4);
        }
        auto wanted = product(kernels_avx512, quantised_vnni, w, x, rows);
        auto got = product(kernels_amx, quantised_amx, w, x, rows);
        if (memcmp(wanted.data(), got.data(), 4 * wanted.size()))
          return printf("%s: %ld rows of %ld inputs differ\n", form.name, rows, inputs), 1;
      }
  puts("tiles give the same bits");
}
