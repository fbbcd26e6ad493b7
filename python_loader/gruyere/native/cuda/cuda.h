// What torch's headers want of CUDA's driver.

#pragma once

#include "cuda_runtime_api.h"

typedef enum cudaError_enum { CUDA_SUCCESS = 0 } CUresult;
