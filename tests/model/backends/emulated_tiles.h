// AMX's tile instructions in plain C++: included before a source that uses them, so that what the
// kernels do with tiles can be checked where the processor has none. As Intel's manual defines them;
// TDPBF16PS sums the even and the odd pairs' members each in order, from zero, and adds both.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__linux__)
#include <unistd.h>
#define syscall(...) 0  // amx_trial.cpp asks for permission to use tiles
#endif

namespace emulated {

struct Config {
  uint8_t palette, start, unused[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
inline thread_local Config config;
inline thread_local uint8_t tile[8][16][64];

inline void load_config(const void* from) {
  memcpy(&config, from, sizeof config);
  memset(tile, 0, sizeof tile);
}
inline void zero(int t) { memset(tile[t], 0, sizeof tile[t]); }
inline void load(int t, const void* from, long stride) {
  zero(t);
  for (int r = 0; r < config.rows[t]; r++) memcpy(tile[t][r], static_cast<const char*>(from) + r * stride, config.bytes[t]);
}
inline void store(int t, void* to, long stride) {
  for (int r = 0; r < config.rows[t]; r++) memcpy(static_cast<char*>(to) + r * stride, tile[t][r], config.bytes[t]);
}

template <class Number>
inline Number at(const uint8_t* row, int i) {
  Number number;
  memcpy(&number, row + sizeof(Number) * i, sizeof(Number));
  return number;
}
inline float bf16(const uint8_t* row, int i) {
  uint32_t bits = static_cast<uint32_t>(at<uint16_t>(row, i)) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// c += a (signed) times b (unsigned), four numbers of 8 bits at a time.
inline void dot_bytes(int c, int a, int b) {
  for (int m = 0; m < config.rows[c]; m++)
    for (int n = 0; n < config.bytes[c] / 4; n++) {
      int32_t sum = at<int32_t>(tile[c][m], n);
      for (int k = 0; k < config.bytes[a]; k++)
        sum += at<int8_t>(tile[a][m], k) * at<uint8_t>(tile[b][k / 4], 4 * n + k % 4);
      memcpy(tile[c][m] + 4 * n, &sum, 4);
    }
}

inline void dot_bf16(int c, int a, int b) {
  for (int m = 0; m < config.rows[c]; m++)
    for (int n = 0; n < config.bytes[c] / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < config.bytes[a] / 4; k++) {
        even = std::fma(bf16(tile[b][k], 2 * n), bf16(tile[a][m], 2 * k), even);
        odd = std::fma(bf16(tile[b][k], 2 * n + 1), bf16(tile[a][m], 2 * k + 1), odd);
      }
      float sum = at<float>(tile[c][m], n) + (even + odd);
      memcpy(tile[c][m] + 4 * n, &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated::load_config(from)
#define _tile_release() (void)0
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, from, stride) emulated::load(t, from, stride)
#define _tile_stored(t, to, stride) emulated::store(t, to, stride)
#define _tile_dpbsud(c, a, b) emulated::dot_bytes(c, a, b)
#define _tile_dpbf16ps(c, a, b) emulated::dot_bf16(c, a, b)
