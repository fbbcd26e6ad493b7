// Without a CUDA compiler this header is the same as cuda_runtime_api.h.

#pragma once

#include "cuda_runtime_api.h"
