//! Bytes and ratios for people.

use gruyere_record::size::BinaryBytes;

/// Bytes with two digits after the point, in the unit that leaves one to four before it.
pub fn bytes(value: u64) -> String {
    BinaryBytes(value).to_string()
}

/// `percent` with two digits: `0.4%`, `9.9%`, `50%`.
pub fn percent(percent: f64) -> String {
    // From 9.95 on, a digit after the point would make three.
    if percent.abs() < 9.95 { format!("{percent:.1}%") } else { format!("{percent:.0}%") }
}

/// Growth of `after` over `before`, with its sign; `None` if `before` is zero.
pub fn growth(before: u64, after: u64) -> Option<String> {
    let change = (after as f64 / before as f64 - 1.0) * 100.0;
    let sign = if change > 0.0 { "+" } else { "" };
    match (before, after) {
        (0, 0) => Some("0%".to_owned()),
        (0, _) => None,
        _ if before == after => Some("0%".to_owned()),
        _ => Some(format!("{sign}{}", percent(change))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_digits_are_told() {
        let cases = [(0.0, "0.0%"), (0.44, "0.4%"), (9.94, "9.9%"), (9.96, "10%"), (76.2, "76%")];
        for (value, told) in cases {
            assert_eq!(percent(value), told);
        }
    }

    #[test]
    fn a_growth_has_its_sign_and_nothing_has_none() {
        assert_eq!(growth(100, 138).as_deref(), Some("+38%"));
        assert_eq!(growth(1000, 996).as_deref(), Some("-0.4%"));
        assert_eq!((growth(7, 7).as_deref(), growth(0, 0).as_deref()), (Some("0%"), Some("0%")));
        assert_eq!(growth(0, 7), None);
    }
}
