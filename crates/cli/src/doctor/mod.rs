//! `gruyere doctor`: obstacles, and their remedies.

mod configuration;
mod devices;
mod finding;
mod gpu;
mod machine;
mod probe;
mod python;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::failure::{Ended, Exit, Failure};
use crate::output;
use crate::target::Folder;
use crate::wrap;
use finding::{Findings, Level};
pub use gpu::program::run_as_asked;

/// Checks this machine for Gruyère: driver and devices, the holders of device memory, shared
/// memory, configuration, torch.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere doctor                    this machine, this environment, the python3
                                    on the PATH
  gruyere doctor --python .venv/bin/python
                                    another interpreter
  gruyere doctor --json | jq '.findings[] | select(.level == \"problem\")'
  srun gruyere doctor               on the nodes of a job, in its environment
  gruyere doctor --gpu --out gpu    test the GPU too, and keep the results for a
                                    report

Each finding is ok, a note, a warning (something available is not used) or a problem (Gruyère does \
not work this way); the remedy is on the line below. The driver, NVML and Python are queried in \
separate processes; one that hangs is reported after --time-limit. Without NVML, the command \
briefly creates a context on each device to query its free memory. `python -m gruyere --doctor` \
tests Gruyère with torch.

--gpu tests the first device of CUDA_VISIBLE_DEVICES with two programs that come with this \
command. No other process should use the device meanwhile. If a driver rule that Gruyère relies on \
is false, a finding states the consequence; overwritten data is a problem marked CORRUPTION. With \
--json, all results are under `gpu`. If a finding asks for a report, the files are kept even \
without --out, and the finding names their folder. GRUYERE_CONF applies to the stress test.

Exit codes: 0 no problem; 1 a problem, or the findings can't be printed; 2 wrong usage.")]
pub struct Arguments {
    /// Print JSON: findings, and the facts behind them.
    #[arg(long)]
    json: bool,
    /// The Python interpreter to look for torch in. Default: the python3 on the PATH.
    #[arg(long, value_name = "PYTHON")]
    python: Option<PathBuf>,
    /// Seconds that the driver, NVML and Python each have to answer.
    #[arg(
        long, value_name = "SECONDS", default_value = "20",
        value_parser = clap::value_parser!(u32).range(1..=3600)
    )]
    time_limit: u32,
    #[command(flatten)]
    trial: gpu::Trial,
    /// Answer one question, as JSON: how this command asks itself.
    #[arg(long, hide = true)]
    probe: Option<devices::Probe>,
    #[command(flatten)]
    folder: Folder,
}

pub fn run(arguments: &Arguments) -> Ended {
    if let Some(probe) = arguments.probe {
        let answer = devices::answer(probe).map_err(Failure::new)?;
        // Only the parent process reads this.
        output::print(format_args!("{answer}\n"))?;
        return Ok(Exit::Fine);
    }
    let limit = Duration::from_secs(arguments.time_limit.into());
    let mut findings = Findings::default();
    findings.ok("gruyere", format!("command version {}", env!("CARGO_PKG_VERSION")));
    machine::limits(&mut findings);
    let mut records = arguments.folder.list().unwrap_or_default().found;
    records.retain(|found| !found.claim.is_false());
    let devices = devices::examine(&mut findings, &records, limit);
    machine::shared_memory(&mut findings, &arguments.folder.directory);
    machine::records(&mut findings, &records);
    let environment =
        |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    configuration::examine(&mut findings, &environment, &records);
    let version = devices.driver.as_ref().map(|driver| driver.version);
    python::examine(&mut findings, arguments.python.as_deref(), version, limit);
    let trial = &arguments.trial;
    let gpu = trial.is_wanted.then(|| gpu::examine(&mut findings, trial, devices.driver.as_ref()));
    let problems = findings.count(Level::Problem);
    let text = if arguments.json {
        let mut value = json!({
            "findings": findings.0,
            "problems": problems,
            "warnings": findings.count(Level::Warning),
            "driver": devices.driver,
            "nvml": devices.nvml,
        });
        if let Some(gpu) = gpu {
            value["gpu"] = gpu;
        }
        format!("{value:#}\n")
    } else {
        findings.text(wrap::width())
    };
    output::print(text)?;
    Ok(if problems > 0 { Exit::Failed } else { Exit::Fine })
}
