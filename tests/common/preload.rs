//! C programs that run under LD_PRELOAD on the simulator.
#![allow(dead_code)]

#[path = "phantom_owner.rs"]
pub mod phantom_owner;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds a package's shared library as this test was built, and returns its path.
pub fn build(package: &str, file: &str) -> PathBuf {
    let folder = std::env::current_exe()
        .unwrap()
        .ancestors()
        .nth(2)
        .unwrap()
        .file_name()
        .unwrap()
        .to_owned();
    let profile = if folder == "debug" { "dev".as_ref() } else { folder.as_os_str() };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "build",
            "--quiet",
            "--lib",
            "--package",
            package,
            "--message-format=json",
            "--profile",
        ])
        .arg(profile)
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let messages = String::from_utf8(output.stdout).expect("cargo speaks UTF-8");
    let ending = format!("/{file}");
    PathBuf::from(
        messages.split('"').find(|word| word.ends_with(&ending)).expect("cargo names the library"),
    )
}

/// A folder with the libraries under the names that programs look for, and the compiled programs.
pub struct Workshop {
    pub folder: PathBuf,
}

/// The result of a program.
pub struct Run {
    pub success: bool,
    pub status: String,
    pub stdout: String,
    pub stderr: String,
}

impl Run {
    /// Asserts that the program kept its promise.
    #[track_caller]
    pub fn kept(&self) {
        let Self { success, status, stdout, stderr } = self;
        assert!(*success && stdout.contains("kept"), "{status}\n{stdout}{stderr}");
    }
}

impl Workshop {
    pub fn new() -> Self {
        // One folder per test program, new at each run.
        let name = std::env::current_exe().unwrap().file_stem().unwrap().to_owned();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let link = |target: &Path, name: &str| {
            std::os::unix::fs::symlink(target, folder.join(name)).unwrap();
        };
        let phantom = build("gruyere-phantom-abi", "libphantom_cuda.so");
        link(&phantom, "libcudart.so.12");
        link(&phantom, "libcuda.so.1");
        // The library built with this test: building the package by itself, with other features of
        // its dependencies, would replace it under the same name for every later link.
        let own = std::env::current_exe().unwrap().with_file_name("libgruyere.so");
        assert!(own.is_file(), "{}: cargo builds it beside the tests", own.display());
        link(&own, "libgruyere.so");
        Self { folder }
    }

    pub fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }

    fn compile(&self, source: &str, output: &str, flags: &[&str], libraries: &str) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let result = Command::new(compiler)
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"])
            .args(flags)
            .arg("-I")
            .arg(root.join("include"))
            .arg("-o")
            .arg(self.folder.join(output))
            .arg(root.join("tests/preload").join(source))
            .arg("-L")
            .arg(&self.folder)
            .args(libraries.split_whitespace())
            .arg("-ldl")
            .output()
            .expect("a C compiler");
        assert!(result.status.success(), "{}", String::from_utf8_lossy(&result.stderr));
    }

    /// Compiles a program of tests/preload, linked with `libraries`.
    pub fn program(&self, source: &str, name: &str, libraries: &str) {
        // Written elsewhere first: another test may be running it.
        let fresh = format!("{name}.new");
        self.compile(source, &fresh, &[], libraries);
        std::fs::rename(self.folder.join(fresh), self.folder.join(name)).unwrap();
    }

    /// Compiles a shared library of tests/preload.
    pub fn library(&self, source: &str, name: &str, libraries: &str) {
        self.compile(source, name, &["-shared", "-fPIC"], libraries);
    }

    /// Runs a program under preload.
    pub fn preloaded(&self, name: &str, arguments: &[&str], settings: &[(&str, &str)]) -> Run {
        self.command(&self.folder.join(name), arguments, settings, true)
    }

    /// Runs a program without preload.
    pub fn bare(&self, name: &str, arguments: &[&str], settings: &[(&str, &str)]) -> Run {
        self.command(&self.folder.join(name), arguments, settings, false)
    }

    pub fn command(
        &self,
        program: &Path,
        arguments: &[&str],
        settings: &[(&str, &str)],
        preload: bool,
    ) -> Run {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_remove("GRUYERE_CONF")
            .env_remove("GRUYERE_LOG")
            .env_remove("LD_PRELOAD");
        command.env("LD_LIBRARY_PATH", &self.folder).env("PHANTOM_QUIET", "1");
        command.envs([phantom_owner::variable().unwrap()]).envs(settings.iter().copied());
        if preload {
            command.env("LD_PRELOAD", self.folder.join("libgruyere.so"));
        }
        let output = command.output().expect("the program runs");
        Run {
            success: output.status.success(),
            status: output.status.to_string(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: phantom_owner::without_its_line(&output.stderr),
        }
    }
}
