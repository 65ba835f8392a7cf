// Tries AMX's tile instructions in a child process: some systems list them, but kill a process that uses them.
#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;  // arch_prctl(): permission to use tiles

bool same_gemms(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
                const QuantisedKernels& quantised_plain, float* memory) {
  constexpr long rows = 37, inputs = 128, outputs = 64;
  float* free = memory;
  auto floats = [&](long count) { return (free += round_up(count, 16)) - round_up(count, 16); };
  float *x = floats(rows * inputs), *a = floats(rows * outputs), *b = floats(rows * outputs), *scales = floats(rows * inputs / GROUP);
  uint16_t* w = reinterpret_cast<uint16_t*>(floats(outputs * inputs / 2));
  void* values = floats(rows * inputs / 2);
  unsigned state = 1;
  auto random = [&] { return state = state * 1664525u + 1013904223u; };
  for (long i = 0; i < outputs * inputs; i++) w[i] = static_cast<uint16_t>(0x3c00 + random() % 0x400 + (random() >> 31 << 15));
  for (long i = 0; i < rows * inputs; i++) x[i] = static_cast<float>(static_cast<int>(random() >> 24) - 128) / 64.0f;
  struct Form {
    long bits, int16;
  };
  bool same = true;
  for (Form form : {Form{0, 0}, Form{8, 1}, Form{8, 0}}) {
    pl_weight weight{w, nullptr, outputs, inputs, form.bits, inputs / GROUP, PL_SCALE_BFLOAT16, 0, form.int16};
    QuantisedRows quantised_x{values, scales, inputs, form.int16 != 0};
    for (long r = 0; r < rows && form.bits; r++) quantised_plain.quantise_row(x + r * inputs, quantised_x, r);
    Gemm g{&weight, PL_BFLOAT16, x, rows, inputs, STORE, a, outputs, 0, 0.0f, &quantised_plain, quantised_x};
    plain.gemm(g, 0, 1, free);
    g.y = b, g.quantised = &quantised_amx;
    amx.gemm(g, 0, 1, free);
    same = same && memcmp(a, b, rows * outputs * sizeof(float)) == 0;
  }
  return same;
}

bool amx_works(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
               const QuantisedKernels& quantised_plain) {
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return false;
  std::vector<float> memory(TRIAL_FLOATS);  // before the fork: the child must not allocate any
  int ends[2];
  if (pipe(ends)) return false;
  pid_t child = fork();
  if (child == 0) {
    char same = same_gemms(amx, quantised_amx, plain, quantised_plain, memory.data()) ? 1 : 0;
    _exit(write(ends[1], &same, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  // The answer comes through a pipe, as there is no exit status to wait for where SIGCHLD is ignored.
  char same = 0;
  while (child > 0 && read(ends[0], &same, 1) < 0 && errno == EINTR) {
  }
  close(ends[0]);
  while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return same == 1;
}
#else
bool amx_works(const Kernels&, const QuantisedKernels&, const Kernels&, const QuantisedKernels&) { return false; }
#endif
