#pragma once
#include "kernels.h"

// Whether `tiled` gives the bits of `plain` on this system, tried in a process of its own.
bool amx_works(const Kernels& tiled, const Kernels& plain);
