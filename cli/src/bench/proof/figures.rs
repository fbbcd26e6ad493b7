//! What the proof found, in the order in which it is shown.

use gruyere_replay::floor::Ends;
use gruyere_replay::observe::Observed;
use serde::Serialize;

/// Which setting a run belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The model of torch's default allocator.
    Torch,
    /// The model of torch's expandable segments.
    Expandable,
    /// Gruyère as it comes.
    Default,
    /// Gruyère told to hold little.
    Tight,
    /// Another configuration of Gruyère, without bars.
    Other,
}

/// An allocator of the proof.
#[derive(Clone, Debug, Serialize)]
pub struct Setting {
    pub role: Role,
    /// Heading of its column.
    pub name: String,
    /// `GRUYERE_CONF`; absent for the models.
    pub conf: Option<String>,
    /// The configuration was refused, with this reason.
    pub refused: Option<String>,
}

/// A trace and what each setting made of it, in the order of the settings.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Name of the trace, with its seed where it has other sizes.
    pub trace: String,
    pub operations: u64,
    /// Bytes.
    pub peak_live: u64,
    /// When the device is done at best.
    pub ends: Option<Ends>,
    pub runs: Vec<Runs>,
}

/// The runs of one setting on one trace; what was not asked for is absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Runs {
    /// Nothing takes time.
    pub still: Option<Observed>,
    /// On the timeline, driver calls free.
    pub calls_free: Option<Observed>,
    /// On the timeline, driver calls charged.
    pub calls_charged: Option<Observed>,
    /// The same on a device of 1.02 times the peak of live.
    pub small: Option<Observed>,
    /// Smallest device / peak live.
    pub fit_ratio: Option<f64>,
    /// No device completes.
    pub no_fit: bool,
}

impl Runs {
    /// Every run with the words for it.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Observed)> {
        let runs = [
            ("without time", &self.still),
            ("on the timeline, calls free", &self.calls_free),
            ("on the timeline", &self.calls_charged),
            ("on the small device", &self.small),
        ];
        runs.into_iter().filter_map(|(what, run)| Some((what, run.as_ref()?)))
    }
}

impl Case {
    /// The trace's name without a seed.
    pub fn base(&self) -> &str {
        self.trace.split('~').next().unwrap_or_default()
    }

    /// The device's end in `run` over that of a perfect allocator, minus 1.
    pub fn lateness(&self, run: &Observed) -> Option<f64> {
        self.over_perfect(run.device_end_ns)
    }

    /// `end` over that of a perfect allocator, minus 1.
    pub fn over_perfect(&self, end: u64) -> Option<f64> {
        let perfect = self.ends?.perfect_ns.max(1) as f64;
        Some((end as f64 - perfect) / perfect)
    }
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Proof {
    /// Always `gruyere.proof`.
    pub schema: &'static str,
    /// Version of the schema.
    pub version: u32,
    pub settings: Vec<Setting>,
    /// The traces.
    pub cases: Vec<Case>,
    /// Public traces.
    pub public: Vec<Case>,
    /// The traces joined.
    pub long: Option<Case>,
    /// Instructions a malloc or free, by callgrind; or why they were not counted.
    pub instructions: Option<Result<f64, String>>,
}

impl Proof {
    /// Place of the setting with `role`.
    pub fn place(&self, role: Role) -> Option<usize> {
        self.settings.iter().position(|setting| setting.role == role)
    }

    /// Every case, those of public traces and of the long run included.
    pub fn all_cases(&self) -> impl Iterator<Item = &Case> {
        self.cases.iter().chain(&self.public).chain(&self.long)
    }
}
