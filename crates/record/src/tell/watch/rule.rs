//! Rules of `alert:` in the configuration: `THRESHOLD[=ACTION]`, joined by `+`.

use super::threshold::{ParseError, Threshold};
use std::fmt;

/// The process's action when a threshold is passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// One line of the log, at level `warn`.
    #[default]
    Log,
    /// That, and unused memory goes back to the device, as with `empty_cache`.
    Trim,
    /// Calls the listeners for alerts.
    Callback,
}

impl Action {
    /// All of them, by name.
    pub const ALL: [(&str, Action); 3] =
        [("log", Action::Log), ("trim", Action::Trim), ("callback", Action::Callback)];
}

/// A threshold and its action.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// The watched threshold.
    pub threshold: Threshold,
    /// The action when it is passed.
    pub action: Action,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Action::ALL
            .iter()
            .find(|(_, action)| *action == self.action)
            .map_or("", |(name, _)| name);
        write!(f, "{}={name}", self.threshold)
    }
}

/// Parses the value of `alert:`.
///
/// # Errors
/// The wrong rule, its fault and the remedy.
pub fn parse_rules(text: &str) -> Result<Vec<Rule>, ParseError> {
    text.split('+').map(str::trim).map(parse_rule).collect()
}

fn parse_rule(text: &str) -> Result<Rule, ParseError> {
    // `>=` has an equals sign too: an action begins with a letter.
    let split = text
        .rsplit_once('=')
        .filter(|(_, name)| name.trim().starts_with(|c: char| c.is_alphabetic()));
    let (threshold, action) = match split {
        None => (text, Action::default()),
        Some((threshold, name)) => {
            let name = name.trim();
            let found = Action::ALL.iter().find(|(action, _)| *action == name);
            let (_, action) = found.ok_or_else(|| ParseError {
                input: text.to_owned(),
                reason: format!("there is no action \"{name}\"; expected log, trim or callback"),
            })?;
            (threshold, *action)
        }
    };
    Ok(Rule { threshold: threshold.parse()?, action })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_thresholds_with_actions() {
        let rules = parse_rules(
            "fragmentation>30%=log + oom-in<10min=callback+retries>=1=trim+largest<=2GiB",
        );
        let rules: Vec<(String, Action)> = rules
            .expect("valid")
            .into_iter()
            .map(|rule| (rule.threshold.text().to_owned(), rule.action))
            .collect();
        let expected = [
            ("fragmentation>30%", Action::Log),
            ("oom-in<10min", Action::Callback),
            ("retries>=1", Action::Trim),
            ("largest<=2GiB", Action::Log),
        ];
        assert_eq!(rules, expected.map(|(text, action)| (text.to_owned(), action)));
        let again = parse_rules("retries>=1=trim").expect("valid");
        assert_eq!(again[0].to_string(), "retries>=1=trim");
    }

    #[test]
    fn a_rule_that_is_wrong_is_named() {
        for (text, parts) in [
            ("live>1GiB=mail", ["live>1GiB=mail", "log, trim or callback"]),
            ("live>1GiB=log+lve>1GiB", ["\"lve>1GiB\"", "did you mean live?"]),
            ("live>1GiB+", ["\"\"", "METRIC>VALUE"]),
            ("log", ["\"log\"", "METRIC>VALUE"]),
        ] {
            let message = parse_rules(text).expect_err(text).to_string();
            for part in parts {
                assert!(message.contains(part), "{message} has no {part}");
            }
        }
    }
}
