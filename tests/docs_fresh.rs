//! Tables of the documentation are made from the code; `cargo xtask docs` (GRUYERE_BLESS=1) writes
//! them anew.

#[path = "common/generated_table.rs"]
mod generated_table;

use std::fmt::Write as _;

use generated_table::{check, with_table};
use gruyere::config::keys::markdown_table;
use gruyere::record::device_gauge::{DeviceGauge, Kind};

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
