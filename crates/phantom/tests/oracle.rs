//! The oracle finds each planted fault, and is silent on the clean counterpart.

use gruyere_phantom::oracle::Fault;
use gruyere_phantom::{Config, Costs, Gpu, StreamKind, as_program};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

/// A GPU without costs, three streams, and one plain allocation for blocks.
struct Scene {
    gpu: Gpu,
    a: usize,
    b: usize,
    c: usize,
    memory: u64,
    event: usize,
}

fn scene() -> Scene {
    let gpu = Gpu::new(Config { costs: Costs::zero(), ..Config::devices(2, 256 * MIB) });
    let [a, b, c] = [0; 3].map(|_| gpu.stream_create(0, StreamKind::NonBlocking).unwrap());
    let memory = gpu.alloc(0, 8 * MIB).unwrap();
    let event = gpu.event_create(0).unwrap();
    Scene { gpu, a, b, c, memory, event }
}

impl Scene {
    fn malloc(&self, id: u64, address: u64, bytes: u64, stream: usize) {
        self.gpu.block_malloc(id, address, bytes, 0, stream);
    }

    /// Block 1 lived at the start of the memory and was used on `a`.
    fn used_on_a(&self) {
        self.malloc(1, self.memory, MIB, self.a);
        self.gpu.launch(0, self.a, 3, 100).unwrap();
        self.gpu.block_free(self.memory);
    }

    /// Block 2 comes to the same place for `stream`.
    fn reuse_on(&self, stream: usize) {
        self.malloc(2, self.memory, MIB, stream);
    }

    #[track_caller]
    fn assert_silent(&self) {
        assert_eq!(self.gpu.faults(), []);
    }

    /// Exactly one fault, and it is of this kind.
    #[track_caller]
    fn assert_one(&self, is: impl Fn(&Fault) -> bool) -> Fault {
        let faults = self.gpu.take_faults();
        assert!(faults.len() == 1 && is(&faults[0]), "{faults:#?}");
        faults[0].clone()
    }

    #[track_caller]
    fn assert_out_of_order(&self) {
        let stream = self.gpu.stream_id(0, self.a).unwrap();
        self.assert_one(|fault| {
            matches!(
                fault, Fault::OutOfOrder { block: 2, previous: Some(1), on, .. } if on.id == stream
            )
        });
    }

    fn record(&self, stream: usize) {
        self.gpu.event_record(0, self.event, stream).unwrap();
    }

    fn wait(&self, stream: usize) {
        self.gpu.stream_wait_event(0, stream, self.event).unwrap();
    }
}

// Reuse in stream order.

#[test]
fn reuse_on_the_same_stream_is_fine() {
    let scene = scene();
    scene.used_on_a();
    scene.reuse_on(scene.a);
    scene.assert_silent();
}

#[test]
fn reuse_on_another_stream_is_found() {
    let scene = scene();
    scene.used_on_a();
    scene.reuse_on(scene.b);
    let fault = scene.gpu.faults()[0].to_string();
    assert!(fault.starts_with("block 2 at 0x") && fault.contains("block 1"), "{fault}");
    scene.assert_out_of_order();
}

#[test]
fn reuse_after_event_and_query_is_fine() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    assert_eq!(scene.gpu.event_query(0, scene.event), Ok(false));
    scene.gpu.host_spend(300);
    assert_eq!(scene.gpu.event_query(0, scene.event), Ok(true));
    scene.reuse_on(scene.b);
    scene.assert_silent();
}

#[test]
fn a_query_that_was_false_proves_nothing() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    assert_eq!(scene.gpu.event_query(0, scene.event), Ok(false));
    scene.reuse_on(scene.b);
    scene.assert_out_of_order();
}

#[test]
fn work_that_merely_happens_to_be_done_proves_nothing() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    scene.gpu.host_spend(1_000_000);
    scene.reuse_on(scene.b);
    scene.assert_out_of_order();
}

#[test]
fn an_event_recorded_before_the_free_proves_nothing() {
    let scene = scene();
    scene.malloc(1, scene.memory, MIB, scene.a);
    scene.record(scene.a);
    scene.gpu.block_free(scene.memory);
    scene.gpu.event_synchronize(0, scene.event).unwrap();
    scene.reuse_on(scene.b);
    scene.assert_out_of_order();
}

#[test]
fn reuse_after_a_wait_on_the_device_is_fine() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    scene.wait(scene.b);
    scene.reuse_on(scene.b);
    scene.assert_silent();
}

#[test]
fn a_wait_of_one_stream_is_no_other_streams() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    scene.wait(scene.b);
    scene.reuse_on(scene.c);
    scene.assert_out_of_order();
}

#[test]
fn waits_pass_on_what_their_stream_waited_for() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    scene.wait(scene.b);
    scene.record(scene.b);
    scene.wait(scene.c);
    scene.reuse_on(scene.c);
    scene.assert_silent();
}

#[test]
fn an_event_recorded_anew_stands_for_the_new_record_only() {
    let scene = scene();
    scene.used_on_a();
    scene.record(scene.a);
    scene.record(scene.c);
    scene.wait(scene.b);
    scene.reuse_on(scene.b);
    scene.assert_out_of_order();
}

#[test]
fn host_waits_of_any_kind_order_what_follows() {
    for wait in [
        |s: &Scene| s.gpu.stream_synchronize(0, s.a),
        |s: &Scene| s.gpu.device_synchronize(0),
        |s: &Scene| as_program(|| s.gpu.device_synchronize(0)),
        |s: &Scene| {
            s.record(s.a);
            s.gpu.event_synchronize(0, s.event)
        },
        |s: &Scene| {
            s.gpu.host_spend(300);
            s.gpu.stream_query(0, s.a).map(|done| assert!(done))
        },
        |s: &Scene| s.gpu.alloc(0, MIB).and_then(|other| s.gpu.free(0, other)),
    ] {
        let scene = scene();
        scene.used_on_a();
        wait(&scene).unwrap();
        scene.reuse_on(scene.b);
        scene.assert_silent();
    }
}

#[test]
fn a_wait_for_another_stream_or_device_proves_nothing() {
    for wait in
        [|s: &Scene| s.gpu.stream_synchronize(0, s.b), |s: &Scene| s.gpu.device_synchronize(1)]
    {
        let scene = scene();
        scene.used_on_a();
        wait(&scene).unwrap();
        scene.reuse_on(scene.b);
        scene.assert_out_of_order();
    }
}

#[test]
fn recorded_streams_count_as_the_blocks_own() {
    let scene = scene();
    scene.malloc(1, scene.memory, MIB, scene.a);
    scene.gpu.block_record_stream(scene.memory, 0, scene.b);
    scene.gpu.block_free(scene.memory);
    scene.reuse_on(scene.a);
    let b = scene.gpu.stream_id(0, scene.b).unwrap();
    scene.assert_one(|fault| matches!(fault, Fault::OutOfOrder { on, .. } if on.id == b));

    let scene = self::scene();
    scene.malloc(1, scene.memory, MIB, scene.a);
    scene.gpu.block_record_stream(scene.memory, 0, scene.b);
    scene.gpu.block_free(scene.memory);
    scene.record(scene.b);
    scene.wait(scene.a);
    scene.reuse_on(scene.a);
    scene.assert_silent();
}

#[test]
fn a_recycled_handle_is_not_the_stream_before_it() {
    let mut scene = scene();
    scene.used_on_a();
    let before = scene.gpu.stream_id(0, scene.a).unwrap();
    scene.gpu.stream_destroy(0, scene.a).unwrap();
    let recycled = scene.gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    assert_eq!(recycled, scene.a);
    scene.reuse_on(recycled);
    scene.assert_one(|fault| matches!(fault, Fault::OutOfOrder { on, .. } if on.id == before));
    scene.a = recycled;
}

#[test]
fn a_device_wait_covers_streams_that_were_destroyed() {
    let scene = scene();
    scene.malloc(1, scene.memory, MIB, scene.a);
    scene.gpu.launch(0, scene.a, 1, 100).unwrap();
    scene.gpu.stream_destroy(0, scene.a).unwrap();
    scene.gpu.block_free(scene.memory);
    scene.gpu.device_synchronize(0).unwrap();
    scene.reuse_on(scene.b);
    scene.assert_silent();
}

#[test]
fn the_default_stream_orders_blocking_streams_only() {
    let scene = scene();
    scene.malloc(1, scene.memory, MIB, 0);
    scene.gpu.block_free(scene.memory);
    let blocking = scene.gpu.stream_create(0, StreamKind::Blocking).unwrap();
    scene.reuse_on(blocking);
    scene.gpu.block_free(scene.memory);
    scene.malloc(3, scene.memory, MIB, 0);
    scene.assert_silent();
    scene.gpu.block_free(scene.memory);
    scene.malloc(4, scene.memory, MIB, scene.b);
    scene
        .assert_one(|fault| matches!(fault, Fault::OutOfOrder { block: 4, previous: Some(3), .. }));
}

#[test]
fn only_the_bytes_that_are_shared_matter() {
    let scene = scene();
    scene.used_on_a();
    scene.malloc(2, scene.memory + MIB, MIB, scene.b);
    scene.assert_silent();
    scene.malloc(3, scene.memory + MIB - 512, 512, scene.b);
    scene
        .assert_one(|fault| matches!(fault, Fault::OutOfOrder { block: 3, previous: Some(1), .. }));
}

// Two live blocks.

#[test]
fn two_live_blocks_on_one_byte_are_found() {
    let scene = scene();
    scene.malloc(1, scene.memory, MIB, scene.a);
    scene.malloc(2, scene.memory + MIB, MIB, scene.a);
    scene.assert_silent();
    scene.malloc(3, scene.memory + MIB - 1, 1, scene.a);
    scene.assert_one(|fault| matches!(fault, Fault::TwoLive { block: 3, other: 1, .. }));
}

/// One handle of a page, mapped twice.
fn aliases(scene: &Scene) -> [u64; 2] {
    let base = scene.gpu.address_reserve(0, 4 * PAGE, 0).unwrap();
    let handle = scene.gpu.physical_create(0, PAGE).unwrap();
    [base, base + 2 * PAGE].map(|at| {
        scene.gpu.map(0, at, PAGE, 0, handle).unwrap();
        scene.gpu.set_access(0, at, PAGE, &[0]).unwrap();
        at
    })
}

#[test]
fn two_live_blocks_through_an_alias_are_found() {
    let scene = scene();
    let [x, y] = aliases(&scene);
    scene.malloc(1, x, MIB, scene.a);
    scene.malloc(2, y + MIB, MIB, scene.a);
    scene.assert_silent();
    scene.malloc(3, y + 512, 512, scene.a);
    let fault =
        scene.assert_one(|fault| matches!(fault, Fault::TwoLive { block: 3, other: 1, .. }));
    assert!(matches!(fault, Fault::TwoLive { other_address, .. } if other_address == x));
}

#[test]
fn reuse_through_an_alias_in_order_is_fine_and_out_of_order_is_found() {
    let scene = scene();
    let [x, y] = aliases(&scene);
    scene.malloc(1, x, PAGE, scene.a);
    scene.gpu.block_free(x);
    scene.malloc(2, y, PAGE, scene.a);
    scene.gpu.block_free(y);
    scene.assert_silent();
    scene.malloc(3, x, PAGE, scene.b);
    scene
        .assert_one(|fault| matches!(fault, Fault::OutOfOrder { block: 3, previous: Some(2), .. }));
}

#[test]
fn remapping_does_not_hide_former_use() {
    let scene = scene();
    let base = scene.gpu.address_reserve(0, 2 * PAGE, 0).unwrap();
    let handle = scene.gpu.physical_create(0, PAGE).unwrap();
    scene.gpu.map(0, base, PAGE, 0, handle).unwrap();
    scene.gpu.set_access(0, base, PAGE, &[0]).unwrap();
    scene.malloc(1, base, PAGE, scene.a);
    scene.gpu.block_free(base);
    scene.gpu.unmap(0, base, PAGE).unwrap();
    scene.assert_one(|fault| matches!(fault, Fault::TakenUnderWork { block: Some(1), .. }));
    scene.gpu.map(0, base + PAGE, PAGE, 0, handle).unwrap();
    scene.gpu.set_access(0, base + PAGE, PAGE, &[0]).unwrap();
    scene.malloc(2, base + PAGE, PAGE, scene.b);
    scene.assert_out_of_order();
}

// Memory behind blocks.

#[test]
fn a_block_over_unmapped_addresses_is_found() {
    let scene = scene();
    let [x, _] = aliases(&scene);
    scene.malloc(1, x + MIB, MIB, scene.a);
    scene.assert_silent();
    scene.malloc(2, x, 2 * PAGE, scene.b);
    let faults = scene.gpu.take_faults();
    let hole = |fault: &Fault| {
        matches!(
            *fault, Fault::Unbacked { block: 2, backed: PAGE, address, .. } if address == x + PAGE
        )
    };
    assert!(faults.iter().any(hole), "{faults:?}");
    scene.malloc(3, 0x1234_0000, 512, scene.a);
    scene.assert_one(|fault| matches!(fault, Fault::Unbacked { block: 3, backed: 0, .. }));
}

#[test]
fn a_block_in_memory_that_went_back_to_the_pool_is_found() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span, MIB, scene.a);
    scene.assert_silent();
    scene.gpu.block_free(span);
    scene.gpu.pool_free(0, span, scene.a).unwrap();
    scene.assert_silent();
    scene.malloc(2, span, MIB, scene.a);
    scene.assert_one(|fault| matches!(fault, Fault::Unbacked { block: 2, .. }));
}

#[test]
fn a_block_without_access_is_found() {
    let scene = scene();
    let base = scene.gpu.address_reserve(0, PAGE, 0).unwrap();
    let handle = scene.gpu.physical_create(0, PAGE).unwrap();
    scene.gpu.map(0, base, PAGE, 0, handle).unwrap();
    scene.malloc(1, base, MIB, scene.a);
    scene.assert_one(|fault| matches!(fault, Fault::NoAccess { block: 1, device: 0, .. }));
    scene.gpu.block_free(base);
    scene.gpu.set_access(0, base, PAGE, &[0]).unwrap();
    scene.malloc(2, base, MIB, scene.a);
    scene.assert_silent();
}

// Memory taken away.

#[test]
fn unmapping_under_a_live_block_is_found() {
    let scene = scene();
    let [x, y] = aliases(&scene);
    scene.malloc(1, x, MIB, scene.a);
    scene.gpu.unmap(0, y, PAGE).unwrap();
    scene.assert_silent();
    scene.gpu.unmap(0, x, PAGE).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderLive { call: "cuMemUnmap", block: 1, .. })
    });
}

#[test]
fn unmapping_under_unfinished_work_is_found() {
    let scene = scene();
    let [x, _] = aliases(&scene);
    scene.malloc(1, x, MIB, scene.a);
    scene.gpu.block_free(x);
    scene.record(scene.a);
    scene.wait(scene.b); // An order on the device does not help: unmapping is the host's.
    scene.gpu.unmap(0, x, PAGE).unwrap();
    scene.assert_one(|fault| matches!(fault, Fault::TakenUnderWork { block: Some(1), .. }));
}

#[test]
fn unmapping_an_alias_is_judged_by_the_work_that_went_through_it() {
    let scene = scene();
    let [x, y] = aliases(&scene);
    scene.malloc(1, x, MIB, scene.a);
    scene.gpu.block_free(x);
    scene.malloc(2, y, MIB, scene.a);
    scene.gpu.unmap(0, x, PAGE).unwrap();
    scene.assert_one(|fault| matches!(fault, Fault::TakenUnderWork { block: Some(1), .. }));

    let scene = self::scene();
    let [x, y] = aliases(&scene);
    scene.malloc(1, x, MIB, scene.a);
    scene.gpu.block_free(x);
    scene.malloc(2, y, MIB, scene.a);
    scene.record(scene.a);
    scene.gpu.event_synchronize(0, scene.event).unwrap();
    scene.gpu.unmap(0, x, PAGE).unwrap();
    scene.assert_silent();
}

#[test]
fn freeing_plain_memory_under_a_live_block_is_found() {
    let scene = scene();
    scene.used_on_a();
    scene.reuse_on(scene.a);
    scene.gpu.free(0, scene.memory).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderLive { call: "cuMemFree", block: 2, .. })
    });
}

#[test]
fn freeing_plain_memory_waits_for_its_work() {
    let scene = scene();
    scene.used_on_a();
    scene.gpu.free(0, scene.memory).unwrap();
    scene.assert_silent();
}

#[test]
fn a_span_goes_back_to_the_pool_in_order() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span, MIB, scene.a);
    scene.gpu.block_record_stream(span, 0, scene.b);
    scene.gpu.block_free(span);
    scene.record(scene.b);
    scene.wait(scene.a);
    scene.gpu.pool_free(0, span, scene.a).unwrap();
    scene.assert_silent();
}

#[test]
fn a_span_that_goes_back_under_unfinished_work_is_found() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span, 4 * MIB, scene.a);
    scene.gpu.block_free(span);
    scene.gpu.pool_free(0, span, scene.b).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderWork { call: "cuMemFreeAsync", block: Some(1), .. })
    });
}

#[test]
fn a_span_that_goes_back_under_a_live_block_is_found_and_so_is_what_follows() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span + MIB, MIB, scene.a);
    scene.gpu.pool_free(0, span, scene.a).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderLive { call: "cuMemFreeAsync", block: 1, .. })
    });
    scene.gpu.pool_trim(0, pool, 0).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderLive { call: "cuMemPoolTrimTo", block: 1, .. })
    });
}

#[test]
fn the_release_threshold_under_a_live_block_is_found() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span, MIB, scene.a);
    scene.gpu.pool_free(0, span, scene.a).unwrap();
    scene.gpu.take_faults();
    scene.gpu.stream_synchronize(0, scene.a).unwrap();
    scene.assert_one(|fault| {
        matches!(fault, Fault::TakenUnderLive { call: "the release threshold", .. })
    });
}

#[test]
fn a_span_is_usable_in_the_order_of_its_allocation_only() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.c).unwrap();
    scene.malloc(1, span, MIB, scene.a);
    scene.assert_one(|fault| matches!(fault, Fault::OutOfOrder { block: 1, previous: None, .. }));
    scene.gpu.stream_synchronize(0, scene.c).unwrap();
    scene.malloc(2, span + MIB, MIB, scene.b);
    scene.assert_silent();
}

#[test]
fn the_pools_own_reuse_is_judged_by_physical_byte() {
    let scene = scene();
    let pool = scene.gpu.pool_create(0, 0).unwrap();
    let span = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.a).unwrap();
    scene.malloc(1, span, 4 * MIB, scene.a);
    scene.gpu.launch(0, scene.a, 1, 1000).unwrap();
    scene.gpu.block_free(span);
    // In the pool's order, so other streams may get it once the free is complete.
    scene.gpu.pool_free(0, span, scene.a).unwrap();
    scene.gpu.host_spend(1000);
    let again = scene.gpu.pool_alloc(0, pool, 4 * MIB, scene.b).unwrap();
    assert_eq!(again, span);
    scene.malloc(2, again, 4 * MIB, scene.b);
    scene.assert_silent();
    scene.gpu.block_free(again);
    // Unknown to the pool, which assumes that c's free comes after everything.
    scene.gpu.pool_free(0, again, scene.c).unwrap();
    scene.assert_one(|fault| matches!(fault, Fault::TakenUnderWork { block: Some(2), .. }));
}

// The harness.

#[test]
fn a_harness_that_frees_what_is_not_live_is_told() {
    let scene = scene();
    scene.gpu.block_free(scene.memory);
    scene.assert_one(|fault| matches!(fault, Fault::UnknownBlock { .. }));
    scene.gpu.block_malloc(1, scene.memory, MIB, 0, 0xdead);
    scene.assert_one(|fault| matches!(fault, Fault::UnknownStream { handle: 0xdead, .. }));
    assert_eq!(scene.gpu.live_blocks(), 0);
}

#[test]
fn an_oracle_that_is_off_says_nothing() {
    let gpu = Gpu::new(Config { oracle: false, ..Config::new(64 * MIB) });
    gpu.block_malloc(1, 0x1000, MIB, 0, 0);
    gpu.block_malloc(2, 0x1000, MIB, 0, 0);
    assert_eq!(gpu.fault_count(), 0);
}
