//! `GRUYERE_CONF`: what the user may choose, in the habit of `PYTORCH_CUDA_ALLOC_CONF`.
//!
//! `GRUYERE_CONF="key:value,key:value"`. The keys are data ([`keys::KEYS`]): the parser, its error messages and the table
//! of the README are all made from that one table, so none of them can fall behind the others.
#![deny(unsafe_code, clippy::unwrap_used)]

pub mod dropped;
pub mod keys;
pub mod logging;

use crate::driver::cuda::HandleType;
use crate::watch::Rule;
use dropped::Dropped;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

pub use gruyere_record::{record_dir, size};
pub use size::Size;

/// The environment variable that [`Config::from_env`] reads.
pub const VARIABLE: &str = "GRUYERE_CONF";

/// Where device memory comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backing {
    /// [`Backing::Stitch`] on devices with virtual memory management, else [`Backing::Pool`] where there are stream-ordered
    /// pools, else [`Backing::Fixed`].
    #[default]
    Auto,
    /// Pages of physical memory, mapped wherever a run of them is needed.
    Stitch,
    /// Spans from the driver's stream-ordered pools.
    Pool,
    /// Spans from `cuMemAlloc`: slower to grow, but IPC handles work on them.
    Fixed,
    /// Every call goes straight to the driver.
    Passthrough,
}

/// When streams may be made to wait for each other, though the program did not ask for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waits {
    /// Never.
    Off,
    /// Where the alternative is out of memory.
    #[default]
    OutOfMemory,
    /// To hold the slack too.
    Budget,
}

/// When a driver pool may hand memory that was freed on one stream to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolReuse {
    /// Whenever the driver can.
    #[default]
    On,
    /// Where the program's own events order the streams: neither because work happens to be
    /// finished, nor by waits that the driver inserts.
    Exact,
}

/// The switches that answer "is it you?".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Debug {
    /// Fill memory with a pattern when it is handed out and when it comes back.
    pub poison: bool,
    /// Synchronise the device before memory is handed out again.
    pub sync: bool,
    /// Keep old mappings of pages that have moved, until the alternative is out of memory.
    pub mapped: bool,
}

/// What the interposed CUDA calls of the process do ([`crate::door::preload`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreloadMode {
    /// [`PreloadMode::Manage`] where the library was put in by LD_PRELOAD, else [`PreloadMode::Off`].
    #[default]
    Auto,
    /// The heap serves the calls.
    Manage,
    /// The calls go through untouched and are recorded.
    Observe,
    /// The calls go through.
    Off,
}

/// `preload:`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preload {
    /// What is done with a call.
    pub mode: PreloadMode,
    /// Whether the driver's calls are interposed too.
    pub driver: bool,
}

/// Everything `GRUYERE_CONF` can say. The default is what an empty variable means.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where device memory comes from.
    pub backing: Backing,
    /// How physical memory may leave the process.
    pub handle_type: HandleType,
    /// Whether memory freed on one stream may serve another (once events prove it safe).
    pub share: bool,
    /// Debugging switches.
    pub debug: Debug,
    /// Ceiling on the physical memory held on each device; `None`: the device's memory.
    pub limit: Option<Size>,
    /// Left free on each device for those who cannot call the allocator back.
    pub headroom: Size,
    /// How much more may be held than the peak of live bytes before idle memory is moved, a share of that peak or bytes; `None`: 1%,
    /// and more in a small heap.
    pub slack: Option<Size>,
    /// Waits that the program did not ask for.
    pub waits: Waits,
    /// Whether idle memory goes back to the device in low-memory phases.
    pub auto_trim: bool,
    /// Mapped on each device at its start, by the number of the lifetime (auto, transient, step, persistent).
    pub reserve: [Size; 4],
    /// Whether the record in /dev/shm is written.
    pub record: bool,
    /// Live blocks that the record's block map has room for.
    pub record_blocks: u32,
    /// Records of processes that ended without a clean exit which a new process leaves.
    pub records_kept: u32,
    /// Events that the record's ring keeps.
    pub ring_events: u32,
    /// Folder for out-of-memory dumps; `None`: they only go to the log.
    pub dump_dir: Option<PathBuf>,
    /// Folder that keeps what runs did; `None`: nothing is kept.
    pub history: Option<PathBuf>,
    /// The run's name; `None`: that of its program.
    pub name: Option<String>,
    /// Bytes a driver pool keeps at a synchronisation; `None`: all of them.
    pub release_threshold: Option<Size>,
    /// Driver pools: reuse across streams.
    pub pool_reuse: PoolReuse,
    /// What the interposed CUDA calls do.
    pub preload: Preload,
    /// Whether a profiler is told what the heap does.
    pub nvtx: bool,
    /// File for a trace of all requests.
    pub trace: Option<PathBuf>,
    /// Thresholds, and what to do when one is passed.
    pub alert: Vec<Rule>,
    /// The keys that were given and that the next release will not know.
    pub dropped: Vec<&'static Dropped>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            backing: Backing::Auto,
            handle_type: HandleType::Auto,
            share: true,
            debug: Debug::default(),
            limit: None,
            headroom: Size::Bytes(512 << 20),
            slack: None,
            waits: Waits::OutOfMemory,
            auto_trim: true,
            reserve: [Size::Bytes(0); 4],
            record: true,
            record_blocks: 1 << 22,
            records_kept: 8,
            ring_events: 1 << 16,
            dump_dir: None,
            history: None,
            name: None,
            release_threshold: None,
            pool_reuse: PoolReuse::On,
            preload: Preload::default(),
            nvtx: false,
            trace: None,
            alert: Vec::new(),
            dropped: Vec::new(),
        }
    }
}

/// What is wrong with a `GRUYERE_CONF`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The key, as the user wrote it.
    pub key: String,
    /// The value, as the user wrote it; empty where there was none.
    pub value: String,
    /// What is wrong, and what would be right: the keys, the values or the range.
    pub reason: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{VARIABLE}: ")?;
        if self.value.is_empty() {
            write!(f, "\"{}\": {}", self.key, self.reason)
        } else {
            write!(f, "\"{}:{}\": {}", self.key, self.value, self.reason)
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Parses `key:value,key:value`. Spaces around entries, keys and values are ignored, and so are empty entries; a key
    /// given twice takes its last value, so that an override can be appended.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (name, value) = match entry.split_once(':') {
                Some((name, value)) => (name.trim(), value.trim()),
                None => (entry, ""),
            };
            let error = |reason| ConfigError { key: name.into(), value: value.into(), reason };
            if let Some(dropped) = dropped::find(name) {
                dropped.apply(&mut config, value).map_err(error)?;
                continue;
            }
            let key = keys::find(name).map_err(error)?;
            if value.is_empty() {
                return Err(error(format!("a value is missing; {}", key.expects())));
            }
            key.apply(&mut config, value).map_err(error)?;
        }
        Ok(config)
    }

    /// Parses the environment's `GRUYERE_CONF`; the default where it is not set.
    pub fn from_env() -> Result<Self, ConfigError> {
        match std::env::var(VARIABLE) {
            Ok(text) => Self::parse(&text),
            Err(std::env::VarError::NotPresent) => Ok(Self::default()),
            Err(std::env::VarError::NotUnicode(text)) => Err(ConfigError {
                key: text.to_string_lossy().into_owned(),
                value: String::new(),
                reason: "not valid UTF-8".into(),
            }),
        }
    }

    /// Warns of keys that the next release will not know: once in a process, when there is a
    /// logger.
    pub fn warn_of_dropped_keys(&self) {
        static DONE: AtomicBool = AtomicBool::new(false);
        if !self.dropped.is_empty() && !DONE.swap(true, Ordering::Relaxed) {
            self.dropped.iter().for_each(|dropped| log::warn!("{}", dropped.warning()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(text).expect_err("accepted").to_string()
    }

    #[test]
    fn an_empty_variable_means_the_defaults() {
        for text in ["", " ", ",", " , ,"] {
            assert_eq!(Config::parse(text), Ok(Config::default()), "{text:?}");
        }
    }

    #[test]
    fn every_documented_default_is_the_default() {
        for key in keys::KEYS {
            let config = Config::parse(&format!("{}:{}", key.name, key.default)).expect(key.name);
            assert_eq!(config, Config::default(), "{}", key.name);
        }
    }

    #[test]
    fn every_key_changes_what_it_names() {
        let text = "backing:fixed, handle_type:fabric, share:off,debug:sync+poison+mapped,limit:90%,headroom:1.5GiB,slack:0.5%,waits:budget,\
                    auto_trim:off,reserve: persistent = 40% + step=2GiB,record:off,record_blocks:4096,records_kept:3,\
                    ring_events:2048,dump_dir:/tmp/a:b,release_threshold:2MiB,\
                    pool_reuse:exact , history:/var/runs,name:llama-7b,nvtx:on,\
                    preload:observe+driver,trace:/tmp/%p.zst,alert:live>90%=trim+oom-in<1h";
        let expected = Config {
            backing: Backing::Fixed,
            handle_type: HandleType::Fabric,
            share: false,
            debug: Debug { poison: true, sync: true, mapped: true },
            limit: Some(Size::Percent(90.0)),
            headroom: Size::Bytes(3 << 29),
            slack: Some(Size::Percent(0.5)),
            waits: Waits::Budget,
            auto_trim: false,
            reserve: [Size::Bytes(0), Size::Bytes(0), Size::Bytes(2 << 30), Size::Percent(40.0)],
            record: false,
            record_blocks: 4096,
            records_kept: 3,
            ring_events: 2048,
            dump_dir: Some("/tmp/a:b".into()),
            history: Some("/var/runs".into()),
            name: Some("llama-7b".into()),
            release_threshold: Some(Size::Bytes(2 << 20)),
            pool_reuse: PoolReuse::Exact,
            preload: Preload { mode: PreloadMode::Observe, driver: true },
            nvtx: true,
            trace: Some("/tmp/%p.zst".into()),
            alert: crate::watch::parse_rules("live>90%=trim+oom-in<1h=log").expect("valid"),
            dropped: Vec::new(),
        };
        assert_eq!(Config::parse(text), Ok(expected));
        for key in keys::KEYS {
            assert!(text.contains(key.name), "{} is not covered here", key.name);
        }
    }

    #[test]
    fn the_last_value_of_a_key_counts() {
        let config = Config::parse("backing:pool,backing:passthrough").expect("valid");
        assert_eq!(config.backing, Backing::Passthrough);
    }

    #[test]
    fn an_unknown_key_lists_all_keys() {
        let message = error("share:on,limits:1GiB");
        assert!(message.contains("limits:1GiB"), "{message}");
        for key in keys::KEYS {
            assert!(message.contains(key.name), "{message}");
        }
    }

    #[test]
    fn a_bad_value_names_the_key_the_value_and_the_choice() {
        let message = error("backing:heap");
        assert!(
            message.contains("backing:heap") && message.contains("auto|stitch|pool|fixed|passthrough"),
            "{message}"
        );
        let message = error("share:yes");
        assert!(message.contains("share:yes") && message.contains("on|off"), "{message}");
        let message = error("debug:poison+off");
        assert!(message.contains("poison+off") && message.contains("off"), "{message}");
        let message = error("ring_events:12");
        assert!(
            message.contains("ring_events:12") && message.contains("1024") && message.contains("16777216"),
            "{message}"
        );
        let message = error("limit:lots");
        assert!(
            message.contains("limit:lots") && message.contains("512KiB") && message.contains("90%"),
            "{message}"
        );
        let message = error("limit:1KiB");
        assert!(message.contains("limit:1KiB") && message.contains("2MiB"), "{message}");
    }

    #[test]
    fn a_bad_reserve_names_what_is_wrong_with_it() {
        for (value, named) in [
            ("10GiB", "persistent=10GiB+step=2GiB"),
            ("weights=10GiB", "auto|transient|step|persistent"),
            ("persistent=lots", "persistent=lots"),
            ("step=1GiB+step=2GiB", "step is given twice"),
            ("persistent=1GiB+", "persistent=10GiB+step=2GiB"),
            ("step=18446744073709551615", "more than 16 EiB when rounded up"),
            ("persistent=1GiB+step=16777215.9999999TiB", "step=16777215.9999999TiB"),
        ] {
            let message = error(&format!("reserve:{value}"));
            assert!(message.contains(&format!("reserve:{value}")) && message.contains(named), "{message}");
        }
        assert_eq!(Config::parse("reserve:step=1GiB,reserve:none"), Ok(Config::default()));
    }

    #[test]
    fn a_bad_alert_names_what_is_wrong_with_it() {
        for (value, named) in [
            ("fragmentaton>30%", "did you mean fragmentation?"),
            ("oom-in<10min=mail", "log, trim or callback"),
            ("live>1GiB=log+", "METRIC>VALUE"),
        ] {
            let message = error(&format!("alert:{value}"));
            assert!(message.contains(&format!("alert:{value}")) && message.contains(named), "{message}");
        }
        assert_eq!(Config::parse("alert:live>1GiB,alert:none"), Ok(Config::default()));
    }

    #[test]
    fn preload_takes_a_mode_and_the_driver_and_no_nonsense() {
        let preload = |text: &str| Config::parse(&format!("preload:{text}")).map(|config| config.preload);
        let of = |mode, driver| Ok(Preload { mode, driver });
        assert_eq!(preload("driver"), of(PreloadMode::Auto, true));
        assert_eq!(preload("driver + manage"), of(PreloadMode::Manage, true));
        assert_eq!(preload("off"), of(PreloadMode::Off, false));
        for wrong in ["manage+observe", "off+driver", "driver+driver", "on", "manage+"] {
            let message = error(&format!("preload:{wrong}"));
            assert!(message.contains(wrong) && message.contains("auto|manage|observe|off"), "{message}");
        }
    }

    #[test]
    fn a_missing_value_says_what_is_expected() {
        assert!(error("share").contains("on|off"));
        assert!(error("limit:").contains("512KiB"));
    }

    #[test]
    fn a_wait_that_there_is_not_names_those_that_there_are() {
        let message = error("waits:always");
        assert!(message.contains("waits:always") && message.contains("off|oom|budget"), "{message}");
        assert_eq!(Config::parse("slack:64MiB").expect("valid").slack, Some(Size::Bytes(64 << 20)));
        assert_eq!(Config::parse("slack:0.5%,slack:none").expect("valid").slack, None);
    }
}
