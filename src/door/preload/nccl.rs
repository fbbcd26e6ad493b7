//! NCCL's functions that make communicators: each announces more than one rank to the heap, then
//! makes the real call ([`super::later`]). Splitting or shrinking takes a communicator
//! that one of these made.

use super::later::forbid_waits_before_ranks;
use super::runtime::{CudaError, Runtime, UniqueId};
use super::shim::export;
use std::ffi::{c_int, c_void};

export! {
    ncclCommInitRank after unique_id => comm_init_rank;
    ncclCommInitRankConfig after unique_id_and_config => comm_init_rank_config;
    ncclCommInitRankScalable after 6 => comm_init_rank_scalable;
    ncclCommInitAll after 3 => comm_init_all;
}

/// An `ncclResult_t` is an `int`, as a `cudaError_t` is.
type NcclResult = CudaError;
type Caller = *const c_void;

// SAFETY of every body below: its shim alone calls it, with the arguments of the program, which
// keep the promises of NCCL's function of that name and go to that function.

unsafe extern "C" fn comm_init_rank(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    caller: Caller,
) -> NcclResult {
    forbid_waits_before_ranks(ranks, "ncclCommInitRank");
    // SAFETY: as above.
    unsafe { Runtime::of(caller).ncclCommInitRank(out, ranks, id, rank) }
}

unsafe extern "C" fn comm_init_rank_config(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut c_void,
    caller: Caller,
) -> NcclResult {
    forbid_waits_before_ranks(ranks, "ncclCommInitRankConfig");
    // SAFETY: as above.
    unsafe { Runtime::of(caller).ncclCommInitRankConfig(out, ranks, id, rank, config) }
}

unsafe extern "C" fn comm_init_rank_scalable(
    out: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *mut c_void,
    config: *mut c_void,
    caller: Caller,
) -> NcclResult {
    forbid_waits_before_ranks(ranks, "ncclCommInitRankScalable");
    // SAFETY: as above.
    unsafe { Runtime::of(caller).ncclCommInitRankScalable(out, ranks, rank, count, ids, config) }
}

unsafe extern "C" fn comm_init_all(
    out: *mut *mut c_void,
    devices: c_int,
    list: *const c_int,
    caller: Caller,
) -> NcclResult {
    forbid_waits_before_ranks(devices, "ncclCommInitAll");
    // SAFETY: as above.
    unsafe { Runtime::of(caller).ncclCommInitAll(out, devices, list) }
}
