//! Lifetimes beyond the tag of a request: reserved memory, tags of live blocks, checkpoints, and
//! alerts.

use crate::common::{DEFAULT, GIB, KEEPING, MIB, Rig};
use gruyere::config::keys::KEYS;
use gruyere::heap::{ALERTS, Alert, AlertKind, Error, Lifetime, lifetime};
use gruyere_phantom::{Caller, Config as GpuConfig, as_program};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn rig(memory: u64, conf: &str) -> Rig {
    let rig = Rig::over(GpuConfig::new(memory), conf);
    rig.heap.announce_hooks(3);
    rig
}

fn tagged(rig: &Rig, lifetime: Lifetime, size: u64) -> u64 {
    assert!(lifetime::push(lifetime));
    let address = rig.malloc(size, DEFAULT);
    assert!(lifetime::pop());
    address
}

/// Live bytes by lifetime, from the record.
fn live(rig: &Rig) -> [u64; 4] {
    let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
    let snapshot = reader.device(0).unwrap();
    std::array::from_fn(|lifetime| snapshot.sum(|_, of| of == lifetime).live_bytes())
}

#[test]
fn the_configuration_knows_every_lifetime_by_name() {
    let reserve = KEYS.iter().find(|key| key.name == "reserve").unwrap();
    assert_eq!(reserve.default, "none");
    for lifetime in Lifetime::ALL {
        let config =
            gruyere::config::Config::parse(&format!("reserve:{}=1MiB", lifetime.name())).unwrap();
        let sizes = config.heap.reserve.map(|size| size.resolve(GIB));
        assert_eq!((sizes[lifetime as usize], sizes.iter().sum::<u64>()), (MIB, MIB));
    }
}

#[test]
fn a_reserve_is_mapped_when_the_device_is_first_used_and_serves_its_lifetime_without_a_driver_call()
{
    for conf in KEEPING {
        let rig = rig(GIB, &format!("{conf},reserve:persistent=25%+step=32MiB"));
        assert_eq!(rig.gpu.books(0).physical, 0);
        assert!(rig.heap.free(rig.malloc(1, DEFAULT)));
        assert!(rig.gpu.books(0).physical >= 288 * MIB, "{conf}");
        let before = rig.gpu.counts(Caller::Allocator);
        let weights = tagged(&rig, Lifetime::Persistent, 250 * MIB);
        let activation = tagged(&rig, Lifetime::Step, 30 * MIB);
        assert_eq!(rig.gpu.counts(Caller::Allocator), before, "{conf}");
        assert!(rig.heap.free(weights) && rig.heap.free(activation));
        rig.heap.trim();
        assert!(rig.gpu.books(0).physical >= 288 * MIB, "{conf}: empty_cache leaves it");
        rig.check();
    }
}

#[test]
fn others_take_what_is_reserved_only_where_the_alternative_is_out_of_memory() {
    for conf in KEEPING {
        let rig = rig(GIB, &format!("{conf},reserve:persistent=400MiB"));
        let first = rig.malloc(500 * MIB, DEFAULT);
        assert!(rig.gpu.books(0).physical >= 900 * MIB, "{conf}: beside the reserve");
        let second = rig.malloc(400 * MIB, DEFAULT);
        assert!(rig.heap.free(first) && rig.heap.free(second));
        rig.heap.trim();
        assert_eq!(rig.gpu.books(0).physical, 0, "{conf}: given up for good");
        rig.check();
    }
}

#[test]
fn pages_are_moved_out_of_a_lifetime_down_to_its_reserve_only() {
    let rig = rig(GIB, "backing:stitch,headroom:0,reserve:persistent=300MiB");
    let weights = tagged(&rig, Lifetime::Persistent, 500 * MIB);
    assert!(rig.heap.free(weights));
    let batch = rig.malloc(600 * MIB, DEFAULT);
    let before = rig.gpu.counts(Caller::Allocator);
    let weights = tagged(&rig, Lifetime::Persistent, 290 * MIB);
    assert_eq!(rig.gpu.counts(Caller::Allocator), before);
    assert!(rig.heap.free(weights) && rig.heap.free(batch));
    rig.check();
}

#[test]
fn a_reserve_that_cannot_be_had_fails_the_first_request_with_what_to_do() {
    for conf in KEEPING {
        let rig = rig(GIB, &format!("{conf},reserve:persistent=10GiB"));
        for _ in 0..2 {
            let error = rig.heap.malloc(1, 0, DEFAULT).unwrap_err();
            assert!(matches!(error, Error::Reserve(_)));
            let text = error.to_string();
            for part in
                ["reserve:persistent=", "10.00 GiB", "device 0", "1.00 GiB free", "reserve less"]
            {
                assert!(text.contains(part), "{text}");
            }
            assert_eq!(rig.gpu.books(0).physical, 0, "{conf}");
        }
        assert_eq!(rig.gpu.misuses(), []);
    }
}

#[test]
fn settings_that_the_device_cannot_meet_are_named_with_the_reason() {
    for (conf, parts) in [
        (
            "limit:0.00000001%",
            [
                "GRUYERE_CONF limit:0.00000001%: that is 0 bytes of the 1.00 GiB",
                "2MiB is the least",
            ],
        ),
        ("limit:0.1%", ["that is 1.02 MiB of the 1.00 GiB of device 0", "set a larger share"]),
        (
            "reserve:auto=90%+step=90%",
            ["reserve:auto=90%+step=90%: 1.80 GiB in all, more than the 1.00 GiB", "reserve less"],
        ),
        (
            "limit:100MiB,reserve:auto=200MiB",
            ["reserve:auto=200MiB: 200.00 MiB in all, more than the 100.00 MiB", "or limit:"],
        ),
    ] {
        let rig = rig(GIB, conf);
        for _ in 0..2 {
            let error = rig.heap.malloc(1, 0, DEFAULT).unwrap_err();
            assert!(matches!(error, Error::Setting(_)), "{conf}: {error}");
            let text = error.to_string();
            assert!(parts.iter().all(|part| text.contains(part)), "{text}");
            assert_eq!(rig.gpu.books(0).physical, 0, "{conf}");
        }
    }
    for conf in ["limit:0.2%,headroom:0", "headroom:0,reserve:auto=50%+step=25%"] {
        let rig = rig(GIB, conf);
        rig.malloc(1, DEFAULT);
        rig.check();
    }
}

#[test]
fn a_live_block_that_is_tagged_is_counted_under_its_new_lifetime_until_it_is_gone() {
    for conf in ["backing:stitch", "backing:pool", "backing:passthrough"] {
        let rig = rig(GIB, &format!("{conf},record:on"));
        let blocks = [rig.malloc(1000, DEFAULT), rig.malloc(3 * MIB, DEFAULT)];
        if conf == "backing:passthrough" {
            assert!(
                !blocks.iter().any(|&block| rig.heap.tag(block, Lifetime::Step)),
                "not kept here"
            );
            blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
            continue;
        }
        let bytes = 1024 + 3 * MIB;
        assert_eq!(live(&rig), [bytes, 0, 0, 0]);
        for lifetime in [
            Lifetime::Persistent,
            Lifetime::Step,
            Lifetime::Step,
            Lifetime::Auto,
            Lifetime::Persistent,
        ] {
            for address in blocks {
                assert!(rig.heap.tag(address, lifetime));
                assert!(!rig.heap.tag(address + 512, lifetime), "no block starts there");
            }
            let mut expected = [0; 4];
            expected[lifetime as usize] = bytes;
            assert_eq!(live(&rig), expected);
            rig.check();
        }
        // In the block map too.
        let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
        assert!(
            reader
                .blocks()
                .entries
                .iter()
                .all(|(block, _)| block.lifetime == Lifetime::Persistent as u8)
        );
        blocks.into_iter().for_each(|address| assert!(rig.heap.free(address)));
        assert_eq!(live(&rig), [0; 4]);
        assert!(!rig.heap.tag(blocks[0], Lifetime::Step), "it is gone");
        assert!(!rig.heap.tag(0x1234, Lifetime::Step));
        assert_eq!(rig.heap.stats(0).unwrap().bad_frees, 0, "a wrong tag is no bad free");
        // The slot's next block has its own lifetime.
        let next = rig.malloc(1000, DEFAULT);
        assert_eq!((next, live(&rig)), (blocks[0], [1024, 0, 0, 0]));
        assert!(rig.heap.free(next));
        rig.check();
    }
}

#[test]
fn a_tagged_block_that_other_streams_use_waits_for_them_and_its_books_close() {
    let rig = rig(GIB, "record:on");
    let other = rig.stream();
    for size in [1000, 3 * MIB] {
        for tag_first in [true, false] {
            let address = rig.malloc(size, DEFAULT);
            if tag_first {
                assert!(rig.heap.tag(address, Lifetime::Persistent));
            }
            assert!(rig.heap.record_stream(address, other));
            if !tag_first {
                assert!(rig.heap.tag(address, Lifetime::Persistent));
            }
            as_program(|| rig.gpu.launch(0, other.0, 1, 1_000_000)).unwrap();
            assert!(rig.heap.free(address));
            let again = rig.malloc(size, DEFAULT);
            assert_ne!(again, address, "its other stream is not past it");
            assert!(rig.heap.free(again));
            rig.heap.trim();
            assert_eq!(live(&rig), [0; 4]);
            let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
            let snapshot = reader.device(0).unwrap();
            for lifetime in 0..4 {
                assert_eq!(snapshot.sum(|_, of| of == lifetime).pending_blocks(), 0);
            }
            rig.check();
        }
    }
}

#[test]
fn tags_change_no_sum_of_blocks() {
    let rig = rig(GIB, "record:on");
    let count = || {
        let reader = gruyere::record::Reader::own(rig.heap.record()).unwrap();
        let total = reader.device(0).unwrap().total();
        (total.mallocs, total.malloc_bytes, total.frees, total.live_requested())
    };
    let address = rig.malloc(777, DEFAULT);
    let before = count();
    assert!(rig.heap.tag(address, Lifetime::Persistent));
    assert_eq!(count(), before);
    assert!(rig.heap.free(address));
}

#[test]
fn a_checkpoint_trims_where_memory_is_low_and_not_again_soon() {
    let rig = rig(GIB, "backing:pool");
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let weights = rig.malloc(100 * MIB, DEFAULT);
    let activation = rig.malloc(300 * MIB, DEFAULT);
    assert_eq!(rig.heap.checkpoint(after(0)), 0, "at the peak");
    assert!(rig.heap.free(activation));
    assert!(rig.heap.checkpoint(after(1)) >= 300 * MIB);
    let activation = rig.malloc(300 * MIB, DEFAULT);
    assert!(rig.heap.free(activation));
    let before = rig.gpu.counts(Caller::Allocator);
    for seconds in [0, 1, 2, 30] {
        assert_eq!(rig.heap.checkpoint(after(seconds)), 0, "too soon");
    }
    assert_eq!(rig.gpu.counts(Caller::Allocator), before, "and costs no driver call");
    assert!(rig.heap.checkpoint(after(31)) >= 300 * MIB);
    assert_eq!(rig.heap.checkpoint(after(100)), 0, "nothing lies idle");
    assert!(rig.heap.free(weights));
    rig.check();
}

#[test]
fn those_who_want_alerts_hear_of_short_memory_on_the_thread_that_asked() {
    let _alone = crate::alone_with_alerts();
    // Other tests may raise alerts, of other sizes.
    let heard = Arc::new(Mutex::new(Vec::new()));
    let log = heard.clone();
    let rig = Arc::new(rig(GIB, "backing:fixed,headroom:0"));
    let inner = rig.clone();
    ALERTS.listen(Some(Arc::new(move |alert: &Alert| {
        if alert.asked == 777 * MIB {
            // No lock is held: the heap serves requests from inside.
            assert!(inner.heap.free(inner.malloc(1000, DEFAULT)));
            inner.heap.validate().unwrap();
            log.lock().unwrap().push((*alert, std::thread::current().id()));
        }
    })));
    let held = rig.malloc(600 * MIB, DEFAULT);
    let refused = |is_the_programs: bool| {
        let Err(Error::OutOfMemory(mut report)) = rig.heap.malloc(777 * MIB, 0, DEFAULT) else {
            panic!("a gigabyte is not enough")
        };
        if is_the_programs {
            rig.heap.note_out_of_memory(&mut report, DEFAULT);
        }
    };
    refused(true);
    ALERTS.listen(None);
    refused(true);
    // A door found another way: memory was short, and the request succeeded.
    refused(false);
    assert!(rig.heap.free(held));
    let heard = heard.lock().unwrap();
    let kinds: Vec<AlertKind> = heard.iter().map(|(alert, _)| alert.kind).collect();
    assert_eq!(kinds, [AlertKind::Reclaim, AlertKind::OutOfMemory]);
    for (alert, thread) in heard.iter() {
        assert_eq!((alert.device, alert.live, alert.count), (0, 600 * MIB, 1));
        assert!(alert.reserved >= 600 * MIB);
        assert_eq!(*thread, std::thread::current().id());
    }
    // And from the queue, on any thread.
    let of_ours = std::iter::from_fn(|| ALERTS.next(Duration::ZERO))
        .filter(|(alert, _)| alert.asked == 777 * MIB);
    assert_eq!(of_ours.count(), 5);
}
