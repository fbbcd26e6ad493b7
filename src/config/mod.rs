//! `GRUYERE_CONF`: the user's settings, in the style of `PYTORCH_CUDA_ALLOC_CONF`.
//!
//! `GRUYERE_CONF="key:value,key:value"`. The keys are data ([`keys::KEYS`]): that one table yields
//! the parser, its error messages and the table of docs/configuration.md, so none of them can lag
//! behind.
#![deny(unsafe_code, clippy::unwrap_used)]

pub mod keys;
pub mod logging;

use crate::driver::cuda::HandleType;
use crate::heap::settings::Settings;
use std::fmt;
use std::path::PathBuf;

pub use crate::heap::settings::{Backing, Debug, PoolReuse, Waits};
pub use gruyere_record::{record_dir, size};
pub use size::Size;

/// The environment variable that [`Config::from_env`] reads.
pub const VARIABLE: &str = "GRUYERE_CONF";

/// What the interposed CUDA calls of the process do ([`crate::door::preload`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreloadMode {
    /// [`PreloadMode::Manage`] if LD_PRELOAD loaded the library, else [`PreloadMode::Off`].
    #[default]
    Auto,
    /// The heap serves the calls.
    Manage,
    /// The calls pass through unchanged and are recorded.
    Observe,
    /// The calls pass through.
    Off,
}

/// `preload:`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preload {
    /// The treatment of a call.
    pub mode: PreloadMode,
    /// Whether the driver's calls are interposed too.
    pub driver: bool,
}

/// How torch is connected (`door:`). The Python package decides: the library offers both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    /// [`Door::Native`] if available.
    #[default]
    Auto,
    /// Through torch's own interface ([`crate::door::native`]).
    Native,
    /// Through torch's hooks ([`crate::door::torch`]).
    Pluggable,
}

/// Whether a line about its device memory follows the end of a program (`summary:`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Summary {
    /// Under the Python package, on a terminal, for rank 0.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// The blocks that record their place in the program (`blame:`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Blame {
    /// [`Blame::Large`] under the Python package, else [`Blame::Off`].
    #[default]
    Auto,
    /// None.
    Off,
    /// Those above 16 KiB, and slabs.
    Large,
    /// All.
    All,
}

/// All settings of `GRUYERE_CONF`. The default is that of an empty variable.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The heap's settings.
    pub heap: Settings,
    /// How physical memory may leave the process.
    pub handle_type: HandleType,
    /// Folder for out-of-memory dumps; `None`: the log only.
    pub dump_dir: Option<PathBuf>,
    /// Folder for the histories of runs; `None`: no history.
    pub history: Option<PathBuf>,
    /// The run's name; `None`: that of its program.
    pub name: Option<String>,
    /// How torch is connected.
    pub door: Door,
    /// Whether a line about its device memory follows the end of a program.
    pub summary: Summary,
    /// The blocks that record their place in the program.
    pub blame: Blame,
    /// What the interposed CUDA calls do.
    pub preload: Preload,
    /// Whether to report the heap's work to a profiler.
    pub nvtx: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            heap: Settings::default(),
            handle_type: HandleType::Auto,
            dump_dir: None,
            history: None,
            name: None,
            door: Door::default(),
            summary: Summary::default(),
            blame: Blame::default(),
            preload: Preload::default(),
            nvtx: false,
        }
    }
}

/// An error in `GRUYERE_CONF`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// The key, as the user wrote it.
    pub key: String,
    /// The value, as the user wrote it; empty if there was none.
    pub value: String,
    /// The error, and what is allowed: the keys, the values or the range.
    pub reason: String,
}

impl ConfigError {
    /// The text, for settings that came from `source` in place of the variable.
    pub fn in_source(&self, source: &str) -> String {
        let ConfigError { key, value, reason } = self;
        match value.is_empty() {
            true => format!("{source}: \"{key}\": {reason}"),
            false => format!("{source}: \"{key}:{value}\": {reason}"),
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.in_source(VARIABLE))
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Parses `key:value,key:value`. Spaces around entries, keys and values are ignored, and so are
    /// empty entries; a key given twice takes its last value, so that an override can be appended.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (name, value) = match entry.split_once(':') {
                Some((name, value)) => (name.trim(), value.trim()),
                None => (entry, ""),
            };
            let error = |reason| ConfigError { key: name.into(), value: value.into(), reason };
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
        let text = "backing:fixed, handle_type:fabric, \
                    share:off,debug:sync+poison+mapped,limit:90%,headroom:1.5GiB,slack:0.5%,\
                    waits:budget,auto_trim:off,reserve: persistent = 40% + \
                    step=2GiB,record:off,record_blocks:4096,records_kept:3,ring_events:2048,\
                    dump_dir:/tmp/a:b,release_threshold:2MiB,pool_reuse:exact , \
                    history:/var/runs,name:llama-7b,nvtx:on,preload:observe+driver,door:native,\
                    summary:on,blame:all,trace:/tmp/%p.zst,alert:live>90%=trim+oom-in<1h";
        let expected = Config {
            heap: Settings {
                backing: Backing::Fixed,
                share: false,
                debug: Debug { poison: true, sync: true, mapped: true },
                limit: Some(Size::Percent(90.0)),
                headroom: Size::Bytes(3 << 29),
                slack: Some(Size::Percent(0.5)),
                waits: Waits::Budget,
                auto_trim: false,
                reserve: [
                    Size::Bytes(0),
                    Size::Bytes(0),
                    Size::Bytes(2 << 30),
                    Size::Percent(40.0),
                ],
                record: false,
                record_blocks: 4096,
                records_kept: 3,
                ring_events: 2048,
                release_threshold: Some(Size::Bytes(2 << 20)),
                pool_reuse: PoolReuse::Exact,
                trace: Some("/tmp/%p.zst".into()),
                alert: crate::watch::parse_rules("live>90%=trim+oom-in<1h=log").expect("valid"),
            },
            handle_type: HandleType::Fabric,
            dump_dir: Some("/tmp/a:b".into()),
            history: Some("/var/runs".into()),
            name: Some("llama-7b".into()),
            door: Door::Native,
            summary: Summary::On,
            blame: Blame::All,
            preload: Preload { mode: PreloadMode::Observe, driver: true },
            nvtx: true,
        };
        assert_eq!(Config::parse(text), Ok(expected));
        for key in keys::KEYS {
            assert!(text.contains(key.name), "{} is not covered here", key.name);
        }
    }

    #[test]
    fn the_last_value_of_a_key_counts() {
        let config = Config::parse("backing:pool,backing:passthrough").expect("valid");
        assert_eq!(config.heap.backing, Backing::Passthrough);
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
            message.contains("backing:heap")
                && message.contains("auto|stitch|pool|fixed|passthrough"),
            "{message}"
        );
        let message = error("share:yes");
        assert!(message.contains("share:yes") && message.contains("on|off"), "{message}");
        let message = error("debug:poison+off");
        assert!(message.contains("poison+off") && message.contains("off"), "{message}");
        let message = error("ring_events:12");
        assert!(
            message.contains("ring_events:12")
                && message.contains("1024")
                && message.contains("16777216"),
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
            assert!(
                message.contains(&format!("reserve:{value}")) && message.contains(named),
                "{message}"
            );
        }
        assert_eq!(Config::parse("reserve:step=1GiB,reserve:none"), Ok(Config::default()));
    }

    #[test]
    fn a_mistyped_key_is_told_the_one_that_was_meant() {
        for (text, named) in [
            ("limt:2GiB", "unknown key; did you mean limit?"),
            ("LIMIT:2GiB", "did you mean limit?"),
            ("limit=2GiB", "write `:` in place of `=`, as in limit:VALUE"),
            ("limt=2GiB", "did you mean limit:VALUE (with `:`, not `=`)?"),
            ("xyzzy=2GiB", "a value follows `:`, not `=`"),
            ("xyzzy:2GiB", "unknown key; the keys are backing, "),
        ] {
            let message = error(text);
            assert!(message.contains(named) && message.contains(text), "{message}");
            assert!(message.contains("keys are backing, handle_type, "), "{message}");
        }
    }

    #[test]
    fn a_share_out_of_range_is_refused_without_naming_what_it_is_no_share_of() {
        for text in ["slack:200%", "limit:101%", "reserve:auto=1000%"] {
            let message = error(text);
            assert!(message.contains("a percentage lies in 0% to 100%"), "{message}");
            assert!(!message.contains("the device's memory"), "{message}");
        }
    }

    #[test]
    fn a_bad_alert_names_what_is_wrong_with_it() {
        for (value, named) in [
            ("fragmentaton>30%", "did you mean fragmentation?"),
            ("oom-in<10min=mail", "log, trim or callback"),
            ("live>1GiB=log+", "METRIC>VALUE"),
        ] {
            let message = error(&format!("alert:{value}"));
            assert!(
                message.contains(&format!("alert:{value}")) && message.contains(named),
                "{message}"
            );
        }
        assert_eq!(Config::parse("alert:live>1GiB,alert:none"), Ok(Config::default()));
    }

    #[test]
    fn preload_takes_a_mode_and_the_driver_and_no_nonsense() {
        let preload =
            |text: &str| Config::parse(&format!("preload:{text}")).map(|config| config.preload);
        let of = |mode, driver| Ok(Preload { mode, driver });
        assert_eq!(preload("driver"), of(PreloadMode::Auto, true));
        assert_eq!(preload("driver + manage"), of(PreloadMode::Manage, true));
        assert_eq!(preload("off"), of(PreloadMode::Off, false));
        for wrong in ["manage+observe", "off+driver", "driver+driver", "on", "manage+"] {
            let message = error(&format!("preload:{wrong}"));
            assert!(
                message.contains(wrong) && message.contains("auto|manage|observe|off"),
                "{message}"
            );
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
        assert!(
            message.contains("waits:always") && message.contains("off|oom|budget"),
            "{message}"
        );
        assert_eq!(
            Config::parse("slack:64MiB").expect("valid").heap.slack,
            Some(Size::Bytes(64 << 20))
        );
        assert_eq!(Config::parse("slack:0.5%,slack:none").expect("valid").heap.slack, None);
    }
}
