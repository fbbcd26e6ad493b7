//! Every position of failure in a program with pools and reserves: run once for each of the
//! allocator's driver calls in it, with exactly that call failing. Nothing is lost, and a refused
//! request succeeds later.

use crate::common::{DEFAULT, MIB};
use crate::flaky::{self, Plan};
use crate::world::World;
use gruyere::driver::ErrorKind;
use gruyere::heap::{Error, PoolError, PoolKey};
use gruyere_phantom::as_program;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

struct Program {
    world: World,
    /// The driver's pools hold memory in their own chunks, which may contain spans of several of
    /// our pools.
    in_driver_pools: bool,
    /// Whether memory ran out.
    refused: AtomicBool,
    /// Pools over the driver that still hold memory.
    outside: Mutex<Vec<PoolKey>>,
}

impl Program {
    fn new(conf: &str) -> Self {
        Self {
            world: World::new(200 * MIB, conf),
            in_driver_pools: conf.contains("backing:pool"),
            refused: AtomicBool::new(false),
            outside: Mutex::default(),
        }
    }

    /// Creates pools, uses them on two streams, exhausts, releases and destroys them, and checks
    /// the invariants throughout.
    fn run(&self) {
        let side = self.world.rig.passing_stream();
        let mut next = 1;
        for round in 0..3u64 {
            let keys = [("a", 20 * MIB), ("b", 0)].map(|(name, reserve)| {
                let made = self.world.rig.heap.pool_create(name, 0, reserve, None);
                self.world.rig.heap.validate().unwrap();
                match made {
                    Ok(key) => Some(key),
                    Err(PoolError::Reserve { .. } | PoolError::Heap(Error::Driver(_))) => None,
                    Err(other) => panic!("{other}"),
                }
            });
            let mut blocks = Vec::new();
            for key in keys.into_iter().flatten() {
                self.world.rig.heap.pool_enter(key).unwrap();
                for (size, stream) in [
                    (3000, DEFAULT),
                    (50 * MIB, side),
                    (900_000, side),
                    (60 * MIB + round * MIB, DEFAULT),
                ] {
                    match self.world.rig.heap.malloc(size, 0, stream) {
                        Ok(address) => {
                            self.world.rig.gpu.block_malloc(next, address, size, 0, stream.0);
                            next += 1;
                            blocks.push(address);
                            as_program(|| self.world.rig.gpu.launch(0, stream.0, 1, 40_000))
                                .unwrap();
                        }
                        Err(Error::OutOfMemory(_)) => self.refused.store(true, Ordering::Relaxed),
                        Err(Error::Driver(_)) => {}
                        Err(other) => panic!("{other}"),
                    }
                    self.world.rig.heap.validate().unwrap();
                }
                self.world.rig.heap.pool_leave(key).unwrap();
            }
            for address in blocks {
                self.world.rig.gpu.block_free(address);
                assert!(self.world.rig.heap.free(address));
            }
            for (at, key) in keys.into_iter().enumerate() {
                let Some(key) = key else { continue };
                let given = if at == 0 {
                    self.world.rig.heap.pool_release(key)
                } else {
                    self.world.rig.heap.pool_destroy(key)
                };
                assert!(
                    matches!(given, Ok(_) | Err(PoolError::Kept { .. } | PoolError::Unquiet)),
                    "{given:?}"
                );
                self.world.rig.heap.validate().unwrap();
            }
        }
    }

    /// The same with a pool of given segments, which are taken back.
    fn run_outside(&self) {
        let key = match self.world.rig.heap.pool_create("outside", 0, 0, None) {
            Ok(key) => key,
            Err(PoolError::Heap(Error::Driver(_))) => return,
            Err(other) => panic!("{other}"),
        };
        self.outside.lock().unwrap().push(key);
        self.world.rig.heap.pool_from_outside(key, true).unwrap();
        let mut blocks = Vec::new();
        for size in [3000, 5 * MIB, 4 * MIB, 30 * MIB, 300 * MIB] {
            for _ in 0..2 {
                self.world.rig.heap.pool_enter(key).unwrap();
                let answer = self.world.rig.heap.malloc(size, 0, DEFAULT);
                self.world.rig.heap.pool_leave(key).unwrap();
                match answer {
                    Ok(address) => {
                        blocks.push(address);
                        break;
                    }
                    Err(Error::NoSegment(bytes))
                        if self.world.rig.heap.pool_has_room(key, bytes) =>
                    {
                        if let Ok(address) = self.world.rig.heap.plain_segment(key, bytes) {
                            self.world.rig.heap.pool_bring(key, size, address, bytes).unwrap();
                        }
                    }
                    Err(Error::NoSegment(_) | Error::Driver(_)) => {}
                    Err(other) => panic!("{other}"),
                }
                self.world.rig.heap.validate().unwrap();
            }
        }
        for address in blocks {
            assert!(self.world.rig.heap.free(address));
            self.take_outside();
        }
    }

    /// Takes idle segments back, and drops empty pools. Segments refused by the driver stay in
    /// their pool.
    fn take_outside(&self) {
        self.outside.lock().unwrap().retain(|&key| {
            for (address, bytes) in self.world.rig.heap.pool_take(key) {
                if self.world.rig.heap.free_plain(key, address).is_err() {
                    let size = if bytes == 2 * MIB { 1 } else { bytes };
                    self.world.rig.heap.pool_bring(key, size, address, bytes).unwrap();
                }
            }
            self.world.rig.heap.validate().unwrap();
            self.world.rig.heap.pool_stats(key).unwrap().live_blocks > 0
                || !self.world.rig.heap.pool_forget(key)
        });
    }

    fn finish(&self) {
        self.take_outside();
        assert!(self.outside.lock().unwrap().is_empty());
        for name in ["a", "b"] {
            if let Ok(key) = self.world.rig.heap.pool_create(name, 0, 0, None) {
                match self.world.rig.heap.pool_destroy(key) {
                    Ok(_) => {}
                    // The chunk goes with the other pool's span, at the next trim.
                    Err(PoolError::Kept { .. }) if self.in_driver_pools => {}
                    Err(other) => panic!("{name}: {other}"),
                }
            }
        }
        self.world.rig.heap.trim();
        self.world.rig.heap.trim();
        self.world.rig.heap.validate().unwrap();
        assert_eq!(self.world.rig.gpu.faults(), []);
        assert_eq!(self.world.rig.gpu.misuses(), []);
        assert_eq!(self.world.rig.gpu.books(0).physical, 0, "memory is lost");
    }
}

fn fail_every_call(conf: &str) {
    let run = |program: &mut Program, nth| {
        program.run();
        program.run_outside();
        let refused = program.refused.load(Ordering::Relaxed);
        assert!(nth > 0 || refused, "memory is short in the program");
    };
    let kinds = [ErrorKind::OutOfMemory, ErrorKind::InvalidValue];
    let end = |program: &mut Program, _| program.finish();
    let make = || Program::new(conf);
    flaky::fail_every_call(conf, &kinds, make, |program| &program.world.driver, run, end);
}

#[test]
fn nothing_is_lost_whichever_call_of_a_pool_of_pages_fails() {
    fail_every_call("backing:stitch,headroom:0");
}

#[test]
fn nothing_is_lost_whichever_call_of_a_pool_of_spans_fails() {
    fail_every_call("backing:pool,headroom:0");
}

#[test]
fn nothing_is_lost_whichever_plain_allocation_of_a_pool_fails() {
    fail_every_call("backing:fixed,headroom:0");
}

#[test]
fn nothing_is_lost_when_calls_fail_at_random_while_threads_use_and_release_pools() {
    for conf in ["backing:stitch,headroom:0", "backing:pool,headroom:0", "backing:fixed,headroom:0"]
    {
        let program = Program::new(conf);
        let World { rig, driver, .. } = &program.world;
        driver.set(Plan::OneIn(12));
        std::thread::scope(|scope| {
            for thread in 0..3u64 {
                scope.spawn(move || {
                    let stream = rig.passing_stream();
                    let mut random = thread + 1;
                    for round in 0..120u64 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let name = ["a", "b"][(random >> 60) as usize % 2];
                        let Ok(key) =
                            rig.heap.pool_create(name, 0, (random >> 50) % 3 * 4 * MIB, None)
                        else {
                            continue;
                        };
                        // Another thread may destroy it first.
                        if rig.heap.pool_enter(key).is_err() {
                            continue;
                        }
                        let sizes =
                            [900, 60_000 * (1 + round % 16), (1 + (random >> 40) % 12) * MIB];
                        let blocks: Vec<u64> = sizes
                            .into_iter()
                            .enumerate()
                            .filter_map(|(at, size)| {
                                let address = rig.heap.malloc(size, 0, stream).ok()?;
                                let id = (thread << 32) + round * 8 + at as u64 + 1;
                                rig.gpu.block_malloc(id, address, size, 0, stream.0);
                                Some(address)
                            })
                            .collect();
                        as_program(|| rig.gpu.launch(0, stream.0, 1, 20_000)).unwrap();
                        rig.heap.pool_leave(key).unwrap();
                        for address in blocks {
                            rig.gpu.block_free(address);
                            assert!(rig.heap.free(address));
                        }
                        match round % 4 {
                            0 => drop(rig.heap.pool_release(key)),
                            1 => drop(rig.heap.pool_destroy(key)),
                            _ => {}
                        }
                    }
                });
            }
        });
        driver.set(Plan::Sound);
        program.finish();
    }
}

#[test]
fn a_reserve_of_the_configuration_that_meets_a_failure_leaves_nothing_and_is_had_at_the_next_request()
 {
    for backing in ["stitch", "pool", "fixed"] {
        let conf = format!("backing:{backing},headroom:0,reserve:persistent=40MiB+step=10MiB");
        let request = |World { rig, .. }: &World| {
            let address = rig.heap.malloc(1000, 0, DEFAULT)?;
            assert!(rig.gpu.books(0).physical >= 50 * MIB);
            assert!(rig.heap.free(address));
            Ok::<(), Error>(())
        };
        let world = World::new(200 * MIB, &conf);
        let calls = {
            request(&world).unwrap();
            world.driver.calls()
        };
        for nth in 1..=calls {
            let world = World::new(200 * MIB, &conf);
            world.driver.set(Plan::Nth(nth, ErrorKind::InvalidValue));
            if let Err(error) = request(&world) {
                assert!(
                    matches!(error, Error::Reserve(_) | Error::Driver(_)),
                    "{conf} {nth}: {error}"
                );
                world.driver.set(Plan::Sound);
                assert_eq!(world.physical(), 0, "{conf}: call {nth} of {calls}");
                request(&world).unwrap();
            }
            world.rig.check();
        }
    }
}
