// Checks that the loaded torch has the functions of its allocator interface in the same order as
// the headers from which the shim is built. torch calls them by their index in a virtual table, so
// with another order it would call the wrong function.

#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace gruyere {
namespace {

// The virtual table of a class in a loaded library, as the names of its functions; "" for functions
// whose name the library does not export.
class Table {
public:
    Table(void *library, const std::string &symbol) {
        link_map *map = nullptr;
        if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !read(map)) {
            return;
        }
        const ElfW(Sym) *table = nullptr;
        std::unordered_map<uintptr_t, const char *> names;
        for (size_t at = 0; at < count_; ++at) {
            const ElfW(Sym) &one = symbols_[at];
            if (one.st_shndx == SHN_UNDEF) {
                continue;
            }
            if (ELF64_ST_TYPE(one.st_info) == STT_FUNC) {
                names.emplace(map->l_addr + one.st_value, strings_ + one.st_name);
            } else if (symbol == strings_ + one.st_name) {
                table = &one;
            }
        }
        if (!table) {
            return;
        }
        const auto *words = reinterpret_cast<const uintptr_t *>(map->l_addr + table->st_value);
        // The functions follow the offset to the object's top and the pointer to its type info.
        for (size_t at = 2; at < table->st_size / sizeof(uintptr_t); ++at) {
            const auto name = names.find(words[at]);
            methods.push_back(name == names.end() ? "" : method(c10::demangle(name->second)));
        }
    }

    std::vector<std::string> methods;

private:
    // The part of a name after the class. Empty for a destructor, whose name contains the class.
    static std::string method(const std::string &name) {
        const size_t end = name.find('(');
        const size_t colons = name.rfind("::", end);
        const std::string last = colons == std::string::npos ? name : name.substr(colons + 2);
        return last[0] == '~' ? "" : last;
    }

    bool read(const link_map *map) {
        const uint32_t *hash = nullptr;
        for (const ElfW(Dyn) *one = map->l_ld; one->d_tag != DT_NULL; ++one) {
            if (one->d_tag == DT_SYMTAB) {
                symbols_ = reinterpret_cast<const ElfW(Sym) *>(one->d_un.d_ptr);
            } else if (one->d_tag == DT_STRTAB) {
                strings_ = reinterpret_cast<const char *>(one->d_un.d_ptr);
            } else if (one->d_tag == DT_GNU_HASH) {
                hash = reinterpret_cast<const uint32_t *>(one->d_un.d_ptr);
            }
        }
        // glibc's loader adds the library's address to these; others may not.
        const bool is_whole = symbols_ && strings_ && hash &&
                              reinterpret_cast<uintptr_t>(hash) >= map->l_addr;
        count_ = is_whole ? count(hash) : 0;
        return is_whole;
    }

    // The number of symbols, which can only be found from the chains of the hash table.
    static size_t count(const uint32_t *hash) {
        const uint32_t buckets = hash[0], first = hash[1], words = hash[2];
        const uint32_t *bucket = hash + 4 + words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
        const uint32_t last = buckets ? *std::max_element(bucket, bucket + buckets) : 0;
        if (last < first) {
            return first;
        }
        const uint32_t *chain = bucket + buckets + (last - first);
        size_t more = 1;
        while (!(*chain++ & 1)) {
            ++more;
        }
        return last + more;
    }

    const ElfW(Sym) *symbols_ = nullptr;
    const char *strings_ = nullptr;
    size_t count_ = 0;
};

// Throws if the loaded torch's interface is known to differ from that of the class whose virtual
// table is the symbol `ours`. torch's pluggable allocator exports the names of most functions.
void check_order(const std::string &ours) {
    Dl_info self{};
    link_map *map = nullptr;
    TORCH_CHECK(dladdr1(reinterpret_cast<void *>(&check_order), &self,
                        reinterpret_cast<void **>(&map), RTLD_DL_LINKMAP) != 0,
                "the loader does not know the shim");
    void *shim = dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    void *torch = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    const Table here(shim, ours);
    const Table there(
        torch, "_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE");
    TORCH_CHECK(!here.methods.empty() && !there.methods.empty(),
                "torch's allocator interface cannot be read where it is loaded");
    TORCH_CHECK(here.methods.size() == there.methods.size(),
                "torch's allocator interface has ", there.methods.size(),
                " functions where it is loaded and ", here.methods.size(), " in its headers");
    for (size_t at = 0; at < here.methods.size(); ++at) {
        const std::string &mine = here.methods[at], &theirs = there.methods[at];
        TORCH_CHECK(mine.empty() || theirs.empty() || mine == theirs,
                    "function ", at, " of torch's allocator interface is ", theirs,
                    " where it is loaded and ", mine, " in its headers");
    }
}

} // namespace
} // namespace gruyere
