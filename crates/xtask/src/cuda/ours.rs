//! Our declarations of CUDA: functions that we call, functions that we implement, and numbers that
//! stand for names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::constants::{self, Constant};
use super::dwarf::{self, Signature, Type};
use super::header;
use crate::parts::{cargo, succeed};

/// Our declaration of a CUDA function.
pub struct Function {
    pub signature: Signature,
    /// Its place, for messages.
    pub place: String,
    /// Whether CUDA's callers call it; it may read fewer arguments than there are.
    pub is_callee: bool,
    /// Whether it replaces, or is built against, a single version of the runtime: the newest.
    pub newest_runtime_alone: bool,
}

/// All CUDA declarations of the project.
pub struct Declared {
    pub functions: Vec<Function>,
    pub constants: Vec<Constant>,
}

/// The sources with named numbers.
const NUMBERS: [&str; 5] = [
    "crates/heap/src/driver",
    "src/driver",
    "src/door",
    "crates/phantom/src",
    "crates/phantom/abi/src",
];
/// The headers of our C programs, and what they need to compile.
const HEADERS: [&str; 4] = [
    "tests/preload/cuda.h",
    "tests/preload/cudart.h",
    "tests/preload/driver/driver.h",
    "tests/gpu/probe/driver.h",
];

/// Builds the libraries and reads the declarations in them and in the sources.
pub fn declared(root: &Path) -> Result<Declared, String> {
    // Overrides the profiles: this needs debug information, and a function inlined everywhere has
    // none. Uses a folder of its own, to leave the tests' libraries unchanged.
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let target = target.join("declared");
    let mut build = cargo(
        root,
        &["build", "--quiet", "--package", "gruyere", "--package", "gruyere-phantom-abi"],
    );
    build.arg("--target-dir").arg(&target).env("CARGO_PROFILE_DEV_DEBUG", "full");
    for package in ["gruyere", "gruyere-phantom"] {
        build.arg("--config").arg(format!("profile.dev.package.{package}.opt-level=0"));
    }
    succeed(&mut build)?;
    let (mut functions, enumerators) = of_library(root, &target.join("debug/libgruyere.so"))?;
    functions.extend(of_stand_in(&target.join("debug/libphantom_cuda.so"))?);
    let mut all = Vec::new();
    for file in HEADERS {
        let (of_header, numbers) = of_c_header(root, file)?;
        functions.extend(of_header);
        all.extend(numbers);
    }
    for folder in NUMBERS {
        all.extend(constants::under(root, folder)?);
    }
    // The enumerations of its bindings.
    all.extend(enumerators);
    Ok(Declared { functions, constants: all })
}

/// Modules whose functions have CUDA's names and signatures: the functions that the library calls,
/// the number of parameters before CUDA's, and the file in which a line begins with each function
/// once.
const CALLED: [(&str, usize, &str); 3] = [
    ("gruyere::driver::cuda::symbols", 1, "src/driver/cuda/symbols.rs"),
    ("gruyere::door::preload::runtime", 1, "src/door/preload/runtime.rs"),
    ("gruyere::door::preload::driver::real", 0, "src/door/preload/driver/real.rs"),
];
/// The functions that the library implements: their module, and the file with their CUDA names.
const SERVED: [(&str, &str); 2] = [
    ("gruyere::door::preload::entry", "src/door/preload/entry.rs"),
    ("gruyere::door::preload::driver::calls", "src/door/preload/driver/calls.rs"),
];

fn of_library(root: &Path, library: &Path) -> Result<(Vec<Function>, Vec<Constant>), String> {
    let is_in = |scope: &str, module: &str| {
        scope == module || scope.strip_prefix(module).is_some_and(|rest| rest.starts_with("::"))
    };
    let of_cuda = |name: &str| name.starts_with("cu");
    let wanted = |scope: &str, name: &str| {
        CALLED.iter().any(|(module, ..)| of_cuda(name) && is_in(scope, module))
            || SERVED.iter().any(|(module, _)| scope == *module)
    };
    let mut model = dwarf::read(library, &wanted)?;
    let mut functions = Vec::new();
    for mut signature in model.functions.iter().filter(|function| of_cuda(&function.name)).cloned()
    {
        let Some((module, before, _)) =
            CALLED.iter().find(|(module, ..)| is_in(&signature.scope, module))
        else {
            continue;
        };
        // Methods take `self` first; `has::cudaX(runtime)` and similar are not CUDA's functions.
        if signature.scope.ends_with("::has") {
            continue;
        }
        signature.parameters.drain(..(*before).min(signature.parameters.len()));
        // The wrapper makes a `Result` of the code.
        if matches!(signature.result, Type::Record(_)) {
            signature.result = Type::Integer(4);
        }
        functions.push(Function {
            place: (*module).into(),
            signature,
            is_callee: false,
            newest_runtime_alone: false,
        });
    }
    // An unused function is not in the library: the sources list the required ones.
    for (module, _, file) in CALLED {
        let text =
            std::fs::read_to_string(root.join(file)).map_err(|error| format!("{file}: {error}"))?;
        let named: BTreeSet<_> = text
            .lines()
            .filter_map(|line| line.trim().split_once('('))
            .map(|(name, _)| name)
            .collect();
        let named: Vec<_> =
            named.into_iter().filter(|name| header::is_function_of_cuda(name)).collect();
        let found = |name: &&&str| {
            functions
                .iter()
                .any(|function| function.place == module && function.signature.name == ***name)
        };
        if named.is_empty() || named.iter().filter(found).count() != named.len() {
            let missing: Vec<_> = named.iter().filter(|name| !found(name)).collect();
            return Err(format!(
                "{file}: not found in {}: {missing:?} of {} functions",
                library.display(),
                named.len()
            ));
        }
    }
    for (module, file) in SERVED {
        let text =
            std::fs::read_to_string(root.join(file)).map_err(|error| format!("{file}: {error}"))?;
        let served = if file.ends_with("entry.rs") { exported(&text) } else { handed_out(&text) };
        if served.is_empty() {
            return Err(format!(
                "{file}: no line says which functions of CUDA's are served, as \
                 crates/xtask/src/cuda/ours.rs reads it"
            ));
        }
        for Served { name, body, shim } in served {
            // A generic function has its arguments in its name.
            let of_body = |function: &&Signature| {
                function.scope == module && function.name.split('<').next() == Some(&body)
            };
            let Some(mut signature) = model.functions.iter().find(of_body).cloned() else {
                return Err(format!("{file}: no function {body} for {name}"));
            };
            if let Some(shim) = shim {
                // The caller's address comes last, at the shim's argument count.
                signature.parameters.pop();
                let counted = shim.parse().unwrap_or(EXTENT_ARGUMENTS);
                if counted != signature.parameters.len() {
                    let has = signature.parameters.len();
                    return Err(format!(
                        "{file}: the shim of {name} counts {counted} arguments, {body} has {has}"
                    ));
                }
                if shim == "extent"
                    && let Some(Type::Pointer { to, .. }) = signature.parameters.pop()
                {
                    signature.parameters.push(*to);
                }
            }
            signature.name = name;
            functions.push(Function {
                place: format!("{module}::{body}"),
                signature,
                is_callee: true,
                newest_runtime_alone: false,
            });
        }
    }
    // The driver's only: our own enumerations of functions have the runtime's names. The last
    // enumerator of some only counts the others, and grows with every version of CUDA.
    let counts = |name: &str| name.ends_with("_MAX") || name.ends_with("_NUM_OPTIONS");
    model.enumerators.retain(|(name, _)| name.starts_with("CU") && !counts(name));
    let constant =
        |(name, value)| Constant { name, value, place: "cudarc, in libgruyere.so".into() };
    Ok((functions, model.enumerators.into_iter().map(constant).collect()))
}

struct Served {
    name: String,
    body: String,
    /// The shim's count, if there is a shim: arguments, or `extent`.
    shim: Option<String>,
}

/// The arguments of `after extent`: a pointer, then a structure by value, which the shim passes on
/// as a pointer.
const EXTENT_ARGUMENTS: usize = 2;

/// `cudaMalloc after 2 => malloc;`
fn exported(text: &str) -> Vec<Served> {
    let line = |line: &str| {
        let (name, rest) = line.trim().split_once(" after ")?;
        let (count, body) = rest.strip_suffix(';')?.split_once(" => ")?;
        Some(Served { name: name.into(), body: body.into(), shim: Some(count.into()) })
    };
    text.lines().filter_map(line).collect()
}

/// `Function::cuMemAllocAsync => malloc_async::<false> as *const c_void,`
fn handed_out(text: &str) -> Vec<Served> {
    let line = |line: &str| {
        let (name, rest) = line.trim().strip_prefix("Function::")?.split_once(" => ")?;
        let body = rest.strip_suffix(" as *const c_void,")?.split("::<").next()?;
        Some(Served { name: name.into(), body: body.into(), shim: None })
    };
    text.lines().filter_map(line).collect()
}

/// The stand-in's exports with CUDA's names.
fn of_stand_in(library: &Path) -> Result<Vec<Function>, String> {
    let model = dwarf::read(library, &|scope, name| {
        scope.starts_with("phantom_cuda::") && header::is_function_of_cuda(name)
    })?;
    let function = |signature: Signature| Function {
        place: signature.scope.clone(),
        signature,
        is_callee: true,
        newest_runtime_alone: true,
    };
    Ok(model.functions.into_iter().map(function).collect())
}

/// The declarations in a header of our tests.
fn of_c_header(root: &Path, file: &str) -> Result<(Vec<Function>, Vec<Constant>), String> {
    let stem = root.join("target/cuda-headers").join(file.replace('/', "-"));
    let includes = format!("#include \"{}\"\n", root.join(file).display());
    let flags = [format!("-I{}", root.join("include").display())];
    let code = header::preprocess(&stem, &includes, &flags, &[])?;
    let names: BTreeSet<_> = header::functions_in(&code).collect();
    let model =
        header::declarations(&stem, &includes, &flags, &names.into_iter().collect::<Vec<_>>())?;
    let function = |signature| Function {
        place: file.to_owned(),
        signature,
        is_callee: false,
        newest_runtime_alone: true,
    };
    let constant = |(name, value)| Constant { name, value, place: file.to_owned() };
    Ok((
        model.functions.into_iter().map(function).collect(),
        model.enumerators.into_iter().map(constant).collect(),
    ))
}
