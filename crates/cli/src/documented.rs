//! Checks the commands in README and the pages: the command line parses each, and the library its
//! settings. (`python -m gruyere`, and GPUs and sweeps of `gruyere dryrun`: test_documented.py.)
//! Writes docs/commands.md from their help.

#[path = "../../../tests/common/generated_table.rs"]
mod generated_table;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use generated_table::check;
use gruyere::config::Config;

use super::{Cli, Command, MOST_COLUMNS};
use crate::launch_line;

/// Pages whose commands are not for users, or belong to an earlier version.
const NOT_READ: [&str; 1] = ["docs/decisions"];
/// Placeholders for a reader's own values, and their substitutes.
const STAND_FOR: [(&str, &str); 3] = [("PID", "4242"), ("ADDRESS", "0x7f3a40200400"), ("[", "")];
/// Shell tokens that end a command.
const ENDS: [&str; 6] = ["|", "||", "&", "&&", ">", ";"];

/// A command of a page.
#[derive(Debug, PartialEq)]
struct Shown {
    line: String,
    /// Within a sentence: it may be only the command's name.
    is_mention: bool,
}

/// The commands of a page: in blocks of `sh`, in indented blocks, between backquotes.
fn shown(page: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    let mut fence: Option<bool> = None;
    let mut lines = page.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            fence = if fence.is_some() { None } else { Some(language == "sh") };
            continue;
        }
        let mut add = |line: &str, is_mention| {
            found.push(Shown { line: line.trim().to_owned(), is_mention });
        };
        match fence {
            Some(true) => {
                let mut whole = line.to_owned();
                while whole.ends_with('\\') {
                    whole.pop();
                    whole.push_str(lines.next().unwrap_or_default());
                }
                add(&whole, false);
            }
            Some(false) => {}
            None => {
                if let Some(line) = line.strip_prefix("    ") {
                    // An explanation follows the command.
                    add(line.trim().split("   ").next().unwrap_or_default(), false);
                }
                for code in line.split('`').skip(1).step_by(2) {
                    add(code, true);
                }
            }
        }
    }
    found
}

/// The words of a command, its settings (`GRUYERE_CONF=`) separate; `None`: not ours.
fn words(line: &str) -> Option<(Vec<String>, Option<String>)> {
    let mut line = line.to_owned();
    for (word, instead) in STAND_FOR {
        line = line.replace(word, instead);
    }
    let words = shlex::split(&line.replace(']', ""))?;
    let mut words = words.into_iter().peekable();
    let mut settings = None;
    while let Some(word) = words.peek().filter(|word| word.contains('=') || *word == "sudo") {
        settings = word.strip_prefix("GRUYERE_CONF=").map(str::to_owned).or(settings);
        words.next();
    }
    let mut words: Vec<String> =
        words.take_while(|word| !ENDS.contains(&word.as_str())).filter(|w| w != "...").collect();
    for cargo in [["cargo", "run", "--"].as_slice(), &["cargo", "run", "--release", "--"]] {
        if words.iter().map(String::as_str).take(cargo.len()).eq(cargo.iter().copied()) {
            words.splice(..cargo.len(), ["gruyere".to_owned()]);
        }
    }
    (words.first().is_some_and(|word| word == "gruyere") && words.len() > 1 || settings.is_some())
        .then_some((words, settings))
}

/// Error that the command would print.
fn fault(command: &Shown) -> Option<String> {
    let (words, settings) = words(&command.line)?;
    if let Some(text) = settings.filter(|text| !text.starts_with("key:"))
        && let Err(error) = Config::parse(&text)
    {
        return Some(error.to_string());
    }
    let is_placeholder = |word: &String| word.chars().all(char::is_uppercase);
    if words.first().is_none_or(|word| word != "gruyere")
        || words.get(1).is_some_and(is_placeholder)
    {
        return None;
    }
    let read = |command: &[OsString], name| launch_line::read(command, name, &[]).err();
    match Cli::try_parse_from(&words) {
        Ok(cli) => match cli.command {
            Command::Compare(arguments) => read(arguments.command(), "compare"),
            // A sentence may contain only the name.
            Command::Dryrun(_) if command.is_mention && words.len() == 2 => None,
            Command::Dryrun(arguments) => arguments.fault(),
            Command::Watch(arguments) => arguments.fault(),
            _ => None,
        },
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
            ErrorKind::MissingRequiredArgument
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                if command.is_mention =>
            {
                None
            }
            // "as `--html` makes it"
            ErrorKind::InvalidValue
                if command.is_mention && error.to_string().contains("none was supplied") =>
            {
                None
            }
            _ => Some(error.to_string()),
        },
    }
}

/// Every page for users.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found =
        ["README.md", "python_loader/README.md", "dashboards/README.md", "examples/README.md"]
            .map(|page| root.join(page))
            .to_vec();
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if NOT_READ.iter().any(|part| path.ends_with(part)) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "md") {
                found.push(path);
            }
        }
    }
    found
}

#[test]
fn every_command_of_readme_and_the_pages_is_one_that_this_program_takes() {
    let (mut faults, mut read) = (Vec::new(), 0);
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        for command in shown(&text) {
            read += usize::from(words(&command.line).is_some());
            if let Some(fault) = fault(&command) {
                faults.push(format!("{}: {}\n{fault}", page.display(), command.line));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(read > 100, "only {read} commands were found");
}

#[test]
fn a_command_that_is_none_is_noticed() {
    let fault = |page: &str| shown(page).iter().find_map(fault);
    for page in [
        "```sh\ngruyere watch 'oom-in<10min' --exec './page-me.sh'\n```",
        "```sh\nRANK=0 gruyere watch \\\n    'oom<10min'\n```",
        "    gruyere top --sort nothing      a word\n",
        "the command `gruyere tops`",
        "`GRUYERE_CONF=limits:90% python train.py`",
        "```sh\ngruyere compare\n```",
        "`gruyere dryrun --steps 0 train.py`",
        "`gruyere compare -- python -I train.py`",
    ] {
        assert!(fault(page).is_some(), "{page}");
    }
    for page in [
        "```sh\ngruyere map PID --by age | head      # a word\n```",
        "```text\ngruyere nothing\n```",
        "`gruyere compare`, `gruyere dryrun`, `gruyere map --html` and `gruyere map [PID]`",
        "    gruyere doctor [--python .venv/bin/python] [--json]\n",
    ] {
        assert_eq!(fault(page), None, "{page}");
    }
}

/// The pages about commands, under docs/.
const PAGES: [(&str, &str); 17] = [
    ("address", "after-the-crash.md#an-illegal-access"),
    ("bench", "measured.md"),
    ("compare", "bench-torch.md#one-script-one-word"),
    ("diff", "after-the-crash.md"),
    ("doctor", "operations.md#gruyere-doctor---gpu"),
    ("dryrun", "dryrun.md"),
    ("export", "operations.md"),
    ("map", "map.md"),
    ("post", "after-the-crash.md"),
    ("ps", "watching.md"),
    ("record", "record-a-trace.md"),
    ("report", "reports.md"),
    ("run", "preload.md"),
    ("snapshot", "after-the-crash.md"),
    ("stat", "watching.md"),
    ("top", "watching.md"),
    ("watch", "watching.md#gruyere-watch"),
];

/// The help of the whole command and of each subcommand, as sections of a page.
fn reference() -> String {
    let mut whole = Cli::command().term_width(MOST_COLUMNS);
    whole.build();
    let help = |command: &mut clap::Command| {
        let help = command.render_help().to_string();
        let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
        format!("```text\n{}\n```\n", lines.join("\n").trim_end())
    };
    let mut text = format!("## gruyere\n\n{}", help(&mut whole));
    for command in whole.get_subcommands_mut().filter(|command| command.get_name() != "help") {
        let name = command.get_name().to_owned();
        text += &format!("\n## gruyere {name}\n\n");
        if let Some((_, page)) = PAGES.iter().find(|(of, _)| *of == name) {
            let title = page.split(".md").next().unwrap_or_default().replace('-', " ");
            text += &format!("How to: [{title}]({page}).\n\n");
        }
        text += &help(command);
    }
    text
}

#[test]
fn the_page_of_the_commands_is_their_help() {
    check("docs/commands.md", "commands", &reference());
}
