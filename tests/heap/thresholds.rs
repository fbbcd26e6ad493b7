//! The thresholds of `alert:` in the process itself: the listeners, the times, and the rate limit.

use crate::common::{DEFAULT, GIB, MIB, Rig};
use gruyere::heap::{ALERTS, Alert, AlertKind};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// Longer than the least time between two looks.
const LOOK: Duration = Duration::from_millis(120);

struct Heard {
    alerts: Arc<Mutex<Vec<Alert>>>,
    _turn: MutexGuard<'static, ()>,
}

impl Heard {
    fn listen(then: impl Fn() + Send + Sync + 'static) -> Self {
        let turn = crate::alone_with_alerts();
        let alerts = Arc::new(Mutex::new(Vec::new()));
        let log = alerts.clone();
        ALERTS.listen(Some(Arc::new(move |alert: &Alert| {
            if alert.kind == AlertKind::Threshold {
                log.lock().unwrap().push(*alert);
                then();
            }
        })));
        Self { alerts, _turn: turn }
    }

    fn count(&self) -> usize {
        self.alerts.lock().unwrap().len()
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        ALERTS.listen(None);
    }
}

fn rig(conf: &str) -> Arc<Rig> {
    let rig = Rig::bare(8 * GIB, conf);
    rig.heap.announce_hooks(3);
    Arc::new(rig)
}

fn step(rig: &Rig) {
    std::thread::sleep(LOOK);
    rig.heap.mark_step();
}

#[test]
fn a_listener_hears_of_a_passed_threshold_once_with_no_lock_held() {
    for record in ["on", "off"] {
        let rig =
            rig(&format!("record:{record},headroom:0,alert:live>1GiB=callback+live>7GiB=callback"));
        let inner = rig.clone();
        let heard = Heard::listen(move || {
            // The heap serves requests from inside.
            assert!(inner.heap.free(inner.malloc(3 * MIB, DEFAULT)));
            inner.heap.validate().unwrap();
            inner.heap.mark_step();
        });
        let small = rig.malloc(500 * MIB, DEFAULT);
        step(&rig);
        assert_eq!(heard.count(), 0, "record {record}");
        let large = rig.malloc(GIB, DEFAULT);
        step(&rig);
        step(&rig);
        let alerts = heard.alerts.lock().unwrap().clone();
        assert_eq!(alerts.len(), 1, "once, record {record}: {alerts:?}");
        let Alert { device, threshold, value, count, live, .. } = alerts[0];
        assert_eq!((device, threshold, count), (0, 0, 1));
        assert_eq!((value, live), ((GIB + 500 * MIB) as f64, GIB + 500 * MIB));
        // It was back, but a threshold raises at most one alert a minute.
        assert!(rig.heap.free(large));
        step(&rig);
        let large = rig.malloc(GIB, DEFAULT);
        step(&rig);
        assert_eq!(heard.count(), 1, "record {record}");
        assert!(rig.heap.free(large) && rig.heap.free(small));
    }
}

#[test]
fn what_an_alert_says_is_of_one_reading_whatever_happens_meanwhile() {
    for record in ["on", "off"] {
        let rig = rig(&format!(
            "record:{record},headroom:0,alert:live>1GiB=callback+live>1100MiB=callback"
        ));
        let inner = rig.clone();
        // Between the alerts of one look, as another thread may.
        let heard = Heard::listen(move || {
            inner.malloc(GIB, DEFAULT);
        });
        rig.malloc(GIB + 500 * MIB, DEFAULT);
        step(&rig);
        let alerts = heard.alerts.lock().unwrap().clone();
        assert_eq!(alerts.len(), 2, "record {record}: {alerts:?}");
        for Alert { value, live, live_peak, reserved, .. } in alerts {
            assert_eq!(value, live as f64, "record {record}");
            assert!(live <= live_peak && live <= reserved, "record {record}");
        }
    }
}

#[test]
fn without_a_step_mark_a_threshold_is_seen_all_the_same() {
    let rig = rig("record:on,headroom:0,auto_trim:off,alert:reserved>90%=callback");
    let heard = Heard::listen(|| {});
    let large = rig.malloc(7 * GIB + 512 * MIB, DEFAULT);
    for _ in 0..3 * 256 {
        let block = rig.malloc(2 * MIB, DEFAULT);
        assert!(rig.heap.free(block));
    }
    assert_eq!(heard.count(), 1);
    assert!(rig.heap.free(large));
}

#[test]
fn trim_gives_back_what_lies_idle() {
    let rig = rig("record:on,headroom:0,auto_trim:off,alert:unused>50%=trim");
    let kept = rig.malloc(512 * MIB, DEFAULT);
    let large = rig.malloc(4 * GIB, DEFAULT);
    assert!(rig.heap.free(large));
    assert!(rig.heap.stats(0).unwrap().reserved >= 4 * GIB);
    step(&rig);
    assert!(rig.heap.stats(0).unwrap().reserved < GIB, "{:?}", rig.heap.stats(0));
    assert!(rig.heap.free(kept));
    rig.check();
}

#[test]
fn a_leak_is_heard_of_before_memory_has_run_out() {
    let rig = rig("record:on,headroom:0,alert:oom-in<1h=callback");
    let heard = Heard::listen(|| {});
    let weights = rig.malloc(GIB, DEFAULT);
    let mut leaked = 0;
    let mut heard_at = None;
    // 64 MiB a step, in steps that take a GiB and give it back.
    while heard_at.is_none() && leaked < 90 {
        for _ in 0..4 {
            let blocks: Vec<u64> = (0..16).map(|_| rig.malloc(64 * MIB, DEFAULT)).collect();
            std::thread::sleep(Duration::from_millis(10));
            blocks.into_iter().for_each(|block| assert!(rig.heap.free(block)));
        }
        rig.malloc(64 * MIB, DEFAULT);
        leaked += 1;
        rig.heap.mark_step();
        heard_at = (heard.count() > 0).then_some(leaked);
    }
    let heard_at = heard_at.expect("heard of");
    assert!((10..90).contains(&heard_at), "after {heard_at} steps");
    let alert = heard.alerts.lock().unwrap()[0];
    assert!(alert.value > 0.0 && alert.value < 60.0, "{alert:?}");
    assert!(rig.heap.free(weights));
}
