//! `cargo xtask gpu-bundle`: a folder that runs on a bare machine with a driver
//! (tests/gpu/bundle/README.md), and its rehearsal on the stand-in.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::deadline::{self, Stream};
use crate::parts::{cargo, output, succeed};

/// Maximum size, bytes: people copy it to machines by hand.
const MOST: u64 = 20_000_000;
const NAME: &str = "gruyere-gpu";

/// C programs, with their sources.
const PROGRAMS: [(&str, &[&str]); 2] = [
    ("probe", &["tests/gpu/probe"]),
    ("canaries", &["tests/gpu/canaries", "tests/gpu/probe/driver.c", "tests/gpu/probe/kernels.c"]),
];
/// Files copied unchanged: a file, or a folder's files with this ending; and the destination.
const COPIED: [(&str, &str, &str); 7] = [
    ("tests/gpu/bundle", "sh", ""),
    ("tests/gpu/bundle", "md", ""),
    ("traces", "zst", "traces"),
    ("tests/gpu", "py", "acceptance"),
    ("tests/gpu", "md", "acceptance"),
    ("traces/small/programs", "py", "acceptance/programs"),
    (".", "LICENSE-MIT", ""),
];

/// Copied as a whole: the acceptance program and `bench --torch` put the library into torch with
/// it.
const PACKAGE: &str = "python_loader/gruyere";

fn told<T>(path: &Path, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{}: {error}", path.display()))
}

/// Makes the folder and its archive under `out`; returns the archive.
pub fn make(root: &Path, out: &Path) -> Result<PathBuf, String> {
    succeed(&mut cargo(root, &["build", "--release", "--locked"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let folder = out.join(NAME);
    if folder.exists() {
        told(&folder, std::fs::remove_dir_all(&folder))?;
    }
    told(&folder, std::fs::create_dir_all(&folder))?;
    for name in ["libgruyere.so", "libgruyere_driver.so", "gruyere"] {
        // Keeps the dynamic linker's symbols.
        let built = target.join("release").join(name);
        output(
            Command::new("strip")
                .arg("--strip-unneeded")
                .arg(&built)
                .arg("-o")
                .arg(folder.join(name)),
        )?;
    }
    for (name, sources) in PROGRAMS {
        let mut command = Command::new("cc");
        command
            .args(["-O2", "-Wall", "-Wextra", "-Werror", "-s"])
            .arg("-I")
            .arg(root.join("include"));
        for source in sources {
            let path = root.join(source);
            command.args(if path.is_dir() { files(&path, "c")? } else { vec![path] });
        }
        output(command.arg("-o").arg(folder.join(name)).args(["-ldl", "-lpthread"]))?;
    }
    for (from, ending, to) in COPIED {
        let to = folder.join(to);
        told(&to, std::fs::create_dir_all(&to))?;
        for file in files(&root.join(from), ending)? {
            let name = file.file_name().unwrap_or_default();
            told(&file, std::fs::copy(&file, to.join(name)))?;
        }
    }
    copy_package(&root.join(PACKAGE), &folder.join(PACKAGE))?;
    let bytes = size(&folder)?;
    if bytes > MOST {
        return Err(format!(
            "{}: {bytes} bytes, at most {MOST} may be: is libgruyere.so stripped?",
            folder.display()
        ));
    }
    let archive = out.join(format!("{NAME}.tar.gz"));
    output(Command::new("tar").arg("-C").arg(out).arg("-czf").arg(&archive).arg(NAME))?;
    println!(
        "{}: {:.1} MB; packed, {}: {:.1} MB",
        folder.display(),
        mb(bytes),
        archive.display(),
        mb(told(&archive, archive.metadata())?.len())
    );
    Ok(archive)
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// The files of `folder` that end in `ending` (or have that name).
fn files(folder: &Path, ending: &str) -> Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for entry in told(folder, std::fs::read_dir(folder))? {
        let path = told(folder, entry)?.path();
        let is_called = path.file_name().is_some_and(|name| name == ending);
        if path.is_file() && (is_called || path.extension().is_some_and(|its| its == ending)) {
            found.push(path);
        }
    }
    if found.is_empty() {
        return Err(format!("{}: no file of it is called or ends in {ending}", folder.display()));
    }
    found.sort();
    Ok(found)
}

/// Copies the package with its folders, without what Python has compiled of it.
fn copy_package(from: &Path, to: &Path) -> Result<(), String> {
    told(to, std::fs::create_dir_all(to))?;
    for entry in told(from, std::fs::read_dir(from))? {
        let path = told(from, entry)?.path();
        let name = path.file_name().unwrap_or_default();
        if name == "__pycache__" {
            continue;
        }
        match path.is_dir() {
            true => copy_package(&path, &to.join(name))?,
            false => told(&path, std::fs::copy(&path, to.join(name))).map(drop)?,
        }
    }
    Ok(())
}

fn size(folder: &Path) -> Result<u64, String> {
    let mut sum = 0;
    for entry in told(folder, std::fs::read_dir(folder))? {
        let path = told(folder, entry)?.path();
        sum += if path.is_dir() { size(&path)? } else { told(&path, path.metadata())?.len() };
    }
    Ok(sum)
}

/// The bundle on the stand-in, unpacked in an empty folder: every part that needs no torch runs and
/// reports success; the second call has nothing left to do; a program that overwrites its blocks is
/// corruption, and stops the session; the limit ends a part that hangs, and an interrupted part
/// runs again.
pub fn rehearse(root: &Path) -> Result<(), String> {
    let place = tempfile::tempdir().map_err(|error| format!("a temporary folder: {error}"))?;
    let archive = make(root, place.path())?;
    succeed(&mut cargo(root, &["build", "--quiet", "--package", "gruyere-phantom-abi"]))?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let machine = place.path().join("machine");
    let library = machine.join("lib");
    told(&library, std::fs::create_dir_all(&library))?;
    output(Command::new("tar").arg("-C").arg(&machine).arg("-xzf").arg(&archive))?;
    let stand_in = told(&target, target.join("debug/libphantom_cuda.so").canonicalize())?;
    told(&library, std::os::unix::fs::symlink(stand_in, library.join("libcuda.so.1")))?;

    let owner = crate::phantom_owner::variable()
        .map_err(|error| format!("the lock without which nobody runs on the stand-in: {error}"))?;
    let session = Session { folder: machine.join(NAME), library, owner };
    // The parts with torch are not rehearsed; their package is whole.
    let modules = "import gruyere._enable, gruyere._native.shim, gruyere._torch.blame, \
                   gruyere._bench.parts";
    let package = session.folder.join("python_loader");
    output(Command::new("python3").args(["-c", modules]).env("PYTHONPATH", package))?;
    let first = session.run("results", &[])?;
    first.expect(
        0,
        &["probe", "canaries", "canaries-destroyed", "canaries-planted", "bench", "stress"],
        "passed",
    )?;
    for part in ["probe", "canaries", "stress", "bench"] {
        if first.part(part)?["document"].is_null() {
            return Err(format!("{part}: its document is not in summary.json"));
        }
    }
    let destroyed = first.part("canaries-destroyed")?["document"]["streams_destroyed"].as_u64();
    if destroyed.is_none_or(|count| count == 0) {
        return Err(format!("canaries-destroyed destroyed no stream: {destroyed:?}"));
    }
    let again = session.run("results", &[])?;
    if again.text.contains("--- ") || again.summary["parts"] != first.summary["parts"] {
        return Err(format!("what was done was done again:\n{}", again.text));
    }

    let broken = session.run("corrupted", &[("GRUYERE_CANARIES", "--overwrite")])?;
    broken.expect(3, &["canaries"], "CORRUPTION")?;
    broken.expect(3, &["canaries-destroyed", "bench", "stress"], "not run")?;
    let refused = session.run("corrupted", &[])?;
    if refused.text.contains("--- ") {
        return Err(format!("it went on after corruption:\n{}", refused.text));
    }
    session.hangs_end()?;
    println!("{}", first.text);
    Ok(())
}

/// An unpacked bundle, and a folder with a libcuda.
struct Session {
    folder: PathBuf,
    library: PathBuf,
    /// Marks us as the holder of the stand-in's lock.
    owner: (&'static str, String),
}

struct Ended {
    code: Option<i32>,
    /// stderr and stdout.
    text: String,
    summary: Value,
}

impl Session {
    fn command(&self, results: &Path) -> Command {
        let mut command = Command::new("./session.sh");
        command.arg("--quick").current_dir(&self.folder).env("LD_LIBRARY_PATH", &self.library);
        command
            .env("GRUYERE_SESSION_RESULTS", results)
            .env("PHANTOM_QUIET", "1")
            .env(self.owner.0, &self.owner.1)
            .env_remove("GRUYERE_CONF");
        command
    }

    /// `./session.sh --quick`.
    fn run(&self, results: &str, settings: &[(&str, &str)]) -> Result<Ended, String> {
        let results = self.folder.join(results);
        let mut command = self.command(&results);
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let limit = deadline::stretched(deadline::COMMAND);
        let ended = deadline::run(
            command.envs(settings.iter().copied()).stderr(Stdio::piped()),
            limit,
            |stream, bytes| match stream {
                Stream::Out => out.extend_from_slice(bytes),
                Stream::Err => err.extend_from_slice(bytes),
            },
        )
        .map_err(|error| format!("session.sh: {error}"))?;
        let text = format!("{}{}", String::from_utf8_lossy(&err), String::from_utf8_lossy(&out));
        if ended.overdue {
            return Err(format!("session.sh took longer than {} s:\n{text}", limit.as_secs()));
        }
        let file = results.join("summary.json");
        let summary =
            std::fs::read(&file).map_err(|error| format!("{}: {error}\n{text}", file.display()))?;
        let summary = serde_json::from_slice(&summary)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        Ok(Ended { code: ended.status.code(), text, summary })
    }
}

impl Session {
    /// With a program in the probe's place that never ends: interrupted, then ended by its limit.
    fn hangs_end(&self) -> Result<(), String> {
        let probe = self.folder.join("probe");
        told(&probe, std::fs::rename(&probe, self.folder.join("probe-kept")))?;
        told(&probe, std::fs::write(&probe, "#!/bin/sh\necho begun\nexec sleep 600\n"))?;
        told(
            &probe,
            std::fs::set_permissions(&probe, std::os::unix::fs::PermissionsExt::from_mode(0o755)),
        )?;
        let results = self.folder.join("hung");
        let begun = results.join("probe/stdout");
        let mut running = self
            .command(&results)
            .arg("probe")
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("session.sh: {error}"))?;
        let deadline = Instant::now() + Duration::from_secs(30);
        while std::fs::read(&begun).unwrap_or_default().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        output(Command::new("sh").args(["-c", &format!("kill -TERM {}", running.id())]))?;
        let deadline = Instant::now() + deadline::stretched(Duration::from_secs(60));
        let ended = loop {
            match running.try_wait().map_err(|error| format!("session.sh: {error}"))? {
                Some(ended) => break ended,
                None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
                None => {
                    let _ = running.kill();
                    return Err("a session that was interrupted does not end".to_owned());
                }
            }
        };
        if ended.code() != Some(130) || results.join("probe/outcome").exists() {
            return Err(format!("an interrupted session ended with {ended}, or told an outcome"));
        }
        let ended = self.run("hung", &[("GRUYERE_SESSION_LIMIT", "2")])?;
        let probe = ended.part("probe")?;
        if probe["outcome"] != "FAILED" || probe["line"] != "took more than 2 s" {
            return Err(format!("a part that hangs is not ended by its limit:\n{}", ended.text));
        }
        Ok(())
    }
}

impl Ended {
    fn part(&self, name: &str) -> Result<&Value, String> {
        let parts = self.summary["parts"].as_array().into_iter().flatten();
        parts
            .into_iter()
            .find(|part| part["name"] == name)
            .ok_or_else(|| format!("summary.json has no part {name}"))
    }

    /// Checks that the session ended with `code`, and these parts as `outcome`.
    fn expect(&self, code: i32, parts: &[&str], outcome: &str) -> Result<(), String> {
        if self.code != Some(code) {
            return Err(format!(
                "session.sh ended with {:?}, not {code}:\n{}",
                self.code, self.text
            ));
        }
        for name in parts {
            let part = self.part(name)?;
            if part["outcome"] != outcome {
                return Err(format!(
                    "{name} is {}, not {outcome}:\n{}",
                    part["outcome"], self.text
                ));
            }
        }
        Ok(())
    }
}
