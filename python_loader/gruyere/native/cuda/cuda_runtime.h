// Without a CUDA compiler the runtime's headers are one.

#pragma once

#include "cuda_runtime_api.h"
