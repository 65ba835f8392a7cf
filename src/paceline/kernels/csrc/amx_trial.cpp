// Whether the tile instructions can be used: some systems list them, and kill who uses them.
#include "amx_trial.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

constexpr long ASK_FOR_STATE = 0x1023, TILE_DATA = 18;  // arch_prctl's

bool agree(const Kernels& tiled, const QuantisedKernels& tiled_codes, const Kernels& plain, const QuantisedKernels& plain_codes,
           std::vector<float>& memory) {
  constexpr long rows = 37, inputs = 128, outputs = 64;
  float* at = memory.data();
  auto floats = [&](long count) { return (at += round_up(count, 16)) - round_up(count, 16); };
  float *x = floats(rows * inputs), *a = floats(rows * outputs), *b = floats(rows * outputs), *scales = floats(rows * inputs / GROUP);
  uint16_t* w = reinterpret_cast<uint16_t*>(floats(outputs * inputs / 2));
  void* numbers = floats(rows * inputs / 2);
  unsigned state = 1;
  auto next = [&] { return state = state * 1664525u + 1013904223u; };
  for (long i = 0; i < outputs * inputs; i++) w[i] = static_cast<uint16_t>(0x3c00 + next() % 0x400 + (next() >> 31 << 15));
  for (long i = 0; i < rows * inputs; i++) x[i] = static_cast<float>(static_cast<int>(next() >> 24) - 128) / 64.0f;
  struct Form {
    long bits, wide;
  };
  bool same = true;
  for (Form form : {Form{0, 0}, Form{8, 1}, Form{8, 0}}) {
    pl_weight weight{w, nullptr, outputs, inputs, form.bits, inputs / GROUP, PL_SCALE_BFLOAT16, 0, form.wide};
    QuantisedRows codes{numbers, scales, inputs, form.wide != 0};
    for (long r = 0; r < rows && form.bits; r++) plain_codes.quantise_row(x + r * inputs, codes, r);
    Gemm p{&weight, PL_BFLOAT16, x, rows, inputs, STORE, a, outputs, 0, 0.0f, &plain_codes, codes};
    plain.gemm(p, 0, 1, at);
    p.y = b, p.quantised = &tiled_codes;
    tiled.gemm(p, 0, 1, at);
    same = same && memcmp(a, b, rows * outputs * sizeof(float)) == 0;
  }
  return same;
}

bool amx_works(const Kernels& tiled, const QuantisedKernels& tiled_codes, const Kernels& plain, const QuantisedKernels& plain_codes) {
  if (syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA)) return false;
  std::vector<float> memory(TRIAL_FLOATS);  // before the fork: the child may not ask for any
  int ends[2];
  if (pipe(ends)) return false;
  pid_t child = fork();
  if (child == 0) {
    char same = agree(tiled, tiled_codes, plain, plain_codes, memory) ? 1 : 0;
    _exit(write(ends[1], &same, 1) == 1 ? 0 : 1);
  }
  close(ends[1]);
  // The answer comes through a pipe: where SIGCHLD is ignored, no exit status can be waited for.
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
