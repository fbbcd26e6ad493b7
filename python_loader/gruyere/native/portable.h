// For a shim that is built beforehand (python_loader/build_shims.py): it runs on machines older
// than the one that builds it, down to glibc 2.28 and GCC 8's C++ library, as torch's wheels do.
// What newer ones have under another name or version is named here as the old ones have it.

#pragma once

#if defined(GRUYERE_PORTABLE)

#if defined(__x86_64__)
#define GRUYERE_FIRST_GLIBC "GLIBC_2.2.5"
#define GRUYERE_DLINFO_GLIBC "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define GRUYERE_FIRST_GLIBC "GLIBC_2.17"
#define GRUYERE_DLINFO_GLIBC "GLIBC_2.17"
#endif

// From glibc 2.34 on they are libc's own, under a version of their own.
__asm__(".symver dlopen,dlopen@" GRUYERE_FIRST_GLIBC);
__asm__(".symver dlsym,dlsym@" GRUYERE_FIRST_GLIBC);
__asm__(".symver dladdr1,dladdr1@" GRUYERE_DLINFO_GLIBC);
__asm__(".symver dlinfo,dlinfo@" GRUYERE_DLINFO_GLIBC);

// From glibc 2.32 on it says whether reference counts need no atomic instructions. They have them.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#include <exception>

#if __GLIBCXX__ && _GLIBCXX_RELEASE >= 11
extern "C" void gruyere_drop_exception(void *)
    __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// What the destructor calls from GCC 11 on; before, the destructor itself was in the library, and
// still is.
void std::__exception_ptr::exception_ptr::_M_release() noexcept {
    gruyere_drop_exception(this);
    _M_exception_object = nullptr;
}
#endif

#endif
