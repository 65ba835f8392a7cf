// core/noise.py in C++: splitmix64, and the random bits of a key and a token.
#pragma once
#include <cstdint>

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull, MIX_1 = 0xBF58476D1CE4E5B9ull, MIX_2 = 0x94D049BB133111EBull;

static inline uint64_t splitmix(uint64_t x) {
  x += GOLDEN;
  x = (x ^ (x >> 30)) * MIX_1;
  x = (x ^ (x >> 27)) * MIX_2;
  return x ^ (x >> 31);
}

// 63 random bits. `hash` is that of the token's id, splitmix(id * GOLDEN).
static inline uint64_t random_bits(uint64_t key, uint64_t hash) {
  uint64_t x = (hash ^ key) * MIX_1;
  x = (x ^ x >> 32 ^ (0 - (x >> 63)) << 32) * MIX_2;  // a shift that copies the sign; AVX2 has none of 64 bits
  return x & (~0ull >> 1);
}
