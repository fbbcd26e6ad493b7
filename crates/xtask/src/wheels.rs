//! `cargo xtask wheels`: the files of a release. Wheels for pip, the source, their checksums, and
//! the notes.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{command, output, succeed, text};
use crate::runner::{self, Counts, Outcome};
use crate::shims::{self, Which};

/// Machines with wheels.
const MACHINES: [&str; 2] = ["x86_64", "aarch64"];
/// Suffix of their build target, with the oldest glibc: that of torch's own wheels.
const TARGET: &str = "-unknown-linux-gnu.2.28";
/// Maximum size of a wheel, bytes: it is stripped.
const MOST: u64 = 8_000_000;
/// Folder of a release's files in the test run.
const OUT: &str = "target/dist";
/// The Python with the tests' torch (tests/pytorch/run).
const TORCH: &str = ".venv-torch/bin/python";

/// Makes all files of a release under `out`: wheels for all machines, or for this one (`here`),
/// which needs neither zig nor another machine's Rust or C++.
pub fn make(root: &Path, out: &Path, here: bool) -> Result<(), String> {
    let machines = if here { Vec::new() } else { MACHINES.map(str::to_owned).to_vec() };
    make_with(root, out, here, &Which { machines, ..Default::default() })
}

/// As [`make`], with these shims.
fn make_with(root: &Path, out: &Path, here: bool, which: &Which) -> Result<(), String> {
    let out = root.join(out);
    let wrong = |error: std::io::Error| format!("{}: {error}", out.display());
    if out.exists() {
        std::fs::remove_dir_all(&out).map_err(wrong)?;
    }
    std::fs::create_dir_all(&out).map_err(wrong)?;
    let python = environment(root, "target/dist-build")?;
    let shims = shims::make(root, which)?;
    let targets = match here {
        true => vec![String::new()],
        false => MACHINES.map(|machine| format!("{machine}{TARGET}")).to_vec(),
    };
    for target in targets {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]);
        pip.arg("--wheel-dir").arg(&out).arg(root.join("python_loader"));
        pip.env("GRUYERE_WHEEL_SHIMS", &shims).env("GRUYERE_WHEEL_TARGET", target);
        succeed(&mut pip)?;
    }
    let version = env!("CARGO_PKG_VERSION");
    let archive = out.join(format!("gruyere-{version}.tar.gz"));
    let mut git = Command::new("git");
    git.args(["archive", "--format=tar.gz", "HEAD", "--output"]).arg(&archive);
    succeed(git.arg(format!("--prefix=gruyere-{version}/")).current_dir(root))?;
    let notes = notes(&text(&root.join("CHANGELOG.md"))?, version)?;
    std::fs::write(out.join("NOTES.md"), notes).map_err(wrong)?;
    let mut names = files(&out)?;
    names.retain(|name| name != "NOTES.md");
    let sums = output(Command::new("sha256sum").args(&names).current_dir(&out))?;
    std::fs::write(out.join("SHA256SUMS"), sums).map_err(wrong)?;
    for name in files(&out)? {
        let bytes = std::fs::metadata(out.join(&name)).map_err(wrong)?.len();
        println!("{bytes:>10}  {}", out.join(&name).display());
        if name.ends_with(".whl") && bytes > MOST {
            return Err(format!("{name} has {bytes} bytes, at most {MOST} are wanted"));
        }
    }
    Ok(())
}

/// The part of the test run: the wheel without Rust; then the newest torch, and the oldest one with
/// a shim, installed as their users do, and the wheel beside it, and tests there.
pub fn part(root: &Path) -> Outcome {
    let script = root.join("tests/pytorch/run");
    match runner::command(&mut command(root, script, &["--environment"])) {
        Outcome::Passed(_) => {}
        other => return other,
    }
    match make_for_tests(root).and_then(|wheel| check(root, &wheel).map(|()| wheel)) {
        Ok(wheel) => {
            let options = ["--tests", "--wheel"];
            let mut script = command(root, root.join("tests/pytorch/plain"), &options);
            runner::command(script.arg(wheel).args([shims::NEWEST, shims::OLDEST]))
        }
        Err(reason) => Outcome::Failed(Counts::default(), reason),
    }
}

/// Makes a wheel for this machine, with the shims for the oldest torch and for that of the tests.
fn make_for_tests(root: &Path) -> Result<PathBuf, String> {
    let installed = vec![packages(&root.join(TORCH))?];
    let which = Which { versions: vec![shims::OLDEST.into()], installed, ..Default::default() };
    make_with(root, Path::new(OUT), true, &which)?;
    let name = files(&root.join(OUT))?.into_iter().find(|name| name.ends_with(".whl"));
    Ok(root.join(OUT).join(name.ok_or("pip made no wheel")?))
}

/// The folder of a Python's packages.
fn packages(python: &Path) -> Result<PathBuf, String> {
    let asked = "import sysconfig; print(sysconfig.get_path('purelib'))";
    Ok(output(Command::new(python).args(["-c", asked]))?.trim().into())
}

/// Installs this machine's wheel without Rust, and runs it on the stand-in GPU.
fn check(root: &Path, wheel: &Path) -> Result<(), String> {
    let python = environment(root, "target/dist-user")?;
    let path = "/usr/bin:/bin";
    // A user's environment: without our variables and without cargo.
    let user = |program: &Path| {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", path).env("HOME", root.join("target/dist-user"));
        command.current_dir(root.join("target"));
        command
    };
    let mut pip = user(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]);
    succeed(pip.arg("--force-reinstall").arg(wheel))?;
    let said = output(user(&python.with_file_name("gruyere")).arg("--version"))?;
    if !said.contains(env!("CARGO_PKG_VERSION")) {
        return Err(format!("the installed command says {said:?}"));
    }
    let asked = "from gruyere._native import library; library.load(); print('loaded')";
    let said = output(user(&python).args(["-c", asked]))?;
    if said.trim() != "loaded" {
        return Err(format!("python said {said:?}"));
    }
    // Assets of every page.
    let asked = "from pathlib import Path; import gruyere; \
                 page = Path(gruyere.__file__).with_name('_page'); \
                 print(*sorted(f.name for f in page.iterdir()))";
    let said = output(user(&python).args(["-c", asked]))?;
    if said.trim() != "shared.js style.css" {
        return Err(format!("the package's _page has {said:?}"));
    }
    // The stand-in GPU and the native door, from the wheel alone, with a torch and with neither a
    // compiler nor a home.
    let site = packages(&python)?;
    let torch = packages(&root.join(TORCH))?.display().to_string();
    let seen = site.join("torch-is-there.pth");
    std::fs::write(&seen, torch).map_err(|error| format!("{}: {error}", seen.display()))?;
    let mut bare = user(&python);
    bare.env("PATH", "/nowhere").env("HOME", "/proc/nowhere").args(["-c", ON_THE_STAND_IN]);
    let said = output(&mut bare)?;
    let prebuilt = site.join("gruyere/_native/prebuilt");
    let wanted = format!("Phantom H100 (stand-in) 512 native {}\n", prebuilt.display());
    if said == wanted { Ok(()) } else { Err(format!("torch said {said:?}, not {wanted:?}")) }
}

/// The steps of a user of the installed package to run torch on the stand-in.
const ON_THE_STAND_IN: &str = "
import os, subprocess, sys, tempfile
from pathlib import Path
from gruyere import _stand_in
program = '''
import torch, gruyere
gruyere.enable()
from gruyere import _enable
from gruyere._native import shim
block = torch.zeros(4, device=\"cuda\")
print(torch.cuda.get_device_name(), torch.cuda.memory_allocated(), end=\" \")
print(_enable.door()[0], shim.file() and shim.file().parent)
'''
with tempfile.TemporaryDirectory() as folder, _stand_in.Owner(Path(folder)) as owner:
    environment = {**os.environ, **_stand_in.environment(owner)}
    subprocess.run([sys.executable, '-c', program], env=environment, check=True)
";

/// The Python of a virtual environment, which is made if necessary.
fn environment(root: &Path, folder: &str) -> Result<PathBuf, String> {
    let folder = root.join(folder);
    let python = folder.join("bin/python");
    if !python.exists() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    Ok(python)
}

/// The names of a folder's files, in order.
fn files(folder: &Path) -> Result<Vec<String>, String> {
    let wrong = |error| format!("{}: {error}", folder.display());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(wrong)? {
        names.push(entry.map_err(wrong)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// The changelog's section on `version`.
fn notes(changelog: &str, version: &str) -> Result<String, String> {
    let heading = format!("## [{version}]");
    let from = changelog
        .lines()
        .skip_while(|line| !line.starts_with(&heading))
        .skip(1)
        .take_while(|line| !line.starts_with("## ["));
    let notes = from.collect::<Vec<_>>().join("\n");
    if notes.trim().is_empty() {
        return Err(format!("CHANGELOG.md says nothing under {heading:?}"));
    }
    Ok(notes.trim().to_owned() + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_notes_are_what_the_changelog_says_of_the_version() {
        let changelog = "# Log\n\n## [0.2.0] - x\n\n- new\n- more\n\n## [0.1.0]\n\n- old\n";
        assert_eq!(notes(changelog, "0.2.0").unwrap(), "- new\n- more\n");
        assert_eq!(notes(changelog, "0.1.0").unwrap(), "- old\n");
        assert!(notes(changelog, "0.3.0").unwrap_err().contains("## [0.3.0]"));
    }
}
