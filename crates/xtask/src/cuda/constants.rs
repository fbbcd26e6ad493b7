//! Numbers in our sources that stand for CUDA's names.
//!
//! Three notations, all in use before this check existed:
//!
//! ```text
//! /// `CUDA_ERROR_INVALID_VALUE`, and whatever else is to be said.
//! const INVALID_VALUE: u32 = 1;
//!
//! const CU_STREAM_NON_BLOCKING: u32 = 1;
//!
//! 2 => (c"CUDA_ERROR_OUT_OF_MEMORY", ...
//! ```

use std::path::{Path, PathBuf};

use super::dwarf::is_cudas;

/// A number, and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    pub name: String,
    pub value: i128,
    /// File and line.
    pub place: String,
}

/// The constants in Rust files under `folder`.
pub fn under(root: &Path, folder: &str) -> Result<Vec<Constant>, String> {
    let mut files = Vec::new();
    collect(&root.join(folder), &mut files).map_err(|error| format!("{folder}: {error}"))?;
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let name = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        found.extend(in_text(&text, &name));
    }
    Ok(found)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn in_text(text: &str, file: &str) -> Vec<Constant> {
    let mut documented: Vec<String> = Vec::new();
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix("///") {
            if documented.is_empty() {
                documented = names_at_start(comment);
            }
            continue;
        }
        let place = || format!("{file}:{}", index + 1);
        if let Some((own, value)) = constant(line) {
            let names =
                if is_cudas(own) { vec![own.to_owned()] } else { std::mem::take(&mut documented) };
            found.extend(names.into_iter().map(|name| Constant { name, value, place: place() }));
        } else if let Some((name, value)) = arm(line) {
            found.push(Constant { name, value, place: place() });
        }
        documented.clear();
    }
    found
}

/// The names at the start of a comment: `` `A` `` or `` `A` and `B` ``.
fn names_at_start(comment: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut rest = comment.trim_start();
    while let Some((name, after)) = rest.strip_prefix('`').and_then(|rest| rest.split_once('`')) {
        if !is_cudas(name)
            || !name.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_')
        {
            break;
        }
        names.push(name.to_owned());
        rest = after.trim_start();
        rest = rest.strip_prefix("and ").unwrap_or(rest);
    }
    names
}

/// `const NAME: TYPE = 1;`, with any visibility.
fn constant(line: &str) -> Option<(&str, i128)> {
    let (_, after) = line
        .split_once("const ")
        .filter(|(before, _)| before.is_empty() || before.starts_with("pub"))?;
    let (name, after) = after.split_once(':')?;
    let value = after.split_once('=')?.1.split(';').next()?;
    Some((name.trim(), literal(value)?))
}

/// `2 => (c"CUDA_ERROR_OUT_OF_MEMORY", ...`.
fn arm(line: &str) -> Option<(String, i128)> {
    let (value, after) = line.split_once("=> (c\"")?;
    let name = after.split('"').next().filter(|name| is_cudas(name))?;
    Some((name.to_owned(), literal(value)?))
}

fn literal(text: &str) -> Option<i128> {
    let text = text.trim().replace('_', "");
    match text.strip_prefix("0x") {
        Some(digits) => i128::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_of_naming_a_number_is_read() {
        let text = "
            /// `CU_STREAM_NON_BLOCKING` and `cudaStreamNonBlocking`: not behind the legacy stream.
            pub(super) const NON_BLOCKING: u32 = 0x1;
            const CU_DEVICE_ATTRIBUTE_WARP_SIZE: i32 = 10;
            2 => (c\"CUDA_ERROR_OUT_OF_MEMORY\", c\"out of memory\"),
            /// What `CUDA_ERROR_UNKNOWN` is not.
            const OTHER: u32 = 5;
            /// `CUresult` is a type.
            const TYPE: u32 = 6;
        ";
        let found: Vec<_> =
            in_text(text, "f").into_iter().map(|it| (it.name, it.value, it.place)).collect();
        let told = |name: &str, value, line: u32| (name.to_owned(), value, format!("f:{line}"));
        assert_eq!(
            found,
            [
                told("CU_STREAM_NON_BLOCKING", 1, 3),
                told("cudaStreamNonBlocking", 1, 3),
                told("CU_DEVICE_ATTRIBUTE_WARP_SIZE", 10, 4),
                told("CUDA_ERROR_OUT_OF_MEMORY", 2, 5),
            ]
        );
    }
}
