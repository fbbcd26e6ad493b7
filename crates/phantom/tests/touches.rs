//! The oracle of programs that allocate and free by CUDA's rules: touches of kernels, and blocks of
//! the program.

use gruyere_phantom::oracle::Fault;
use gruyere_phantom::{Config, Costs, Gpu, StreamKind, as_program};

const PAGE: u64 = 2 << 20;
/// Long compared with every action of the host.
const KERNEL: u64 = 1_000_000;

fn gpu() -> (Gpu, [usize; 2]) {
    let gpu = Gpu::new(Config { costs: Costs::zero(), ..Config::new(1 << 30) });
    let streams = [0; 2].map(|_| gpu.stream_create(0, StreamKind::NonBlocking).unwrap());
    (gpu, streams)
}

fn assert_one(gpu: &Gpu, is: impl Fn(&Fault) -> bool) {
    let faults = gpu.take_faults();
    assert!(faults.len() == 1 && is(&faults[0]), "{faults:?}");
}

#[test]
fn memory_of_a_running_kernel_is_not_for_everybody() {
    let (gpu, [a, _]) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(memory, 512)]).unwrap();
    gpu.disowns(memory);
    gpu.owns(memory, PAGE, None);
    assert_one(&gpu, |fault| {
        matches!(fault, Fault::HandedOutBusy { block: 2, stream: None, previous: 1, .. })
    });
}

#[test]
fn it_is_once_the_kernel_is_done_and_before_for_its_own_stream() {
    let (gpu, [a, b]) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(memory, 512)]).unwrap();
    gpu.disowns(memory);
    gpu.owns(memory, 512, Some(a));
    gpu.disowns(memory);
    assert_eq!(gpu.take_faults(), []);
    // Another stream waits first.
    let event = gpu.event_create(0).unwrap();
    gpu.event_record(0, event, a).unwrap();
    gpu.stream_wait_event(0, b, event).unwrap();
    gpu.owns(memory, 512, Some(b));
    gpu.disowns(memory);
    assert_eq!(gpu.take_faults(), []);
    as_program(|| gpu.device_synchronize(0)).unwrap();
    gpu.owns(memory, 512, None);
    assert_eq!(gpu.take_faults(), []);
}

#[test]
fn an_event_of_the_whole_context_orders_what_it_was_recorded_behind() {
    let (gpu, [a, b]) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(memory, 512)]).unwrap();
    gpu.disowns(memory);
    let event = gpu.event_create(0).unwrap();
    gpu.context_event_record(0, event).unwrap();
    // Later work does not count.
    gpu.launch(0, b, 9, KERNEL).unwrap();
    gpu.event_synchronize(0, event).unwrap();
    gpu.owns(memory, PAGE, None);
    assert_eq!(gpu.take_faults(), []);
}

#[test]
fn two_kernels_on_the_same_bytes_need_an_order() {
    let (gpu, [a, b]) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(memory, 4096)]).unwrap();
    gpu.launch_touching(0, b, KERNEL, &[(memory + 4000, 200)]).unwrap();
    assert_one(&gpu, |fault| matches!(fault, Fault::Race { block: 1, previous: 1, .. }));
    // The next kernel on the stream begins after the first, and adjacent bytes do not conflict.
    gpu.launch_touching(0, b, KERNEL, &[(memory, 200)]).unwrap();
    gpu.launch_touching(0, a, KERNEL, &[(memory + 4200, 200)]).unwrap();
    assert_eq!(gpu.take_faults(), []);
}

#[test]
fn kernels_touch_live_blocks_only() {
    let (gpu, [a, _]) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, 1024, None);
    gpu.launch_touching(0, a, KERNEL, &[(memory + 512, 512)]).unwrap();
    assert_eq!(gpu.take_faults(), []);
    gpu.launch_touching(0, a, KERNEL, &[(memory + 512, 513)]).unwrap();
    assert_one(&gpu, |fault| matches!(fault, Fault::TouchedNobodys { bytes: 513, .. }));
    gpu.disowns(memory);
    gpu.memset(0, memory, 512, a).unwrap();
    assert_one(&gpu, |fault| matches!(fault, Fault::TouchedNobodys { bytes: 512, .. }));
    gpu.disowns(memory);
    assert_one(&gpu, |fault| matches!(fault, Fault::UnknownBlock { .. }));
}

#[test]
fn two_blocks_of_the_program_share_nothing_and_lie_in_memory() {
    let (gpu, _) = gpu();
    let memory = gpu.alloc(0, PAGE).unwrap();
    gpu.owns(memory, 1024, None);
    gpu.owns(memory + 512, 1024, None);
    assert_one(&gpu, |fault| matches!(fault, Fault::TwoLive { block: 2, other: 1, .. }));
    gpu.owns(memory + PAGE - 512, 1024, None);
    assert_one(&gpu, |fault| matches!(fault, Fault::Unbacked { block: 3, backed: 512, .. }));
}

#[test]
fn unmapping_under_a_running_kernel_is_found() {
    let (gpu, [a, _]) = gpu();
    let base = gpu.address_reserve(0, PAGE, 0).unwrap();
    let handle = gpu.physical_create(0, PAGE).unwrap();
    gpu.map(0, base, PAGE, 0, handle).unwrap();
    gpu.set_access(0, base, PAGE, &[0]).unwrap();
    gpu.owns(base, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(base, 512)]).unwrap();
    gpu.disowns(base);
    gpu.unmap(0, base, PAGE).unwrap();
    assert_one(&gpu, |fault| matches!(fault, Fault::TakenUnderWork { call: "cuMemUnmap", .. }));
    // Another address reaches the same memory.
    let other = gpu.address_reserve(0, PAGE, 0).unwrap();
    gpu.map(0, other, PAGE, 0, handle).unwrap();
    gpu.set_access(0, other, PAGE, &[0]).unwrap();
    gpu.owns(other, PAGE, None);
    assert_one(&gpu, |fault| matches!(fault, Fault::HandedOutBusy { previous: 1, .. }));
}

#[test]
fn unmapping_one_of_two_addresses_is_no_matter_to_a_kernel_on_the_other() {
    let (gpu, [a, _]) = gpu();
    let handle = gpu.physical_create(0, PAGE).unwrap();
    let [used, idle] = [0; 2].map(|_| {
        let base = gpu.address_reserve(0, PAGE, 0).unwrap();
        gpu.map(0, base, PAGE, 0, handle).unwrap();
        gpu.set_access(0, base, PAGE, &[0]).unwrap();
        base
    });
    gpu.owns(used, PAGE, None);
    gpu.launch_touching(0, a, KERNEL, &[(used, 512)]).unwrap();
    gpu.unmap(0, idle, PAGE).unwrap();
    assert_eq!(gpu.take_faults(), []);
}

#[test]
fn a_reset_leaves_nothing_of_its_context() {
    let (gpu, [a, _]) = gpu();
    let default = gpu.pool_create(0, 0).unwrap();
    let other = gpu.pool_create(0, 0).unwrap();
    for pool in [default, other] {
        gpu.pool_alloc(0, pool, PAGE, a).unwrap();
    }
    gpu.alloc(0, PAGE).unwrap();
    gpu.event_create(0).unwrap();
    assert!(gpu.books(0).physical > 3 * PAGE);
    gpu.reset_device(0, Some(default)).unwrap();
    let held = gpu.held();
    assert_eq!(
        (gpu.books(0).physical, held.pools, held.events, held.streams, held.plain),
        (0, 1, 0, 0, 0)
    );
    let b = gpu.stream_create(0, StreamKind::NonBlocking).unwrap();
    assert!(gpu.pool_alloc(0, default, PAGE, b).is_ok(), "the default pool is empty, not gone");
    assert!(gpu.pool_alloc(0, other, PAGE, b).is_err());
}

#[test]
fn what_a_capture_allocates_is_its_graphs() {
    let (gpu, [a, b]) = gpu();
    gpu.begin_capture(0, a, Default::default(), None).unwrap();
    let [kept, freed] = [0; 2].map(|_| gpu.graph_alloc(0, 512, a).unwrap());
    gpu.graph_free(0, freed, a).unwrap();
    let graph = gpu.end_capture(0, a).unwrap();
    assert!(gpu.graph_alloc(0, 512, a).is_err(), "nothing captures any more");
    assert_eq!((gpu.books(0).physical, gpu.held().pool_allocations), (2 * PAGE, 0));
    gpu.graph_destroy(0, graph).unwrap();
    assert_eq!(gpu.books(0).physical, PAGE, "what the graph did not free is the program's to free");
    gpu.graph_free(0, kept, b).unwrap();
    assert_eq!(gpu.books(0).physical, 0);
    assert!(gpu.graph_free(0, kept, b).is_err());
}
