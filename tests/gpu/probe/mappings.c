/* Reservations, handles and mappings: what a call may cover, and what handles may be exported. */
#include "cases.h"
#include "driver.h"
#include "kernels.h"
#include "report.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void case_facts(int unused) {
    (void)unused;
    char name[256] = "";
    int version = 0;
    cuda.cuDeviceGetName(name, sizeof name - 1, 0);
    cuda.cuDriverGetVersion(&version);
    fact("device", "%s", name);
    fact_number("driver_api", version);
    fact_number("memory_bytes", (double)total_memory());
    fact_number("free_bytes", (double)free_memory());
    fact_number("kernels_run", kernels_run());
    static const struct {
        const char *name;
        int number;
    } attributes[] = {
        {"compute_capability_major", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        {"compute_capability_minor", CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR},
        {"multiprocessors", CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {"integrated", CU_DEVICE_ATTRIBUTE_INTEGRATED},
        {"unified_addressing", CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING},
        {"virtual_memory_management", CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
        {"memory_pools", CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED},
        {"pool_handle_types", CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES},
        {"posix_file_descriptors", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
        {"fabric_handles", CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED},
        {"rdma_with_mappings", CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED},
    };
    for (unsigned i = 0; i < sizeof attributes / sizeof *attributes; i++)
        fact_number(attributes[i].name, attribute(attributes[i].number));
    if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) return;
    for (int rdma = 0; rdma < 2; rdma++)
        for (int option = CU_MEM_ALLOC_GRANULARITY_MINIMUM;
             option <= CU_MEM_ALLOC_GRANULARITY_RECOMMENDED; option++) {
            CUmemAllocationProp prop = ordinary();
            size_t bytes = 0;
            char what[64];
            prop.allocFlags.gpuDirectRDMACapable = (unsigned char)rdma;
            snprintf(what, sizeof what, "granularity_%s%s_bytes",
                     option ? "recommended" : "minimum", rdma ? "_rdma" : "");
            if (cuda.cuMemGetAllocationGranularity(&bytes, &prop, option) == CUDA_SUCCESS)
                fact_number(what, (double)bytes);
            if (!rdma && !option)
                rule("granularity.divides_2_mib", is(bytes && PAGE % bytes == 0), "%zu bytes",
                     bytes);
        }
}

void case_reservations(int unused) {
    (void)unused;
    CUdeviceptr at = 0;
    CUresult code = cuda.cuMemAddressReserve(&at, PAGE, 0, 0, 0);
    rule("reserve.alignment_0_gives_2_mib", code ? UNKNOWN : is(at % PAGE == 0), "code %u, %#llx",
         code, at);
    code = cuda.cuMemAddressReserve(&at, PAGE, GIB, 0, 0);
    rule("reserve.alignment_1_gib_is_kept", code ? UNKNOWN : is(at % GIB == 0), "code %u, %#llx",
         code, at);

    /* Two neighbours: what one reservation had, reserved again in halves. */
    CUdeviceptr low = reserve(64 * MIB), high = 0;
    MUST(cuda.cuMemAddressFree(low, 64 * MIB));
    CUdeviceptr wished = low;
    code = cuda.cuMemAddressReserve(&low, 32 * MIB, PAGE, wished, 0);
    if (!code) code = cuda.cuMemAddressReserve(&high, 32 * MIB, PAGE, wished + 32 * MIB, 0);
    if (code || high != low + 32 * MIB) {
        /* A driver that does not heed wishes may still put one behind the other. */
        for (int tries = 0; tries < 64 && !code && high != low + 32 * MIB; tries++) {
            low = high;
            code = cuda.cuMemAddressReserve(&high, 32 * MIB, PAGE, low + 32 * MIB, 0);
        }
    }
    rule("reserve.wished_address_is_given", code ? UNKNOWN : is(low == wished), "code %u", code);
    if (code || high != low + 32 * MIB) {
        rule("two_reservations.map_is_accepted", UNKNOWN, "no two neighbours were to be had");
        return;
    }
    CUmemGenericAllocationHandle wide = create(2 * PAGE), one = create(PAGE), two = create(PAGE);
    pending("two_reservations.map_is_accepted");
    code = cuda.cuMemMap(high - PAGE, 2 * PAGE, 0, wide, 0);
    rule("two_reservations.map_is_accepted", is(code == CUDA_SUCCESS), "code %u", code);
    if (!code) MUST(cuda.cuMemUnmap(high - PAGE, 2 * PAGE));
    MUST(cuda.cuMemMap(high - PAGE, PAGE, 0, one, 0));
    MUST(cuda.cuMemMap(high, PAGE, 0, two, 0));
    pending("two_reservations.set_access_is_accepted");
    code = cuda.cuMemSetAccess(high - PAGE, 2 * PAGE, &own_access, 1);
    rule("two_reservations.set_access_is_accepted", is(code == CUDA_SUCCESS), "code %u", code);
    pending("two_reservations.unmap_is_accepted");
    code = cuda.cuMemUnmap(high - PAGE, 2 * PAGE);
    rule("two_reservations.unmap_is_accepted", is(code == CUDA_SUCCESS), "code %u", code);
    if (code) {
        /* What a refusal leaves: both, one, none? */
        CUresult first = cuda.cuMemUnmap(high - PAGE, PAGE), second = cuda.cuMemUnmap(high, PAGE);
        rule("two_reservations.refused_unmap_leaves_both", is(!first && !second),
             "unmapped one by one: %u, %u", first, second);
    }
}

void case_mappings(int unused) {
    (void)unused;
    CUdeviceptr at = reserve(16 * PAGE);
    CUmemGenericAllocationHandle large = create(4 * PAGE), one = create(PAGE), two = create(PAGE);
#define TRY(name, call)                                                       \
    do {                                                                      \
        pending(name);                                                        \
        code = (call);                                                        \
        rule(name, is(code == CUDA_SUCCESS), "code %u", code);                \
    } while (0)
    CUresult code;
    TRY("map.front_of_a_handle_is_accepted", cuda.cuMemMap(at, PAGE, 0, large, 0));
    if (!code) {
        TRY("map.front_of_a_handle_gets_access", cuda.cuMemSetAccess(at, PAGE, &own_access, 1));
        MUST(cuda.cuMemUnmap(at, PAGE));
    }
    TRY("map.middle_of_a_handle_is_accepted", cuda.cuMemMap(at, PAGE, PAGE, large, 0));
    if (!code) MUST(cuda.cuMemUnmap(at, PAGE));
    MUST(cuda.cuMemMap(at, 4 * PAGE, 0, large, 0));
    TRY("set_access.part_of_a_mapping_is_accepted", cuda.cuMemSetAccess(at, PAGE, &own_access, 1));
    TRY("set_access.again_is_accepted", cuda.cuMemSetAccess(at, 4 * PAGE, &own_access, 1));
    TRY("map.over_a_mapping_is_accepted", cuda.cuMemMap(at, PAGE, 0, one, 0));
    TRY("unmap.part_of_a_mapping_is_accepted", cuda.cuMemUnmap(at, PAGE));
    if (code) MUST(cuda.cuMemUnmap(at, 4 * PAGE));
    MUST(cuda.cuMemMap(at + 8 * PAGE, PAGE, 0, one, 0));
    TRY("map.second_mapping_of_a_handle_is_accepted",
        cuda.cuMemMap(at + 9 * PAGE, PAGE, 0, one, 0));
    TRY("set_access.over_two_mappings_is_accepted",
        cuda.cuMemSetAccess(at + 8 * PAGE, 2 * PAGE, &own_access, 1));
    TRY("release.while_mapped_is_accepted", cuda.cuMemRelease(one));
    TRY("map.of_a_released_handle_that_is_mapped_is_accepted",
        cuda.cuMemMap(at + 10 * PAGE, PAGE, 0, one, 0));
    if (!code) MUST(cuda.cuMemUnmap(at + 10 * PAGE, PAGE));
    TRY("unmap.two_mappings_at_once_is_accepted", cuda.cuMemUnmap(at + 8 * PAGE, 2 * PAGE));
    MUST(cuda.cuMemMap(at + 12 * PAGE, PAGE, 0, two, 0));
    TRY("unmap.over_a_hole_is_accepted", cuda.cuMemUnmap(at + 12 * PAGE, 2 * PAGE));
    TRY("address_free.of_a_part_is_accepted", cuda.cuMemAddressFree(at, PAGE));
}

/* Handles that other processes may import, and the RDMA flag. */
void case_handle_types(int unused) {
    (void)unused;
    static const struct {
        const char *name;
        int type;
    } types[] = {{"posix", CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
                 {"fabric", CU_MEM_HANDLE_TYPE_FABRIC},
                 {"none", 0}};
    for (unsigned i = 0; i < 3; i++) {
        char name[96];
        union {
            int descriptor;
            unsigned char fabric[64];
        } shared;
        CUmemAllocationProp prop = ordinary();
        CUmemGenericAllocationHandle handle = 0, again = 0;
        prop.requestedHandleTypes = types[i].type;
        snprintf(name, sizeof name, "handle_type.%s_is_created", types[i].name);
        pending(name);
        CUresult code = cuda.cuMemCreate(&handle, PAGE, &prop, 0);
        rule(name, is(code == CUDA_SUCCESS), "code %u", code);
        if (code) continue;
        snprintf(name, sizeof name, "handle_type.%s_is_exported", types[i].name);
        pending(name);
        code = cuda.cuMemExportToShareableHandle(
            &shared, handle,
            types[i].type ? types[i].type : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        rule(name, is(code == CUDA_SUCCESS), "code %u", code);
        if (code) continue;
        snprintf(name, sizeof name, "handle_type.%s_is_imported", types[i].name);
        pending(name);
        int is_file = types[i].type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        code = cuda.cuMemImportFromShareableHandle(
            &again, is_file ? (void *)(uintptr_t)shared.descriptor : &shared, types[i].type);
        rule(name, is(code == CUDA_SUCCESS), "code %u", code);
        if (is_file) close(shared.descriptor);
    }
    for (int rdma = 0; rdma < 2; rdma++) {
        const char *name = rdma ? "rdma.flag_is_accepted" : "rdma.without_the_flag_is_accepted";
        CUmemAllocationProp prop = ordinary();
        CUmemGenericAllocationHandle handle = 0;
        CUdeviceptr at = reserve(PAGE);
        prop.allocFlags.gpuDirectRDMACapable = (unsigned char)rdma;
        pending(name);
        CUresult made = cuda.cuMemCreate(&handle, PAGE, &prop, 0);
        CUresult mapped = made ? made : cuda.cuMemMap(at, PAGE, 0, handle, 0);
        CUresult access = mapped ? mapped : cuda.cuMemSetAccess(at, PAGE, &own_access, 1);
        rule(name, is(!access), "create %u, map %u, set access %u", made, mapped, access);
    }
}

/* A copy from where nothing may be read: each breaks the context, or should. */
void case_no_access(int what) {
    static const char *const names[NO_ACCESS] = {"access.before_set_access_is_refused",
                                                 "access.after_unmap_is_refused",
                                                 "access.of_nothing_mapped_is_refused"};
    CUdeviceptr at = reserve(PAGE);
    CUmemGenericAllocationHandle handle = create(PAGE);
    unsigned word = 0;
    if (what < 2) MUST(cuda.cuMemMap(at, PAGE, 0, handle, 0));
    if (what == 1) {
        MUST(cuda.cuMemSetAccess(at, PAGE, &own_access, 1));
        MUST(cuda.cuMemUnmap(at, PAGE));
    }
    pending(names[what]);
    CUresult code = cuda.cuMemcpyDtoH_v2(&word, at, sizeof word);
    rule(names[what], is(code != CUDA_SUCCESS), "code %u, then cuCtxSynchronize %u", code,
         cuda.cuCtxSynchronize());
}
