//! `gruyere bench proof`: every figure that judges this allocator, beside torch's, each with its
//! bar.

mod bars;
mod figures;
mod job;
mod print;
mod workers;

use super::{FAULTS, OUT_OF_MEMORY, bundled, open_prices, traces_in, write};
use crate::{failure, output};
use figures::{Case, Proof, Role, Runs, Setting};
use gruyere_replay::observe::Observed;
use job::{Answer, Clock, Found, Job, Room, Source, Task, Who};
use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use workers::Work;

/// Exit code: a bar is not met.
const NOT_MET: u8 = 5;
/// Size of the device in the tight runs, in peaks of live.
const SMALL: f64 = 1.02;
/// Seed of the long run's order.
const LONG_SEED: u64 = 1;
/// The trace whose instructions are counted.
const COUNTED: &str = "moe.trace.zst";

const EXAMPLES: &str = "\
Examples:
  gruyere bench proof               all parts on the seven bundled traces: a
                                    minute or two
  gruyere bench proof --part hold --part timeline
                                    some parts
  gruyere bench proof --jitter 1 --jitter 2
                                    traces of the same shapes with other sizes
  gruyere bench proof --public ../shared/traces/public --part public
  gruyere bench proof --part long --trace my.trace.zst --long 20
                                    one trace twenty times over
  gruyere bench proof --conf share:off
                                    a column more
  gruyere bench proof --part timeline --prices by-mapping
                                    time, where access costs by the mapping

Exit status: 0 every bar is met; 1 something could not be read, written or run; 2 wrong arguments; \
3 the oracle, the driver's books or an invariant found a fault; 4 a trace did not complete with \
room to spare; 5 a bar is not met.";

/// Judge Gruyère by every figure that it promises, beside torch's allocators.
///
/// Two settings have bars: Gruyère as it comes, and one told to hold little (`--tight`). Every run
/// is on the stand-in GPU with the oracle of stream order on (the search for the smallest device
/// excepted). No figure hangs on a clock.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Judge this trace in place of the bundled ones; may be repeated.
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// Judge the traces with other sizes, drawn from SEED, in place of their own; may be repeated.
    #[arg(long, value_name = "SEED")]
    jitter: Vec<u64>,
    /// Only this part; may be repeated.
    #[arg(long, value_enum, value_name = "PART")]
    part: Vec<Part>,
    /// Configuration of the setting that has the bars of `as it comes`.
    #[arg(long, value_name = "STRING", default_value = "")]
    default: String,
    /// Configuration of the setting that is told to hold little.
    #[arg(long, value_name = "STRING", default_value = "slack:0.5%,waits:budget")]
    tight: String,
    /// One more column for Gruyère configured by STRING, without bars; may be repeated.
    #[arg(long, value_name = "STRING")]
    conf: Vec<String>,
    /// What driver calls cost on the timeline: by-call, by-mapping, by-mapping-and-page, or a JSON
    /// file (also that of tests/gpu/probe). The bars are those of by-call.
    #[arg(long, value_name = "NAME|FILE", default_value = "by-call")]
    prices: String,
    /// Folder of public traces, of which only calls to the allocator are known.
    #[arg(long, value_name = "DIR")]
    public: Option<PathBuf>,
    /// The long run joins so many traces, each as often as the others, in an order drawn from a
    /// seed.
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    long: usize,
    /// Processes that measure side by side; default: the cores that this one may use.
    #[arg(long, value_name = "COUNT")]
    jobs: Option<usize>,
    /// Write proof.json to this folder too.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Print the JSON in place of the tables.
    #[arg(long)]
    json: bool,
    /// Do one job of the proof, and print what it found.
    #[arg(long, hide = true, value_name = "JSON")]
    job: Option<String>,
}

/// A part of the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Hold and area, nothing takes time.
    Hold,
    /// Hold, device end and host time on the timeline.
    Timeline,
    /// On a device of 1.02 times the peak of live, on the timeline.
    Small,
    /// The smallest device that completes.
    Fit,
    /// The traces joined.
    Long,
    /// Public traces (--public).
    Public,
    /// Instructions a malloc or free; needs valgrind.
    Instructions,
}

/// Position of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    case: Where,
    setting: usize,
    figure: What,
}

/// A case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Where {
    Trace(usize),
    Public(usize),
    Long,
}

/// A figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    Ends,
    Still,
    CallsFree,
    CallsCharged,
    Small,
    Fit,
}

///
/// # Errors
/// Failure to read, write or run.
pub fn main(args: &Args) -> Result<ExitCode, Box<dyn std::error::Error>> {
    if let Some(job) = &args.job {
        output::print(serde_json::to_string(&serde_json::from_str::<Job>(job)?.run()?)? + "\n")?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(folder) = &args.out {
        std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let plan = Plan::new(args)?;
    let proof = plan.carry_out()?;
    let bars = bars::judge(&proof);
    let json = serde_json::to_string(&serde_json::json!({ "proof": proof, "bars": bars }))? + "\n";
    if let Some(folder) = &args.out {
        write(&folder.join("proof.json"), &json)?;
    }
    let text = if args.json { json } else { print::draw(&proof, &bars) };
    output::print(text)?;
    Ok(ExitCode::from(verdict(&proof, &bars)))
}

/// Prints broken rules to stderr, and returns the exit status.
fn verdict(proof: &Proof, bars: &[bars::Bar]) -> u8 {
    let mut status = if bars.iter().all(|bar| bar.met) { 0 } else { NOT_MET };
    if proof.settings.iter().any(|setting| setting.refused.is_some()) {
        status = NOT_MET;
    }
    let say = |case: &Case, setting: &Setting, what: &str| {
        failure::say("bench proof", format_args!("{} on {}: {what}", setting.name, case.trace));
    };
    for (case, setting, runs) in proof.rows() {
        for run in runs.with_room().filter(|run| !run.completed()) {
            say(
                case,
                setting,
                &format!("out of memory with {} bytes held and room to spare", run.peak_reserved),
            );
            status = OUT_OF_MEMORY;
        }
    }
    for (case, setting, runs) in proof.rows() {
        for run in runs.with_room().chain(&runs.small).filter(|run| run.fault_count > 0) {
            say(case, setting, &format!("{} faults", run.fault_count));
            run.faults.iter().for_each(|fault| failure::say("bench proof", fault));
            status = FAULTS;
        }
        // No run ends before the floor: else the floor is wrong.
        let floor = case.ends.map_or(0, |ends| ends.floor_ns);
        let charged = runs.calls_charged.iter().chain(&runs.small);
        for run in charged.filter(|run| run.completed() && run.device_end_ns < floor) {
            say(
                case,
                setting,
                &format!("done at {} ns, before the floor of {floor} ns", run.device_end_ns),
            );
            status = FAULTS;
        }
    }
    status
}

impl Args {
    /// Whether this judges the bundled traces with the default settings: only then it counts
    /// instructions.
    fn judges_what_is_bundled(&self) -> bool {
        self.trace.is_empty() && self.jitter.is_empty() && self.default.is_empty()
    }
}

/// The planned measurements.
struct Plan<'a> {
    args: &'a Args,
    settings: Vec<Setting>,
    traces: Vec<Source>,
    public: Vec<Source>,
}

impl<'a> Plan<'a> {
    fn new(args: &'a Args) -> Result<Self, String> {
        open_prices(Some(&args.prices))?;
        let paths = if args.trace.is_empty() { bundled()? } else { args.trace.clone() };
        let seeds: Vec<Option<u64>> = match args.jitter.as_slice() {
            [] => vec![None],
            seeds => seeds.iter().copied().map(Some).collect(),
        };
        let traces = seeds
            .iter()
            .flat_map(|&seed| paths.iter().map(move |path| Source::file(path.clone(), seed)));
        if args.part.contains(&Part::Instructions) && !args.judges_what_is_bundled() {
            return Err(
                "instructions are counted with the bundled traces and default settings only; \
                 `gruyere bench --instructions --trace FILE` counts them on another trace"
                    .to_owned(),
            );
        }
        let public = match &args.public {
            None if args.part.contains(&Part::Public) => {
                return Err("--part public needs --public DIR".to_owned());
            }
            None => Vec::new(),
            Some(folder) => {
                let paths = traces_in(folder);
                if paths.is_empty() {
                    return Err(format!(
                        "{}: there is no *.trace.zst in this folder",
                        folder.display()
                    ));
                }
                paths.into_iter().map(|path| Source::file(path, None)).collect()
            }
        };
        let ours = |role, name: &str, conf: &str| Setting {
            role,
            name: name.to_owned(),
            conf: Some(conf.to_owned()),
            refused: None,
        };
        let model =
            |role, name: &str| Setting { role, name: name.to_owned(), conf: None, refused: None };
        let mut settings = vec![
            model(Role::Torch, "torch"),
            model(Role::Expandable, "expandable"),
            ours(Role::Default, "default", &args.default),
            ours(Role::Tight, "tight", &args.tight),
        ];
        settings.extend(args.conf.iter().map(|conf| ours(Role::Other, conf, conf)));
        Ok(Self { args, settings, traces: traces.collect(), public })
    }

    fn wants(&self, part: Part) -> bool {
        self.args.part.is_empty() || self.args.part.contains(&part)
    }

    /// Longest first, so that no worker ends with a long job.
    fn jobs(&self) -> Vec<(Place, Job)> {
        let mut jobs = Vec::new();
        let mut add = |case, source: &Source, setting, figure, task| {
            jobs.push((
                Place { case, setting, figure },
                Job { source: source.clone(), task, prices: self.args.prices.clone() },
            ));
        };
        let whos: Vec<Who> = self
            .settings
            .iter()
            .map(|setting| match (&setting.conf, setting.role) {
                (Some(conf), _) => Who::Gruyere(conf.clone()),
                (None, Role::Expandable) => Who::Expandable,
                (None, _) => Who::Torch,
            })
            .collect();
        let observe = |who: &Who, clock, room| Task::Observe { who: who.clone(), clock, room };
        if self.wants(Part::Long) {
            let long = Source {
                paths: self.traces.iter().flat_map(|source| source.paths.clone()).collect(),
                jitter: self.args.jitter.first().copied(),
                joined: Some((self.args.long, LONG_SEED)),
            };
            for (place, who) in whos.iter().enumerate() {
                add(
                    Where::Long,
                    &long,
                    place,
                    What::Still,
                    observe(who, Clock::Still, Room::Ample),
                );
            }
        }
        for (index, source) in self.traces.iter().enumerate() {
            let case = Where::Trace(index);
            for (place, who) in whos.iter().enumerate() {
                if self.wants(Part::Fit) {
                    add(case, source, place, What::Fit, Task::Fit { who: who.clone() });
                }
                if self.wants(Part::Timeline) {
                    let charged = observe(who, Clock::CallsCharged, Room::Ample);
                    add(case, source, place, What::CallsCharged, charged);
                    add(
                        case,
                        source,
                        place,
                        What::CallsFree,
                        observe(who, Clock::CallsFree, Room::Ample),
                    );
                }
                if self.wants(Part::Small) {
                    let small = observe(who, Clock::CallsCharged, Room::Times(SMALL));
                    add(case, source, place, What::Small, small);
                }
                // The long run is compared with these.
                if self.wants(Part::Hold) || self.wants(Part::Long) {
                    add(case, source, place, What::Still, observe(who, Clock::Still, Room::Ample));
                }
            }
            if self.wants(Part::Timeline) || self.wants(Part::Small) {
                add(case, source, 0, What::Ends, Task::Ends);
            }
        }
        for (index, source) in self.public.iter().enumerate().filter(|_| self.wants(Part::Public)) {
            for (place, who) in whos.iter().enumerate() {
                let task = observe(who, Clock::Still, Room::Ample);
                add(Where::Public(index), source, place, What::Still, task);
            }
        }
        jobs
    }

    fn carry_out(mut self) -> Result<Proof, String> {
        let (places, jobs): (Vec<Place>, Vec<Job>) = self.jobs().into_iter().unzip();
        let mut works: Vec<Work> = jobs.into_iter().map(Work::Apart).collect();
        let counted = self.wants(Part::Instructions) && self.args.judges_what_is_bundled();
        if counted {
            let path = bundled()?.into_iter().find(|path| path.ends_with(COUNTED));
            // First, since it takes longest.
            works.insert(
                0,
                Work::Instructions(path.ok_or_else(|| format!("{COUNTED} is not bundled"))?),
            );
        }
        let mut results = workers::all(&works, self.args.jobs)?;
        let instructions = if counted { results.remove(0).instructions() } else { None };
        let answers: HashMap<Place, Answer> = places
            .into_iter()
            .zip(results)
            .filter_map(|(place, done)| Some((place, done.answer()?)))
            .collect();
        for (place, answer) in &answers {
            if let Found::Refused(why) = &answer.found {
                self.settings[place.setting].refused = Some(why.clone());
            }
        }
        let case = |case| self.case(case, &answers);
        Ok(Proof {
            schema: "gruyere.proof",
            version: 1,
            prices: self.args.prices.clone(),
            cases: (0..self.traces.len()).filter_map(|index| case(Where::Trace(index))).collect(),
            public: (0..self.public.len()).filter_map(|index| case(Where::Public(index))).collect(),
            long: case(Where::Long),
            settings: self.settings.clone(),
            instructions,
        })
    }

    fn case(&self, case: Where, answers: &HashMap<Place, Answer>) -> Option<Case> {
        let facts = answers.iter().find(|(place, _)| place.case == case)?.1;
        let find = |setting, figure| {
            answers.get(&Place { case, setting, figure }).map(|answer| &answer.found)
        };
        let observed = |setting, figure| match find(setting, figure) {
            Some(Found::Observed(observed)) => Some(Observed::clone(observed)),
            _ => None,
        };
        let runs = |setting| {
            let fit = match find(setting, What::Fit) {
                Some(Found::Fit(fit)) => Some(*fit),
                _ => None,
            };
            Runs {
                still: observed(setting, What::Still),
                calls_free: observed(setting, What::CallsFree),
                calls_charged: observed(setting, What::CallsCharged),
                small: observed(setting, What::Small),
                fit_ratio: fit.flatten().map(|bytes| bytes as f64 / facts.peak_live.max(1) as f64),
                no_fit: fit == Some(None),
            }
        };
        Some(Case {
            trace: facts.trace.clone(),
            operations: facts.operations,
            peak_live: facts.peak_live,
            ends: match find(0, What::Ends) {
                Some(Found::Ends(ends)) => Some(*ends),
                _ => None,
            },
            runs: (0..self.settings.len()).map(runs).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::figures::fixture::{PERFECT, ours};
    use super::*;

    fn status(change: impl FnOnce(&mut Case)) -> u8 {
        let mut proof = ours("moe", (1.004, 0.004), (1.004, 0.004), (1.0, 0.0));
        change(&mut proof.cases[0]);
        verdict(&proof, &bars::judge(&proof))
    }

    fn runs(case: &mut Case) -> &mut Runs {
        &mut case.runs[2]
    }

    #[test]
    fn status_tells_what_is_not_met_from_what_is_broken() {
        assert_eq!(status(|_| {}), 0);
        assert_eq!(status(|case| runs(case).fit_ratio = Some(1.2)), NOT_MET);
        let out = |run: &mut Option<Observed>| run.as_mut().unwrap().out_of_memory_at = Some(3);
        assert_eq!(status(|case| out(&mut runs(case).small)), NOT_MET);
        assert_eq!(status(|case| out(&mut runs(case).calls_free)), OUT_OF_MEMORY);
        let fault = |run: &mut Option<Observed>| run.as_mut().unwrap().fault_count = 1;
        assert_eq!(status(|case| fault(&mut runs(case).small)), FAULTS);
        assert_eq!(status(|case| fault(&mut runs(case).still)), FAULTS);
    }

    #[test]
    fn an_end_before_the_floor_is_a_fault_of_the_bench() {
        let floor = |over: u64| {
            move |case: &mut Case| case.ends.as_mut().unwrap().floor_ns = PERFECT + over
        };
        assert_eq!(status(floor(0)), 0);
        assert_eq!(status(floor(4_000_001)), FAULTS);
    }

    #[test]
    fn a_setting_that_was_refused_is_no_success() {
        let mut proof = ours("moe", (1.004, 0.004), (1.004, 0.004), (1.0, 0.0));
        proof.settings[3].refused = Some("unknown key".to_owned());
        assert_eq!(verdict(&proof, &[]), NOT_MET);
    }
}
