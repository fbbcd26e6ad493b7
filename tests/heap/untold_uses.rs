//! Uses of a block by another stream that no `record_stream` told the heap of. torch's allocator
//! gives the block back to its own stream alone, at that stream's next malloc; FSDP and much else
//! has the stream wait for the user before that malloc, and not before the free. (`order.rs` has it
//! in random programs under the oracle.)

use crate::common::{DEFAULT, MIB, Rig, malloc_again, wait, wait_and_tell};
use gruyere::driver::StreamHandle;
use gruyere_phantom::{Config as GpuConfig, as_program};

const BLOCK: u64 = 64 * MIB;
/// Work of the user's, in nanoseconds: longer than all else.
const LONG: u64 = 1_000_000_000;

/// A rig with nothing to spare, with events behind a whole context or without; a block's stream,
/// and a third one.
fn rig(context_events: bool) -> (Rig, [StreamHandle; 2]) {
    let config = GpuConfig { context_events, ..GpuConfig::new(1 << 34) };
    let rig = Rig::over(config, "slack:0B");
    rig.heap.announce_hooks(3);
    let streams = [rig.stream(), rig.stream()];
    streams.iter().for_each(|&stream| malloc_again(&rig.heap, 0, stream));
    (rig, streams)
}

/// Frees a block of `owner` whose stream is done with it, while the default stream still uses it.
fn free_in_use(rig: &Rig, owner: StreamHandle) {
    let address = rig.malloc(BLOCK, owner);
    launch(rig, owner, 1);
    launch(rig, DEFAULT, LONG);
    assert!(rig.heap.free(address));
    rig.gpu.host_spend(1_000_000);
}

fn launch(rig: &Rig, stream: StreamHandle, nanoseconds: u64) {
    as_program(|| rig.gpu.launch(0, stream.0, 1, nanoseconds)).unwrap();
}

/// Whether `stream` gets the memory of the freed block: one of two such blocks takes none of the
/// device.
fn gets(rig: &Rig, stream: StreamHandle) -> bool {
    // The second finds done the event that the first has recorded.
    (0..2).any(|_| {
        let held = rig.gpu.books(0).physical;
        rig.malloc(BLOCK, stream);
        rig.gpu.host_spend(1_000_000);
        rig.gpu.books(0).physical == held
    })
}

#[test]
fn what_a_stream_has_freed_serves_no_other_before_its_next_malloc_though_it_is_past_the_free() {
    for context_events in [false, true] {
        let (rig, [owner, other]) = rig(context_events);
        free_in_use(&rig, owner);
        assert!(!gets(&rig, other), "the default stream still uses it");
        rig.heap.validate().unwrap();
    }
}

#[test]
fn from_its_next_malloc_on_the_stream_is_behind_whoever_used_what_it_had_freed() {
    let (rig, [owner, other]) = rig(false);
    free_in_use(&rig, owner);
    // As the program must before it asks for memory there.
    wait(&rig.gpu, 0, [owner, DEFAULT]).unwrap();
    malloc_again(&rig.heap, 0, owner);
    assert!(!gets(&rig, other), "the default stream is not done");
    rig.gpu.host_spend(2 * LONG);
    assert!(gets(&rig, other));
    rig.heap.validate().unwrap();
}

#[test]
fn an_event_behind_all_work_of_the_device_is_behind_the_users_too() {
    let (rig, [owner, other]) = rig(true);
    free_in_use(&rig, owner);
    rig.malloc(BLOCK, other);
    rig.gpu.host_spend(2 * LONG);
    assert!(gets(&rig, other), "without a further malloc of its stream");
    rig.heap.validate().unwrap();
}

#[test]
fn the_programs_own_wait_for_the_blocks_stream_does_not_cover_its_users() {
    for again in [false, true] {
        let (rig, [owner, other]) = rig(false);
        free_in_use(&rig, owner);
        if again {
            wait(&rig.gpu, 0, [owner, DEFAULT]).unwrap();
            malloc_again(&rig.heap, 0, owner);
        }
        assert!(wait_and_tell(&rig.gpu, &rig.heap, 0, [other, owner]));
        assert_eq!(gets(&rig, other), again);
        rig.heap.validate().unwrap();
    }
}

#[test]
fn what_the_default_stream_has_freed_serves_others_once_it_is_past_the_free() {
    let (rig, [_, other]) = rig(false);
    let block = rig.malloc(BLOCK, DEFAULT);
    launch(&rig, DEFAULT, 1);
    assert!(rig.heap.free(block));
    rig.gpu.host_spend(1_000_000);
    assert!(gets(&rig, other));
}
