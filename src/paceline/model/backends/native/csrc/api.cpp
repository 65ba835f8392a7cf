// The C interface: choosing kernels, packing, and the two things that are computed.
#include <cstring>
#include <new>

#include "amx_trial.h"
#include "forward.h"

namespace {

// The best first. Tiles come after what always works: they are used where they are asked for.
const Kernels* const every[] = {
#if defined(__x86_64__)
    &kernels_avx512, &kernels_avx2, &kernels_amx,
#endif
    &kernels_portable};

bool usable(const Kernels* k) {
  if (!k) return false;
#if defined(__x86_64__)
  if (k == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (k == &kernels_amx) {
    static const bool works = &kernels_amx && usable(&kernels_avx512) && amx_works(kernels_amx, kernels_avx512);
    return works;
  }
  if (k == &kernels_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return k == &kernels_portable;
}

const Kernels* best() {
  for (const Kernels* k : every)
    if (usable(k)) return k;
  return &kernels_portable;
}

const Kernels* chosen = nullptr;

const Kernels& kernels() {
  if (!chosen) chosen = best();
  return *chosen;
}

struct Packed {  // where output `o` and input `i` of a packed matrix are
  int64_t dtype, place, inputs;
  int64_t at(int64_t o, int64_t i) const {
    int64_t panel = place == PL_PLAIN ? o / PANEL : o / 16;
    int64_t lane = place == PL_PLAIN ? o % PANEL : o % 16 + (place == PL_UP ? 16 : 0);
    int64_t begin = (panel * round_up(inputs, STRIPE) + i / 2 * 2) * PANEL;
    return dtype == PL_BFLOAT16 ? begin + 2 * lane + i % 2 : begin + i % 2 * PANEL + lane;
  }
};

template <class Number, bool out>
void copy(const Packed& packed, Number* dense, int64_t rows, int64_t first, Number* data) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < packed.inputs; i++) {
      Number &a = dense[r * packed.inputs + i], &b = data[packed.at(first + r, i)];
      if (out)
        a = b;
      else
        b = a;
    }
}

}  // namespace

extern "C" {

const char* pl_instructions(void) { return kernels().name; }

int pl_choose(const char* instructions) {
  for (const Kernels* k : every)
    if (k && !strcmp(k->name, instructions) && usable(k)) {
      chosen = k;
      return 0;
    }
  return 1;
}

int64_t pl_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs) {
  return round_up(outputs, PANEL) * round_up(inputs, STRIPE) * (dtype == PL_BFLOAT16 ? 2 : 4);
}

void pl_pack(int64_t dtype, int64_t place, const void* dense, int64_t rows, int64_t inputs, int64_t first,
             void* packed) {
  Packed p{dtype, place, inputs};
  if (dtype == PL_BFLOAT16)
    copy<uint16_t, false>(p, static_cast<uint16_t*>(const_cast<void*>(dense)), rows, first,
                          static_cast<uint16_t*>(packed));
  else
    copy<float, false>(p, static_cast<float*>(const_cast<void*>(dense)), rows, first, static_cast<float*>(packed));
}

void pl_unpack(int64_t dtype, int64_t place, void* dense, int64_t rows, int64_t inputs, int64_t first,
               const void* packed) {
  Packed p{dtype, place, inputs};
  if (dtype == PL_BFLOAT16)
    copy<uint16_t, true>(p, static_cast<uint16_t*>(dense), rows, first,
                         static_cast<uint16_t*>(const_cast<void*>(packed)));
  else
    copy<float, true>(p, static_cast<float*>(dense), rows, first, static_cast<float*>(const_cast<void*>(packed)));
}

int pl_product(int64_t dtype, const pl_weight* w, const void* x, int64_t rows, float cap, void* y, int64_t threads) {
  try {
    const Kernels& k = kernels();
    Rows in, scratch;
    in.shape(rows, w->inputs);
    scratch.shape(threads, product_scratch(rows, w->inputs));
    int64_t bytes = w->inputs * (dtype == PL_BFLOAT16 ? 2 : 4);
    for (int64_t r = 0; r < rows; r++) k.take(dtype, static_cast<const char*>(x) + r * bytes, w->inputs, in.at(r));
    Product p{w, dtype, in.at(0), rows, in.ld, LOGITS, y, w->outputs, 0, cap};
#pragma omp parallel num_threads(static_cast<int>(threads))
    {
      FlushToZero flush;
      k.product(p, omp_get_thread_num(), omp_get_num_threads(), scratch.at(omp_get_thread_num()));
    }
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

void* pl_open(const pl_model* model) { return new (std::nothrow) Forward(*model); }

void pl_close(void* opened) { delete static_cast<Forward*>(opened); }

int pl_forward(void* opened, const pl_batch* batch) {
  try {
    static_cast<Forward*>(opened)->run(kernels(), *batch);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
}
