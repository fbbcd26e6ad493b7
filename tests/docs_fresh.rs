//! The table of the configuration is made from the code; `cargo xtask docs` (GRUYERE_BLESS=1)
//! writes it anew.

use std::path::Path;

use gruyere::config::keys::markdown_table;

const BEGIN: &str = "<!-- configuration: written by `cargo xtask docs` -->\n";
const END: &str = "<!-- configuration: end -->";

/// `text` with the part between the marks replaced; `None` where the marks are missing.
fn with_table(text: &str, table: &str) -> Option<String> {
    let begin = text.find(BEGIN)? + BEGIN.len();
    let end = begin + text[begin..].find(END)?;
    Some(format!("{}{table}{}", &text[..begin], &text[end..]))
}

#[test]
fn the_configuration_s_table_is_the_code_s() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = markdown_table();
    let page = "docs/configuration.md";
    let path = root.join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let fresh =
        with_table(&text, &table).unwrap_or_else(|| panic!("{page} lacks the marks {BEGIN}{END}"));
    if std::env::var_os("GRUYERE_BLESS").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    } else {
        assert!(text == fresh, "{page} is stale: run `cargo xtask docs`");
    }
}

#[test]
fn a_stale_table_is_noticed() {
    let stale = format!("before\n{BEGIN}| old |\n{END}\nafter\n");
    let fresh = with_table(&stale, "| new |\n").unwrap();
    assert_eq!(fresh, format!("before\n{BEGIN}| new |\n{END}\nafter\n"));
    assert_eq!(with_table("no marks", "| new |\n"), None);
}
