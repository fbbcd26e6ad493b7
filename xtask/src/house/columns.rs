//! The width of lines: 100 columns for code, comments and prose.
//!
//! What no break could mend, or a break would spoil, may be longer:
//!
//! - rows of Markdown tables, in comments too;
//! - code blocks of Markdown pages: commands that are copied, and what they print;
//! - marks in Markdown (`<!-- figure: NAME -->`), which no reader of a page sees, count nothing;
//! - lines with a word of more than 80 characters: an address, a mangled name, a test's name.
//!
//! There is no mark that lets a line pass: test data is broken as other text is.

use std::path::Path;

/// The most characters of a line.
const WIDTH: usize = 100;
/// A word that is longer is what makes its line long.
const WORD: usize = 80;
/// What is measured, by its ending.
const ENDINGS: [&str; 9] = ["rs", "py", "c", "cpp", "h", "hpp", "sh", "toml", "md"];
/// Folders that are not: what is built, what others wrote, measurements as they were printed.
const LEFT_OUT: [&str; 4] = ["target", "build", ".git", "results"];

/// Fails where a line of the repository at `root` is too long, and names it.
pub fn check(root: &Path) -> Result<(), String> {
    let mut long = Vec::new();
    look(root, root, &mut long)?;
    if long.is_empty() {
        return Ok(());
    }
    println!("{}", long.join("\n"));
    Err(format!("{} lines have more than {WIDTH} columns", long.len()))
}

/// Adds the long lines at and below `folder` to `long`, by file and number.
fn look(root: &Path, folder: &Path, long: &mut Vec<String>) -> Result<(), String> {
    let at = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let entries = std::fs::read_dir(folder).map_err(|error| at(folder, error))?;
    let mut paths = Vec::new();
    for entry in entries {
        paths.push(entry.map_err(|error| at(folder, error))?.path());
    }
    paths.sort();
    for path in paths {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !is_left_out(name) {
                look(root, &path, long)?;
            }
            continue;
        }
        let Some(ending) = path.extension().and_then(|ending| ending.to_str()) else { continue };
        if !ENDINGS.contains(&ending) {
            continue;
        }
        let text = std::fs::read_to_string(&path).map_err(|error| at(&path, error))?;
        let shown = path.strip_prefix(root).unwrap_or(&path).display();
        for (number, columns) in long_lines(ending, &text) {
            long.push(format!("{shown}:{number}: {columns} columns"));
        }
    }
    Ok(())
}

fn is_left_out(folder: &str) -> bool {
    LEFT_OUT.contains(&folder) || folder.starts_with(".venv")
}

/// The lines of a file that are too long, each with its number (from 1) and its columns.
fn long_lines(ending: &str, text: &str) -> Vec<(usize, usize)> {
    let mut page = Page::default();
    let mut long = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let is_code = ending == "md" && page.is_code(line);
        let columns = line.chars().count() - if ending == "md" { marks(line) } else { 0 };
        let is_broken_by = |word: &str| word.chars().count() > WORD;
        let may_be = is_code || is_row(ending, line) || line.split_whitespace().any(is_broken_by);
        if columns > WIDTH && !may_be {
            long.push((number, columns));
        }
    }
    long
}

/// The characters of a line's marks.
fn marks(line: &str) -> usize {
    let mut count = 0;
    let mut rest = line;
    while let Some((_, from)) = rest.split_once("<!-- ")
        && let Some((mark, after)) = from.split_once(" -->")
    {
        count += "<!-- ".len() + mark.chars().count() + " -->".len();
        rest = after;
    }
    count
}

/// Whether `line` is a row of a Markdown table.
fn is_row(ending: &str, line: &str) -> bool {
    let line = line.trim_start();
    match ending {
        "md" => line.starts_with('|'),
        "rs" => line
            .strip_prefix("//")
            .is_some_and(|line| line.trim_start_matches(['/', '!']).trim_start().starts_with('|')),
        _ => false,
    }
}

/// Where in a Markdown page one is.
#[derive(Debug, Default)]
struct Page {
    /// The fence that a code block began with.
    fence: Option<String>,
    /// Columns of a paragraph that begins here: a list's item has its text further in.
    margin: usize,
    /// In a code block by indentation.
    indented: bool,
    /// Behind an empty line.
    behind_empty: bool,
}

impl Page {
    /// Whether `line`, the page's next one, belongs to a code block.
    fn is_code(&mut self, line: &str) -> bool {
        let text = line.trim_start();
        if let Some(fence) = &self.fence {
            if text.starts_with(fence.as_str()) && text.trim_end().chars().all(|c| "`~".contains(c))
            {
                self.fence = None;
            }
            return true;
        }
        if text.starts_with("```") || text.starts_with("~~~") {
            self.fence = Some(text[..3].to_owned());
            return true;
        }
        let behind_empty = std::mem::replace(&mut self.behind_empty, text.is_empty());
        if text.is_empty() {
            return self.indented;
        }
        let indent = line.len() - text.len();
        if indent < self.margin {
            self.margin = 0;
        }
        self.indented = indent >= self.margin + 4 && (self.indented || behind_empty);
        if !self.indented {
            let marker = text.split(' ').next().unwrap_or_default();
            let is_number = marker.strip_suffix(['.', ')']).is_some_and(|number| {
                !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
            });
            if ["-", "*", "+"].contains(&marker) || is_number {
                self.margin = indent + marker.len() + 1;
            }
        }
        self.indented
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [usize; 0] = [];

    fn long_words(columns: usize) -> String {
        "word ".repeat(columns / 5 + 1)[..columns].to_owned()
    }

    fn numbers(ending: &str, text: &str) -> Vec<usize> {
        long_lines(ending, text).into_iter().map(|(number, _)| number).collect()
    }

    #[test]
    fn a_line_has_a_hundred_characters_at_most_whatever_their_bytes() {
        let fits = format!("// {}", "é ".repeat(48));
        assert_eq!(long_lines("rs", &format!("{fits}\n{fits}éé\n")), [(2, 101)]);
    }

    #[test]
    fn a_table_s_row_may_be_long_where_there_are_tables() {
        let row = format!("| {} |", long_words(120));
        assert_eq!(numbers("md", &row), NONE);
        assert_eq!(numbers("rs", &format!("//! {row}\n    /// {row}\n")), NONE);
        assert_eq!(numbers("rs", &row), [1]);
        assert_eq!(numbers("py", &format!("# {row}")), [1]);
    }

    #[test]
    fn a_word_that_cannot_be_broken_may_be_long_and_other_words_may_not() {
        assert_eq!(numbers("md", &format!("at https://{}", "a/".repeat(60))), NONE);
        assert_eq!(numbers("rs", &format!("fn {}() {{", "a_".repeat(50))), NONE);
        assert_eq!(numbers("rs", &format!("let name = \"{}\";", long_words(100))), [1]);
    }

    #[test]
    fn marks_of_a_page_count_nothing() {
        let (mark, prose) = ("<!-- figure: holds -->1<!-- . -->", long_words(90));
        assert_eq!(numbers("md", &format!("{prose} {mark} {mark}\n")), NONE);
        assert_eq!(numbers("md", &format!("{prose} {mark} and still more\n")), [1]);
        assert_eq!(numbers("rs", &format!("// {prose} {mark}\n")), [1]);
    }

    #[test]
    fn a_page_s_code_may_be_long_and_its_prose_may_not() {
        let long = long_words(120);
        assert_eq!(numbers("md", &format!("```text\n{long}\n```\n{long}\n")), [4]);
        assert_eq!(numbers("md", &format!("prose\n\n    {long}\n\n    {long}\n{long}\n")), [6]);
        assert_eq!(numbers("md", &format!("prose\n    {long}\n")), [2]);
    }

    #[test]
    fn a_list_s_items_are_prose_as_far_in_as_their_text_is() {
        let long = long_words(120);
        assert_eq!(numbers("md", &format!("- item\n\n  {long}\n\n    - {long}\n")), [3, 5]);
        assert_eq!(numbers("md", &format!("10. item\n\n    {long}\n\n        {long}\n")), [3]);
        assert_eq!(numbers("md", &format!("- item\n\nprose\n\n    {long}\n")), NONE);
    }

    #[test]
    fn what_is_built_and_what_was_measured_is_left_out() {
        assert!(["target", ".git", ".venv", ".venv-torch", "results"].into_iter().all(is_left_out));
        assert!(!["src", ".ci", "tests"].into_iter().any(is_left_out));
    }

    #[test]
    fn long_lines_are_named_by_file_and_number() {
        let root = tempfile::tempdir().unwrap();
        for folder in ["a/target", "c"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        for file in ["a/b.rs", "a/b.json", "a/target/b.rs", "c/toml", "c/d.toml"] {
            std::fs::write(root.path().join(file), format!("\n// {}\n", long_words(98))).unwrap();
        }
        let mut long = Vec::new();
        look(root.path(), root.path(), &mut long).unwrap();
        assert_eq!(long, ["a/b.rs:2: 101 columns", "c/d.toml:2: 101 columns"]);
    }
}
