//! What we declare of CUDA, held to NVIDIA's own headers: signatures, structures and numbers.
//!
//! Nothing here is a list of what we declare. Ours is read from the libraries as the compiler made
//! them, from the sources where a number stands for a name, and from the headers of the tests;
//! theirs from `cuda.h` and `cuda_runtime_api.h`, compiled. Numbers are static assertions;
//! signatures and structures are compared in what both compilers wrote down ([`dwarf`]), which
//! knows every field of every structure that a pointer leads to, without anybody naming them.

mod compare;
mod constants;
mod dwarf;
mod header;
mod ours;
mod wheels;

use std::collections::BTreeSet;
use std::path::Path;

use crate::runner::{Counts, Outcome};

use header::{Header, Mode};
use ours::Declared;

/// Names that look like the driver's and are another library's, of which nothing is simulated:
/// cuFile's.
const OF_OTHERS: &str = "cuFile";

/// The part of the test run.
pub fn part(root: &Path) -> Outcome {
    let headers = match wheels::get(root) {
        Ok(headers) => headers,
        Err(reason) => return Outcome::Skipped(reason),
    };
    match check(root, &headers) {
        Ok(()) => Outcome::Passed(Counts::default()),
        Err(reason) => Outcome::Failed(Counts::default(), reason),
    }
}

fn check(root: &Path, headers: &[wheels::Headers]) -> Result<(), String> {
    let declared = ours::declared(root)?;
    let mut found = Found::default();
    // The newest first: what is a stand-in for its runtime alone is asked of older ones only where
    // the newest has no such function.
    for headers in headers.iter().rev() {
        for mode in Mode::ALL {
            let header = Header::compile(root, headers, mode, &declared)?;
            found.judge(&declared, &header);
        }
    }
    for function in &declared.functions {
        let name = &function.signature.name;
        if !found.known.contains(name.as_str()) && !name.starts_with(OF_OTHERS) {
            found.problems.insert(format!("{} ({}): in no header", name, function.place));
        }
    }
    for constant in &declared.constants {
        if !found.known.contains(constant.name.as_str()) {
            found.problems.insert(format!("{} ({}): in no header", constant.name, constant.place));
        }
    }
    println!(
        "{} declarations of functions and {} numbers of ours: {} comparisons with CUDA {}",
        declared.functions.len(),
        declared.constants.len(),
        found.comparisons,
        headers.iter().map(|headers| headers.version.to_string()).collect::<Vec<_>>().join(" and "),
    );
    if found.problems.is_empty() {
        return Ok(());
    }
    found.problems.iter().for_each(|problem| println!("  {problem}"));
    Err(format!("{} declarations differ from NVIDIA's headers", found.problems.len()))
}

#[derive(Default)]
struct Found<'a> {
    /// Names that some header has.
    known: BTreeSet<&'a str>,
    problems: BTreeSet<String>,
    comparisons: usize,
}

impl<'a> Found<'a> {
    fn judge(&mut self, declared: &'a Declared, header: &Header) {
        let before = self.known.clone();
        for function in &declared.functions {
            let signature = &function.signature;
            let Some(theirs) = header.function(&signature.name) else { continue };
            self.known.insert(&signature.name);
            let of_runtime = signature.name.starts_with("cuda");
            if of_runtime
                && function.newest_runtime_alone
                && before.contains(signature.name.as_str())
            {
                continue;
            }
            self.comparisons += 1;
            for what in compare::differences(signature, theirs, function.is_callee) {
                self.problems.insert(format!(
                    "{} ({}), CUDA {}: {what}",
                    signature.name, function.place, header.version
                ));
            }
        }
        for constant in &declared.constants {
            if header.has_number(&constant.name) {
                self.known.insert(&constant.name);
                self.comparisons += 1;
            }
        }
        self.problems.extend(header.wrong_numbers.iter().cloned());
    }
}
