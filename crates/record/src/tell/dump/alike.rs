//! Joins steps that were alike.
#![deny(unsafe_code)]

/// Consecutive rows of a table by steps: alike, or changing by the same amount each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first step.
    pub first: u64,
    /// The last step.
    pub last: u64,
    /// Number of rows in it.
    pub rows: u64,
    /// Bytes of the first.
    pub from: u64,
    /// Bytes of the last.
    pub to: u64,
}

/// Two rows are alike if they differ by at most one part in so many, or by `LEAST` bytes.
const PART: u64 = 20;
/// The same for a row and the line it should lie on.
const LINE: u64 = 50;
const LEAST: u64 = 64 << 10;

impl Run {
    fn of((step, bytes): (u64, u64)) -> Self {
        Self { first: step, last: step, rows: 1, from: bytes, to: bytes }
    }

    /// Whether its rows are alike, without steady growth or fall.
    pub fn is_level(&self) -> bool {
        are_alike(self.from, self.to)
    }

    /// Its steps: `step 3`, `steps 4 to 846`, `84 of the steps 10 to 840`.
    pub fn steps(&self) -> String {
        let all = self.last.saturating_sub(self.first).saturating_add(1);
        match self.rows {
            1 => format!("step {}", self.first),
            rows if rows == all => format!("steps {} to {}", self.first, self.last),
            rows => format!("{rows} of the steps {} to {}", self.first, self.last),
        }
    }

    /// Whether the next row belongs to it: like the first row, or on the line through the ends.
    fn takes(&self, (step, bytes): (u64, u64)) -> bool {
        let steps = i128::from(self.last.saturating_sub(self.first).max(1));
        let a_step = (i128::from(self.to) - i128::from(self.from)) / steps;
        let on = i128::from(self.to) + a_step * i128::from(step.saturating_sub(self.last));
        let is_on = u64::try_from(on).is_ok_and(|on| differs_by(on, bytes, LINE));
        self.is_level() && are_alike(self.from, bytes) || self.rows > 1 && is_on
    }

    fn take(&mut self, (step, bytes): (u64, u64)) {
        (self.last, self.to, self.rows) = (step, bytes, self.rows + 1);
    }
}

fn are_alike(one: u64, other: u64) -> bool {
    differs_by(one, other, PART)
}

fn differs_by(one: u64, other: u64, part: u64) -> bool {
    one.abs_diff(other) <= (one.max(other) / part).max(LEAST)
}

/// Joins rows, sorted by step, into runs.
pub fn runs(rows: &[(u64, u64)]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, &row) in rows.iter().enumerate() {
        let taken = runs.last_mut().is_some_and(|run| {
            let mut longer = *run;
            longer.take(row);
            // Two rows always lie on a line: it takes three.
            let begins_line =
                run.rows == 1 && rows.get(at + 1).is_some_and(|&next| longer.takes(next));
            let takes = run.takes(row) || begins_line;
            if takes {
                *run = longer;
            }
            takes
        });
        if !taken {
            runs.push(Run::of(row));
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn steps_that_are_alike_are_one_row_and_the_first_ones_are_their_own() {
        let mut rows = vec![(0, 500 * MIB), (1, 10 * MIB), (2, 800 * MIB)];
        rows.extend((3..=846).map(|step| (step, 1200 * MIB + step % 7 * MIB)));
        let found = runs(&rows);
        let last = found.last().unwrap();
        assert_eq!((last.steps().as_str(), last.is_level()), ("steps 3 to 846", true));
        assert_eq!(found.len(), 4, "{found:?}");
    }

    #[test]
    fn a_steady_growth_is_one_row_with_both_ends() {
        let rows: Vec<(u64, u64)> = (4..=40).map(|step| (step, (1000 + 64 * step) * MIB)).collect();
        let found = runs(&rows);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].from, found[0].to), (1256 * MIB, 3560 * MIB));
        assert!(!found[0].is_level());
    }

    #[test]
    fn rows_of_every_tenth_step_are_told_so() {
        let rows: Vec<(u64, u64)> = (1..=84).map(|n| (10 * n, 5 * MIB)).collect();
        assert_eq!(runs(&rows)[0].steps(), "84 of the steps 10 to 840");
        assert_eq!(runs(&[(7, 1)])[0].steps(), "step 7");
    }

    #[test]
    fn what_goes_up_and_down_is_not_made_one() {
        let rows: Vec<(u64, u64)> =
            (0..8).map(|step| (step, if step % 2 == 0 { 10 } else { 900 } * MIB)).collect();
        assert_eq!(runs(&rows).len(), 8);
    }
}
