// The declarations of the CUDA driver API that torch's headers need.

#pragma once

#include "cuda_runtime_api.h"

typedef enum cudaError_enum { CUDA_SUCCESS = 0 } CUresult;
