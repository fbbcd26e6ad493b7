//! include/gruyere.h, made by cbindgen from the exported functions.

use std::path::Path;
use std::process::Command;

use crate::parts::output;

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

/// Fails where the committed header differs from the code, or is not valid C and C++.
pub fn check(root: &Path) -> Result<(), String> {
    let path = root.join(PATH);
    let committed = std::fs::read(&path).map_err(|error| format!("{PATH}: {error}"))?;
    if committed != generate(root)? {
        return Err(format!("{PATH} is stale: run `cargo xtask header`"));
    }
    for language in ["-xc", "-xc++"] {
        let compiler = if language == "-xc" { "cc" } else { "c++" };
        output(
            Command::new(compiler)
                .args([language, "-fsyntax-only", "-Wall", "-Wextra", "-Werror"])
                .arg(&path),
        )?;
    }
    println!("{PATH} is fresh, valid C and valid C++");
    Ok(())
}

/// Writes the header.
pub fn write(root: &Path) -> Result<(), String> {
    let path = root.join(PATH);
    let folder = path.parent().ok_or("no folder")?;
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    std::fs::write(&path, generate(root)?).map_err(|error| format!("{}: {error}", path.display()))
}
