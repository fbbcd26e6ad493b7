//! An argument of the program, with values to try.

use std::str::FromStr;

use serde::Serialize;

/// `NAME=VALUES` or `NAME=--flag:VALUES`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sweep {
    /// Its name in the table; `{NAME}` stands for it in the program's arguments.
    pub name: String,
    /// The program's own flag, which precedes the value.
    pub flag: Option<String>,
    /// Listed values, in order.
    pub values: Vec<String>,
    /// The smallest and the largest value of a search for the largest that fits.
    pub range: Option<(u64, u64)>,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Sweep, String> {
        let forms = "expected NAME=1,2,4 or NAME=1..64, with --flag: before the values if the \
                     program's arguments have no {NAME}";
        let (name, rest) = text.split_once('=').ok_or(forms)?;
        let is_flag = rest.starts_with('-');
        let (flag, values) = match rest.rsplit_once(':').filter(|_| is_flag) {
            Some((flag, values)) => (Some(flag.to_owned()), values),
            None => (None, rest),
        };
        let empty = |word: &&str| word.is_empty();
        if name.is_empty() || values.is_empty() || values.split(',').any(|word| empty(&word)) {
            return Err(forms.to_owned());
        }
        let mut sweep = Sweep { name: name.to_owned(), flag, values: Vec::new(), range: None };
        match values.split_once("..") {
            Some((low, high)) => match (low.parse::<u64>(), high.parse::<u64>()) {
                (Ok(low), Ok(high)) if low <= high => sweep.range = Some((low, high)),
                _ => return Err(format!("{values}: expected whole numbers, as in 1..64")),
            },
            None => sweep.values = values.split(',').map(str::to_owned).collect(),
        }
        Ok(sweep)
    }
}

impl Sweep {
    /// The error if the program's arguments have no place for the value.
    pub fn misses(&self, arguments: &[String]) -> Option<String> {
        let place = format!("{{{}}}", self.name);
        if self.flag.is_some() || arguments.iter().any(|word| word.contains(&place)) {
            return None;
        }
        Some(format!(
            "--sweep {}: the program's arguments have no {place}; write it where the value goes, \
             or name the flag: --sweep {}=--batch-size:1..64",
            self.name, self.name
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_a_list_or_a_range_of_a_place_or_a_flag() {
        let list: Sweep = "batch=1,2,4".parse().unwrap();
        assert_eq!((list.values.len(), list.range, list.flag), (3, None, None));
        let range: Sweep = "batch=--per-device:1..64".parse().unwrap();
        assert_eq!(range.range, Some((1, 64)));
        assert_eq!(range.flag.as_deref(), Some("--per-device"));
        for wrong in ["batch", "=1", "batch=", "batch=4..1", "batch=a..b", "batch=1,,2"] {
            assert!(wrong.parse::<Sweep>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_value_without_a_place_is_said() {
        let sweep: Sweep = "batch=1,2".parse().unwrap();
        assert!(sweep.misses(&["--batch".to_owned()]).unwrap().contains("{batch}"));
        assert_eq!(sweep.misses(&["--batch={batch}".to_owned()]), None);
    }
}
