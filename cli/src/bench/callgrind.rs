//! Reads callgrind's output: instructions spent in and below a function.
//!
//! The format is described in valgrind's manual ("Callgrind Format Specification"). Names are
//! compressed (`fn=(12) name`, later `fn=(12)`); the last number on the line after a `calls=` line
//! is the inclusive cost of those calls.

use std::collections::HashMap;

/// Costs by function, in instructions.
#[derive(Debug, Default)]
pub struct Profile {
    names: HashMap<String, String>,
    /// Cost of a function's own instructions.
    own: HashMap<String, u64>,
    /// (caller, callee, inclusive cost).
    calls: Vec<(String, String, u64)>,
}

impl Profile {
    /// Reads the text of an output file (one event, instructions, as callgrind records by default).
    pub fn parse(text: &str) -> Self {
        let mut profile = Self::default();
        let (mut function, mut callee) = (String::new(), None);
        for line in text.lines() {
            if let Some(name) = line.strip_prefix("fn=") {
                function = profile.name(name);
            } else if let Some(name) = line.strip_prefix("cfn=") {
                callee = Some(profile.name(name));
            } else if line.starts_with(['+', '-', '*'])
                || line.starts_with(|c: char| c.is_ascii_digit())
            {
                let Some(cost) =
                    line.split_ascii_whitespace().nth(1).and_then(|cost| cost.parse().ok())
                else {
                    continue;
                };
                match callee.take() {
                    Some(callee) => profile.calls.push((function.clone(), callee, cost)),
                    None => *profile.own.entry(function.clone()).or_default() += cost,
                }
            }
        }
        profile
    }

    fn name(&mut self, text: &str) -> String {
        match text.split_once(") ") {
            Some((id, name)) => {
                self.names.insert(format!("{id})"), name.to_owned());
                name.to_owned()
            }
            None => self.names.get(text).cloned().unwrap_or_else(|| text.to_owned()),
        }
    }

    /// Instructions in and below `function`.
    pub fn inclusive(&self, function: &str) -> u64 {
        let below =
            self.calls.iter().filter(|(caller, _, _)| caller == function).map(|call| call.2);
        self.own.get(function).copied().unwrap_or(0) + below.sum::<u64>()
    }

    /// Instructions in and below the functions that satisfy `is_inside`, entered from others.
    pub fn entered(&self, is_inside: impl Fn(&str) -> bool) -> u64 {
        let entries =
            self.calls.iter().filter(|(caller, callee, _)| is_inside(callee) && !is_inside(caller));
        entries.map(|call| call.2).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: &str = "\
# callgrind format
events: Ir

fl=(1) a.rs
fn=(1) gruyere_malloc
10 5
cfn=(2) Heap::malloc
calls=3 20
+1 90
* 2

fn=(2)
20 40
cfi=(2) phantom.rs
cfn=(3) <PhantomDriver as Driver>::event_record
calls=1 7
+2 50

fn=(3)
7 10
cfn=(4) gruyere_phantom::Gpu::event_record
calls=1 9
8 40

fn=(4)
9 40
totals: 97
";

    #[test]
    fn inclusive_cost_is_own_and_below() {
        let profile = Profile::parse(SAMPLE);
        assert_eq!(profile.inclusive("gruyere_malloc"), 97);
        assert_eq!(profile.inclusive("Heap::malloc"), 90);
        assert_eq!(profile.inclusive("nobody"), 0);
    }

    #[test]
    fn entries_count_once_however_deep_they_go() {
        let profile = Profile::parse(SAMPLE);
        let phantom = |name: &str| name.contains("Phantom") || name.contains("gruyere_phantom");
        assert_eq!(profile.entered(phantom), 50);
    }
}
