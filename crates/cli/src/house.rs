//! This command's folder, and the Python interpreter for work that needs torch: `bench --torch`,
//! `compare` and `dryrun` find an interpreter that has the package, and execute it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The place of this command: installed by the wheel, beside an interpreter that has the package;
/// or built in the source tree, beside the library and the stand-in, with the package in the tree.
pub struct House {
    beside: Option<PathBuf>,
    /// In a build of the source tree, the library and the package's folder.
    tree: Option<(PathBuf, PathBuf)>,
}

/// Checks whether an interpreter is usable.
const PROBE: &str = "
import sys
if sys.version_info < (3, 9):
    sys.exit('it is Python %d.%d, but 3.9 or newer is needed' % sys.version_info[:2])
try:
    import gruyere._bench.compare, gruyere._dryrun.main
    print('it can')
except ImportError as error:
    sys.exit('it lacks the package gruyere, or has an older one (%s): run %s -m pip install \
    ./python_loader in the source tree' % (error, sys.executable))
";

impl House {
    /// Finds this command's place.
    pub fn find() -> Self {
        let beside =
            std::env::current_exe().ok().and_then(|file| Some(file.parent()?.to_path_buf()));
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python_loader");
        // `cargo run` leaves the library of a dependency in deps.
        let library = beside.iter().flat_map(|folder| [folder.clone(), folder.join("deps")]);
        let library =
            library.map(|folder| folder.join("libgruyere.so")).find(|file| file.is_file());
        let tree = library
            .filter(|_| package.join("gruyere/_bench").is_dir())
            .map(|library| (library, package));
        Self { beside, tree }
    }

    /// The folder of this command, which may also contain the stand-in GPU.
    pub fn beside(&self) -> Option<&Path> {
        self.beside.as_deref()
    }

    /// Executes an interpreter with these arguments: `chosen`, or the default. Returns only if no
    /// interpreter is usable, with the reason and the remedy.
    pub fn turn_into(&self, chosen: Option<&Path>, arguments: &[&str]) -> String {
        match self.interpreter(chosen) {
            Ok(python) => {
                let error = self.command(&python).args(arguments).exec();
                format!("{}: {error}", python.display())
            }
            Err(error) => error,
        }
    }

    /// A usable interpreter.
    fn interpreter(&self, chosen: Option<&Path>) -> Result<PathBuf, String> {
        let python = chosen.map_or_else(|| self.usual(), Path::to_path_buf);
        let remedy = "name one that has torch (--python; for gruyere compare, before the script)";
        let output =
            self.command(&python).args(["-c", PROBE]).output().map_err(|error| {
                format!("{} cannot be run ({error}): {remedy}", python.display())
            })?;
        if output.status.success() && output.stdout.starts_with(b"it can") {
            return Ok(python);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let last =
            said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it printed nothing");
        Err(format!("{} is not usable: {last}; or {remedy}", python.display()))
    }

    /// The interpreter that a user would expect.
    fn usual(&self) -> PathBuf {
        let active =
            std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python"));
        let neighbour = self.beside.as_ref().map(|folder| folder.join("python"));
        let mut there = [active, neighbour].into_iter().flatten().filter(|file| file.is_file());
        there.next().unwrap_or_else(|| PathBuf::from("python3"))
    }

    /// The interpreter's command, with paths to the package and the library.
    fn command(&self, python: &Path) -> Command {
        let mut command = Command::new(python);
        if let Some((library, package)) = &self.tree {
            let mut path = OsString::from(package);
            if let Some(more) = std::env::var_os("PYTHONPATH").filter(|more| !more.is_empty()) {
                path.push(":");
                path.push(more);
            }
            command.env("PYTHONPATH", path);
            if std::env::var_os("GRUYERE_LIBRARY").is_none() {
                command.env("GRUYERE_LIBRARY", library);
            }
        }
        command
    }
}
