#pragma once
#include <vector>

#include "kernels.h"

constexpr long TRIAL_FLOATS = 40000;

// Whether GEMMs with and without tiles give the same bits: with bf16 weights, and with 8-bit weights and int16 or
// int8 activations. `memory` has TRIAL_FLOATS.
bool same_gemms(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
                const QuantisedKernels& quantised_plain, std::vector<float>& memory);

// Whether the AMX kernels run here and give the bits of the plain ones, tried in a child process.
bool amx_works(const Kernels& amx, const QuantisedKernels& quantised_amx, const Kernels& plain,
               const QuantisedKernels& quantised_plain);
