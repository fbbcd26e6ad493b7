//! Builds the probe and the canaries (tests/gpu) into the command, whose `doctor --gpu` runs them
//! where there are neither sources nor a compiler.

use std::path::{Path, PathBuf};

/// The C files of a folder, in order.
fn sources(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let named = |error| std::io::Error::other(format!("{}: {error}", folder.display()));
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(named)? {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "c") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn main() -> std::io::Result<()> {
    // The running build's, not the one that compiled this: checkouts may share CARGO_TARGET_DIR.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").ok_or(std::io::ErrorKind::NotFound)?;
    let root = Path::new(&package).join("../..");
    let gpu = root.join("tests/gpu");
    // The canaries first: the linker resolves their use of the probe's files in the later library.
    for name in ["canaries", "probe"] {
        let folder = gpu.join(name);
        cc::Build::new()
            .files(sources(&folder)?)
            .include(root.join("include"))
            .define("main", format!("gruyere_{name}_main").as_str())
            // Hides their names from the libraries that they load.
            .flag("-fvisibility=hidden")
            // Keeps this machine's folders out of `__FILE__`.
            .flag_if_supported(format!("-fmacro-prefix-map={}/=", root.display()))
            .extra_warnings(true)
            .opt_level(2)
            .try_compile(&format!("gruyere_{name}"))
            .map_err(std::io::Error::other)?;
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    // Separate libraries before glibc 2.34.
    for library in ["dl", "pthread"] {
        println!("cargo::rustc-link-lib={library}");
    }
    println!("cargo::rerun-if-changed={}", root.join("include/gruyere.h").display());
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
