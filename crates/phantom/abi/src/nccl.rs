//! NCCL on one rank: a collective copies the sender's data to the receiver. A communicator of
//! several ranks is refused. The memory of NCCL's channels is unknown (`workspaces.rs`).

use crate::abi::{Answer, Counter, In, Out};
use crate::entry::{Face, entry};
use crate::gpu::{failed, gpu};
use crate::{context, registrations, workspaces};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// `ncclUnhandledCudaError`, `ncclInvalidArgument`, `ncclInvalidUsage`.
const UNHANDLED: u32 = 1;
const INVALID_ARGUMENT: u32 = 4;
const INVALID_USAGE: u32 = 5;

/// `ncclUniqueId`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

/// A communicator has no state: any address serves.
fn communicator(out: Out<usize>, name: &'static str, ranks: i32) -> u32 {
    static COMMUNICATOR: u64 = 0;
    if ranks != 1 {
        eprintln!(
            "the stand-in GPU has NCCL for one rank only, and this program asks for {ranks} \
             ({name}): let them use gloo (torch.distributed.init_process_group(\"gloo\"), \
             ddp_backend=\"gloo\" in TrainingArguments), run the first of them without the others \
             (`gruyere dryrun --ranks {ranks}`, `gruyere compare --stand-in --ranks {ranks}`), or \
             start one rank (--nproc-per-node 1, WORLD_SIZE=1)"
        );
        return INVALID_USAGE;
    }
    workspaces::unknown(name);
    match out.put(&raw const COMMUNICATOR as usize) {
        Ok(()) => 0,
        Err(_) => INVALID_ARGUMENT,
    }
}

/// Runs `body` as a call of the program.
fn called(calls: &'static Counter, body: impl FnOnce() -> Answer) -> u32 {
    if entry(calls, Face::Runtime, body) == 0 { 0 } else { UNHANDLED }
}

macro_rules! nccl {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> u32 {
            static CALLS: Counter = Counter::new(stringify!($name));
            called(&CALLS, move || $body)
        }
    )*};
}

/// Exports functions that do nothing on one rank.
macro_rules! nothing {
    ($($name:ident)*) => { $crate::entry::succeeds! { $($name)* } };
}

nothing! {
    ncclCommAbort ncclCommDestroy ncclCommFinalize ncclGroupEnd ncclGroupStart ncclRedOpDestroy
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetUniqueId(out: Out<UniqueId>) -> u32 {
    // No other rank reads it.
    out.put(UniqueId([0x6e; 128])).map_or(INVALID_ARGUMENT, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRank(out: Out<usize>, ranks: i32, _id: UniqueId, _rank: i32) -> u32 {
    communicator(out, "ncclCommInitRank", ranks)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankConfig(
    out: Out<usize>,
    ranks: i32,
    _id: UniqueId,
    _rank: i32,
    _config: usize,
) -> u32 {
    communicator(out, "ncclCommInitRankConfig", ranks)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitRankScalable(
    out: Out<usize>,
    ranks: i32,
    _rank: i32,
    _ids: i32,
    _id: usize,
    _config: usize,
) -> u32 {
    communicator(out, "ncclCommInitRankScalable", ranks)
}

/// One of `count` devices is one rank.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitAll(out: Out<usize>, count: i32, _devices: usize) -> u32 {
    communicator(out, "ncclCommInitAll", count)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSplit(
    _communicator: usize,
    color: i32,
    _key: i32,
    out: Out<usize>,
    _config: usize,
) -> u32 {
    if color < 0 {
        // NCCL_SPLIT_NOCOLOR: in no group.
        return out.put(0).map_or(INVALID_ARGUMENT, |()| 0);
    }
    communicator(out, "ncclCommSplit", 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(_communicator: usize, out: Out<i32>) -> u32 {
    out.put(1).map_or(INVALID_ARGUMENT, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(_communicator: usize, out: Out<i32>) -> u32 {
    out.put(0).map_or(INVALID_ARGUMENT, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(_communicator: usize, out: Out<u32>) -> u32 {
    out.put(0).map_or(INVALID_ARGUMENT, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRegister(
    _communicator: usize,
    address: u64,
    bytes: usize,
    out: Out<usize>,
) -> u32 {
    let Some(handle) = registrations::add(address, bytes as u64) else { return INVALID_ARGUMENT };
    out.put(handle).map_or(INVALID_ARGUMENT, |()| 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(_communicator: usize, handle: usize) -> u32 {
    if registrations::remove(handle) { 0 } else { INVALID_ARGUMENT }
}

/// Returns any number that is not a built-in operation.
#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpCreatePreMulSum(
    out: Out<u32>,
    _scalar: In<u8>,
    _kind: u32,
    _where: u32,
    _communicator: usize,
) -> u32 {
    out.put(5).map_or(INVALID_ARGUMENT, |()| 0)
}

/// Bytes of a `ncclDataType_t`.
fn size(kind: u32) -> Result<usize, u32> {
    match kind {
        0 | 1 | 10 | 11 => Ok(1), // integers of 8 bits, floats of 8 bits
        6 | 9 => Ok(2),           // half, bfloat16
        2 | 3 | 7 => Ok(4),
        4 | 5 | 8 => Ok(8),
        _ => Err(crate::abi::code::INVALID_VALUE),
    }
}

/// Copies the sender's memory to the receiver's, in the order of `stream`.
fn passed(from: u64, to: u64, count: usize, kind: u32, stream: usize) -> Answer {
    registrations::used(from);
    registrations::used(to);
    if from == to || count == 0 {
        return gpu().launch(stream);
    }
    gpu().copy(to, from, count * size(kind)?, stream)
}

/// One half of a message to oneself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    Sent,
    Received,
}

/// The halves that wait for their counterparts, all of one kind, and their addresses. A rank that
/// sends to itself receives in the order of its sends, in one group.
static WAITING: Mutex<VecDeque<(Half, u64)>> = Mutex::new(VecDeque::new());

/// The other half's address, if it has come.
fn meet(half: Half, place: u64) -> Option<u64> {
    let mut waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner);
    match waiting.front() {
        Some(&(other, there)) if other != half => {
            waiting.pop_front();
            Some(there)
        }
        _ => {
            waiting.push_back((half, place));
            None
        }
    }
}

nccl! {
    fn ncclAllReduce(
        from: u64, to: u64, count: usize, kind: u32, _op: u32, _comm: usize, stream: usize
    ) {
        passed(from, to, count, kind, stream)
    }

    fn ncclReduce(
        from: u64, to: u64, count: usize, kind: u32, _op: u32, _root: i32, _comm: usize,
        stream: usize,
    ) {
        passed(from, to, count, kind, stream)
    }

    fn ncclReduceScatter(
        from: u64, to: u64, count: usize, kind: u32, _op: u32, _comm: usize, stream: usize
    ) {
        passed(from, to, count, kind, stream)
    }

    fn ncclBroadcast(
        from: u64, to: u64, count: usize, kind: u32, _root: i32, _comm: usize, stream: usize
    ) {
        passed(from, to, count, kind, stream)
    }

    fn ncclBcast(place: u64, count: usize, kind: u32, _root: i32, _comm: usize, stream: usize) {
        passed(place, place, count, kind, stream)
    }

    fn ncclAllGather(from: u64, to: u64, count: usize, kind: u32, _comm: usize, stream: usize) {
        passed(from, to, count, kind, stream)
    }

    fn ncclAlltoAll(from: u64, to: u64, count: usize, kind: u32, _comm: usize, stream: usize) {
        passed(from, to, count, kind, stream)
    }

    fn ncclSend(from: u64, count: usize, kind: u32, _to: i32, _comm: usize, stream: usize) {
        match meet(Half::Sent, from) {
            Some(to) => passed(from, to, count, kind, stream),
            None => Ok(()),
        }
    }

    fn ncclRecv(to: u64, count: usize, kind: u32, _from: i32, _comm: usize, stream: usize) {
        match meet(Half::Received, to) {
            Some(from) => passed(from, to, count, kind, stream),
            None => Ok(()),
        }
    }

    fn ncclMemAlloc(out: Out<u64>, bytes: usize) {
        out.put(gpu().sim.alloc(context::runtime_device(), bytes as u64).map_err(failed)?)
    }

    fn ncclMemFree(address: u64) {
        gpu().free(address)
    }
}
