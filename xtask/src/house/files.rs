//! The Rust files below a folder, as modules.

use std::path::Path;

use super::modules::{self, Module};

/// All modules at and below `folder`, whose own module is `path`: the crate, to begin with.
pub fn read(folder: &Path, path: &str) -> Result<Vec<Module>, String> {
    let mut modules = Vec::new();
    let entries =
        std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let file = entry.map_err(|error| format!("{}: {error}", folder.display()))?.path();
        let Some(stem) = file.file_stem().and_then(|stem| stem.to_str()) else { continue };
        if file.is_dir() {
            modules.extend(read(&file, &format!("{path}::{stem}"))?);
        } else if file.extension().is_some_and(|extension| extension == "rs") {
            let name = if stem == "mod" || stem == "lib" {
                path.to_owned()
            } else {
                format!("{path}::{stem}")
            };
            let text = std::fs::read_to_string(&file)
                .map_err(|error| format!("{}: {error}", file.display()))?;
            modules.push(
                modules::parse(&name, &text)
                    .map_err(|error| format!("{}: {error}", file.display()))?,
            );
        }
    }
    modules.sort_by(|one, two| one.path.cmp(&two.path));
    Ok(modules)
}
