/* Makes the call of the driver's that argv[1] names, as libcuda exports it, with arguments of no
 * meaning. */
#define BY_DLSYM
#include "driver.h"

int main(int count, char **arguments) {
    CUdeviceptr block;
    CHECK(count == 2);
    driver_start();
    OK(cuMemAlloc(&block, 1000));
    CUresult (*call)(void *, void *, void *, size_t, void *) = symbol_of(arguments[1]);
    call(NULL, NULL, NULL, 0, NULL);
    OK(cuMemFree(block));
    puts("kept");
    return 0;
}
