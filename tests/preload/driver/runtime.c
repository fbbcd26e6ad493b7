/* A CUDA runtime as the real one is built: on the driver, through cuGetProcAddress. To be a shared
 * library. */
#define STATIC_RUNTIME
#include "driver.h"

int cudaGetDevice(int *device) {
    *device = 0;
    return 0;
}

int cudaMalloc(void **pointer, size_t bytes) {
    CUdeviceptr address;
    driver_start();
    CUresult code = cuMemAlloc(&address, bytes);
    if (code == 0) *pointer = (void *)address;
    return (int)code;
}

int cudaFree(void *pointer) {
    driver_start();
    return pointer ? (int)cuMemFree((CUdeviceptr)pointer) : 0;
}
