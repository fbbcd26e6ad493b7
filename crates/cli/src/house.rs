//! This command's folder, and the Python interpreter for work that needs torch: `bench --torch`,
//! `compare` and `dryrun` find an interpreter that has the package, and execute it. clap declares
//! their options; the package reads the values.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::launch_line::Program;

/// A command's request to the package: the arguments as typed, and what only this command knows.
#[derive(Serialize)]
struct Request<'a, A> {
    #[serde(flatten)]
    arguments: &'a A,
    #[serde(flatten)]
    program: Option<&'a Program>,
    /// Default name of the program's run: the name that `history:` would give it.
    run_name: Option<String>,
    gruyere: &'static str,
    /// A folder that may contain the stand-in.
    beside: Option<&'a Path>,
}

/// Executes `python -m PACKAGE COMMAND REQUEST`; the interpreter is `chosen`, the program's, or the
/// default. Returns only if no interpreter is usable, with the reason and the remedy.
pub fn turn_into(
    package: &str,
    command: &str,
    arguments: &impl Serialize,
    chosen: Option<&Path>,
    program: Option<&Program>,
) -> String {
    let house = House::find();
    let request = Request {
        arguments,
        program,
        run_name: program.map(|program| program.main.name_of_run()),
        gruyere: env!("CARGO_PKG_VERSION"),
        beside: house.beside.as_deref(),
    };
    let request = serde_json::to_string(&request).expect("plain data");
    let chosen = chosen.or_else(|| program?.python.as_deref());
    match house.interpreter(chosen) {
        Ok(python) => {
            let mut line = house.command(&python);
            let error = line.args(["-m", package, command, &request]).exec();
            format!("{}: {error}", python.display())
        }
        Err(error) => error,
    }
}

/// The place of this command: installed by the wheel, beside an interpreter that has the package;
/// or built in the source tree, beside the library and the stand-in, with the package in the tree.
struct House {
    beside: Option<PathBuf>,
    /// In a build of the source tree, the library and the package's folder.
    tree: Option<(PathBuf, PathBuf)>,
}

/// Exit code of [`PROBE`] without the package.
const LACKS: i32 = 3;
/// Checks whether an interpreter is usable.
const PROBE: &str = "
import sys
if sys.version_info < (3, 9):
    sys.exit('it is Python %d.%d, but 3.9 or newer is needed' % sys.version_info[:2])
try:
    import gruyere._bench.compare, gruyere._dryrun.main
    print('it can')
except ImportError as error:
    print('it lacks the package gruyere, or has an older one (%s)' % error, file=sys.stderr)
    sys.exit(3)
";

impl House {
    /// Finds this command's place.
    fn find() -> Self {
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
        let install = match (output.status.code() == Some(LACKS), &self.tree, self.neighbour()) {
            (false, ..) => String::new(),
            (true, None, Some(neighbour)) => {
                format!("install it as for {}, or ", neighbour.display())
            }
            (true, ..) => format!(
                "run {} -m pip install ./python_loader in the source tree, or ",
                python.display()
            ),
        };
        Err(format!("{} is not usable: {last}; {install}{remedy}", python.display()))
    }

    /// The interpreter beside this command, if there is one.
    fn neighbour(&self) -> Option<PathBuf> {
        self.beside.as_ref().map(|folder| folder.join("python")).filter(|file| file.is_file())
    }

    /// The interpreter that a user would expect.
    fn usual(&self) -> PathBuf {
        let active =
            std::env::var_os("VIRTUAL_ENV").map(|folder| Path::new(&folder).join("bin/python"));
        let active = active.filter(|file| file.is_file());
        active.or_else(|| self.neighbour()).unwrap_or_else(|| PathBuf::from("python3"))
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
