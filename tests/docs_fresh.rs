//! Tables of the documentation are made from the code; `cargo xtask docs` (GRUYERE_BLESS=1) writes
//! them anew.

use std::fmt::Write as _;
use std::path::Path;

use gruyere::config::keys::markdown_table;
use gruyere::record::device_gauge::{DeviceGauge, Kind};

/// `text` with the part between the marks of the table `name` replaced; `None` where the marks are
/// missing.
fn with_table(text: &str, name: &str, table: &str) -> Option<String> {
    let mark = format!("<!-- {name}: written by `cargo xtask docs` -->\n");
    let begin = text.find(&mark)? + mark.len();
    let end = begin + text[begin..].find(&format!("<!-- {name}: end -->"))?;
    Some(format!("{}{table}{}", &text[..begin], &text[end..]))
}

fn check(page: &str, name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{page}: {error}"));
    let fresh = with_table(&text, name, table)
        .unwrap_or_else(|| panic!("{page} lacks the marks of the table {name}"));
    if std::env::var_os("GRUYERE_BLESS").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    } else {
        assert!(text == fresh, "{page} is stale: run `cargo xtask docs`");
    }
}

#[test]
fn the_configuration_s_table_is_the_code_s() {
    check("docs/configuration.md", "configuration", &markdown_table());
}

#[test]
fn the_gauges_table_is_the_code_s() {
    let mut table =
        "| metric | in `stat --json` and `watch` | what it is |\n|---|---|---|\n".to_owned();
    for gauge in DeviceGauge::ALL {
        let Some(metric) = gauge.metric() else { continue };
        let total = if gauge.kind() == Kind::Counter { "_total" } else { "" };
        let (name, help) = (gauge.name(), gauge.help());
        writeln!(table, "| `{metric}{total}` | `{name}` | {help} |").unwrap();
    }
    check("docs/operations.md", "gauges", &table);
}

#[test]
fn a_stale_table_is_noticed() {
    let (begin, end) =
        ("<!-- one: written by `cargo xtask docs` -->\n", "<!-- one: end -->\nafter\n");
    let fresh = with_table(&format!("before\n{begin}| old |\n{end}"), "one", "| new |\n").unwrap();
    assert_eq!(fresh, format!("before\n{begin}| new |\n{end}"));
    assert_eq!(with_table("no marks", "one", "| new |\n"), None);
}
