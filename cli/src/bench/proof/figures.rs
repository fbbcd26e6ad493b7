//! The proof's results, in the order of their display.

use gruyere_replay::floor::Ends;
use gruyere_replay::observe::Observed;
use serde::Serialize;

/// Setting of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The model of torch's default allocator.
    Torch,
    /// The model of torch's expandable segments.
    Expandable,
    /// Gruyère's default.
    Default,
    /// Gruyère set to hold little.
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
    /// Reason why the configuration was refused.
    pub refused: Option<String>,
}

/// A trace and the results of each setting on it, in the order of the settings.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Name of the trace, with the seed if its sizes are changed.
    pub trace: String,
    pub operations: u64,
    /// Bytes.
    pub peak_live: u64,
    /// Best end of the device's work.
    pub ends: Option<Ends>,
    pub runs: Vec<Runs>,
}

/// The runs of a setting on a trace; unrequested runs are absent.
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
    /// The runs on a device with room to spare.
    pub fn with_room(&self) -> impl Iterator<Item = &Observed> {
        [&self.still, &self.calls_free, &self.calls_charged].into_iter().flatten()
    }
}

impl Case {
    /// The trace's name without a seed.
    pub fn base(&self) -> &str {
        self.trace.split('~').next().unwrap_or_default()
    }

    /// End of the device's work in `run` over that with a perfect allocator, minus 1.
    pub fn lateness(&self, run: &Observed) -> Option<f64> {
        self.over_perfect(run.device_end_ns)
    }

    /// `end` over that with a perfect allocator, minus 1.
    pub fn over_perfect(&self, end: u64) -> Option<f64> {
        let perfect = self.ends?.perfect_ns.max(1) as f64;
        Some((end as f64 - perfect) / perfect)
    }
}

/// All figures of a proof.
#[derive(Clone, Debug, Serialize)]
pub struct Proof {
    /// Always `gruyere.proof`.
    pub schema: &'static str,
    /// Version of the schema.
    pub version: u32,
    /// Prices of driver calls: a name, or a file's path.
    pub prices: String,
    pub settings: Vec<Setting>,
    /// The traces.
    pub cases: Vec<Case>,
    /// Public traces.
    pub public: Vec<Case>,
    /// The traces joined.
    pub long: Option<Case>,
    /// Instructions per malloc or free, by callgrind; or why they were not counted.
    pub instructions: Option<Result<f64, String>>,
}

impl Proof {
    /// Position of the setting with `role`.
    pub fn place(&self, role: Role) -> Option<usize> {
        self.settings.iter().position(|setting| setting.role == role)
    }

    /// The runs of every setting on every trace, public ones and the long run included.
    pub fn rows(&self) -> impl Iterator<Item = (&Case, &Setting, &Runs)> {
        let cases = self.cases.iter().chain(&self.public).chain(&self.long);
        cases.flat_map(|case| {
            case.runs.iter().zip(&self.settings).map(move |(runs, setting)| (case, setting, runs))
        })
    }
}

/// Made-up proofs, for tests of the text about them.
#[cfg(test)]
pub mod fixture {
    use super::*;
    use std::collections::BTreeMap;

    pub const PERFECT: u64 = 1_000_000_000;

    pub fn run(hold_ratio: f64, lateness: f64) -> Observed {
        Observed {
            out_of_memory_at: None,
            peak_reserved: 0,
            hold_ratio,
            area_ratio: hold_ratio,
            peak_address: 1 << 30,
            device_end_ns: (PERFECT as f64 * (1.0 + lateness)) as u64,
            host_blocked_ns: 0,
            host_charged_ns: 0,
            calls: BTreeMap::new(),
            faults: Vec::new(),
            fault_count: 0,
        }
    }

    /// A proof of a single trace: the runs of torch, expandable, default, tight and another
    /// configuration, each with the same figures throughout.
    fn proof(trace: &str, runs: [(f64, f64); 5]) -> Proof {
        let roles = [Role::Torch, Role::Expandable, Role::Default, Role::Tight, Role::Other];
        let setting = |role| Setting {
            role,
            name: format!("{role:?}"),
            conf: Some(String::new()),
            refused: None,
        };
        let runs = runs.map(|(hold, late)| Runs {
            still: Some(run(hold, 0.0)),
            calls_free: Some(run(hold, 0.0)),
            calls_charged: Some(run(hold, late)),
            small: Some(run(hold, late)),
            fit_ratio: Some(hold),
            no_fit: false,
        });
        let ends = Ends {
            perfect_ns: PERFECT,
            program_ns: PERFECT,
            floor_ns: PERFECT,
            at_once_ns: PERFECT,
            taking_ns: 0,
        };
        let case = Case {
            trace: trace.to_owned(),
            operations: 2,
            peak_live: 2 << 30,
            ends: Some(ends),
            runs: runs.to_vec(),
        };
        Proof {
            prices: "by-call".to_owned(),
            schema: "gruyere.proof",
            version: 1,
            settings: roles.map(setting).to_vec(),
            cases: vec![case],
            public: Vec::new(),
            long: None,
            instructions: None,
        }
    }

    /// Torch at 1.5, expandable at 1.1; then Gruyère's.
    pub fn ours(trace: &str, default: (f64, f64), tight: (f64, f64), other: (f64, f64)) -> Proof {
        proof(trace, [(1.5, 0.01), (1.1, 0.01), default, tight, other])
    }
}
