//! Keys of earlier releases: each is accepted for one release, with a warning that names its
//! replacement.
#![deny(unsafe_code, clippy::unwrap_used)]

use super::{Config, PoolReuse, VARIABLE};

/// A value of a dropped key, and what it means now.
type Meaning = (&'static str, fn(&mut Config));

/// A key that there is no more.
#[derive(Debug, PartialEq, Eq)]
pub struct Dropped {
    /// As users wrote it.
    pub name: &'static str,
    /// What to write in its place, or that nothing is needed.
    pub instead: &'static str,
    /// The values that it took, and what each means now.
    values: &'static [Meaning],
}

/// `on` was the default of all three: whoever says so of one has not asked for the others.
const REUSE: &[Meaning] =
    &[("on", |_| {}), ("off", |config| config.heap.pool_reuse = PoolReuse::Exact)];
const POOL_REUSE: &str = "pool_reuse:on or pool_reuse:exact takes its place";

/// Every dropped key. A key leaves this table with the release after the one that dropped it.
static DROPPED: &[Dropped] = &[
    Dropped { name: "reuse_event_dependencies", instead: POOL_REUSE, values: REUSE },
    Dropped { name: "reuse_opportunistic", instead: POOL_REUSE, values: REUSE },
    Dropped { name: "reuse_internal", instead: POOL_REUSE, values: REUSE },
];

/// Looks a dropped key up by name.
pub(super) fn find(name: &str) -> Option<&'static Dropped> {
    DROPPED.iter().find(|dropped| dropped.name == name)
}

impl Dropped {
    /// Does what `value` means now, and notes that the key was given.
    ///
    /// # Errors
    /// The values that the key took.
    pub(super) fn apply(&'static self, config: &mut Config, value: &str) -> Result<(), String> {
        let Some((_, means)) = self.values.iter().find(|(name, _)| *name == value) else {
            let names: Vec<_> = self.values.iter().map(|(name, _)| *name).collect();
            return Err(format!("expected {}; {}", names.join("|"), self.warning()));
        };
        means(config);
        if !config.dropped.contains(&self) {
            config.dropped.push(self);
        }
        Ok(())
    }

    /// What a user is told who gives the key.
    pub fn warning(&self) -> String {
        format!(
            "{VARIABLE}: the key {} is accepted in this release for the last time; {}",
            self.name, self.instead
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::*;

    #[test]
    fn a_dropped_key_is_accepted_and_named_once_with_what_replaced_it() {
        for dropped in DROPPED {
            let name = dropped.name;
            let parse = |text: &str| Config::parse(text).expect(name);
            let off = parse(&format!("{name}:off,{name}:off"));
            assert_eq!(
                (off.heap.pool_reuse, off.dropped.as_slice()),
                (PoolReuse::Exact, &[dropped][..])
            );
            let warning = off.dropped[0].warning();
            assert!(warning.contains(name) && warning.contains("pool_reuse:exact"), "{warning}");
            let on = parse(&format!("{name}:on"));
            assert_eq!((on.heap.pool_reuse, on.dropped.len()), (PoolReuse::On, 1));
        }
        assert_eq!(Config::parse("pool_reuse:exact").expect("valid").dropped, [] as [&Dropped; 0]);
    }

    #[test]
    fn a_dropped_key_takes_what_it_took_and_hides_no_key() {
        for dropped in DROPPED {
            let error = Config::parse(&format!("{}:maybe", dropped.name))
                .expect_err("accepted")
                .to_string();
            assert!(error.contains("on|off") && error.contains(dropped.instead), "{error}");
            assert!(keys::KEYS.iter().all(|key| key.name != dropped.name), "{}", dropped.name);
        }
    }
}
