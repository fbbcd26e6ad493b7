//! External programs that the tests call: which are missing here, what is skipped without them, and
//! the command that installs them (`cargo xtask tools --install`; .ci/run calls it too).
//!
//! docs/developing.md has the same list in prose.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::parts::{cargo, command, output, succeed};

/// An external tool of the tests.
#[derive(Debug)]
pub struct Tool {
    /// Its name in parts that need it, and in tests that lack it.
    pub name: &'static str,
    is_there: Found,
    install: Install,
    /// Skipped portions of parts that run without it: the part, and the portion.
    leaves_out: &'static [(&'static str, &'static str)],
}

/// Condition for a tool to be present.
#[derive(Debug)]
enum Found {
    /// All of these programs.
    All(&'static [&'static str]),
    /// One of these programs.
    One(&'static [&'static str]),
    /// Python with virtual environments.
    Venv,
}

/// Method of installation.
#[derive(Debug)]
enum Install {
    /// By Debian's package.
    Debian(&'static str),
    /// Debian's package, unpacked and not installed: the installation would start a service and add
    /// two dozen packages.
    Unpacked(&'static str),
    /// By cargo, into a folder of its own.
    Cargo(&'static [&'static str]),
}

/// Folders of [`Install::Unpacked`] and [`Install::Cargo`].
const FOLDERS: [&str; 2] = ["target/prometheus/usr/bin", "target/mdbook/bin"];

/// The part whose individual tests lack tools.
const RUST: &str = "rust tests";

/// All tools. Rust and a C compiler are not listed: without them this doesn't run.
pub const TOOLS: [Tool; 8] = [
    Tool {
        name: "c++",
        is_there: Found::All(&["c++"]),
        install: Install::Debian("build-essential"),
        leaves_out: &[("header", "the header as C++"), (RUST, "the examples (3 tests)")],
    },
    Tool {
        name: "make",
        is_there: Found::All(&["make"]),
        install: Install::Debian("build-essential"),
        leaves_out: &[(RUST, "the examples (3 tests)")],
    },
    Tool {
        name: "binutils",
        is_there: Found::All(&["nm", "readelf", "strip"]),
        install: Install::Debian("binutils"),
        leaves_out: &[],
    },
    Tool {
        name: "valgrind",
        is_there: Found::All(&["valgrind"]),
        install: Install::Debian("valgrind"),
        leaves_out: &[(RUST, "memcheck of preload:driver (1 test)")],
    },
    Tool {
        name: "chromium",
        // As in tests/html/measure.py.
        is_there: Found::One(&[
            "chromium",
            "chromium-browser",
            "google-chrome",
            "google-chrome-stable",
            "chrome",
        ]),
        install: Install::Debian("chromium"),
        leaves_out: &[(RUST, "the page of `gruyere map --html` in a browser (2 tests)")],
    },
    Tool {
        name: "python3-venv",
        is_there: Found::Venv,
        install: Install::Debian("python3-venv"),
        leaves_out: &[],
    },
    Tool {
        name: "prometheus",
        is_there: Found::All(&["prometheus", "promtool"]),
        install: Install::Unpacked("prometheus"),
        leaves_out: &[],
    },
    Tool {
        name: "mdbook",
        is_there: Found::All(&["mdbook"]),
        install: Install::Cargo(&[
            "install",
            "--quiet",
            "--locked",
            "--root",
            "target/mdbook",
            "--no-default-features",
            "--features",
            "search",
            "mdbook@0.5.4",
        ]),
        leaves_out: &[],
    },
];

/// The command that installs what is missing.
pub const COMMAND: &str = "cargo xtask tools --install";

/// The missing tools.
pub fn missing(root: &Path) -> Vec<&'static Tool> {
    TOOLS.iter().filter(|tool| !tool.is_there(root)).collect()
}

/// Path of a program: where [`COMMAND`] has put it, or on the PATH.
pub fn find(root: &Path, program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let ours = FOLDERS.iter().map(|folder| root.join(folder));
    ours.chain(std::env::split_paths(&path))
        .map(|folder| folder.join(program))
        .find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    file.metadata().is_ok_and(|facts| facts.is_file() && facts.permissions().mode() & 0o111 != 0)
}

impl Tool {
    fn is_there(&self, root: &Path) -> bool {
        let found = |program: &&str| find(root, program).is_some();
        match &self.is_there {
            Found::All(programs) => programs.iter().all(found),
            Found::One(programs) => programs.iter().any(found),
            Found::Venv => Command::new("python3")
                .args(["-c", "import ensurepip, venv"])
                .output()
                .is_ok_and(|output| output.status.success()),
        }
    }

    /// The portions of `parts` skipped without it.
    fn leaves_out(&self, parts: &[(&str, &[&str])]) -> Vec<String> {
        let needing = parts.iter().filter(|(_, needs)| needs.contains(&self.name));
        let some = self.leaves_out.iter().filter(|(of, _)| parts.iter().any(|(it, _)| it == of));
        needing
            .map(|(part, _)| format!("part {part}"))
            .chain(some.map(|(_, what)| (*what).to_owned()))
            .collect()
    }
}

/// Notice before a test run: the missing tools, what is skipped in these parts (each with its
/// needs), and how to install the tools. Empty if nothing is missing.
pub fn notice(missing: &[&Tool], parts: &[(&str, &[&str])]) -> String {
    let mut text = String::new();
    for tool in missing {
        let left = tool.leaves_out(parts);
        if !left.is_empty() {
            text += &format!("  {}: leaves out {}\n", tool.name, left.join(", "));
        }
    }
    if text.is_empty() {
        return text;
    }
    format!("missing here:\n{text}to install all of it: {COMMAND}\n")
}

/// `cargo xtask tools`: lists the present and the missing tools.
pub fn list(root: &Path) {
    for tool in &TOOLS {
        println!("{:>8}  {}", if tool.is_there(root) { "there" } else { "MISSING" }, tool.name);
    }
}

/// Installs the missing tools.
///
/// # Errors
/// Those that can't be installed: by name, with the reason.
pub fn install(root: &Path) -> Result<(), String> {
    let missing = missing(root);
    let mut packages: Vec<&str> = missing
        .iter()
        .filter_map(|tool| match tool.install {
            Install::Debian(package) => Some(package),
            _ => None,
        })
        .collect();
    packages.sort_unstable();
    packages.dedup();
    let debian = missing.iter().any(|tool| !matches!(tool.install, Install::Cargo(_)));
    if debian {
        if find(root, "apt-get").is_none() {
            let names: Vec<_> = missing.iter().map(|tool| tool.name).collect();
            return Err(format!(
                "no apt-get, so that only Debian and its kin are served: install these by your \
                 system's own means: {}",
                names.join(", ")
            ));
        }
        succeed(&mut as_root(root, &["apt-get", "update", "-q"])?)?;
    }
    if !packages.is_empty() {
        let mut words = vec!["apt-get", "install", "-q", "-y", "--no-install-recommends"];
        words.extend(packages);
        succeed(&mut as_root(root, &words)?)?;
    }
    for tool in &missing {
        match tool.install {
            Install::Debian(_) => {}
            Install::Unpacked(package) => unpack(root, package)?,
            Install::Cargo(words) => succeed(&mut cargo(root, words))?,
        }
        if !tool.is_there(root) {
            return Err(format!("{} was installed, and is not found on the path", tool.name));
        }
    }
    Ok(())
}

/// A command with root's rights: for other users by sudo, which must not prompt.
fn as_root(root: &Path, words: &[&str]) -> Result<Command, String> {
    let mut all = Vec::new();
    if output(Command::new("id").arg("-u"))?.trim() != "0" {
        all.extend(["sudo", "-n", "--preserve-env=DEBIAN_FRONTEND"]);
    }
    all.extend(words);
    let mut made = command(root, all[0], &all[1..]);
    made.env("DEBIAN_FRONTEND", "noninteractive");
    Ok(made)
}

fn unpack(root: &Path, package: &str) -> Result<(), String> {
    let folder = root.join("target").join(package);
    let wrong = |error: std::io::Error| format!("{}: {error}", folder.display());
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(wrong)?;
    }
    std::fs::create_dir_all(&folder).map_err(wrong)?;
    succeed(&mut command(&folder, "apt-get", &["download", "-q", package]))?;
    let files = std::fs::read_dir(&folder).map_err(wrong)?.flatten().map(|entry| entry.path());
    for file in files.filter(|file| file.extension().is_some_and(|ending| ending == "deb")) {
        succeed(command(&folder, "dpkg", &["-x"]).arg(&file).arg("."))?;
        std::fs::remove_file(&file).map_err(wrong)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> &'static Tool {
        TOOLS.iter().find(|tool| tool.name == name).unwrap()
    }

    #[test]
    fn what_is_missing_is_named_with_what_it_leaves_out_and_the_command_that_installs_it() {
        let parts: [(&str, &[&str]); 3] =
            [("memcheck", &["valgrind"]), (RUST, &[]), ("instructions", &["valgrind"])];
        let said = notice(&[tool("valgrind"), tool("chromium")], &parts);
        assert_eq!(
            said,
            "missing here:\n  valgrind: leaves out part memcheck, part instructions, memcheck of \
             preload:driver (1 test)\n  chromium: \
             leaves out the page of `gruyere map --html` in a browser (2 tests)\nto install all of \
             it: cargo xtask tools --install\n"
        );
        assert_eq!(notice(&[], &parts), "");
        // A tool that no chosen part needs is not mentioned.
        assert_eq!(notice(&[tool("prometheus")], &parts), "");
        assert_eq!(notice(&[tool("chromium")], &parts[..1]), "");
    }

    #[test]
    fn a_program_is_found_where_it_was_put_and_only_if_it_can_be_run() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join(FOLDERS[0]);
        std::fs::create_dir_all(&folder).unwrap();
        assert!(
            !tool("prometheus").is_there(root.path()) || find(root.path(), "promtool").is_some()
        );
        for name in ["prometheus-of-a-test", "promtool-of-a-test"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        assert_eq!(find(root.path(), "prometheus-of-a-test"), None);
        let file = folder.join("prometheus-of-a-test");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find(root.path(), "prometheus-of-a-test"), Some(file));
        assert!(find(root.path(), "sh").is_some());
    }

    #[test]
    fn the_names_of_the_browser_are_those_that_the_test_looks_for() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let script = std::fs::read_to_string(root.join("tests/html/measure.py")).unwrap();
        let line = script.lines().find_map(|line| line.strip_prefix("NAMES = (")).unwrap();
        let names: Vec<&str> =
            line.trim_end_matches(')').split(", ").map(|name| name.trim_matches('"')).collect();
        let Found::One(ours) = tool("chromium").is_there else { panic!() };
        assert_eq!(names, ours);
    }

    #[test]
    fn the_table_of_the_documentation_has_every_tool() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let page = std::fs::read_to_string(root.join("docs/developing.md")).unwrap();
        let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| ")).collect();
        for tool in &TOOLS {
            let named = format!("`{}`", tool.name);
            assert!(rows.iter().any(|row| row.contains(&named)), "no row on {named}");
        }
    }
}
