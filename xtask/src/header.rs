//! include/gruyere.h, made by cbindgen from the exported functions.

use std::path::Path;

const PATH: &str = "include/gruyere.h";

/// The header, as the code has it now.
fn generate(root: &Path) -> Result<Vec<u8>, String> {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml"))
        .map_err(|error| format!("cbindgen.toml: {error}"))?;
    let bindings = cbindgen::Builder::new()
        .with_crate(root)
        .with_config(config)
        .generate()
        .map_err(|error| format!("cbindgen: {error}"))?;
    let mut header = Vec::new();
    bindings.write(&mut header);
    Ok(header)
}

/// Fails where the committed header differs from the code.
pub fn check(root: &Path) -> Result<(), String> {
    let committed = std::fs::read(root.join(PATH)).map_err(|error| format!("{PATH}: {error}"))?;
    if committed == generate(root)? {
        println!("{PATH} is fresh");
        Ok(())
    } else {
        Err(format!("{PATH} is stale: run `cargo xtask header`"))
    }
}

/// Writes the header.
pub fn write(root: &Path) -> Result<(), String> {
    let path = root.join(PATH);
    let folder = path.parent().ok_or("no folder")?;
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    std::fs::write(&path, generate(root)?).map_err(|error| format!("{}: {error}", path.display()))
}
