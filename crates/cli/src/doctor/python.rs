//! torch and the package `gruyere`, as an interpreter would find them. Imports neither: an import
//! takes seconds, and may hang as the driver may. `python -m gruyere --doctor` checks whether they
//! work together.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::finding::Findings;
use super::probe::{Silence, ask};

/// Prints an interpreter's facts; finds specs and reads files, and imports nothing of either
/// package.
const SCRIPT: &str = r#"
import importlib.metadata, importlib.util, json, os, platform, re, sys
def found(name):
    try:
        spec = importlib.util.find_spec(name)
    except Exception:
        return None
    return os.path.dirname(spec.origin) if spec and spec.origin else None
def version(name):
    try:
        return importlib.metadata.version(name)
    except Exception:
        return None
torch, cuda = found("torch"), None
if torch:
    try:
        text = open(os.path.join(torch, "version.py")).read()
        match = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]([0-9.]+)['\"]", text, re.M)
        cuda = match.group(1) if match else None
    except OSError:
        pass
gruyere = found("gruyere")
library = gruyere and os.path.join(gruyere, "libgruyere.so")
print(json.dumps({
    "python": platform.python_version(), "executable": sys.executable,
    "torch": torch, "torch_version": version("torch"), "cuda": cuda,
    "gruyere": gruyere, "gruyere_version": version("gruyere"),
    "library": bool(library and os.path.isfile(library)),
}))
"#;

#[derive(Deserialize)]
struct Says {
    python: String,
    executable: String,
    torch: Option<String>,
    torch_version: Option<String>,
    cuda: Option<String>,
    gruyere: Option<String>,
    gruyere_version: Option<String>,
    library: bool,
}

/// `python -P` needs 3.11; in older ones, too, a file of the current folder must not stand in for
/// torch.
const ELSEWHERE: &str = "/";

/// Examines the packages of `python`. `driver`: the driver's CUDA version, if it works.
pub fn examine(
    findings: &mut Findings,
    python: Option<&Path>,
    driver: Option<i32>,
    limit: Duration,
) {
    // The PATH resolves a name; a path is relative to this folder, wherever the command runs.
    let program = match python {
        Some(path) if path.components().count() > 1 => {
            std::path::absolute(path).unwrap_or(path.to_owned())
        }
        other => other.unwrap_or(Path::new("python3")).to_owned(),
    };
    let answer = ask(Command::new(&program).args(["-c", SCRIPT]).current_dir(ELSEWHERE), limit)
        .and_then(|text| {
            serde_json::from_str::<Says>(&text).map_err(|error| Silence::Died(error.to_string()))
        });
    let says = match answer {
        Ok(says) => says,
        Err(silence) => {
            let text = format!("{}: {silence}", program.display());
            match python {
                Some(_) => findings.problem(
                    "python",
                    text,
                    "name the interpreter of your programs with --python",
                ),
                None => findings.note("python", format!("{text}; --python names another")),
            }
            return;
        }
    };
    findings.ok("python", format!("{} at {}", says.python, says.executable));
    torch(findings, &says, driver);
    package(findings, &says);
}

/// Major and minor version.
fn two(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

fn torch(findings: &mut Findings, says: &Says, driver: Option<i32>) {
    let (Some(place), Some(version)) = (&says.torch, &says.torch_version) else {
        findings.note("torch", "not found by this interpreter; --python names another");
        return;
    };
    let Some(cuda) = &says.cuda else {
        findings.warning(
            "torch",
            format!("{version} in {place} is built without CUDA"),
            "install a build for CUDA (pytorch.org, Get started)",
        );
        return;
    };
    let text = format!("{version} for CUDA {cuda} in {place}");
    let major = driver.map(|driver| driver as u32 / 1000);
    match (two(cuda), major) {
        _ if two(version).is_some_and(|version| version < (2, 4)) => {
            findings.problem("torch", text, "Gruyère needs PyTorch 2.4 or newer");
        }
        (Some((needs, _)), Some(has)) if needs > has => findings.problem(
            "torch",
            format!("{text}, but the driver supports only CUDA {has}"),
            format!("install a driver for CUDA {needs} or newer, or a torch for CUDA {has}"),
        ),
        _ => findings.ok("torch", text),
    }
}

fn package(findings: &mut Findings, says: &Says) {
    const OURS: &str = env!("CARGO_PKG_VERSION");
    let Some(place) = &says.gruyere else {
        findings.note(
            "package",
            "`gruyere` is not installed for this interpreter; `pip install ./python_loader` in a \
             clone of the repository makes `gruyere.enable()` and GRUYERE_ENABLE=1 work",
        );
        return;
    };
    let Some(version) = &says.gruyere_version else {
        findings.warning(
            "package",
            format!(
                "gruyere in {place} is importable but not installed: GRUYERE_ENABLE=1 has no effect"
            ),
            "`pip install ./python_loader` in a clone of the repository",
        );
        return;
    };
    let text = format!("gruyere {version} in {place}");
    if version != OURS {
        findings.warning(
            "package",
            format!("{text}, but this command is {OURS}: they may not read each other's records"),
            "install both from one wheel (pip install --force-reinstall gruyere), or use the \
             command beside that interpreter",
        );
    } else if !says.library && std::env::var_os("GRUYERE_LIBRARY").is_none() {
        findings.problem(
            "package",
            format!("{text} has no libgruyere.so"),
            "install it again: the wheel was built without the library",
        );
    } else {
        findings.ok("package", format!("{text}; `python -m gruyere --doctor` tests it"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    fn says() -> Says {
        Says {
            python: "3.12.1".into(),
            executable: "/usr/bin/python3".into(),
            torch: Some("/x/torch".into()),
            torch_version: Some("2.11.0+cu130".into()),
            cuda: Some("13.0".into()),
            gruyere: Some("/x/gruyere".into()),
            gruyere_version: Some(env!("CARGO_PKG_VERSION").into()),
            library: true,
        }
    }

    fn level(says: &Says, driver: Option<i32>) -> Level {
        let mut findings = Findings::default();
        torch(&mut findings, says, driver);
        package(&mut findings, says);
        findings.0.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
    }

    #[test]
    fn what_does_not_fit_together_is_told() {
        assert_eq!(level(&says(), Some(13000)), Level::Ok);
        assert_eq!(level(&says(), None), Level::Ok);
        assert_eq!(
            level(&says(), Some(12080)),
            Level::Problem,
            "a driver of CUDA 12 runs no CUDA 13"
        );
        assert_eq!(
            level(&Says { cuda: Some("12.9".into()), ..says() }, Some(12020)),
            Level::Ok,
            "minor versions do not matter"
        );
        assert_eq!(
            level(&Says { torch_version: Some("2.3.1".into()), ..says() }, Some(13000)),
            Level::Problem
        );
        assert_eq!(level(&Says { cuda: None, ..says() }, Some(13000)), Level::Warning);
        assert_eq!(
            level(&Says { gruyere_version: Some("0.0.9".into()), ..says() }, None),
            Level::Warning
        );
        assert_eq!(level(&Says { gruyere_version: None, ..says() }, None), Level::Warning);
        assert_eq!(level(&Says { gruyere: None, torch: None, ..says() }, None), Level::Note);
        assert_eq!(level(&Says { library: false, ..says() }, None), Level::Problem);
    }
}
