//! include/gruyere.h, made by cbindgen from the exported functions.

use std::path::Path;
use std::process::Command;

use crate::parts::output;
use crate::runner::{Counts, Outcome};
use crate::said::Reason;
use crate::tools;

const PATH: &str = "include/gruyere.h";
/// Where the exported functions and their types are.
const SOURCE: &str = "src/door/mod.rs";

/// The header, as the code has it now.
fn generate(root: &Path) -> Result<Vec<u8>, String> {
    let file = root.join("cbindgen.toml");
    let config =
        cbindgen::Config::from_file(file).map_err(|error| format!("cbindgen.toml: {error}"))?;
    // Only the door and its modules: what it exports is the interface, and public constants of
    // other modules are not.
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join(SOURCE))
        .generate()
        .map_err(|error| format!("cbindgen: {error}"))?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    Ok(header)
}

/// The part of the test run; without a C++ compiler the header is held to C alone.
pub fn part(root: &Path) -> Outcome {
    let has_cpp = tools::find(root, "c++").is_some();
    match check(root, if has_cpp { &LANGUAGES } else { &LANGUAGES[..1] }) {
        Err(reason) => Outcome::Failed(Counts::default(), reason),
        Ok(()) if has_cpp => Outcome::Passed(Counts::default()),
        Ok(()) => {
            let reasons = [(Reason::Lacks("c++".to_owned()), 1)].into();
            Outcome::Passed(Counts { skipped: 1, reasons, ..Counts::default() })
        }
    }
}

/// What the header is valid in, each with its compiler.
const LANGUAGES: [(&str, &str); 2] = [("c", "cc"), ("c++", "c++")];

/// Fails where the committed header differs from the code, or is not valid in these languages.
fn check(root: &Path, languages: &[(&str, &str)]) -> Result<(), String> {
    let path = root.join(PATH);
    let committed = std::fs::read(&path).map_err(|error| format!("{PATH}: {error}"))?;
    if committed != generate(root)? {
        return Err(format!("{PATH} is stale: run `cargo xtask header`"));
    }
    for (language, compiler) in languages {
        output(
            Command::new(compiler)
                .args(["-x", language, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"])
                .arg(&path),
        )?;
        println!("{PATH} is fresh and valid {}", language.to_uppercase());
    }
    Ok(())
}

/// Writes the header.
pub fn write(root: &Path) -> Result<(), String> {
    let path = root.join(PATH);
    let folder = path.parent().ok_or("no folder")?;
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    std::fs::write(&path, generate(root)?).map_err(|error| format!("{}: {error}", path.display()))
}
