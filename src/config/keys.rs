//! The table of keys: one place for names, values, defaults and meanings.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::fmt::Write as _;

use super::size::{FORMS, Size};
use super::{Backing, Blame, Config, Door, PoolReuse, Preload, PreloadMode, Summary, Waits};
use crate::driver::cuda::HandleType;
use crate::record::near::near;
use crate::record::run::{MAX_NAME, is_name};
use crate::watch::{Rule, parse_rules};

/// Memory is reserved in pages of so many bytes.
const PAGE: u64 = 2 << 20;

/// A key of `GRUYERE_CONF`.
pub struct Key {
    /// The name, as users write it.
    pub name: &'static str,
    /// The default, as users would write it.
    pub default: &'static str,
    /// Its description, for docs/configuration.md's table.
    pub meaning: &'static str,
    kind: Kind,
}

/// Finds the switch that a key or a flag sets.
type SwitchField = fn(&mut Config) -> &mut bool;

/// The values that a key takes, and the field for the value.
enum Kind {
    Choice(&'static [(&'static str, Backing)], fn(&mut Config) -> &mut Backing),
    Waits(&'static [(&'static str, Waits)], fn(&mut Config) -> &mut Waits),
    PoolReuse(&'static [(&'static str, PoolReuse)], fn(&mut Config) -> &mut PoolReuse),
    HandleType(&'static [(&'static str, HandleType)], fn(&mut Config) -> &mut HandleType),
    Door(&'static [(&'static str, Door)], fn(&mut Config) -> &mut Door),
    Summary(&'static [(&'static str, Summary)], fn(&mut Config) -> &mut Summary),
    Blame(&'static [(&'static str, Blame)], fn(&mut Config) -> &mut Blame),
    Switch(SwitchField),
    /// Any of the names, joined by `+`, or `off`.
    Flags(&'static [(&'static str, SwitchField)]),
    Size {
        least: u64,
        field: fn(&mut Config) -> &mut Size,
    },
    /// A size, or the word that stands for "no bound".
    Bound {
        least: u64,
        unbounded: &'static str,
        field: fn(&mut Config) -> &mut Option<Size>,
    },
    Count {
        least: u32,
        most: u32,
        field: fn(&mut Config) -> &mut u32,
    },
    Folder(fn(&mut Config) -> &mut Option<std::path::PathBuf>),
    /// The name of a run, or `none`.
    Name(fn(&mut Config) -> &mut Option<String>),
    File(fn(&mut Config) -> &mut Option<std::path::PathBuf>),
    /// Sizes for lifetimes, `NAME=SIZE+NAME=SIZE`, or `none`.
    Reserves(fn(&mut Config) -> &mut [Size; 4]),
    /// A mode, `driver`, or both joined by `+`.
    Preload(&'static [(&'static str, PreloadMode)], fn(&mut Config) -> &mut Preload),
    /// Thresholds with actions, `THRESHOLD=ACTION+THRESHOLD=ACTION`, or `none`.
    Alerts(fn(&mut Config) -> &mut Vec<Rule>),
}

/// The lifetimes, by number.
const LIFETIMES: [(&str, usize); 4] =
    [("auto", 0), ("transient", 1), ("step", 2), ("persistent", 3)];

/// Every key, in the order of docs/configuration.md's table.
pub static KEYS: &[Key] = &[
    Key {
        name: "backing",
        default: "auto",
        meaning: "Source of device memory: 2 MiB pages, mapped where they are needed (`stitch`); \
                  the driver's stream-ordered pools (`pool`; spans shorter than the pools' step of \
                  32 MiB, as on devices below 8 GiB and near the end of larger ones, come from \
                  `cuMemAlloc`); `cuMemAlloc` (`fixed`; for CUDA IPC); or the driver for each \
                  request (`passthrough`; to rule Gruyère out as the cause of a problem). `auto`: \
                  the first of these that the device supports.",
        kind: Kind::Choice(
            &[
                ("auto", Backing::Auto),
                ("stitch", Backing::Stitch),
                ("pool", Backing::Pool),
                ("fixed", Backing::Fixed),
                ("passthrough", Backing::Passthrough),
            ],
            |config| &mut config.heap.backing,
        ),
    },
    Key {
        name: "handle_type",
        default: "auto",
        meaning: "How pages (`stitch`) can be exported to other processes, for NCCL and other \
                  libraries that export the memory they register, and for CUDA tensors sent to \
                  other processes: as a file descriptor (`posix`, which such tensors need), over \
                  multi-node NVLink (`fabric`), or not at all (`none`). `auto`: `posix` if a first \
                  export on the device works, else `none`.",
        kind: Kind::HandleType(
            &[
                ("auto", HandleType::Auto),
                ("none", HandleType::None),
                ("posix", HandleType::Posix),
                ("fabric", HandleType::Fabric),
            ],
            |config| &mut config.handle_type,
        ),
    },
    Key {
        name: "share",
        default: "on",
        meaning: "Memory freed on one stream may serve another once an event proves it safe. \
                  `off`: as PyTorch's own allocator.",
        kind: Kind::Switch(|config| &mut config.heap.share),
    },
    Key {
        name: "debug",
        default: "off",
        meaning: "`poison` fills memory with a pattern when it is allocated, and when it is freed \
                  by a stream that is known to last; `sync` synchronises the device before it \
                  reuses memory. Slow. `mapped` keeps the old mappings of moved pages: work on \
                  freed memory then reads stale data, as under PyTorch's own allocator, instead of \
                  faulting. Combined: `poison+sync`.",
        kind: Kind::Flags(&[
            ("poison", |config| &mut config.heap.debug.poison),
            ("sync", |config| &mut config.heap.debug.sync),
            ("mapped", |config| &mut config.heap.debug.mapped),
        ]),
    },
    Key {
        name: "limit",
        default: "none",
        meaning: "Ceiling on the physical memory held on each device, in bytes or as a share of \
                  the device. `none`: the device's memory; on a device that shares the host's \
                  memory, the host memory available at the start.",
        kind: Kind::Bound {
            least: 2 << 20,
            unbounded: "none",
            field: |config| &mut config.heap.limit,
        },
    },
    Key {
        name: "headroom",
        default: "512MiB",
        meaning: "Memory left free on each device for users that cannot ask Gruyère to release \
                  memory: NCCL's buffers, cuBLAS and cuDNN handles, lazily loaded kernels, other \
                  processes. Used only where the alternative is out of memory, and then until \
                  memory is released (a trim, a low-memory phase).",
        kind: Kind::Size { least: 0, field: |config| &mut config.heap.headroom },
    },
    Key {
        name: "slack",
        default: "none",
        meaning: "With pages that move (`stitch`): how far held memory may exceed the peak of live \
                  bytes, as a share of that peak or in bytes. Beyond it, Gruyère moves idle \
                  memory, and takes fresh memory only if none is idle. `none`: 0.8%, and in \
                  a heap below 8 GiB up to 3.1% or 64 MiB. Less slack means less memory, shorter \
                  chunks, whose free pages move by themselves (`0`: any free pages serve a large \
                  request), and more driver calls. With `none`, moves that keep the device waiting \
                  pause once they take more than a tenth of the program's time, as long as memory \
                  is left.",
        kind: Kind::Bound { least: 0, unbounded: "none", field: |config| &mut config.heap.slack },
    },
    Key {
        name: "waits",
        default: "auto",
        meaning: "When Gruyère may make one stream wait on the device for another, to reuse memory \
                  that the other has freed: never (`off`), if the alternative is out of memory \
                  (`oom`), or also if the process would otherwise hold more than the peak of its \
                  live bytes plus the `slack` (`budget`). Such a wait can hang a program of \
                  several ranks, or one whose enqueued work waits for later actions of its host. \
                  `auto`: `budget` in a process that is alone, on one device, if the package sees \
                  no such work, else `oom`.",
        kind: Kind::Waits(
            &[
                ("auto", Waits::Auto),
                ("off", Waits::Off),
                ("oom", Waits::OutOfMemory),
                ("budget", Waits::Budget),
            ],
            |config| &mut config.heap.waits,
        ),
    },
    Key {
        name: "auto_trim",
        default: "on",
        meaning: "Release idle memory to the device in low-memory phases: when the program has \
                  used less than half of its peak for a long time (32,768 frees of large blocks \
                  and slabs), or marks a validation or a checkpoint. `off`: only `empty_cache` and \
                  memory pressure release memory.",
        kind: Kind::Switch(|config| &mut config.heap.auto_trim),
    },
    Key {
        name: "reserve",
        default: "none",
        meaning: "Memory to map for each lifetime when a device is first used: \
                  `auto=10GiB+step=2GiB`, in bytes or as a share of the device; `auto` is for \
                  untagged requests. It stays mapped, for that lifetime alone, until the \
                  alternative is out of memory. If it cannot be mapped, the first request fails \
                  with an error that says so.",
        kind: Kind::Reserves(|config| &mut config.heap.reserve),
    },
    Key {
        name: "record",
        default: "on",
        meaning: "Keep the live record of this process in /dev/shm (or `$GRUYERE_RECORD_DIR`), \
                  which `gruyere ps` and `gruyere stat` read.",
        kind: Kind::Switch(|config| &mut config.heap.record),
    },
    Key {
        name: "record_blocks",
        default: "4194304",
        meaning: "Number of live blocks that the record has room for. The room is address space: \
                  only the used part takes memory.",
        kind: Kind::Count {
            least: 1024,
            most: 1 << 28,
            field: |config| &mut config.heap.record_blocks,
        },
    },
    Key {
        name: "records_kept",
        default: "8",
        meaning: "Number of processes whose records a new process keeps in the folder for \
                  `gruyere post`, of this user's processes that ended without a clean exit \
                  (killed, `_exit`): the newest (half of them of programs that ran out of memory, \
                  if there are so many) that fit an eighth of the folder's file system, at least \
                  one, and none if the folder is full. It removes older ones, but never the record \
                  of a live process.",
        kind: Kind::Count {
            least: 0,
            most: 1 << 20,
            field: |config| &mut config.heap.records_kept,
        },
    },
    Key {
        name: "ring_events",
        default: "65536",
        meaning: "Number of latest events that the record keeps, rounded up to a power of two.",
        kind: Kind::Count {
            least: 1024,
            most: 1 << 24,
            field: |config| &mut config.heap.ring_events,
        },
    },
    Key {
        name: "dump_dir",
        default: "none",
        meaning: "Folder for out-of-memory dumps, with a page to share; a passed threshold of \
                  `alert:` leaves a page too. `none`: out-of-memories go to the log only. The path \
                  must not contain a comma.",
        kind: Kind::Folder(|config| &mut config.dump_dir),
    },
    Key {
        name: "history",
        default: "none",
        meaning: "Folder for the history of each run: peaks and a timeline, a few dozen KiB per \
                  process, written at exit, at an out-of-memory and from time to time. `gruyere \
                  report` compares runs. The path must not contain a comma.",
        kind: Kind::Folder(|config| &mut config.history),
    },
    Key {
        name: "name",
        default: "none",
        meaning: "The run's name in its history; `none`: the name of its script or program.",
        kind: Kind::Name(|config| &mut config.name),
    },
    Key {
        name: "summary",
        default: "auto",
        meaning: "One line on stderr when the program ends: live and held memory at the peak, and \
                  the command for more. `auto`: under the Python package, if stderr is a terminal, \
                  for rank 0.",
        kind: Kind::Summary(
            &[("auto", Summary::Auto), ("on", Summary::On), ("off", Summary::Off)],
            |config| &mut config.summary,
        ),
    },
    Key {
        name: "blame",
        default: "auto",
        meaning: "Blocks that record their place in a Python program (file, function, line, \
                  running module and phase): none (`off`), those above 16 KiB and the slabs of \
                  smaller ones (`large`), or all (`all`; each malloc takes a few hundred \
                  nanoseconds more). `auto`: `large` under the Python package, else `off`.",
        kind: Kind::Blame(
            &[
                ("auto", Blame::Auto),
                ("off", Blame::Off),
                ("large", Blame::Large),
                ("all", Blame::All),
            ],
            |config| &mut config.blame,
        ),
    },
    Key {
        name: "release_threshold",
        default: "all",
        meaning: "Free memory that each driver pool may keep when the device synchronises, in \
                  bytes or as a share of the device.",
        kind: Kind::Bound {
            least: 0,
            unbounded: "all",
            field: |config| &mut config.heap.release_threshold,
        },
    },
    Key {
        name: "pool_reuse",
        default: "on",
        meaning: "When a driver pool may reuse memory freed on one stream for another: whenever it \
                  can (`on`), or only if the program's events order the streams (`exact`), so that \
                  runs are reproducible.",
        kind: Kind::PoolReuse(&[("on", PoolReuse::On), ("exact", PoolReuse::Exact)], |config| {
            &mut config.heap.pool_reuse
        }),
    },
    Key {
        name: "preload",
        default: "auto",
        meaning: "Treatment of the program's own CUDA allocations: Gruyère serves them (`manage`), \
                  or passes them through unchanged and records them (`observe`). `auto`: `manage` \
                  if LD_PRELOAD loaded the library, else `off`. `driver`, alone or joined by `+`: \
                  the driver's calls too, for programs that link the CUDA runtime statically \
                  (libgruyere_driver.so must be preloaded too; `gruyere run` does that).",
        kind: Kind::Preload(
            &[
                ("auto", PreloadMode::Auto),
                ("manage", PreloadMode::Manage),
                ("observe", PreloadMode::Observe),
                ("off", PreloadMode::Off),
            ],
            |config| &mut config.preload,
        ),
    },
    Key {
        name: "door",
        default: "auto",
        meaning: "How torch is connected when the Python package replaces its allocator: through \
                  torch's own allocator interface (`auto`, `native`; this takes a small library, \
                  which the wheel contains or a C++ compiler builds once; without either, the \
                  pluggable door is used, and one line says why), or through the hooks of \
                  `CUDAPluggableAllocator` (`pluggable`).",
        kind: Kind::Door(
            &[("auto", Door::Auto), ("native", Door::Native), ("pluggable", Door::Pluggable)],
            |config| &mut config.door,
        ),
    },
    Key {
        name: "nvtx",
        default: "off",
        meaning: "Show growth, moved pages, waits, trims and out-of-memory in Nsight Systems, in \
                  the domain `gruyere`, with counters of held and live memory.",
        kind: Kind::Switch(|config| &mut config.nvtx),
    },
    Key {
        name: "trace",
        default: "none",
        meaning: "File for a trace of every malloc, free and record_stream, for `gruyere bench \
                  --trace`; `%p` in the path stands for the pid, `%r` for the rank. Every call \
                  takes a few hundred nanoseconds more. The path must not contain a comma.",
        kind: Kind::File(|config| &mut config.heap.trace),
    },
    Key {
        name: "alert",
        default: "none",
        meaning: "Thresholds, each with an action when it is passed: \
                  `fragmentation>30%=log+oom-in<10min=callback`. Actions: `log` a warning, `trim` \
                  as `empty_cache` does (and log), `callback` to the listeners \
                  (`gruyere.on_alert`). docs/watching.md lists the metrics.",
        kind: Kind::Alerts(|config| &mut config.heap.alert),
    },
];

/// Looks a key up by name; the error suggests those like it, and lists them all.
pub(super) fn find(name: &str) -> Result<&'static Key, String> {
    if let Some(key) = KEYS.iter().find(|key| key.name == name) {
        return Ok(key);
    }
    let names: Vec<_> = KEYS.iter().map(|key| key.name).collect();
    // `KEY=VALUE`, where the name ends with the `=`.
    let (word, is_joined) = name.split_once('=').map_or((name, false), |(word, _)| (word, true));
    let near = near(word, names.iter().copied());
    let said = match (is_joined, near.as_slice()) {
        (true, [key, ..]) if *key == word => {
            format!("write `:` in place of `=`, as in {word}:VALUE")
        }
        (true, [key, ..]) => format!("unknown key; did you mean {key}:VALUE (with `:`, not `=`)?"),
        (true, []) => "unknown key (and a value follows `:`, not `=`)".to_owned(),
        (false, []) => "unknown key".to_owned(),
        (false, near) => format!("unknown key; did you mean {}?", near.join(" or ")),
    };
    let end = if said.ends_with('?') { " The" } else { "; the" };
    Err(format!("{said}{end} keys are {}", names.join(", ")))
}

impl Key {
    /// The values that the key takes, for the table.
    fn values(&self) -> String {
        match &self.kind {
            Kind::Choice(choices, _) => names(choices),
            Kind::Waits(choices, _) => names(choices),
            Kind::PoolReuse(choices, _) => names(choices),
            Kind::HandleType(choices, _) => names(choices),
            Kind::Door(choices, _) => names(choices),
            Kind::Summary(choices, _) => names(choices),
            Kind::Blame(choices, _) => names(choices),
            Kind::Switch(_) => "on|off".into(),
            Kind::Flags(flags) => format!("off|{}", names(flags)),
            Kind::Size { .. } => "SIZE".into(),
            Kind::Bound { unbounded, .. } => format!("SIZE|{unbounded}"),
            Kind::Count { least, most, .. } => format!("{least} to {most}"),
            Kind::Folder(_) | Kind::File(_) => "PATH|none".into(),
            Kind::Name(_) => "NAME|none".into(),
            Kind::Preload(modes, _) => format!("{}, +driver", names(modes)),
            Kind::Reserves(_) => "LIFETIME=SIZE+...|none".into(),
            Kind::Alerts(_) => "THRESHOLD=log|trim|callback+...|none".into(),
        }
    }

    /// The values that the key takes, for messages.
    pub(super) fn expects(&self) -> String {
        match &self.kind {
            Kind::Choice(..)
            | Kind::Waits(..)
            | Kind::PoolReuse(..)
            | Kind::HandleType(..)
            | Kind::Door(..)
            | Kind::Summary(..)
            | Kind::Blame(..)
            | Kind::Switch(_) => {
                format!("expected {}", self.values())
            }
            Kind::Flags(_) => format!("expected {}, joined by +", self.values()),
            Kind::Size { least, .. } => {
                format!("expected {FORMS}, at least {}", Size::Bytes(*least))
            }
            Kind::Bound { least, unbounded, .. } => {
                format!("expected {FORMS}, at least {}, or {unbounded}", Size::Bytes(*least))
            }
            Kind::Count { least, most, .. } => {
                format!("expected a whole number from {least} to {most}")
            }
            Kind::Folder(_) => "expected a folder's path, or none".into(),
            Kind::Name(_) => format!(
                "expected none, or up to {MAX_NAME} letters, digits, `.`, `_` and `-`, the first \
                 of them no dot"
            ),
            Kind::File(_) => "expected a file's path, or none".into(),
            Kind::Preload(modes, _) => {
                format!(
                    "expected {}, or driver, or one of them and driver joined by +, as in \
                     manage+driver; off stands alone",
                    names(modes)
                )
            }
            Kind::Reserves(_) => format!(
                "expected none, or {}=SIZE, joined by +, as in persistent=10GiB+step=2GiB, each \
                 {FORMS}",
                names(&LIFETIMES)
            ),
            Kind::Alerts(_) => "expected none, or METRIC>VALUE=ACTION, joined by +, as in \
                                fragmentation>30%=log+oom-in<10min=callback; actions are log, \
                                trim, callback"
                .into(),
        }
    }

    /// Parses `value` and puts it into `config`.
    pub(super) fn apply(&self, config: &mut Config, value: &str) -> Result<(), String> {
        let refuse = || self.expects();
        match &self.kind {
            Kind::Choice(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?
            }
            Kind::Waits(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?
            }
            Kind::PoolReuse(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?;
            }
            Kind::HandleType(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?;
            }
            Kind::Door(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?;
            }
            Kind::Summary(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?;
            }
            Kind::Blame(choices, field) => {
                *field(config) = pick(choices, value).ok_or_else(refuse)?;
            }
            Kind::Switch(field) => {
                *field(config) = pick(&[("on", true), ("off", false)], value).ok_or_else(refuse)?
            }
            Kind::Flags(flags) => {
                for (_, field) in *flags {
                    *field(config) = false;
                }
                if value != "off" {
                    for name in value.split('+') {
                        let field = pick(flags, name.trim()).ok_or_else(refuse)?;
                        *field(config) = true;
                    }
                }
            }
            Kind::Size { least, field } => *field(config) = at_least(*least, value)?,
            Kind::Bound { unbounded, field, .. } if value == *unbounded => *field(config) = None,
            Kind::Bound { least, field, .. } => *field(config) = Some(at_least(*least, value)?),
            Kind::Count { least, most, field } => {
                let count = value.parse().ok().filter(|count| (*least..=*most).contains(count));
                *field(config) = count.ok_or_else(refuse)?;
            }
            Kind::Name(field) => {
                *field(config) = match value {
                    "none" => None,
                    name if is_name(name) => Some(name.to_owned()),
                    _ => return Err(refuse()),
                }
            }
            Kind::Preload(modes, field) => {
                *field(config) = preload(modes, value).ok_or_else(refuse)?
            }
            Kind::Folder(field) | Kind::File(field) => {
                *field(config) = (value != "none").then(|| value.into())
            }
            Kind::Reserves(field) => {
                *field(config) =
                    if value == "none" { [Size::Bytes(0); 4] } else { self.reserves(value)? };
            }
            Kind::Alerts(field) => {
                *field(config) = match value {
                    "none" => Vec::new(),
                    value => parse_rules(value).map_err(|error| error.to_string())?,
                };
            }
        }
        Ok(())
    }
}

impl Key {
    /// Sizes by lifetime.
    fn reserves(&self, value: &str) -> Result<[Size; 4], String> {
        let mut sizes = [None; 4];
        for entry in value.split('+') {
            let (name, size) = entry.split_once('=').ok_or_else(|| self.expects())?;
            let lifetime = pick(&LIFETIMES, name.trim()).ok_or_else(|| self.expects())?;
            let named = |reason: String| format!("\"{}\": {reason}", entry.trim());
            let size = size.trim().parse().map_err(named)?;
            // Memory is reserved by the page.
            if matches!(size, Size::Bytes(bytes) if bytes.checked_next_multiple_of(PAGE).is_none())
            {
                return Err(named("more than 16 EiB when rounded up to pages of 2 MiB".into()));
            }
            if sizes[lifetime].replace(size).is_some() {
                return Err(format!("{} is given twice; {}", name.trim(), self.expects()));
            }
        }
        Ok(sizes.map(|size| size.unwrap_or(Size::Bytes(0))))
    }
}

/// A mode at most and `driver` at most once, joined by `+`; `off` alone.
fn preload(modes: &[(&str, PreloadMode)], value: &str) -> Option<Preload> {
    let (mut mode, mut driver) = (None, false);
    for word in value.split('+').map(str::trim) {
        let twice = match word {
            "driver" => std::mem::replace(&mut driver, true),
            word => mode.replace(pick(modes, word)?).is_some(),
        };
        if twice {
            return None;
        }
    }
    let mode = mode.unwrap_or_default();
    (mode != PreloadMode::Off || !driver).then_some(Preload { mode, driver })
}

fn names<T>(choices: &[(&str, T)]) -> String {
    choices.iter().map(|(name, _)| *name).collect::<Vec<_>>().join("|")
}

fn pick<T: Copy>(choices: &[(&str, T)], value: &str) -> Option<T> {
    choices.iter().find(|(name, _)| *name == value).map(|(_, chosen)| *chosen)
}

/// A size with a lower bound. A share of the device can only be checked once the device is known,
/// but 0% is 0 bytes of any.
fn at_least(least: u64, value: &str) -> Result<Size, String> {
    let size: Size = value.parse()?;
    let too_small = match size {
        Size::Bytes(bytes) => bytes < least,
        Size::Percent(percent) => least > 0 && percent == 0.0,
    };
    if too_small { Err(format!("too small: at least {}", Size::Bytes(least))) } else { Ok(size) }
}

/// The Markdown table of all keys, as docs/configuration.md shows it.
pub fn markdown_table() -> String {
    let mut table = String::from("| key | values | default | meaning |\n|---|---|---|---|\n");
    for key in KEYS {
        let values = key.values().replace('|', "\\|");
        // Writing to a String cannot fail.
        let _ =
            writeln!(table, "| `{}` | {values} | `{}` | {} |", key.name, key.default, key.meaning);
    }
    table
}
