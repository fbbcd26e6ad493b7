//! Compares our CUDA declarations with NVIDIA's own headers: signatures, structures and numbers.
//!
//! Nothing here lists our declarations. Ours come from the compiled libraries, from the sources for
//! numbers that stand for names, and from the headers of the tests; NVIDIA's from `cuda.h` and
//! `cuda_runtime_api.h`, compiled. Static assertions check numbers; the debug information of both
//! compilers ([`dwarf`]) provides signatures and structures, with every field of every structure
//! behind a pointer, without a list of names.

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

/// Names that look like the driver's but belong to another library, which is not simulated: cuFile.
const OF_OTHERS: &str = "cuFile";

/// This part of the test run.
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
    // Newest first: older runtimes check a stand-in for a single runtime only if the newest has no
    // such function.
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
    /// Names in some header.
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
