#pragma once
#include <vector>

#include "kernels.h"

constexpr long TRIAL_FLOATS = 40000;

// Whether products with tiles and without agree, of plain numbers and of 8 bits, wide and narrow;
// in `memory` of TRIAL_FLOATS.
bool agree(const Kernels& tiled, const QuantisedKernels& tiled_codes, const Kernels& plain, const QuantisedKernels& plain_codes,
           std::vector<float>& memory);

// Whether `tiled` ones give the bits of `plain` ones on this system, tried in a process of their own.
bool amx_works(const Kernels& tiled, const QuantisedKernels& tiled_codes, const Kernels& plain, const QuantisedKernels& plain_codes);
