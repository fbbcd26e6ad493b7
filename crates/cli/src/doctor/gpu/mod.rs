//! `gruyere doctor --gpu`: the probe and a short stress on the first visible device, and their
//! meaning for a program.
//!
//! Both are C programs built into the command ([`program`]); each runs in a process of its own,
//! within a time limit ([`place`]).
#![deny(unsafe_code, clippy::unwrap_used)]

mod place;
#[allow(unsafe_code)]
pub mod program;
mod rules;
mod stress;

use std::path::PathBuf;
use std::time::Duration;

use gruyere::config::{Config, VARIABLE};
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::devices::DriverFacts;
use super::finding::Findings;
use super::probe::Silence;
use crate::run::library;
use place::{Place, Ran};
use program::Program;

/// What is asked for.
#[derive(clap::Args)]
pub struct Trial {
    /// Also test the first visible GPU, for about a minute and a half: the rules of its driver and
    /// the cost of calls (the probe), and whether blocks keep their contents (a 20 s stress test).
    /// This briefly takes most of the free memory.
    #[arg(long = "gpu")]
    pub is_wanted: bool,
    /// The libgruyere.so to stress. Default: the one that `gruyere run` finds ($GRUYERE_LIBRARY,
    /// beside this command, the Python package's).
    #[arg(long, value_name = "PATH", requires = "is_wanted")]
    library: Option<PathBuf>,
    /// Keep the results of the probe and the stress test in FOLDER: probe.json (also a file for
    /// `gruyere bench --prices`), stress.json, and their output.
    #[arg(long, value_name = "FOLDER", requires = "is_wanted")]
    out: Option<PathBuf>,
    /// More options of the probe, and of the canaries: for tests.
    #[arg(long, hide = true, value_name = "WORDS", default_value = "")]
    probe_with: String,
    #[arg(long, hide = true, value_name = "WORDS", default_value = "")]
    stress_with: String,
    /// Lowers the limits of both: for tests.
    #[arg(long, hide = true, value_name = "SECONDS", default_value_t = u64::MAX)]
    gpu_limit: u64,
}

/// The probe takes a minute; its cases' own limits end a case that hangs.
const PROBE_LIMIT: u64 = 240;
const STRESS_SECONDS: u64 = 20;
/// Machines with many GPUs create contexts slowly.
const STRESS_LIMIT: u64 = STRESS_SECONDS + 100;

/// Examines the device. Returns the programs' output, for `--json`.
pub fn examine(findings: &mut Findings, trial: &Trial, driver: Option<&DriverFacts>) -> Value {
    let mut told = json!({ "probe": null, "stress": null, "folder": null });
    if !driver.is_some_and(DriverFacts::has_a_device) {
        findings.note(
            "probe",
            "not run, nor the stress test: there is no usable device (see driver, above)",
        );
        return told;
    }
    let place = match Place::make(trial.out.as_deref()) {
        Ok(place) => place,
        Err(error) => {
            findings.problem("files", error.text, error.remedy);
            return told;
        }
    };
    let files = place.name();
    let limit = |seconds: u64| Duration::from_secs(seconds.min(trial.gpu_limit));

    let probe = place.run(Program::Probe, "probe", &words(&trial.probe_with), limit(PROBE_LIMIT));
    judge_probe(findings, &probe, &files);
    if probe.is_whole() {
        match library::find(trial.library.as_deref(), false) {
            Err(failure) => findings.problem(
                "stress",
                format!("not run: {failure}"),
                "once the library is there, run gruyere doctor --gpu",
            ),
            Ok(found) => {
                let seconds = STRESS_SECONDS.to_string();
                let mut all: Vec<String> =
                    ["--seconds", &seconds, "--threads", "4", "--destroy-streams"]
                        .map(str::to_owned)
                        .into();
                all.extend(["--library".to_owned(), found.library.display().to_string()]);
                all.extend(words(&trial.stress_with));
                let stress = place.run(Program::Canaries, "stress", &all, limit(STRESS_LIMIT));
                judge_stress(findings, &stress, &files);
                told["stress"] = stress.document.unwrap_or_default();
            }
        }
    } else {
        findings.note("stress", "not run: the probe did not finish");
    }
    told["probe"] = probe.document.unwrap_or_default();
    let is_named = |remedy: &String| remedy.contains(&files);
    match place.keep(findings.0.iter().filter_map(|finding| finding.remedy.as_ref()).any(is_named))
    {
        Ok(Some(folder)) => {
            findings.ok("files", format!("the probe and stress files are in {}", folder.display()));
            told["folder"] = json!(folder);
        }
        Ok(None) => {}
        Err(error) => findings.problem("files", error.text, error.remedy),
    }
    told
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn judge_probe(findings: &mut Findings, probe: &Ran, files: &str) {
    match probe.document.as_ref().map(rules::Document::deserialize) {
        Ok(Ok(document)) if probe.is_whole() => {
            // An invalid configuration is a finding of its own.
            let config =
                Config::parse(&std::env::var(VARIABLE).unwrap_or_default()).unwrap_or_default();
            rules::examine(findings, &document, config.heap.backing, files);
        }
        Ok(Err(reason)) if probe.is_whole() => no_document(findings, "probe", &reason, files),
        _ => {
            let trouble = probe.trouble();
            let (within, remedy) = match &probe.ended {
                Err(Silence::TooLate(_)) => (
                    probe.case().map_or(String::new(), |case| format!(", in the case {case}")),
                    "the driver hangs: see the kernel log (`dmesg | grep -i nvrm`); a GPU that \
                     hangs needs a reset or a reboot"
                        .to_owned(),
                ),
                Ok(status) if status.code() == Some(2) => (
                    String::new(),
                    "the first visible device must be free to use: nvidia-smi -q -d COMPUTE,ECC; \
                     CUDA_VISIBLE_DEVICES names another"
                        .to_owned(),
                ),
                _ => (String::new(), format!("report it with {files}")),
            };
            findings.problem("probe", format!("{trouble}{within}"), remedy);
        }
    }
}

fn no_document(
    findings: &mut Findings,
    area: &'static str,
    reason: &serde_json::Error,
    files: &str,
) {
    findings.problem(
        area,
        format!("its document is invalid: {reason}"),
        format!("report it with {files}"),
    );
}

fn judge_stress(findings: &mut Findings, stress: &Ran, files: &str) {
    match stress.document.as_ref().map(stress::Document::deserialize) {
        Ok(Ok(document)) if stress.code().is_some() => stress::examine(findings, &document, files),
        // The device faulted.
        _ if stress.code() == Some(stress::CORRUPTION) => {
            stress::corruption(findings, &stress.trouble().to_string(), files);
        }
        Ok(Err(reason)) if stress.code() == Some(0) => {
            no_document(findings, "stress", &reason, files)
        }
        _ => findings.problem(
            "stress",
            stress.trouble().to_string(),
            format!("report it with {files}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::super::finding::Level;
    use super::*;

    fn ran(status: i32, words: &str, document: Result<Value, String>) -> Ran {
        Ran { ended: Ok(ExitStatus::from_raw(status)), words: words.to_owned(), document }
    }

    fn told(judge: fn(&mut Findings, &Ran, &str), ran: &Ran) -> String {
        let mut findings = Findings::default();
        judge(&mut findings, ran, "/tmp/x");
        assert_eq!(findings.count(Level::Problem), 1, "{}", findings.text(None));
        findings.text(None)
    }

    #[test]
    fn documents_that_are_none_are_problems_with_their_reason() {
        let text = told(judge_probe, &ran(0, "[facts]\n", Err("EOF".to_owned())));
        assert!(text.contains("its document: EOF") && text.contains("/tmp/x"), "{text}");
        for (judge, document) in [
            (judge_probe as fn(&mut Findings, &Ran, &str), json!({ "rules": 7 })),
            (judge_stress, json!({ "wrong": -1 })),
        ] {
            let text = told(judge, &ran(0, "", Ok(document)));
            assert!(text.contains("its document is invalid") && text.contains("/tmp/x"), "{text}");
        }
    }

    #[test]
    fn a_probe_that_is_interrupted_says_where() {
        let text = told(judge_probe, &ran(libc::SIGTERM, "[facts]\n[many]\n", Err(String::new())));
        assert!(text.contains("killed by signal 15: [many]"), "{text}");
        let hung = Ran {
            ended: Err(Silence::TooLate(Duration::from_secs(240))),
            ..ran(0, "[facts]\n[many]\n", Err(String::new()))
        };
        let text = told(judge_probe, &hung);
        assert!(
            text.contains("no answer within 240 s, in the case many") && text.contains("dmesg"),
            "{text}"
        );
    }

    #[test]
    fn a_device_that_faults_under_the_stress_is_corruption() {
        let none = || Err("No such file".to_owned());
        let text =
            told(judge_stress, &ran(3 << 8, "main.c:180: cuEventRecord answered 700\n", none()));
        assert!(text.contains("CORRUPTION") && text.contains("answered 700"), "{text}");
        let text = told(judge_stress, &ran(9, "", none()));
        assert!(text.contains("killed by signal 9") && !text.contains("CORRUPTION"), "{text}");
    }
}
