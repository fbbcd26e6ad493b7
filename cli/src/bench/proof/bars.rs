//! The bars: what each figure has to be, and whether it is.

use super::figures::{Case, Proof, Role, Runs};
use gruyere_replay::observe::Observed;
use serde::Serialize;

/// A figure of the proof, the column group in which it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Figure {
    Hold,
    Area,
    Fit,
    TimedHold,
    TimedHoldCharged,
    End,
    Blocked,
    Small,
    PublicHold,
    LongHold,
    Instructions,
}

/// One bar, judged.
#[derive(Clone, Debug, Serialize)]
pub struct Bar {
    pub figure: Figure,
    /// The trace.
    pub trace: String,
    /// Place of the setting; absent where the figure has none.
    pub setting: Option<usize>,
    /// The figure and the bar in words.
    pub what: String,
    pub met: bool,
}

/// Bars of one trace: the tight setting's hold ratio with no device time, and the smallest device.
struct OfTrace {
    name: &'static str,
    tight_hold: f64,
    fit: f64,
}

const OF_TRACES: &[OfTrace] = &[
    OfTrace { name: "fsdp", tight_hold: 1.006, fit: 1.006 },
    OfTrace { name: "generate", tight_hold: 1.006, fit: 1.006 },
    OfTrace { name: "gpt2xl_accum", tight_hold: 1.006, fit: 1.006 },
    OfTrace { name: "llama7b_full", tight_hold: 1.006, fit: 1.006 },
    OfTrace { name: "llama7b_lora", tight_hold: 1.006, fit: 1.006 },
    OfTrace { name: "moe", tight_hold: 1.010, fit: 1.010 },
    OfTrace { name: "offload", tight_hold: 1.013, fit: 1.006 },
];
/// For a trace that is none of the seven.
const OF_OTHERS: OfTrace = OfTrace { name: "", tight_hold: 1.02, fit: 1.010 };

/// The trace whose host runs far ahead of recorded streams: bars of its own.
const OFFLOAD: &str = "offload";
const DEFAULT_HOLD: f64 = 1.02;
const DEFAULT_LATENESS: f64 = 0.005;
const TIGHT_TIMED_HOLD: f64 = 1.02;
const TIGHT_LATENESS: f64 = 0.01;
/// For `offload` on the timeline: a hold ratio, and the lateness at which it must be reached.
const OFFLOAD_TRADES: [(f64, f64); 2] = [(1.40, 0.01), (1.05, 0.025)];
const SMALL_LATENESS: f64 = 0.03;
/// Public traces above this peak of live have a bar with the tight setting, bytes.
const PUBLIC_LARGE: u64 = 1 << 30;
const PUBLIC_TIGHT_HOLD: f64 = 1.02;
const LONG_GROWTH: f64 = 0.002;
const INSTRUCTIONS: f64 = 250.0;

/// All bars for which there is a figure.
pub fn judge(proof: &Proof) -> Vec<Bar> {
    let mut judge = Judge { proof, bars: Vec::new() };
    for case in &proof.cases {
        judge.still(case);
        judge.timed(case);
    }
    for case in &proof.public {
        judge.public(case);
    }
    if let Some(long) = &proof.long {
        judge.long(long);
    }
    if let Some(Ok(count)) = proof.instructions {
        let what = format!("{count:.0} instructions a malloc or free, bar {INSTRUCTIONS:.0}");
        judge.bars.push(Bar {
            figure: Figure::Instructions,
            trace: String::new(),
            setting: None,
            what,
            met: count <= INSTRUCTIONS,
        });
    }
    judge.bars
}

struct Judge<'a> {
    proof: &'a Proof,
    bars: Vec<Bar>,
}

impl<'a> Judge<'a> {
    fn runs(&self, case: &'a Case, role: Role) -> Option<&'a Runs> {
        case.runs.get(self.proof.place(role)?)
    }

    fn bar(&mut self, figure: Figure, case: &Case, role: Role, met: bool, what: String) {
        let setting = self.proof.place(role);
        self.bars.push(Bar { figure, trace: case.trace.clone(), setting, what, met });
    }

    fn at_most(&mut self, figure: Figure, case: &Case, role: Role, value: f64, bar: f64, of: &str) {
        self.bar(figure, case, role, value <= bar, format!("{value:.4}, bar {bar:.4}{of}"));
    }

    fn still(&mut self, case: &'a Case) {
        let of_trace = OF_TRACES.iter().find(|bars| bars.name == case.base()).unwrap_or(&OF_OTHERS);
        let still = |runs: &'a Runs| runs.still.as_ref();
        let default = self.runs(case, Role::Default).and_then(still);
        if let Some(ours) = default {
            for (role, name) in [(Role::Torch, "torch"), (Role::Expandable, "expandable")] {
                let Some(theirs) = self.runs(case, role).and_then(still) else { continue };
                let what = format!("{:.4}, {name} {:.4}", ours.area_ratio, theirs.area_ratio);
                self.bar(Figure::Area, case, Role::Default, ours.area_ratio < theirs.area_ratio, what);
            }
            self.no_worse(Figure::Hold, case, ours, still);
            if case.base() != OFFLOAD {
                self.at_most(Figure::Hold, case, Role::Default, ours.hold_ratio, DEFAULT_HOLD, "");
            }
        }
        if let Some(ours) = self.runs(case, Role::Tight).and_then(still) {
            self.at_most(Figure::Hold, case, Role::Tight, ours.hold_ratio, of_trace.tight_hold, "");
        }
        let Some(ours) = self.runs(case, Role::Default) else { return };
        if let Some(fit) = ours.fit_ratio {
            self.at_most(Figure::Fit, case, Role::Default, fit, of_trace.fit, "");
        } else if ours.no_fit {
            self.bar(Figure::Fit, case, Role::Default, false, "no device is large enough".to_owned());
        }
    }

    fn no_worse(
        &mut self,
        figure: Figure,
        case: &'a Case,
        ours: &Observed,
        which: impl Fn(&'a Runs) -> Option<&'a Observed>,
    ) {
        if let Some(theirs) = self.runs(case, Role::Expandable).and_then(which) {
            self.at_most(figure, case, Role::Default, ours.hold_ratio, theirs.hold_ratio, " (expandable)");
        }
    }

    fn timed(&mut self, case: &'a Case) {
        if let Some(runs) = self.runs(case, Role::Default) {
            if let Some(ours) = &runs.calls_free {
                self.no_worse(Figure::TimedHold, case, ours, |runs| runs.calls_free.as_ref());
            }
            if let Some(ours) = &runs.calls_charged {
                self.no_worse(Figure::TimedHoldCharged, case, ours, |runs| runs.calls_charged.as_ref());
                self.late(Figure::End, case, Role::Default, ours, DEFAULT_LATENESS);
                let ms = ours.host_blocked_ns as f64 / 1e6;
                self.bar(
                    Figure::Blocked,
                    case,
                    Role::Default,
                    ours.host_blocked_ns == 0,
                    format!("{ms:.1} ms, bar 0"),
                );
            }
            if let Some(ours) = &runs.small {
                match ours.out_of_memory_at {
                    None => self.late(Figure::Small, case, Role::Default, ours, SMALL_LATENESS),
                    Some(op) => {
                        self.bar(
                            Figure::Small,
                            case,
                            Role::Default,
                            false,
                            format!("out of memory at operation {op}"),
                        );
                    }
                }
            }
        }
        let Some(ours) = self.runs(case, Role::Tight).and_then(|runs| runs.calls_charged.as_ref()) else {
            return;
        };
        if case.base() != OFFLOAD {
            self.at_most(Figure::TimedHoldCharged, case, Role::Tight, ours.hold_ratio, TIGHT_TIMED_HOLD, "");
            self.late(Figure::End, case, Role::Tight, ours, TIGHT_LATENESS);
            return;
        }
        let Some(late) = case.lateness(ours) else { return };
        for (hold, by) in OFFLOAD_TRADES {
            let met = ours.hold_ratio <= hold && late <= by;
            let what = format!(
                "hold {:.4} with the end {:+.2}%, bar {hold:.2} at {:+.1}%",
                ours.hold_ratio,
                late * 100.0,
                by * 100.0
            );
            self.bar(Figure::TimedHoldCharged, case, Role::Tight, met, what);
        }
    }

    fn late(&mut self, figure: Figure, case: &Case, role: Role, ours: &Observed, bar: f64) {
        let Some(late) = case.lateness(ours) else { return };
        let mut what = format!("{:+.2}%, bar {:+.1}%", late * 100.0, bar * 100.0);
        if let Some(floor) = case.ends.and_then(|ends| case.over_perfect(ends.floor_ns)).filter(|&f| f > bar)
        {
            what.push_str(&format!("; the floor is {:+.2}%", floor * 100.0));
        }
        self.bar(figure, case, role, late <= bar, what);
    }

    fn public(&mut self, case: &'a Case) {
        let still = |runs: &'a Runs| runs.still.as_ref();
        if let Some(ours) = self.runs(case, Role::Default).and_then(still) {
            self.no_worse(Figure::PublicHold, case, ours, still);
        }
        let tight = self.runs(case, Role::Tight).and_then(still);
        if let Some(ours) = tight.filter(|_| case.peak_live > PUBLIC_LARGE) {
            self.at_most(Figure::PublicHold, case, Role::Tight, ours.hold_ratio, PUBLIC_TIGHT_HOLD, "");
        }
    }

    fn long(&mut self, long: &'a Case) {
        for role in [Role::Default, Role::Tight] {
            let hold = |case| Some(self.runs(case, role)?.still.as_ref()?.hold_ratio);
            let worst = self.proof.cases.iter().filter_map(hold).fold(f64::NAN, f64::max);
            let Some(ours) = hold(long).filter(|_| worst.is_finite()) else { continue };
            self.at_most(
                Figure::LongHold,
                long,
                role,
                ours,
                worst + LONG_GROWTH,
                " (the worst alone + 0.002)",
            );
        }
    }
}
