//! Which names a mistyped name may stand for.
#![deny(unsafe_code, clippy::unwrap_used)]

/// A name is near another from this likeness on.
const NEAR: f64 = 0.8;
/// The most names to suggest.
const SUGGESTIONS: usize = 3;

/// Those of `names` that are like `name`, likest first; may be empty. Case does not matter, nor
/// whether words are joined by `_` or by `-`.
pub fn near<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let plain = |name: &str| name.to_ascii_lowercase().replace('_', "-");
    let wanted = plain(name);
    let likeness = |name: &str| {
        let name = plain(name);
        let whole = strsim::jaro_winkler(&wanted, &name);
        // `host-wait` is near `host_waits`, and `grow` near `grows`; but containment counts
        // too, as in `driver` for `driver_calls`.
        if wanted.len() >= 3 && name.contains(&wanted) { whole.max(0.9) } else { whole }
    };
    let mut found: Vec<(f64, &str)> = names
        .into_iter()
        .map(|name| (likeness(name), name))
        .filter(|(near, _)| *near >= NEAR)
        .collect();
    found.sort_by(|a, b| b.0.total_cmp(&a.0));
    found.into_iter().take(SUGGESTIONS).map(|(_, name)| name).collect()
}
