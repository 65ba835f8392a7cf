// The C interface (paceline_native.h): choosing the instruction set, packing weights, and the calls that compute.
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>

#include "forward.h"
#include "sampling.h"
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace {

// The best first. All give the same bits but kernels_dpbf16, which has bits of its own.
const Kernels* const all_kernels[] = {
#if defined(__x86_64__)
    &kernels_amx, &kernels_dpbf16, &kernels_avx512, &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_i8mm, &kernels_neon,
#endif
    &kernels_portable};

#if defined(__aarch64__)
// An extension of the ARM instruction set.
struct Extension {
  const char* sysctl_name;           // on macOS
  unsigned long auxv_entry, bit;     // on Linux: AT_HWCAP is 16, AT_HWCAP2 is 26
};
constexpr Extension DOTPROD{"hw.optional.arm.FEAT_DotProd", 16, 20}, I8MM{"hw.optional.arm.FEAT_I8MM", 26, 13},
    BF16{"hw.optional.arm.FEAT_BF16", 26, 14};

bool has(const Extension& e) {
#if defined(__APPLE__)
  int present = 0;
  size_t size = sizeof present;
  return !sysctlbyname(e.sysctl_name, &present, &size, nullptr, 0) && present;
#elif defined(__linux__)
  return getauxval(e.auxv_entry) >> e.bit & 1;
#else
  return false;
#endif
}
#endif

bool runs_here(const Kernels* k) {
  if (!k) return false;
#if defined(__x86_64__)
  if (k == &kernels_avx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (k == &kernels_amx) {
    static const bool works = &kernels_amx && &quantised_amx && runs_here(&kernels_avx512) &&
                              __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                              amx_works(kernels_amx, quantised_amx, kernels_avx512, quantised_vnni);
    return works;
  }
  if (k == &kernels_dpbf16) return runs_here(&kernels_avx512) && __builtin_cpu_supports("avx512bf16");
  if (k == &kernels_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
  if (k == &kernels_i8mm) return &quantised_i8mm && has(I8MM) && has(BF16);
  if (k == &kernels_neon) return true;
#endif
  return k == &kernels_portable;
}

// Whether kernels that run here may be the default. VDPBF16PS runs at its full rate on AMD's processors: 8, 16 and 32
// rows take 0.77, 0.59 and 0.51 of AVX512's time (Zen 4). On Intel's it is no faster. The vendor decides and not a
// timing, since the bits depend on the choice.
bool may_be_default([[maybe_unused]] const Kernels* k) {
#if defined(__x86_64__)
  return k != &kernels_dpbf16 || __builtin_cpu_is("amd");
#else
  return true;
#endif
}

const Kernels* default_kernels() {
  for (const Kernels* k : all_kernels)
    if (runs_here(k) && may_be_default(k)) return k;
  return &kernels_portable;
}

// The kernels of quantised weights that go with those of others. AVX512 without VNNI takes AVX2's, and NEON has two kinds.
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
  if (!chosen) chosen = default_kernels();
  return *chosen;
}

// Where one output of a matrix stands in the packed matrix: its panel, and its lane there. A gated panel has 16 gates
// and the 16 outputs that they gate.
struct PackedOutput {
  int64_t panel, lane;
  PackedOutput(int64_t part, int64_t output)
      : panel(part == PL_PLAIN ? output / PANEL : output / 16),
        lane(part == PL_PLAIN ? output % PANEL : output % 16 + (part == PL_UP ? 16 : 0)) {}
};

// A scale as it is stored, in the lower bytes of the result. It is exact: the caller has checked.
uint32_t encode_scale(int64_t kind, float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (kind != PL_SCALE_HALF) return kind == PL_SCALE_FLOAT ? bits : bits >> 16;
  uint32_t size = bits & 0x7fffffff, least_normal = 0x38800000;
  return (bits >> 16 & 0x8000) | (size < least_normal ? static_cast<uint32_t>(std::fabs(x) * 0x1p24f) : (size - 0x38000000) >> 13);
}

float decode_scale(int64_t kind, uint32_t bits) {
  uint32_t sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
  if (kind == PL_SCALE_HALF && rest < 0x0400) return static_cast<float>(rest) * (sign ? -0x1p-24f : 0x1p-24f);
  if (kind != PL_SCALE_FLOAT) bits = kind == PL_SCALE_HALF ? sign | ((rest << 13) + 0x38000000) : bits << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// The code of value + E2M1_BIAS; 0, not 8, for the value 0.
constexpr auto E2M1_CODES = [] {
  std::array<uint8_t, 2 * E2M1_BIAS + 1> codes{};
  for (uint8_t code = 16; code-- > 0;) codes[static_cast<size_t>(E2M1[code] + E2M1_BIAS)] = code;
  return codes;
}();

// Packs row `row` of a quantised matrix as output `output`, or unpacks it. quantised.h draws the layout.
void copy_quantised_row(bool unpack, const pl_weight& w, int64_t part, int64_t output, int8_t* codes, float* scales,
                        float* offsets, int64_t row) {
  const auto [panel, lane] = PackedOutput(part, output);
  const size_t scale_bytes = w.scale_kind == PL_SCALE_FLOAT ? 4 : 2;
  int64_t groups = w.inputs / group_inputs(w);
  int64_t bias = w.bits == 8 ? 128 : w.e2m1 || w.offset_kind == PL_OFFSETS_UNSIGNED ? 0 : 8;  // codes are stored unsigned
  uint8_t* at = static_cast<uint8_t*>(const_cast<void*>(w.data)) + panel * panel_bytes(w);
  auto copy_scale = [&](float& scale, uint8_t* header) {
    uint32_t bits = unpack ? 0 : encode_scale(w.scale_kind, scale);
    uint8_t* packed = header + scale_bytes * static_cast<size_t>(lane);
    unpack ? memcpy(&bits, packed, scale_bytes) : memcpy(packed, &bits, scale_bytes);
    if (unpack) scale = decode_scale(w.scale_kind, bits);
  };
  for (int64_t g = row * groups; g < (row + 1) * groups; g++) {
    uint8_t* header = at + g % groups * group_bytes(w);
    copy_scale(scales[g], header);
    if (w.offset_kind) copy_scale(offsets[g], header + group_header_bytes(w) / 2);
  }
  at += lane / 16 * 64 + lane % 16 * 4;
  auto stored = [&](int8_t code) { return static_cast<int>(w.e2m1 ? E2M1_CODES[static_cast<size_t>(code + E2M1_BIAS)] : code + bias); };
  auto number = [&](int code) { return static_cast<int8_t>(w.e2m1 ? E2M1[code] : code - bias); };
  const int64_t step = w.bits == 8 ? 16 : GROUP;  // inputs of 16 bytes
  int8_t* next = codes + row * w.inputs;
  for (int64_t i = 0; i < w.inputs; i += step, at += 512, next += step) {
    if (i % group_inputs(w) == 0) at += group_header_bytes(w);
    for (int64_t k = 0; k < 16; k++) {
      uint8_t& byte = at[k / 4 * 128 + k % 4];
      if (w.bits == 8)
        unpack ? next[k] = number(byte) : byte = static_cast<uint8_t>(stored(next[k]));
      else if (unpack)
        next[k] = number(byte & 15), next[k + 16] = number(byte >> 4);
      else
        byte = static_cast<uint8_t>(stored(next[k]) | stored(next[k + 16]) << 4);
    }
  }
}

// Packs rows [rows, inputs] of a dense matrix as the outputs from `first` on, or unpacks them.
template <class Number>
void copy_rows(bool unpack, int64_t part, void* dense, int64_t rows, int64_t inputs, int64_t first, void* packed) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const auto [panel, lane] = PackedOutput(part, first + r);
    Number* begin = static_cast<Number*>(packed) + panel * round_up(inputs, STRIPE) * PANEL;
    for (int64_t i = 0; i < inputs; i++) {
      // A pair of inputs: bf16 numbers side by side in each lane, floats in a line of lanes each.
      int64_t pair = i / 2 * 2 * PANEL, inside = sizeof(Number) == 2 ? 2 * lane + i % 2 : i % 2 * PANEL + lane;
      Number &a = static_cast<Number*>(dense)[r * inputs + i], &b = begin[pair + inside];
      if (unpack)
        a = b;
      else
        b = a;
    }
  }
}

// The status that Python gets: 0 is success, 1: no memory, 2: an id or a position is out of range.
template <class F>
int status_of(const F& work) {
  try {
    work(kernels());
    return 0;
  } catch (const std::out_of_range&) {
    return 2;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

// y = x W^T + b, `passes` times: pass n reads the weights that lie n * stride bytes behind the first.
void multiply(const Kernels& k, int64_t dtype, const pl_weight& w, const void* x, int64_t rows, float cap, void* y,
                    int64_t threads, int64_t passes, int64_t stride) {
  RowBuffer in, scratch;
  in.resize(rows, w.inputs);
  scratch.resize(threads, gemm_scratch(rows, w.inputs));
  int64_t bytes = w.inputs * dtype_bytes(dtype);
  for (int64_t r = 0; r < rows; r++) k.load_row(dtype, static_cast<const char*>(x) + r * bytes, w.inputs, in.row(r));
  const QuantisedKernels& quantised = quantised_of(&k);
  QuantisedBuffer buffer;
  QuantisedRows quantised_x{};
  if (w.bits) {
    buffer.resize(rows, w.inputs);
    quantised_x = buffer.rows_for(w);
    for (int64_t r = 0; r < rows; r++) quantised.quantise_row(in.row(r), quantised_x, r);
  }
#pragma omp parallel num_threads(static_cast<int>(threads))
  {
    FlushToZero flush;
    pl_weight at = w;
    Gemm p{&at, dtype, in.row(0), rows, in.stride, LOGITS, y, w.outputs, 0, cap, &quantised, quantised_x};
    for (int64_t pass = 0; pass < passes; pass++) {
      at.data = static_cast<const char*>(w.data) + pass * stride;
      k.gemm(p, omp_get_thread_num(), omp_get_num_threads(), scratch.row(omp_get_thread_num()));
    }
  }
}

}  // namespace

extern "C" {

const char* pl_instructions(void) { return kernels().name; }

int pl_choose_kernels(const char* instructions) {
  for (const Kernels* k : all_kernels)
    if (k && !strcmp(k->name, instructions) && runs_here(k)) {
      chosen = k;
      return 0;
    }
  return 1;
}

void pl_limit_processors(int64_t most) { Barrier::processor_limit = static_cast<int>(most); }

int64_t pl_spins_before_yield(int64_t threads) { return Barrier::spins_before_yield(static_cast<int>(threads)); }

int64_t pl_active_threads(int64_t threads) { return ActiveThreads::of_process().count(threads); }

int64_t pl_packed_bytes(int64_t dtype, int64_t outputs, int64_t inputs) {
  return round_up(outputs, PANEL) * round_up(inputs, STRIPE) * dtype_bytes(dtype);
}

void pl_copy_dense(int64_t unpack, int64_t dtype, int64_t part, void* dense, int64_t rows, int64_t inputs, int64_t first,
                   void* packed) {
  (dtype == PL_BFLOAT16 ? copy_rows<uint16_t> : copy_rows<float>)(unpack, part, dense, rows, inputs, first, packed);
}

int64_t pl_quantised_bytes(const pl_weight* w) { return round_up(w->outputs, PANEL) / PANEL * panel_bytes(*w); }

void pl_copy_quantised(int64_t unpack, int64_t part, int8_t* codes, float* scales, float* offsets, int64_t rows,
                       int64_t first, const pl_weight* w) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; r++) copy_quantised_row(unpack, *w, part, first + r, codes, scales, offsets, r);
}

int pl_quantise(int64_t dtype, const void* weight, int64_t rows, int64_t columns, int64_t group, int64_t bits, int64_t zero,
             int8_t* codes, float* scales, float* offsets, int64_t threads) {
  return status_of([&](const Kernels& k) {
    WeightRounding r{dtype, weight, columns, group, bits, zero, codes, scales, offsets};
    RowBuffer scratch;
    scratch.resize(threads, rounding_scratch(r));
    long step = rounded_rows(r);
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
    for (int64_t first = 0; first < rows; first += step)
      k.round_weight_rows(r, first, rows - first < step ? rows - first : step, scratch.row(omp_get_thread_num()));
  });
}

int pl_product(int64_t dtype, const pl_weight* w, const void* x, int64_t rows, float cap, int64_t passes, int64_t stride,
               void* y, int64_t threads) {
  return status_of([&](const Kernels& k) { multiply(k, dtype, *w, x, rows, cap, y, threads, passes, stride); });
}

int pl_run_recurrence(const pl_recurrence* rows, int64_t threads) {
  return status_of([&](const Kernels& k) {
#pragma omp parallel for schedule(static) num_threads(static_cast<int>(threads))
    for (int64_t head = 0; head < rows->heads; head++) k.recurrent_steps(*rows, head);
  });
}

void* pl_open(const pl_model* model) { return new (std::nothrow) ModelContext(*model); }

void pl_close(void* opened) { delete static_cast<ModelContext*>(opened); }

int pl_forward(void* opened, const pl_batch* batch) {
  ModelContext* context = static_cast<ModelContext*>(opened);
  return status_of([&](const Kernels& k) { context->forward.run(k, quantised_of(&k), *batch); });
}

int pl_grow(void* opened, const pl_growth* growth) {
  ModelContext* context = static_cast<ModelContext*>(opened);
  return status_of([&](const Kernels& k) { context->growth.run(context->forward, k, quantised_of(&k), *growth); });
}

int pl_verify(const pl_verification* verdicts, int64_t count, int64_t threads) {
  bool any_block = false;
  for (int64_t n = 0; n < count; n++) any_block |= verdicts[n].q != nullptr;
  // Block verification of a draft uses all threads, which is better where there are fewer drafts than threads. That
  // must not happen within a parallel region, even of one thread: threads of an inner one are made anew each time, 3.5 ms.
  std::atomic<int> failed{0};  // an exception must not leave a parallel region
  const Kernels& k = kernels();
  auto verify = [&](int64_t n) {
    if (int status = status_of([&](const Kernels&) { verify_draft(k, verdicts[n]); })) failed = status;
  };
  if (count == 1 || (count < threads && any_block)) {
    for (int64_t n = 0; n < count; n++) verify(n);
  } else {
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(threads))
    for (int64_t n = 0; n < count; n++) verify(n);
  }
  return failed;
}

int pl_medusa_logits(const pl_medusa* heads, const void* x, int64_t rows, int64_t count, void* logits, int64_t threads) {
  return status_of([&](const Kernels& k) { medusa_logits(k, quantised_of(&k), *heads, x, rows, count, logits, threads); });
}
}
