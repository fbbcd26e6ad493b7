//! NVIDIA's compiled headers: the functions that they declare, and whether our numbers equal
//! theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::dwarf::{self, Model, Signature};
use super::ours::Declared;
use super::wheels::Headers;
use crate::parts::output;

/// Settings under which the headers declare different names.
#[derive(Clone, Copy, Debug)]
pub enum Mode {
    /// As for a program.
    Plain,
    /// With the thread's own stream as stream 0: the functions with the suffixes `_ptsz` and
    /// `_ptds`.
    PerThread,
    /// With older versions of functions, under the names that libcuda exports.
    Old,
}

impl Mode {
    pub const ALL: [Self; 3] = [Self::Plain, Self::PerThread, Self::Old];

    fn definition(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::PerThread => Some("-DCUDA_API_PER_THREAD_DEFAULT_STREAM"),
            Self::Old => Some("-D__CUDA_API_VERSION_INTERNAL"),
        }
    }
}

/// The headers to check against.
const INCLUDES: &str = "#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cudaProfiler.h>
#include <cuda_profiler_api.h>
";

/// Headers of a version, in a mode.
pub struct Header {
    pub version: u32,
    functions: BTreeMap<String, Signature>,
    text: Text,
    /// The compiler's errors about our numbers.
    pub wrong_numbers: Vec<String>,
}

/// The C names after the preprocessor.
struct Text {
    /// Names before an opening parenthesis.
    called: BTreeSet<String>,
    /// Possible numbers: words, and macros.
    numbers: BTreeSet<String>,
}

/// Prefix of variables with the type of a function's address.
const ADDRESS_OF: &str = "address_of_";

impl Header {
    pub fn compile(
        root: &Path,
        headers: &Headers,
        mode: Mode,
        declared: &Declared,
    ) -> Result<Self, String> {
        let folder = root.join("target/cuda-headers");
        let stem = folder.join(format!("check-{}-{mode:?}", headers.version));
        let mut flags: Vec<_> =
            headers.folders.iter().map(|folder| format!("-I{}", folder.display())).collect();
        flags.extend(mode.definition().map(str::to_owned));
        let read = |more: &[&str]| preprocess(&stem, INCLUDES, &flags, more);
        let text = Text::of(&read(&[])?, &read(&["-dM"])?);
        let names = declared.functions.iter().map(|function| function.signature.name.as_str());
        let model = declarations(&stem, INCLUDES, &flags, &text.declared_of(names))?;
        let functions =
            model.functions.into_iter().map(|function| (function.name.clone(), function)).collect();
        let mut header =
            Self { version: headers.version, functions, text, wrong_numbers: Vec::new() };
        header.wrong_numbers = header.check_numbers(&stem, &flags, declared)?;
        Ok(header)
    }

    pub fn function(&self, name: &str) -> Option<&Signature> {
        self.functions.get(name)
    }

    pub fn has_number(&self, name: &str) -> bool {
        self.text.numbers.contains(name)
    }

    /// Checks our numbers as static assertions; returns those that the compiler refuses.
    fn check_numbers(
        &self,
        stem: &Path,
        flags: &[String],
        declared: &Declared,
    ) -> Result<Vec<String>, String> {
        let mut code = INCLUDES.to_owned();
        for constant in declared.constants.iter().filter(|constant| self.has_number(&constant.name))
        {
            let (name, value) = (&constant.name, constant.value);
            let message =
                format!("{name} ({}) is not {value} in CUDA {}", constant.place, self.version);
            let _ =
                writeln!(code, "_Static_assert((long long)({name}) == {value}LL, \"{message}\");");
        }
        let file = written(stem, "numbers", &code)?;
        let said =
            Command::new("cc").args(["-std=c11", "-fsyntax-only"]).args(flags).arg(&file).output();
        let said = said.map_err(|error| format!("cc: {error}"))?;
        if said.status.success() {
            return Ok(Vec::new());
        }
        let said = String::from_utf8_lossy(&said.stderr).into_owned();
        let failed: Vec<_> = said
            .lines()
            .filter(|line| line.contains("assert"))
            .filter_map(|line| Some(line.split('"').nth(1)?.to_owned()))
            .collect();
        if failed.is_empty() { Err(format!("{}: {said}", file.display())) } else { Ok(failed) }
    }
}

impl Text {
    fn of(code: &str, macros: &str) -> Self {
        let called = functions_in(code).map(str::to_owned).collect();
        let defined = macros
            .lines()
            .filter_map(|line| line.strip_prefix("#define ")?.split([' ', '(']).next());
        let numbers = words(code)
            .map(|(_, word)| word)
            .chain(defined)
            .filter(|word| dwarf::is_cudas(word))
            .map(str::to_owned)
            .collect();
        Self { called, numbers }
    }

    /// The `names` that are declared as functions.
    fn declared_of<'n>(&self, names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
        names
            .filter(|name| self.called.contains(*name))
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }
}

/// The words of C code, with their ends.
fn words(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut at = 0;
    code.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').filter_map(
        move |word| {
            let end = at + word.len();
            at = end + 1;
            (!word.is_empty()).then_some((end, word))
        },
    )
}

/// Whether a word names a function of the driver or the runtime.
pub fn is_function_of_cuda(word: &str) -> bool {
    let rest = word.strip_prefix("cuda").or_else(|| word.strip_prefix("cu"));
    let is_name = word.chars().all(|letter| letter.is_ascii_alphanumeric() || letter == '_');
    is_name && rest.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}

/// The names of CUDA's functions before an opening parenthesis in `code`, once or more each.
pub fn functions_in(code: &str) -> impl Iterator<Item = &str> {
    let is_called = |end: usize| code[end..].trim_start().starts_with('(');
    words(code)
        .filter(move |&(end, word)| is_function_of_cuda(word) && is_called(end))
        .map(|(_, word)| word)
}

fn written(stem: &Path, what: &str, code: &str) -> Result<PathBuf, String> {
    let file = PathBuf::from(format!("{}-{what}.c", stem.display()));
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    std::fs::write(&file, code).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(file)
}

/// The code of C headers after the preprocessor; with `-dM`, its macros.
pub fn preprocess(
    stem: &Path,
    includes: &str,
    flags: &[String],
    more: &[&str],
) -> Result<String, String> {
    let file = written(stem, "text", includes)?;
    output(Command::new("cc").args(["-std=c11", "-E", "-P"]).args(more).args(flags).arg(&file))
}

/// C's declarations of the functions `names`, and its enumerators.
pub fn declarations(
    stem: &Path,
    includes: &str,
    flags: &[String],
    names: &[&str],
) -> Result<Model, String> {
    let mut code = includes.to_owned();
    for name in names {
        // The headers' macros map a function's name to a version's name: here we need the function
        // itself.
        let _ = write!(code, "#undef {name}\n__typeof__(&{name}) {ADDRESS_OF}{name};\n");
    }
    let file = written(stem, "functions", &code)?;
    let object = file.with_extension("o.so");
    // A library and not an object file: it has no relocations left. Keeps unused enumerations too.
    let made =
        ["-std=gnu11", "-g", "-O0", "-fPIC", "-shared", "-w", "-fno-eliminate-unused-debug-types"];
    output(Command::new("cc").args(made).args(flags).arg(&file).arg("-o").arg(&object))?;
    let mut model = dwarf::read(&object, &|_, name| name.starts_with(ADDRESS_OF))?;
    for function in &mut model.functions {
        function.name.drain(..ADDRESS_OF.len());
    }
    Ok(model)
}
