// The C interface: choosing kernels, packing, and the two things that are computed.
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>

#include "amx_trial.h"
#include "draws.h"
#include "forward.h"
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

// The best first. (Other than the others, kernels_dpbf16 has bits of its own.)
const Kernels* const every[] = {
#if defined(__x86_64__)
    &kernels_amx, &kernels_dpbf16, &kernels_avx512, &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_i8mm, &kernels_neon,
#endif
    &kernels_portable};

#if defined(__aarch64__)
// An extension of ARM's: its name on macOS, its bit on Linux.
struct Extension {
  const char* name;
  unsigned long vector, bit;
};
constexpr Extension DOTPROD{"hw.optional.arm.FEAT_DotProd", 16, 20}, I8MM{"hw.optional.arm.FEAT_I8MM", 26, 13},
    BF16{"hw.optional.arm.FEAT_BF16", 26, 14};

bool has(const Extension& e) {
#if defined(__APPLE__)
  int yes = 0;
  size_t size = sizeof yes;
  return !sysctlbyname(e.name, &yes, &size, nullptr, 0) && yes;
#elif defined(__linux__)
  return getauxval(e.vector) >> e.bit & 1;  // AT_HWCAP, AT_HWCAP2
#else
  return false;
#endif
}
#endif

bool usable(const Kernels* k) {
  if (!k) return false;
#if defined(__x86_64__)
  if (k == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (k == &kernels_amx) {
    static const bool works = &kernels_amx && &quantised_amx && usable(&kernels_avx512) &&
                              __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                              amx_works(kernels_amx, quantised_amx, kernels_avx512, quantised_vnni);
    return works;
  }
  if (k == &kernels_dpbf16) return usable(&kernels_avx512) && __builtin_cpu_supports("avx512bf16");
  if (k == &kernels_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
  if (k == &kernels_i8mm) return &quantised_i8mm && has(I8MM) && has(BF16);
  if (k == &kernels_neon) return true;
#endif
  return k == &kernels_portable;
}

// VDPBF16PS runs at its full rate on AMD's processors: 8, 16 and 32 rows take 0.77, 0.59 and 0.51 of AVX512's time
// (Zen 4). On Intel's it is no faster. The vendor decides and no timing, as bits depend on it.
bool preferred([[maybe_unused]] const Kernels* k) {
#if defined(__x86_64__)
  return k != &kernels_dpbf16 || __builtin_cpu_is("amd");
#else
  return true;
#endif
}

const Kernels* best() {
  for (const Kernels* k : every)
    if (usable(k) && preferred(k)) return k;
  return &kernels_portable;
}

// The kernels of quantised weights that go with others. AVX512 without VNNI has AVX2's; NEON's are two.
const QuantisedKernels& quantised_of(const Kernels* k) {
#if defined(__x86_64__)
  bool wide = k == &kernels_avx512 || k == &kernels_amx || k == &kernels_dpbf16;
  if (k == &kernels_amx) return quantised_amx;
  if (wide && __builtin_cpu_supports("avx512vnni")) return quantised_vnni;
  if (k != &kernels_portable && __builtin_cpu_supports("f16c")) return quantised_avx2;
#elif defined(__aarch64__)
  if (k == &kernels_i8mm) return quantised_i8mm;
  if (k == &kernels_neon) return &quantised_dotprod && has(DOTPROD) ? quantised_dotprod : quantised_neon;
#endif
  return quantised_portable;
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

void put_number(int64_t kind, float x, uint8_t* line, int64_t lane) {
  if (kind == PL_SCALE_FLOAT) {
    memcpy(line + 4 * lane, &x, 4);
    return;
  }
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t half = static_cast<uint16_t>(bits >> 16);  // exact: the caller has looked
  if (kind == PL_SCALE_HALF) {
    float small = x < 0 ? -x : x;
    if (small < 6.103515625e-05f) {
      half = static_cast<uint16_t>((bits >> 16 & 0x8000) | static_cast<uint32_t>(small * 16777216.0f));
    } else {
      half = static_cast<uint16_t>((bits >> 16 & 0x8000) | (((bits & 0x7fffffff) - 0x38000000) >> 13));
    }
  }
  memcpy(line + 2 * lane, &half, 2);
}

float number_at(int64_t kind, const uint8_t* line, int64_t lane) {
  float x;
  if (kind == PL_SCALE_FLOAT) {
    memcpy(&x, line + 4 * lane, 4);
    return x;
  }
  uint16_t half;
  memcpy(&half, line + 2 * lane, 2);
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, bits = static_cast<uint32_t>(half) << 16;
  if (kind == PL_SCALE_HALF) {
    uint32_t rest = half & 0x7fff;
    if (rest < 0x0400) return (sign ? -1.0f : 1.0f) * static_cast<float>(rest) / 16777216.0f;
    bits = sign | ((rest << 13) + 0x38000000);
  }
  memcpy(&x, &bits, 4);
  return x;
}

// Output `output` of a quantised matrix, see quantised.cpp for the layout: into it, or out of it.
template <bool out>
void quantised_row(const pl_weight& w, int64_t place, int64_t output, int8_t* codes, float* scales, float* offsets,
                   int64_t row) {
  int64_t panel = place == PL_PLAIN ? output / PANEL : output / 16;
  int64_t lane = place == PL_PLAIN ? output % PANEL : output % 16 + (place == PL_UP ? 16 : 0);
  int64_t groups = w.inputs / group_inputs(w), least = w.offsets == PL_OFFSETS_LEAST ? 0 : 8;  // of four bits: what makes codes positive
  uint8_t* at = static_cast<uint8_t*>(const_cast<void*>(w.data)) + panel * panel_bytes(w);
  for (int64_t g = row * groups; g < (row + 1) * groups; g++) {
    uint8_t *first = at + g % groups * group_bytes(w), *second = first + group_header_bytes(w) / 2;
    if (out) {
      scales[g] = number_at(w.scale_kind, first, lane);
      if (w.offsets) offsets[g] = number_at(w.scale_kind, second, lane);
    } else {
      put_number(w.scale_kind, scales[g], first, lane);
      if (w.offsets) put_number(w.scale_kind, offsets[g], second, lane);
    }
  }
  at += lane / 16 * 64 + lane % 16 * 4;
  for (int64_t k = 0; k < w.inputs; k++) {
    if (k % group_inputs(w) == 0) at += group_header_bytes(w);
    int8_t& code = codes[row * w.inputs + k];
    if (w.bits == 8) {
      uint8_t& byte = at[k / 4 * 128 + k % 4];
      if (out)
        code = static_cast<int8_t>(byte - 128);
      else
        byte = static_cast<uint8_t>(code + 128);
      continue;
    }
    uint8_t& both = at[k / GROUP * 512 + k % 16 / 4 * 128 + k % 4];
    int shift = k % GROUP < 16 ? 0 : 4;
    if (out)
      code = static_cast<int8_t>((both >> shift & 15) - least);
    else
      both = static_cast<uint8_t>((both & ~(15 << shift)) | (code + least) << shift);
  }
}

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

template <bool out>
void copy_numbers(const Packed& packed, void* dense, int64_t rows, int64_t first, void* data) {
  if (packed.dtype == PL_BFLOAT16)
    copy<uint16_t, out>(packed, static_cast<uint16_t*>(dense), rows, first, static_cast<uint16_t*>(data));
  else
    copy<float, out>(packed, static_cast<float*>(dense), rows, first, static_cast<float*>(data));
}

// What Python is told of it: 0 is well, 1: no memory, 2: an id or a position is out of range.
template <class F>
int outcome(const F& work) {
  try {
    work(kernels());
    return 0;
  } catch (const std::out_of_range&) {
    return 2;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// A product, `passes` times: pass n over the weights n * apart bytes behind the first.
void repeat_product(const Kernels& k, int64_t dtype, const pl_weight& w, const void* x, int64_t rows, float cap, void* y,
                    int64_t threads, int64_t passes, int64_t apart) {
  Rows in, scratch;
  in.shape(rows, w.inputs);
  scratch.shape(threads, gemm_scratch(rows, w.inputs));
  int64_t bytes = w.inputs * (dtype == PL_BFLOAT16 ? 2 : 4);
  for (int64_t r = 0; r < rows; r++) k.load_row(dtype, static_cast<const char*>(x) + r * bytes, w.inputs, in.at(r));
  const QuantisedKernels& quantised = quantised_of(&k);
  Codes codes;
  QuantisedRows coded{};
  if (w.bits) {
    codes.shape(rows, w.inputs);
    coded = codes.of(w);
    for (int64_t r = 0; r < rows; r++) quantised.quantise_row(in.at(r), coded, r);
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    FlushToZero flush;
    pl_weight at = w;
    Gemm p{&at, dtype, in.at(0), rows, in.ld, LOGITS, y, w.outputs, 0, cap, &quantised, coded};
    for (int64_t pass = 0; pass < passes; pass++) {
      at.data = static_cast<const char*>(w.data) + pass * apart;
      k.gemm(p, omp_get_thread_num(), omp_get_num_threads(), scratch.at(omp_get_thread_num()));
    }
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

void pl_limit_processors(int64_t most) { Barrier::processor_limit = static_cast<int>(most); }

int64_t pl_spins_before_yield(int64_t threads) { return Barrier::spins_before_yield(static_cast<int>(threads)); }

int64_t pl_active_threads(int64_t threads) { return ActiveThreads::of_process().count(threads); }

int64_t pl_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs) {
  return round_up(outputs, PANEL) * round_up(inputs, STRIPE) * (dtype == PL_BFLOAT16 ? 2 : 4);
}

void pl_pack(int64_t dtype, int64_t place, const void* dense, int64_t rows, int64_t inputs, int64_t first,
             void* packed) {
  copy_numbers<false>({dtype, place, inputs}, const_cast<void*>(dense), rows, first, packed);
}

void pl_unpack(int64_t dtype, int64_t place, void* dense, int64_t rows, int64_t inputs, int64_t first,
               const void* packed) {
  copy_numbers<true>({dtype, place, inputs}, dense, rows, first, const_cast<void*>(packed));
}

int64_t pl_quantised_bytes(const pl_weight* w) { return round_up(w->outputs, PANEL) / PANEL * panel_bytes(*w); }

void pl_copy_quantised(int64_t out, int64_t place, int8_t* codes, float* scales, float* offsets, int64_t rows,
                       int64_t first, const pl_weight* w) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++)
    if (out)
      quantised_row<true>(*w, place, first + r, codes, scales, offsets, r);
    else
      quantised_row<false>(*w, place, first + r, codes, scales, offsets, r);
}

int pl_round(int64_t dtype, const void* weight, int64_t rows, int64_t columns, int64_t group, int64_t bits, int64_t zero,
             int8_t* codes, float* scales, float* offsets, int64_t threads) {
  return outcome([&](const Kernels& k) {
    WeightRounding r{dtype, weight, columns, group, bits, zero, codes, scales, offsets};
    Rows scratch;
    scratch.shape(threads, rounding_scratch(r));
    long step = rounded_rows(r);
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
    for (int64_t first = 0; first < rows; first += step)
      k.round_weight_rows(r, first, rows - first < step ? rows - first : step, scratch.at(omp_get_thread_num()));
  });
}

int pl_product(int64_t dtype, const pl_weight* w, const void* x, int64_t rows, float cap, int64_t passes, int64_t apart,
               void* y, int64_t threads) {
  return outcome([&](const Kernels& k) { repeat_product(k, dtype, *w, x, rows, cap, y, threads, passes, apart); });
}

int pl_recur(const pl_recurrence* rows, int64_t threads) {
  return outcome([&](const Kernels& k) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
    for (int64_t head = 0; head < rows->heads; head++) k.recurrent_steps(*rows, head);
  });
}

void* pl_open(const pl_model* model) { return new (std::nothrow) Opened(*model); }

void pl_close(void* opened) { delete static_cast<Opened*>(opened); }

int pl_forward(void* opened, const pl_batch* batch) {
  Opened* own = static_cast<Opened*>(opened);
  return outcome([&](const Kernels& k) { own->forward.run(k, quantised_of(&k), *batch); });
}

int pl_grow(void* opened, const pl_growth* growth) {
  Opened* own = static_cast<Opened*>(opened);
  return outcome([&](const Kernels& k) { own->growth.run(own->forward, k, quantised_of(&k), *growth); });
}

int pl_decide(const pl_verdict* verdicts, int64_t count, int64_t threads) {
  bool blocks = false;  // each is judged by all threads, which is better where there are fewer of them
  for (int64_t n = 0; n < count; n++) blocks |= verdicts[n].q != nullptr;
  if (count == 1 || (count < threads && blocks))
    // Not within a parallel region, even of one thread: threads of those within are made anew each time, 3.5 ms.
    return outcome([&](const Kernels& k) {
      for (int64_t n = 0; n < count; n++) decide(k, verdicts[n]);
    });
  std::atomic<bool> lacks_memory{false};  // no exception may leave a parallel region
  int failed = outcome([&](const Kernels& k) {
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
    for (int64_t n = 0; n < count; n++) {
      try {
        decide(k, verdicts[n]);
      } catch (const std::bad_alloc&) {
        lacks_memory = true;
      }
    }
  });
  return failed ? failed : int{lacks_memory};
}

int pl_medusa_logits(const pl_medusa* heads, const void* x, int64_t rows, int64_t count, void* logits, int64_t threads) {
  return outcome([&](const Kernels& k) {
    medusa_logits(k, quantised_of(&k), *heads, x, rows, count, logits, threads);
  });
}
}
