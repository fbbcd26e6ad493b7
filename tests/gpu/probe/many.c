/* Many handles, and much address space. */
#include "cases.h"
#include "driver.h"
#include "report.h"

#include <stdlib.h>

void case_many(int unused) {
    (void)unused;
    enum { WANTED = 20000 };
    static CUmemGenericAllocationHandle handles[WANTED];
    static double times[WANTED];
    CUmemAllocationProp prop = ordinary();
    size_t fits = free_memory() / PAGE * 8 / 10;
    unsigned wanted = fits < WANTED ? (unsigned)fits : WANTED, made = 0, mapped = 0;
    CUdeviceptr at = reserve(2 * wanted * PAGE);
    CUresult code = CUDA_SUCCESS;
    const char *name = "many.20000_handles_are_created";
    pending(name);
    for (; made < wanted; made++) {
        double before = now();
        if ((code = cuda.cuMemCreate(&handles[made], PAGE, &prop, 0))) break;
        times[made] = now() - before;
    }
    rule(name,
         code            ? FALSE
         : made < WANTED ? UNKNOWN
                         : TRUE,
         "%u of %u that fit; code %u", made, wanted, code);
    if (!made) return;
    double first = 0, last = 0;
    unsigned part = made / 10 ? made / 10 : 1;
    for (unsigned i = 0; i < part; i++)
        first += times[i] / part, last += times[made - 1 - i] / part;
    fact_number("many.create_first_tenth_ns", first);
    fact_number("many.create_last_tenth_ns", last);
    name = "many.all_are_mapped_twice";
    pending(name);
    double begin = now();
    for (code = 0; mapped < 2 * made && !code; mapped += !code)
        code = cuda.cuMemMap(at + mapped * PAGE, PAGE, 0, handles[mapped % made], 0);
    fact_number("many.map_ns", (now() - begin) / (mapped ? mapped : 1));
    rule(name, is(mapped == 2 * made), "%u mappings; code %u", mapped, code);
    name = "many.one_set_access_covers_all";
    pending(name);
    begin = now();
    code = cuda.cuMemSetAccess(at, mapped * PAGE, &own_access, 1);
    fact_number("many.set_access_ns_a_mapping", (now() - begin) / (mapped ? mapped : 1));
    rule(name, is(!code), "%u mappings; code %u", mapped, code);
    name = "many.one_unmap_covers_all";
    pending(name);
    begin = now();
    code = cuda.cuMemUnmap(at, mapped * PAGE);
    fact_number("many.unmap_ns_a_mapping", (now() - begin) / (mapped ? mapped : 1));
    rule(name, is(!code), "%u mappings; code %u", mapped, code);
    begin = now();
    for (unsigned i = 0; i < made; i++) MUST(cuda.cuMemRelease(handles[i]));
    fact_number("many.release_ns", (now() - begin) / made);
}

/* Reserves until the driver refuses: in steps as large as the whole device, then in steps of 1 GiB
 * from nothing. */
void case_address_space(int unused) {
    (void)unused;
    enum { MOST = 65536 };
    static CUdeviceptr taken[MOST];
    const size_t steps[] = {2 * (total_memory() / GIB + 1) * GIB, GIB};
    const char *const names[] = {"address_space.twice_the_device", "address_space.1_gib"};
    for (int i = 0; i < 2; i++) {
        size_t step = steps[i];
        unsigned count = 0;
        CUresult code = CUDA_SUCCESS;
        double begin = now();
        /* No more than 512 TiB, and no longer than it must take: no device has more addresses than
         * that. */
        while (count < MOST && count < 512 * 1024 * GIB / step && now() - begin < 4e9) {
            code = cuda.cuMemAddressReserve(&taken[count], step, PAGE, 0, 0);
            if (code) break;
            count++;
        }
        double took = (now() - begin) / (count ? count : 1);
        fact(names[i], "%u reservations of %zu GiB, %.1f TiB, %.0f ns each, then %s (code %u)",
             count, step / GIB, (double)count * step / GIB / 1024, took,
             code ? "refused" : "no more were tried", code);
        if (i == 0)
            rule("address_space.its_end_is_out_of_memory",
                 code ? is(code == CUDA_ERROR_OUT_OF_MEMORY) : UNKNOWN, "code %u after %u", code,
                 count);
        while (count) MUST(cuda.cuMemAddressFree(taken[--count], step));
    }
}
