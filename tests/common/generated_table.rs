//! The part of a page that is made from the code, between two marks.

use std::path::Path;

/// `text` with the part between the marks of the table `name` replaced; `None` where the marks are
/// missing.
pub fn with_table(text: &str, name: &str, table: &str) -> Option<String> {
    let mark = format!("<!-- {name}: written by `cargo xtask docs` -->\n");
    let begin = text.find(&mark)? + mark.len();
    let end = begin + text[begin..].find(&format!("<!-- {name}: end -->"))?;
    Some(format!("{}{table}{}", &text[..begin], &text[end..]))
}

/// Compares the table `name` of a page of this repository with `table`; with GRUYERE_BLESS set,
/// writes it.
pub fn check(page: &str, name: &str, table: &str) {
    // Of the package that this is compiled in: the library's in the root, the command's below it.
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = package.ancestors().find(|folder| folder.join("docs").is_dir());
    let path = root.expect("the repository").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let fresh = with_table(&text, name, table)
        .unwrap_or_else(|| panic!("{page} lacks the marks of the table {name}"));
    if std::env::var_os("GRUYERE_BLESS").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    } else {
        assert!(text == fresh, "{page} is stale: run `cargo xtask docs`");
    }
}
