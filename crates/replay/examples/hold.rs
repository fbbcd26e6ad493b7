//! The bar of hold as tables: peaks of held memory of Gruyère and of torch's allocators.
//!
//!     cargo run --profile quick -p gruyere-replay --example hold
//!     ... --example hold -- traces drawn bottom spans    # these parts; all but spans as it comes
//!     ... --example hold -- --conf slack:0.1%            # with this configuration
//!     ... --example hold -- --most 400000                # drawn: up to so many blocks (100,000)
//!     ... --example hold -- traces --clock 100us         # where kernels take so long
//!     ... --example hold -- longer                       # programs of 40 to 200 steps
//!     ... --example hold -- longer --no-steps            # which do not mark them
//!     ... --example hold -- traces longer --draws 12     # and as often with other sizes
//!     ... --example hold -- --fit                        # and the smallest devices, of the traces
//!     ... --example hold -- traces --from DIR            # of the traces of this folder
//!     ... --example hold -- --write DIR                  # drawn, as traces: tests/pytorch/pace
//!
//! Exits with 1 if the bar is not kept; lists the breaches at the end.

use gruyere_replay::bench::{Contender, smallest_device};
use gruyere_replay::clock::Clock;
use gruyere_replay::drawn;
use gruyere_replay::hold::{Bar, Held, SPANS, Table};
use gruyere_replay::trace::Trace;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

struct Arguments {
    parts: Vec<String>,
    conf: String,
    most: u64,
    clock: Clock,
    no_steps: bool,
    draws: u64,
    fit: bool,
    from: Option<PathBuf>,
    folder: Option<PathBuf>,
}

impl Arguments {
    fn read() -> Outcome<Self> {
        let (parts, conf) = (Vec::new(), String::new());
        let (clock, no_steps, fit) = (Clock::INSTANT, false, false);
        let (most, draws, from, folder) = (100_000, 0, None, None);
        let mut arguments = Self { parts, conf, most, clock, no_steps, draws, fit, from, folder };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            match word.as_str() {
                "--conf" => arguments.conf = words.next().ok_or("--conf: which?")?,
                "--most" => arguments.most = words.next().ok_or("--most: how many?")?.parse()?,
                "--clock" => arguments.clock = words.next().ok_or("--clock: which?")?.parse()?,
                "--no-steps" => arguments.no_steps = true,
                "--draws" => arguments.draws = words.next().ok_or("--draws: how many?")?.parse()?,
                "--fit" => arguments.fit = true,
                "--from" => {
                    arguments.from = Some(words.next().ok_or("--from: which folder?")?.into());
                }
                "--write" => {
                    arguments.folder = Some(words.next().ok_or("--write: which folder?")?.into());
                }
                "traces" | "longer" | "drawn" | "bottom" | "spans" => {
                    arguments.parts.push(word);
                }
                _ => return Err(format!("{word}: traces, longer, drawn, bottom or spans").into()),
            }
        }
        if arguments.parts.is_empty() {
            arguments.parts = ["traces", "drawn", "bottom"].map(str::to_owned).to_vec();
        }
        Ok(arguments)
    }
}

/// The traces of folder `from`; without it, the small traces and the seven large ones.
fn traces(from: Option<&Path>) -> Outcome<Vec<Trace>> {
    if let Some(folder) = from {
        return Ok(Trace::open_all(folder)?);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces");
    let mut traces = Trace::open_all(&folder.join("small"))?;
    traces.extend(Trace::open_all(&folder)?);
    Ok(traces)
}

/// Small programs with eight times as many steps, marked or not.
fn longer(no_steps: bool) -> Outcome<Vec<Trace>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../traces/longer");
    let traces = Trace::open_all(&folder)?;
    Ok(if no_steps { traces.iter().map(Trace::without_steps).collect() } else { traces })
}

/// Runs `traces`, and each with other sizes, `draws` times. Prints for each the mean and the worst
/// hold over its runs; returns the breaches.
fn show_draws(
    traces: &[Trace],
    draws: u64,
    (clock, conf, bar): (Clock, &str, Bar),
) -> Outcome<Vec<String>> {
    let (mut breaches, mut ratios) = (Vec::new(), Vec::new());
    println!("{:<28}{:>9}{:>9}", format!("held / live, {clock}"), "mean", "worst");
    for trace in traces {
        let other = |seed| {
            let mut other = trace.jittered(seed);
            other.name = format!("{} #{seed}", trace.name);
            other
        };
        let runs: Vec<Trace> = [trace.clone()].into_iter().chain((1..=draws).map(other)).collect();
        let table = Table::on(clock, &runs, &[conf], bar)?;
        // One program's median says nothing.
        breaches.extend(table.rows().iter().filter_map(Held::breach));
        let hold = |row: &Held| row.ours[0].map(|held| held as f64 / row.live as f64);
        let held: Vec<f64> = table.rows().iter().filter_map(hold).collect();
        let worst = held.iter().copied().fold(0.0, f64::max);
        println!("{:<28}{:>9.4}{worst:>9.4}", trace.name, mean(&held));
        ratios.extend(held);
    }
    println!("{:<28}{:>9.4}", format!("{} runs", ratios.len()), mean(&ratios));
    Ok(breaches)
}

fn mean(ratios: &[f64]) -> f64 {
    ratios.iter().sum::<f64>() / ratios.len() as f64
}

fn drawn(most: u64) -> Outcome<Vec<Trace>> {
    let programs = drawn::bar(most, 1..=4);
    Ok(programs.iter().map(drawn::Program::trace).collect::<Result<_, _>>()?)
}

/// Prints the smallest devices that complete, over the peak of live.
fn show_fit(from: Option<&Path>, conf: &str) -> Outcome<()> {
    let ours = Contender::Gruyere(conf.to_owned());
    println!("{:<28}{:>9}{:>9}{:>9}", "smallest device / live", "torch", "expand.", "ours");
    for trace in traces(from)? {
        print!("{:<28}", trace.name);
        for contender in [&Contender::Torch, &Contender::Expandable, &ours] {
            let bytes = smallest_device(&trace, contender)?;
            let ratio = bytes.map(|bytes| bytes as f64 / trace.peak_live_of_a_device() as f64);
            print!("{:>9}", ratio.map_or("none".to_owned(), |ratio| format!("{ratio:.4}")));
        }
        println!();
    }
    Ok(())
}

fn main() -> Outcome<ExitCode> {
    let arguments = Arguments::read()?;
    if let Some(folder) = &arguments.folder {
        for program in drawn::bar(arguments.most, 1..=1) {
            std::fs::write(folder.join(format!("{}.trace", program.name())), program.text())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (mut breaches, conf) = (Vec::new(), [arguments.conf.as_str()]);
    let (clock, from) = (arguments.clock, arguments.from.as_deref());
    let bar = if clock.lags() { Bar::Lagging } else { Bar::Trace };
    if arguments.draws > 0 {
        for part in &arguments.parts {
            let traces = match part.as_str() {
                "traces" => traces(from)?,
                "longer" => longer(arguments.no_steps)?,
                _ => return Err(format!("--draws: of traces and longer, not of {part}").into()),
            };
            breaches.extend(show_draws(&traces, arguments.draws, (clock, conf[0], bar))?);
        }
        return Ok(ended(&breaches));
    }
    let mut show = |table: Table| {
        println!("{table}");
        breaches.extend(table.breaches());
    };
    for part in &arguments.parts {
        match part.as_str() {
            "traces" => show(Table::on(clock, &traces(from)?, &conf, bar)?),
            "longer" => show(Table::on(clock, &longer(arguments.no_steps)?, &conf, bar)?),
            "drawn" => show(Table::of(&drawn(arguments.most)?, &conf, Bar::Drawn)?),
            "bottom" => show(Table::of(&drawn::bottom()?, &conf, Bar::Bottom)?),
            _ => {
                show(Table::of(&traces(from)?, &SPANS, Bar::Span)?);
                show(Table::of(&drawn(arguments.most)?, &SPANS, Bar::Span)?);
                show(Table::of(&drawn::bottom()?, &SPANS, Bar::Span)?);
            }
        }
    }
    if arguments.fit {
        show_fit(from, &arguments.conf)?;
    }
    Ok(ended(&breaches))
}

fn ended(breaches: &[String]) -> ExitCode {
    for breach in breaches {
        println!("beyond the bar: {breach}");
    }
    ExitCode::from(u8::from(!breaches.is_empty()))
}
