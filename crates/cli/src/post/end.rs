//! How a process ended, as far as its record shows.

use std::fmt::Write as _;

use gruyere_record::dump::state::{Event, State};
use gruyere_record::layout::Degraded;
use gruyere_record::reader::DeviceSnapshot;
use gruyere_record::{DeviceGauge, EventKind, Reader, counted, facts, sweep};
use serde::Serialize;

/// How a process ended, as far as its record shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The process holds the lock of its record.
    Runs,
    /// The process closed its record.
    Clean,
    /// Lock gone, record not closed: killed.
    Killed,
    /// Undecidable, for example for a copy on another machine.
    Unknown,
}

/// The record's facts about the end.
#[derive(Clone, Debug, Serialize)]
pub struct Ending {
    pub how: End,
    /// The latest time in the record (nanoseconds since 1970).
    pub last_sign_of_life_nanoseconds: Option<u64>,
    /// Whether the machine has not been restarted since.
    pub same_boot: bool,
    pub out_of_memories: u64,
    /// Whether the last event is an out-of-memory.
    pub last_event_is_out_of_memory: bool,
    /// Whether the last request was refused.
    pub ran_out: bool,
    /// Whether an out-of-memory error that nothing caught ended the program: known of the copy that
    /// such an error leaves.
    pub uncaught: bool,
    /// Whether requests were refused after the last of this record, which is a copy.
    #[serde(skip)]
    pub later_refused: bool,
    /// Counters of shards, gauges of devices, and entries that mix several moments.
    pub torn_lanes: u32,
    pub torn_gauges: u32,
    pub torn_entries: u64,
    /// Live blocks that the record had no room for.
    pub unrecorded_blocks: u64,
}

impl Ending {
    /// The end of the process that left this record; `ran_out`: its last request was refused.
    pub fn of(
        reader: &Reader<'_>,
        devices: &[DeviceSnapshot],
        state: &State,
        ran_out: bool,
    ) -> Ending {
        let how = match (reader.health().closed, reader.is_live()) {
            (true, _) => End::Clean,
            (_, Some(true)) => End::Runs,
            (_, Some(false)) => End::Killed,
            (_, None) => End::Unknown,
        };
        let last: Option<&Event> = state.events.entries.last();
        let process = reader.process();
        Ending {
            how,
            last_sign_of_life_nanoseconds: last.map(|event| event.time_nanoseconds),
            same_boot: process.boot == facts::boot_id(),
            out_of_memories: devices
                .iter()
                .map(|device| device.gauge(DeviceGauge::OutOfMemories))
                .sum(),
            last_event_is_out_of_memory: last
                .is_some_and(|event| event.kind == EventKind::OutOfMemory.name()),
            ran_out,
            uncaught: ran_out && sweep::is_copy(reader.path()),
            later_refused: reader.health().degraded & Degraded::LATER_REFUSED != 0,
            torn_lanes: devices.iter().map(|device| device.torn_shards).sum(),
            torn_gauges: devices.iter().map(|device| u32::from(device.torn_gauges)).sum(),
            torn_entries: state.devices.iter().map(|device| device.torn).sum(),
            unrecorded_blocks: state.all_unrecorded().blocks,
        }
    }

    fn why_torn(&self) -> &'static str {
        match self.how {
            End::Killed => "it was killed while it wrote",
            End::Runs | End::Clean | End::Unknown => "it was read while it wrote",
        }
    }

    /// The end in words.
    pub fn in_words(&self) -> String {
        let mut words = match self.how {
            End::Runs => "It is running: this is its state now.".to_owned(),
            End::Clean => "It ended cleanly.".to_owned(),
            End::Killed if self.uncaught => "It ended with an out-of-memory error.".to_owned(),
            End::Killed if self.ran_out => {
                "Its last request was refused; then it was killed, crashed, or left through _exit."
                    .to_owned()
            }
            End::Killed => {
                "It ended without a clean exit: by a signal that it did not handle (SIGTERM or \
             SIGKILL, from a user, a scheduler, or the kernel short of host memory), by a crash, \
             or through _exit."
                    .to_owned()
            }
            End::Unknown => "Whether it still runs is not visible from here.".to_owned(),
        };
        if let Some(time) = self.last_sign_of_life_nanoseconds {
            let time = i128::from(time);
            if let Ok(time) = jiff::Timestamp::from_nanosecond(time) {
                let _ = write!(words, " Its last event was at {time:.3}.");
            }
        }
        if !self.same_boot {
            words.push_str(" The machine has restarted since, or this is another machine.");
        }
        if self.out_of_memories > 0 {
            let times = match self.out_of_memories {
                1 => "once".to_owned(),
                times => format!("{times} times"),
            };
            let _ = write!(words, " It ran out of device memory {times}");
            words.push_str(match self.ran_out {
                _ if self.later_refused => {
                    ", and then again: many out-of-memories followed each other, and this is a \
                     record of one of the last, not of the one that ended the program."
                }
                true => "; no request succeeded after the last refusal.",
                false => ", and went on.",
            });
        }
        if self.torn_lanes + self.torn_gauges > 0 || self.torn_entries > 0 {
            let _ = write!(
                words,
                " Torn ({}): counters of {}, gauges of {}, {}.",
                self.why_torn(),
                counted(self.torn_lanes, "lane"),
                counted(self.torn_gauges, "device"),
                match self.torn_entries {
                    1 => "1 entry".to_owned(),
                    entries => format!("{entries} entries"),
                }
            );
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(how: End) -> Ending {
        Ending {
            how,
            last_sign_of_life_nanoseconds: None,
            same_boot: true,
            out_of_memories: 1,
            last_event_is_out_of_memory: true,
            ran_out: true,
            uncaught: false,
            later_refused: false,
            torn_lanes: 1,
            torn_gauges: 0,
            torn_entries: 0,
            unrecorded_blocks: 0,
        }
    }

    #[test]
    fn an_out_of_memory_error_ended_a_program_only_where_nothing_caught_it() {
        let caught = ending(End::Killed).in_words();
        assert!(caught.starts_with("Its last request was refused; then it was killed"), "{caught}");
        let uncaught = Ending { uncaught: true, ..ending(End::Killed) }.in_words();
        assert!(uncaught.starts_with("It ended with an out-of-memory error"), "{uncaught}");
    }

    #[test]
    fn a_copy_of_an_earlier_out_of_memory_does_not_claim_to_be_of_the_last() {
        let said = Ending { later_refused: true, ..ending(End::Killed) }.in_words();
        assert!(!said.contains("no request succeeded"), "{said}");
        assert!(said.contains("not of the one that ended the program"), "{said}");
    }

    #[test]
    fn what_is_torn_is_told_by_how_the_process_ended() {
        let killed = ending(End::Killed).in_words();
        assert!(killed.contains("Torn (it was killed while it wrote): counters of 1"), "{killed}");
        for how in [End::Runs, End::Unknown] {
            let said = ending(how).in_words();
            assert!(said.contains("Torn (it was read while it wrote)"), "{said}");
        }
    }
}
