//! The tables of the proof, and the list of missed bars.

use super::bars::{Bar, Figure};
use super::figures::{Case, Proof, Role, Runs};
use comfy_table::presets::UTF8_HORIZONTAL_ONLY;
use comfy_table::{CellAlignment, ColumnConstraint, ContentArrangement, Table};
use gruyere_replay::observe::Observed;
use std::fmt::Write as _;

/// A table: a row per trace, a column per setting.
struct Section {
    title: &'static str,
    figure: Option<Figure>,
    cell: fn(&Case, &Runs) -> Option<String>,
}

const OF_TRACES: &[Section] = &[
    Section {
        title: "Hold: peak reserved / peak live, nothing takes device time",
        figure: Some(Figure::Hold),
        cell: |_, runs| runs.still.as_ref().map(hold),
    },
    Section {
        title: "Area: reserved / live, both summed over all mallocs and frees",
        figure: Some(Figure::Area),
        cell: |_, runs| runs.still.as_ref().map(|run| format!("{:.4}", run.area_ratio)),
    },
    Section {
        title: "Driver calls, nothing takes device time",
        figure: None,
        cell: |_, runs| runs.still.as_ref().map(|run| run.driver_calls().to_string()),
    },
    Section {
        title: "Fit: smallest device that completes / peak live",
        figure: Some(Figure::Fit),
        cell: |_, runs| match runs.fit_ratio {
            Some(fit) => Some(format!("{fit:.4}")),
            None => runs.no_fit.then(|| "none".to_owned()),
        },
    },
    Section {
        title: "Hold on the timeline, driver calls free (as the real allocators were measured)",
        figure: Some(Figure::TimedHold),
        cell: |_, runs| runs.calls_free.as_ref().map(hold),
    },
    Section {
        title: "Hold on the timeline, driver calls charged",
        figure: Some(Figure::TimedHoldCharged),
        cell: |_, runs| runs.calls_charged.as_ref().map(hold),
    },
    Section {
        title: "Device end on the timeline, driver calls charged, over that of a perfect allocator",
        figure: Some(Figure::End),
        cell: |case, runs| runs.calls_charged.as_ref().and_then(|run| late(case, run)),
    },
    Section {
        title: "Host blocked in waits of the allocator, and driver calls charged, on the timeline, \
                ms",
        figure: Some(Figure::Blocked),
        cell: |_, runs| {
            let ms = |ns: u64| ns as f64 / 1e6;
            let run = runs.calls_charged.as_ref()?;
            Some(format!("{:.1} + {:.1}", ms(run.host_blocked_ns), ms(run.host_charged_ns)))
        },
    },
    Section {
        title: "On a device of 1.02 times the peak of live, on the timeline: device end, driver \
                calls",
        figure: Some(Figure::Small),
        cell: |case, runs| {
            let run = runs.small.as_ref()?;
            let end = late(case, run).unwrap_or_default();
            Some(match run.out_of_memory_at {
                None => format!("{end}  {:>6}", run.driver_calls()),
                Some(_) => "out of memory".to_owned(),
            })
        },
    },
];

const OF_PUBLIC: &[Section] = &[
    Section { title: "Public traces: hold", figure: Some(Figure::PublicHold), ..OF_TRACES[0] },
    Section { title: "Public traces: area", figure: None, ..OF_TRACES[1] },
];

const OF_LONG: &[Section] = &[
    Section { title: "A long run: hold", figure: Some(Figure::LongHold), ..OF_TRACES[0] },
    Section { title: "A long run: area", figure: None, ..OF_TRACES[1] },
    Section { title: "A long run: driver calls", ..OF_TRACES[2] },
    Section {
        title: "A long run: peak of reserved address space, GiB (it may grow with the device, \
                which here has 8 peaks of live)",
        figure: Some(Figure::LongAddress),
        cell: |_, runs| {
            let peak = runs.still.as_ref()?.peak_address;
            Some(format!("{:.1}", peak as f64 / (1u64 << 30) as f64))
        },
    },
];

fn hold(run: &Observed) -> String {
    if run.completed() { format!("{:.4}", run.hold_ratio) } else { "out of memory".to_owned() }
}

fn late(case: &Case, run: &Observed) -> Option<String> {
    case.lateness(run).map(percent)
}

fn percent(part: f64) -> String {
    format!("{:+.2}%", part * 100.0)
}

/// The text of `proof`, with figures marked by `bars`.
pub fn draw(proof: &Proof, bars: &[Bar]) -> String {
    let mut text = format!("Prices of driver calls: {}\n\n", proof.prices);
    for section in OF_TRACES {
        text.push_str(&table(section, &proof.cases, proof, bars));
    }
    text.push_str(&at_best(&proof.cases));
    for section in OF_PUBLIC {
        text.push_str(&table(section, &proof.public, proof, bars));
    }
    let mut long: Vec<Case> = proof.long.iter().cloned().collect();
    if !long.is_empty() {
        long.extend(proof.cases.iter().cloned());
    }
    for section in OF_LONG {
        text.push_str(&table(section, &long, proof, bars));
    }
    match &proof.instructions {
        Some(Ok(count)) => {
            let mark = mark(bars, Figure::Instructions, "", None);
            let _ = writeln!(
                text,
                "Instructions a malloc or free, moe, C ABI, record on: {count:.0}{mark}\n"
            );
        }
        Some(Err(why)) => {
            let _ = writeln!(text, "Instructions were not counted: {why}\n");
        }
        None => {}
    }
    for setting in &proof.settings {
        match (&setting.conf, &setting.refused) {
            (Some(conf), Some(why)) => {
                let _ = writeln!(text, "{}: {conf:?} was refused: {why}", setting.name);
            }
            (Some(conf), None) => {
                let _ = writeln!(text, "{}: GRUYERE_CONF={conf:?}", setting.name);
            }
            _ => {}
        }
    }
    text.push_str(&verdicts(proof, bars));
    text
}

fn table(section: &Section, cases: &[Case], proof: &Proof, bars: &[Bar]) -> String {
    let shown: Vec<usize> = (0..proof.settings.len())
        .filter(|&place| cases.iter().any(|case| cell(section, case, place).is_some()))
        .collect();
    if shown.is_empty() {
        return String::new();
    }
    let mut table = plain();
    table.set_header(
        ["trace", "peak live"]
            .into_iter()
            .chain(shown.iter().map(|&place| proof.settings[place].name.as_str())),
    );
    for case in cases {
        let figures = shown.iter().map(|&place| {
            let text = cell(section, case, place).unwrap_or_default();
            let mark = section.figure.map(|figure| mark(bars, figure, &case.trace, Some(place)));
            text + mark.unwrap_or_default()
        });
        table.add_row([case.trace.clone(), size(case.peak_live)].into_iter().chain(figures));
    }
    finish(section.title, table)
}

fn cell(section: &Section, case: &Case, place: usize) -> Option<String> {
    (section.cell)(case, case.runs.get(place)?)
}

/// The earliest possible end of the device's work.
fn at_best(cases: &[Case]) -> String {
    if cases.iter().all(|case| case.ends.is_none()) {
        return String::new();
    }
    let mut table = plain();
    table.set_header([
        "trace",
        "perfect s",
        "program's calls",
        "floor",
        "at once",
        "taking the peak ms",
    ]);
    for case in cases {
        let Some(ends) = case.ends else { continue };
        let over = |end| case.over_perfect(end).map(percent).unwrap_or_default();
        table.add_row([
            case.trace.clone(),
            format!("{:.3}", ends.perfect_ns as f64 / 1e9),
            over(ends.program_ns),
            over(ends.floor_ns),
            over(ends.at_once_ns),
            format!("{:.1}", ends.taking_ns as f64 / 1e6),
        ]);
    }
    finish("Device end at best", table)
        + "  program's calls: an allocator that costs nothing, the program's own events and waits \
           charged\n\
           \x20 floor: each page's own share of its cost, paid when live first needs the page, \
           idle host time used: nobody is below it\n\
           \x20 at once: the peak of live created, mapped and made accessible in one call each \
           before anything else\n\n"
}

fn plain() -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Disabled);
    table
}

fn finish(title: &str, mut table: Table) -> String {
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_constraint(ColumnConstraint::ContentWidth);
        column.set_cell_alignment(if index == 0 {
            CellAlignment::Left
        } else {
            CellAlignment::Right
        });
    }
    // Rows of figures need no rules between them.
    let rule = |line: &&str| !line.starts_with('─');
    let lines = table.to_string();
    let lines: Vec<&str> = lines.lines().filter(rule).collect();
    format!("{title}\n{}\n\n", lines.join("\n"))
}

fn mark(bars: &[Bar], figure: Figure, trace: &str, setting: Option<usize>) -> &'static str {
    let mut of = bars
        .iter()
        .filter(|bar| bar.figure == figure && bar.trace == trace && bar.setting == setting);
    match of.next() {
        None => "  ",
        Some(first) if first.met && of.all(|bar| bar.met) => " ✓",
        Some(_) => " ✗",
    }
}

fn verdicts(proof: &Proof, bars: &[Bar]) -> String {
    let mut text = String::new();
    let met = bars.iter().filter(|bar| bar.met).count();
    let _ = writeln!(text, "{met} of {} bars are met.", bars.len());
    for bar in bars.iter().filter(|bar| !bar.met) {
        let setting = bar.setting.map_or("", |place| proof.settings[place].name.as_str());
        let _ = writeln!(
            text,
            "  ✗ {:<17} {:<28} {setting:<8} {}",
            name(bar.figure),
            bar.trace,
            bar.what
        );
    }
    let refused = proof.settings.iter().any(|s| s.role == Role::Tight && s.refused.is_some());
    if refused {
        let _ = writeln!(
            text,
            "  ✗ the bars of the tight setting were not judged: its configuration was refused"
        );
    }
    text
}

fn name(figure: Figure) -> &'static str {
    match figure {
        Figure::Hold => "hold",
        Figure::Area => "area",
        Figure::Fit => "fit",
        Figure::TimedHold => "hold on time",
        Figure::TimedHoldCharged => "hold on time, c.",
        Figure::End => "device end",
        Figure::Blocked => "host blocked",
        Figure::Small => "at 1.02",
        Figure::PublicHold => "public hold",
        Figure::LongHold => "long run",
        Figure::LongAddress => "long run, address",
        Figure::Instructions => "instructions",
    }
}

fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib >= 1024.0 { format!("{:.2} GiB", mib / 1024.0) } else { format!("{mib:.2} MiB") }
}
