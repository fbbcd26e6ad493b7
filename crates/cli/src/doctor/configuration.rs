//! The configuration in force, and its source.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

use gruyere::config::{Config, Preload, PreloadMode, VARIABLE, logging};
use gruyere::nvtx;
use gruyere_record::size::Size;
use gruyere_record::sweep::{Found, State};

use super::finding::Findings;

/// An environment.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Examines the configuration of this shell, and of running processes.
pub fn examine(findings: &mut Findings, environment: Environment, records: &[Found]) {
    let set = environment(VARIABLE);
    match Config::parse(set.as_deref().unwrap_or("")) {
        Err(error) => findings.problem(
            "configuration",
            error.to_string(),
            format!(
                "correct {VARIABLE} in this environment: with this value, programs under `python \
                 -m gruyere` or `gruyere run` do not start, and those under LD_PRELOAD run without \
                 Gruyère, with an error in the log"
            ),
        ),
        Ok(config) => {
            match &set {
                Some(text) if !text.trim().is_empty() => {
                    findings.ok("configuration", format!("{VARIABLE} in this environment: {text}"));
                }
                _ => findings
                    .ok("configuration", format!("{VARIABLE} is not set here: the defaults apply")),
            }
            consequences(findings, &config, environment);
            preload(findings, &config, environment);
        }
    }
    for name in ["GRUYERE_ENABLE", "GRUYERE_LIBRARY", logging::VARIABLE] {
        let Some(value) = environment(name) else { continue };
        if name == "GRUYERE_LIBRARY" && !Path::new(&value).is_file() {
            findings.problem(
                "configuration",
                format!("{name}={value}: no such file"),
                format!("set it to the path of libgruyere.so, or unset {name}"),
            );
        } else {
            findings.ok("configuration", format!("{name}={value}"));
        }
    }
    for name in ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"] {
        if let Some(value) = environment(name).filter(|value| !value.trim().is_empty()) {
            findings.note(
                "configuration",
                format!(
                    "{name}={value}: a torch setting; `python -m gruyere --doctor` shows which \
                     parts apply with the package. Under LD_PRELOAD torch's allocator stays, and \
                     all parts apply; Gruyère does not see memory that expandable_segments maps \
                     there"
                ),
            );
        }
    }
    running(findings, set.as_deref().unwrap_or(""), records);
}

/// Consequences of settings that are valid in themselves.
fn consequences(findings: &mut Findings, config: &Config, environment: Environment) {
    if let Some(folder) = &config.dump_dir {
        dump_dir(findings, folder);
    }
    if !config.heap.record {
        findings.note(
            "configuration",
            "record:off: `gruyere ps`, `top` and `export` do not see processes with this setting",
        );
    }
    if config.heap.debug.poison || config.heap.debug.sync {
        findings.note("configuration", "debug: is on: programs run slowly, as expected");
    }
    if config.nvtx && environment(nvtx::VARIABLE).is_none() {
        findings.note(
            "configuration",
            format!("nvtx:on, but {} is not set; `nsys profile` sets it", nvtx::VARIABLE),
        );
    }
    if matches!(config.heap.headroom, Size::Percent(share) if share >= 50.0) {
        findings.warning(
            "configuration",
            "headroom: leaves half of the device or more to others",
            "headroom:512MiB is the default",
        );
    }
}

/// The folder of the dumps. A missing one is made, with its parents, by the first dump.
fn dump_dir(findings: &mut Findings, folder: &Path) {
    let named = folder.display();
    let is_there = |folder: &&Path| folder.symlink_metadata().is_ok();
    // A relative one ends in "", which is the current folder.
    let deepest = folder.ancestors().find(is_there).unwrap_or(Path::new("."));
    let fault = match std::fs::metadata(deepest) {
        Err(error) => Some(error.to_string()),
        Ok(found) if !found.is_dir() => Some("not a folder".to_owned()),
        // A nameless file: permissions alone don't tell of a read-only file system, nor of root.
        Ok(_) => tempfile::tempfile_in(deepest).err().map(|error| error.to_string()),
    };
    match fault {
        Some(fault) => findings.warning(
            "configuration",
            format!(
                "dump_dir:{named}: no dump can be written there: {}: {fault}",
                deepest.display()
            ),
            "name a folder that the program may write to; until then, the causes of an \
             out-of-memory are only in its error and the log",
        ),
        None if deepest != folder => findings.note(
            "configuration",
            format!("dump_dir:{named}: does not exist yet; the first dump makes it"),
        ),
        None => {}
    }
}

/// LD_PRELOAD and `preload:`, which require each other.
fn preload(findings: &mut Findings, config: &Config, environment: Environment) {
    let list = environment("LD_PRELOAD").unwrap_or_default();
    let files = || list.split([' ', ':']).filter(|file| !file.is_empty()).map(Path::new);
    let named = |name: &str| {
        files()
            .find(|file| file.file_name().is_some_and(|found| found == std::ffi::OsStr::new(name)))
    };
    let library = named("libgruyere.so");
    for file in ["libgruyere.so", "libgruyere_driver.so"].into_iter().filter_map(named) {
        // Without a slash, the loader searches the library path.
        if file.components().count() > 1 && !file.is_file() {
            findings.problem(
                "configuration",
                format!("LD_PRELOAD names {}: no such file", file.display()),
                "correct LD_PRELOAD, or use `gruyere run`",
            );
        }
    }
    let lacks_driver = config.preload.driver && named("libgruyere_driver.so").is_none();
    match library {
        None if config.preload != Preload::default() => findings.note(
            "configuration",
            "preload: is set, but LD_PRELOAD does not name libgruyere.so: it applies only under \
             `gruyere run`",
        ),
        Some(_) if config.preload.mode == PreloadMode::Off => findings.note(
            "configuration",
            "preload:off: libgruyere.so is preloaded, but passes all calls through",
        ),
        Some(_) if lacks_driver => findings.warning(
            "configuration",
            "preload:driver is set, but LD_PRELOAD does not name libgruyere_driver.so: Gruyère \
             does not see driver calls",
            "put libgruyere_driver.so before libgruyere.so there, or use `gruyere run`",
        ),
        Some(file) => findings.ok(
            "configuration",
            format!(
                "LD_PRELOAD has {}: programs in this environment are managed or watched",
                file.display()
            ),
        ),
        None => {}
    }
}

/// Running processes whose configuration differs from this shell's.
fn running(findings: &mut Findings, here: &str, records: &[Found]) {
    let mut by_text: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for found in records.iter().filter(|found| found.state != State::Stale) {
        let Ok(reader) = &found.reader else { continue };
        let process = reader.process();
        if process.configuration.trim() != here.trim() {
            by_text.entry(process.configuration).or_default().push(process.pid);
        }
    }
    for (text, pids) in by_text.into_iter().take(8) {
        let some: Vec<String> = pids.iter().take(8).map(u64::to_string).collect();
        let text = if text.trim().is_empty() { "the defaults" } else { text.trim() };
        findings.note(
            "configuration",
            format!("{} processes ({}) run with {text}", pids.len(), some.join(", ")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;

    fn found(set: &[(&str, &str)]) -> Findings {
        let mut findings = Findings::default();
        let environment = |name: &str| {
            set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        examine(&mut findings, &environment, &[]);
        findings
    }

    #[test]
    fn what_is_set_is_told_and_what_is_wrong_is_a_problem() {
        let plain = found(&[]);
        assert_eq!((plain.count(Level::Problem), plain.count(Level::Warning)), (0, 0));
        assert!(plain.text(None).contains("the defaults apply"));
        let wrong = found(&[
            ("GRUYERE_CONF", "slack:none,limits:1GiB"),
            ("GRUYERE_LIBRARY", "/nowhere/libgruyere.so"),
        ]);
        assert_eq!(wrong.count(Level::Problem), 2, "{}", wrong.text(None));
        assert!(
            wrong.text(None).contains("limits:1GiB")
                && wrong.text(None).contains("/nowhere/libgruyere.so")
        );
        let odd = found(&[
            ("GRUYERE_CONF", "dump_dir:/dev/null/x,record:off,nvtx:on"),
            ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ]);
        assert_eq!(
            (odd.count(Level::Problem), odd.count(Level::Warning)),
            (0, 1),
            "{}",
            odd.text(None)
        );
        assert_eq!(odd.count(Level::Note), 3, "{}", odd.text(None));
    }

    #[test]
    fn a_dump_dir_that_the_first_dump_makes_is_no_fault_and_one_that_can_not_be_made_is() {
        let there = tempfile::tempdir().expect("a folder");
        let there = there.path().to_str().expect("text");
        let told = |folder: &str| found(&[("GRUYERE_CONF", &format!("dump_dir:{folder}"))]);
        let missing = told(&format!("{there}/a/b"));
        assert_eq!((missing.count(Level::Warning), missing.count(Level::Note)), (0, 1));
        assert!(missing.text(None).contains("the first dump makes it"), "{}", missing.text(None));
        assert!(!std::path::Path::new(there).join("a").exists(), "the doctor makes nothing");
        let present = told(there);
        assert_eq!((present.count(Level::Warning), present.count(Level::Note)), (0, 0));
        std::fs::write(format!("{there}/file"), "").expect("written");
        for bad in ["file", "file/below"] {
            let bad = told(&format!("{there}/{bad}"));
            assert!(bad.text(None).contains("not a folder"), "{}", bad.text(None));
            assert_eq!(bad.count(Level::Warning), 1, "{}", bad.text(None));
        }
    }

    #[test]
    fn a_bad_value_is_told_with_what_it_does_in_each_way_in() {
        let told = found(&[("GRUYERE_CONF", "limit:1G")]).text(None);
        assert!(told.contains("do not start"), "{told}");
        assert!(told.contains("under LD_PRELOAD run without Gruyère"), "{told}");
    }

    #[test]
    fn what_preload_and_ld_preload_lack_of_each_other_is_told() {
        let told = |conf: &str, list: &str| found(&[("GRUYERE_CONF", conf), ("LD_PRELOAD", list)]);
        let alone = told("preload:observe", "");
        assert_eq!(alone.count(Level::Note), 1, "{}", alone.text(None));
        let missing = told("", "x.so:/nowhere/libgruyere.so");
        assert_eq!(missing.count(Level::Problem), 1, "{}", missing.text(None));
        let half = told("preload:driver", "libgruyere.so");
        assert!(
            half.count(Level::Warning) == 1 && half.text(None).contains("libgruyere_driver.so"),
            "{}",
            half.text(None)
        );
        let whole = told("preload:driver", "libgruyere_driver.so libgruyere.so");
        assert_eq!(
            (whole.count(Level::Problem), whole.count(Level::Warning)),
            (0, 0),
            "{}",
            whole.text(None)
        );
        assert_eq!(told("preload:off", "libgruyere.so").count(Level::Note), 1);
    }
}
