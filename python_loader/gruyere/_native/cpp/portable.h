// For prebuilt shims (python_loader/build_shims.py), which must run on older machines than the one
// that builds them, down to glibc 2.28 and GCC 8's C++ library, like torch's wheels. Symbols that
// newer libraries have under another name or version are bound here to the old ones.

#pragma once

#if defined(GRUYERE_PORTABLE)

#if defined(__x86_64__)
#define GRUYERE_FIRST_GLIBC "GLIBC_2.2.5"
#define GRUYERE_DLINFO_GLIBC "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define GRUYERE_FIRST_GLIBC "GLIBC_2.17"
#define GRUYERE_DLINFO_GLIBC "GLIBC_2.17"
#endif

// From glibc 2.34 on these are in libc, under a new version.
__asm__(".symver dlopen,dlopen@" GRUYERE_FIRST_GLIBC);
__asm__(".symver dlsym,dlsym@" GRUYERE_FIRST_GLIBC);
__asm__(".symver dladdr1,dladdr1@" GRUYERE_DLINFO_GLIBC);
__asm__(".symver dlinfo,dlinfo@" GRUYERE_DLINFO_GLIBC);

// From glibc 2.32 on this says whether reference counts can do without atomic instructions. Here
// they always use them.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

#include <exception>

#if __GLIBCXX__ && _GLIBCXX_RELEASE >= 11
extern "C" void gruyere_drop_exception(void *)
    __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

// From GCC 11 on the destructor is inline and calls this. Call the library's destructor instead,
// which all versions have.
void std::__exception_ptr::exception_ptr::_M_release() noexcept {
    gruyere_drop_exception(this);
    _M_exception_object = nullptr;
}
#endif

#endif
