//! The help of every command fits the terminal.

#[path = "common/signals.rs"]
#[allow(dead_code)]
mod signals;
#[path = "common/terminal.rs"]
#[allow(dead_code)]
mod terminal;

use std::process::{Command, Stdio};

use terminal::Terminal;

/// Default columns of a terminal.
const COLUMNS: u16 = 80;

fn gruyere(words: &[String]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gruyere"));
    command.args(words).env_remove("COLUMNS").env_remove("LINES").stdin(Stdio::null());
    // The help names the folder, whose path is never broken; a test run's is longer than users'.
    command.env_remove("GRUYERE_RECORD_DIR");
    command
}

fn printed(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Every command and subcommand, as listed in the help; the root is the empty list.
fn commands() -> Vec<Vec<String>> {
    let mut found: Vec<Vec<String>> = vec![Vec::new()];
    let mut next = 0;
    while let Some(parent) = found.get(next).cloned() {
        let help = printed(gruyere(&[&parent[..], &["--help".to_owned()]].concat()));
        // The root's help has its commands in groups.
        let listed = match parent.is_empty() {
            true => help.as_str(),
            false => help.split_once("\nCommands:\n").map_or("", |(_, listed)| listed),
        };
        let listed = listed.split_once("\nOptions:").map_or(listed, |(listed, _)| listed);
        for line in listed.lines().filter(|line| line.starts_with("  ")) {
            let name = line.split_whitespace().next().unwrap_or_default();
            let is_name = line.as_bytes()[2] != b' ' && !["help", "python"].contains(&name);
            if is_name {
                found.push([&parent[..], &[name.trim_end_matches(',').to_owned()]].concat());
            }
        }
        next += 1;
    }
    found
}

fn too_wide(text: &str, most: u16) -> Vec<String> {
    let wide = |line: &&str| line.chars().count() > usize::from(most);
    text.lines().filter(wide).map(str::to_owned).collect()
}

#[test]
fn the_help_of_every_command_fits_the_terminal() {
    let commands = commands();
    let is_known = |words: &[&str]| commands.iter().any(|known| known == words);
    assert!(commands.len() >= 20 && is_known(&["bench", "torch"]), "{commands:?}");
    for words in &commands {
        for option in ["--help", "-h"] {
            let asked = [&words[..], &[option.to_owned()]].concat();
            // 80 columns if the width is unknown, and no more on a wide terminal.
            for columns in [None, Some("80"), Some("200")] {
                let mut command = gruyere(&asked);
                columns.map(|columns| command.env("COLUMNS", columns));
                let text = printed(command);
                let wide = too_wide(&text, COLUMNS);
                assert!(wide.is_empty(), "{asked:?} at {columns:?} columns: {wide:#?}");
            }
        }
        let mut terminal =
            Terminal::sized(gruyere(&[&words[..], &["--help".to_owned()]].concat()), COLUMNS, 24);
        assert!(terminal.ended().success(), "{words:?}");
        let text = terminal.seen().replace("\r\n", "\n");
        assert!(text.contains("Usage:"), "{words:?}: {text}");
        let text = without_styles(&text);
        assert!(too_wide(&text, COLUMNS).is_empty(), "{words:?}: {:#?}", too_wide(&text, COLUMNS));
    }
}

#[test]
fn a_narrow_terminal_gets_narrower_help() {
    let mut command = gruyere(&["post".to_owned(), "--help".to_owned()]);
    command.env("COLUMNS", "60");
    let text = printed(command);
    assert!(too_wide(&text, 60).is_empty(), "{:#?}", too_wide(&text, 60));
}

/// `text` without the escapes for bold and underline.
fn without_styles(text: &str) -> String {
    let mut pieces = text.split('\u{1b}');
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| text + piece.split_once('m').map_or(piece, |(_, rest)| rest))
}
