//! Wraps sentences to a terminal.

use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};

use crate::candidates;

/// The widest line of a sentence, even on a wider terminal.
const MOST: usize = 100;

/// Columns of standard output; `None`: neither a terminal nor a width in $COLUMNS, so lines are not
/// broken, for text searches.
pub fn width() -> Option<usize> {
    let out = io::stdout();
    let is_wanted = out.is_terminal() || std::env::var_os("COLUMNS").is_some();
    is_wanted.then(|| candidates::columns(&out))
}

/// As [`width`], for sentences.
pub fn columns() -> Option<usize> {
    width().map(|columns| columns.min(MOST))
}

/// `head`, then `parts` with `gap` between, in lines of at most `columns` characters, which go on
/// below the first part. A longer part has a line of its own.
pub fn below<'a>(
    head: &str,
    parts: impl IntoIterator<Item = &'a str>,
    gap: &str,
    columns: usize,
) -> String {
    let start = head.chars().count();
    let (mut out, mut used, mut is_first) = (head.to_owned(), start, true);
    for part in parts {
        let wide = part.chars().count();
        if !is_first && used + gap.len() + wide > columns {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', start));
            used = start;
        } else if !is_first {
            out.push_str(gap);
            used += gap.len();
        }
        out.push_str(part);
        used += wide;
        is_first = false;
    }
    out
}

/// `text` in lines of at most `columns` characters, broken at spaces; all but the first begin with
/// `indent`. A longer word has a line of its own.
pub fn wrap(text: &str, columns: usize, indent: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(last) if last.chars().count() + 1 + word.chars().count() <= columns => {
                last.push(' ');
                last.push_str(word);
            }
            Some(_) => lines.push(format!("{indent}{word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Prints a sentence on stderr for the command `name`, as [`crate::failure::say`] does; wrapped if
/// stderr is a terminal.
pub fn say(name: &str, text: impl fmt::Display) {
    eprint_lines(&format!("gruyere {name}: {text}"));
}

/// Prints lines on stderr, those that are too long for a terminal wrapped. A missing reader is no
/// error.
pub fn eprint_lines(text: &str) {
    let stderr = io::stderr();
    let columns = if stderr.is_terminal() { candidates::columns(&stderr) } else { usize::MAX };
    let _ = stderr.lock().write_all(fitted(text, columns).as_bytes());
}

/// `text` for standard output, with the lines that are too long for a terminal wrapped.
pub fn fit(text: &str) -> String {
    fitted(text, width().unwrap_or(usize::MAX))
}

/// Each line that is longer than `columns`, wrapped.
fn fitted(text: &str, columns: usize) -> String {
    let fit = |line: &str| match line.chars().count() > columns {
        true => wrap(line, columns, "  ").join("\n"),
        false => line.to_owned(),
    };
    text.lines().map(|line| fit(line) + "\n").collect()
}

/// Joins indented lines to the line before, as sentences.
pub fn unfold(lines: &[String]) -> Vec<String> {
    let mut sentences: Vec<String> = Vec::new();
    for line in lines {
        match sentences.last_mut().filter(|_| line.starts_with(' ')) {
            Some(last) => {
                last.push(' ');
                last.push_str(line.trim_start());
            }
            None => sentences.push(line.clone()),
        }
    }
    sentences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_fits_and_loses_no_word() {
        let text = "To do: find what keeps that line's result (a list, an attribute) and bound it";
        for columns in [20, 40, 79, 200] {
            let lines = wrap(text, columns, "  ");
            assert!(lines.iter().all(|line| line.chars().count() <= columns), "{lines:?}");
            assert_eq!(unfold(&lines), [text]);
        }
        assert_eq!(below("a  ", ["1 2", "3 4", "5"], "  ", 9), "a  1 2\n   3 4  5");
        let table = "  GPU  LIVE\n    0     1\n";
        assert_eq!(fitted(table, 80), table, "what fits stays as it is");
        assert_eq!(fitted("  a table\nlong sentence", 9), "  a table\nlong\n  sentence\n");
        assert_eq!(wrap("a /very/long/path b", 6, " "), ["a", " /very/long/path", " b"]);
    }
}
