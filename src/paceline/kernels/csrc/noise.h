// core/noise.py in C++: splitmix64, and the random bits of a key and a token id.
#pragma once
#include <cstdint>

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, MIX_1 = 0xBF58476D1CE4E5B9ull, MIX_2 = 0x94D049BB133111EBull;

static inline uint64_t splitmix(uint64_t x) {
  x += GOLDEN;
  x = (x ^ (x >> 30)) * MIX_1;
  x = (x ^ (x >> 27)) * MIX_2;
  return x ^ (x >> 31);
}

// 63 random bits.
static inline uint64_t random_bits(uint64_t key, int64_t id) {
  uint64_t x = (splitmix(static_cast<uint64_t>(id) * GOLDEN) ^ key) * MIX_1;
  x = (x ^ static_cast<uint64_t>(static_cast<int64_t>(x) >> 32)) * MIX_2;
  return x & (~0ull >> 1);
}
