#pragma once
#include "kernels.h"

// Whether `tiled` ones give the bits of `plain` ones on this system, tried in a process of their own.
bool amx_works(const Kernels& tiled, const Quantised& tiled_codes, const Kernels& plain, const Quantised& plain_codes);
