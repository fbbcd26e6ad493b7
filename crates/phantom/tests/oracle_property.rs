//! The oracle's clocks against plain reachability: every action is a node, every order an edge, and
//! reuse is correct if a path leads from each last use to the new block.

use std::collections::HashMap;

use gruyere_phantom::oracle::Fault;
use gruyere_phantom::{Config, Costs, Gpu, StreamKind};
use proptest::prelude::*;

const STREAMS: usize = 4;
const EVENTS: usize = 3;
const SLOTS: u64 = 6;
const SLOT: u64 = 512;

#[derive(Clone, Debug)]
enum Act {
    /// A block over some slots for a stream, unless one of them is taken.
    Malloc {
        from: u64,
        slots: u64,
        stream: usize,
    },
    /// The n-th live block is freed.
    Free {
        which: usize,
    },
    /// The n-th live block is used on a stream.
    RecordStream {
        which: usize,
        stream: usize,
    },
    Record {
        event: usize,
        stream: usize,
    },
    Wait {
        stream: usize,
        event: usize,
    },
    /// The host waits for, or queries, an event.
    HostEvent {
        event: usize,
        query: bool,
    },
    HostStream {
        stream: usize,
    },
    HostDevice,
    /// Kernels; long ones make queries return false.
    Launch {
        stream: usize,
        ns: u64,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let stream = 0..STREAMS;
    let event = 0..EVENTS;
    prop_oneof![
        6 => (0..SLOTS, 1u64..4, stream.clone())
            .prop_map(|(from, slots, stream)| Act::Malloc { from, slots, stream }),
        5 => any::<usize>().prop_map(|which| Act::Free { which }),
        1 => (any::<usize>(), stream.clone()).prop_map(
            |(which, stream)| Act::RecordStream { which, stream }
        ),
        4 => (event.clone(), stream.clone()).prop_map(
            |(event, stream)| Act::Record { event, stream }
        ),
        4 => (stream.clone(), event.clone()).prop_map(
            |(stream, event)| Act::Wait { stream, event }
        ),
        2 => (event, any::<bool>()).prop_map(|(event, query)| Act::HostEvent { event, query }),
        1 => stream.clone().prop_map(|stream| Act::HostStream { stream }),
        1 => Just(Act::HostDevice),
        2 => (stream, 0u64..50).prop_map(|(stream, ns)| Act::Launch { stream, ns }),
    ]
}

/// Every action, with its direct predecessors.
#[derive(Default)]
struct History {
    before: Vec<Vec<usize>>,
    /// The last node of each stream, and of the host.
    last: [Option<usize>; STREAMS],
    host: Option<usize>,
}

impl History {
    /// Adds a node on a stream: after the stream's last, after all that the host knows, and after
    /// `others`.
    fn push(&mut self, stream: usize, others: &[usize]) -> usize {
        let before =
            self.last[stream].into_iter().chain(self.host).chain(others.iter().copied()).collect();
        self.before.push(before);
        self.last[stream] = Some(self.before.len() - 1);
        self.before.len() - 1
    }

    /// The host learns that nodes are done.
    fn host_learns(&mut self, nodes: impl IntoIterator<Item = usize>) {
        self.before.push(self.host.into_iter().chain(nodes).collect());
        self.host = Some(self.before.len() - 1);
    }

    fn is_before(&self, early: usize, late: usize) -> bool {
        let mut open = vec![late];
        let mut seen = vec![false; self.before.len()];
        while let Some(node) = open.pop() {
            if node == early {
                return true;
            }
            if !std::mem::replace(&mut seen[node], true) {
                open.extend(&self.before[node]);
            }
        }
        false
    }
}

struct Block {
    from: u64,
    slots: u64,
    streams: Vec<usize>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_oracle_agrees_with_reachability(
        acts in prop::collection::vec(act(), 1..80), mapped in any::<bool>()
    ) {
        let gpu = Gpu::new(Config { costs: Costs::zero(), ..Config::new(64 << 20) });
        let streams = [0; STREAMS].map(|_| gpu.stream_create(0, StreamKind::NonBlocking).unwrap());
        let events = [0; EVENTS].map(|_| gpu.event_create(0).unwrap());
        let memory = if mapped {
            let base = gpu.address_reserve(0, 2 << 20, 0).unwrap();
            let handle = gpu.physical_create(0, 2 << 20).unwrap();
            gpu.map(0, base, 2 << 20, 0, handle).unwrap();
            gpu.set_access(0, base, 2 << 20, &[0]).unwrap();
            base
        } else {
            gpu.alloc(0, 1 << 20).unwrap()
        };
        let mut history = History::default();
        let mut recorded: HashMap<usize, usize> = HashMap::new();
        let mut live: Vec<Block> = Vec::new();
        // The last uses of each slot.
        let mut uses: Vec<Vec<usize>> = vec![Vec::new(); (SLOTS + 3) as usize];
        for (id, act) in acts.into_iter().enumerate() {
            match act {
                Act::Malloc { from, slots, stream } => {
                    if live
                        .iter()
                        .any(|block| from < block.from + block.slots && block.from < from + slots) {
                        continue;
                    }
                    gpu
                        .block_malloc(
                            id as u64, memory + from * SLOT, slots * SLOT, 0, streams[stream]
                        );
                    let node = history.push(stream, &[]);
                    let range = from as usize..(from + slots) as usize;
                    let fine =
                        uses[range].iter().flatten().all(|&last| history.is_before(last, node));
                    let faults = gpu.take_faults();
                    prop_assert_eq!(faults.is_empty(), fine, "{:?}", faults);
                    let is_of_order = |fault: &Fault| matches!(fault, Fault::OutOfOrder { .. });
                    prop_assert!(faults.iter().all(is_of_order));
                    live.push(Block { from, slots, streams: vec![stream] });
                }
                Act::Free { which } if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    gpu.block_free(memory + block.from * SLOT);
                    let last: Vec<usize> =
                        block.streams.iter().map(|&stream| history.push(stream, &[])).collect();
                    for slot in block.from..block.from + block.slots {
                        uses[slot as usize] = last.clone();
                    }
                }
                Act::RecordStream { which, stream } if !live.is_empty() => {
                    let index = which % live.len();
                    gpu.block_record_stream(memory + live[index].from * SLOT, 0, streams[stream]);
                    if !live[index].streams.contains(&stream) {
                        live[index].streams.push(stream);
                    }
                }
                Act::Record { event, stream } => {
                    gpu.event_record(0, events[event], streams[stream]).unwrap();
                    recorded.insert(event, history.push(stream, &[]));
                }
                Act::Wait { stream, event } => {
                    gpu.stream_wait_event(0, streams[stream], events[event]).unwrap();
                    let others: Vec<usize> = recorded.get(&event).copied().into_iter().collect();
                    history.push(stream, &others);
                }
                Act::HostEvent { event, query } => {
                    let done = if query {
                        gpu.event_query(0, events[event]).unwrap()
                    } else {
                        gpu.event_synchronize(0, events[event]).map(|()| true).unwrap()
                    };
                    if done {
                        history.host_learns(recorded.get(&event).copied());
                    }
                }
                Act::HostStream { stream } => {
                    gpu.stream_synchronize(0, streams[stream]).unwrap();
                    history.host_learns(history.last[stream]);
                }
                Act::HostDevice => {
                    gpu.device_synchronize(0).unwrap();
                    history.host_learns(history.last.into_iter().flatten());
                }
                Act::Launch { stream, ns } => gpu.launch(0, streams[stream], 1, ns).unwrap(),
                _ => {}
            }
        }
    }
}
