//! Verdict on a running process's memory: what `gruyere post` would say now.

use gruyere_record::Reader;
use gruyere_record::conclusion::{Accused, Cause, Conclusion};
use gruyere_record::dump::from_record;
use gruyere_record::dump::state::MOST_EVENTS;
use gruyere_record::sites::{Line, Sites};

use super::app::Row;
use crate::candidates::remedy;
use crate::wrap::unfold;

/// The part of a conclusion that fits on a screen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The cause of the first sentence.
    pub cause: Cause,
    /// The first sentence; empty: no known problem.
    pub says: String,
    /// The remedy.
    pub remedy: Option<String>,
    /// The line or block accused of growth.
    pub accused: Option<Accused>,
}

impl Verdict {
    /// Reads all blocks of a device for its verdict at this moment.
    pub fn read(reader: &Reader<'_>, device: u32) -> Verdict {
        let mut state = from_record::state(reader, MOST_EVENTS);
        state.devices.retain(|state| state.device == device);
        Conclusion::of(&state, &[]).into()
    }

    /// The verdict of a row; for an ended process, the verdict at its end.
    pub fn of(row: &Row, now: &Verdict) -> Verdict {
        match &row.ending {
            Some(ending) => Verdict {
                says: ending.says.clone(),
                remedy: ending.remedy.clone(),
                ..Verdict::default()
            },
            None => now.clone(),
        }
    }

    /// The problem, then the remedy.
    pub fn sentences(&self) -> Vec<String> {
        let says = Some(self.says.clone()).filter(|says| !says.is_empty());
        says.into_iter().chain(self.remedy.clone()).collect()
    }

    /// Names the accused line before each line that it called: a conclusion names the line of the
    /// program's author, a list the lines of the layers below it. A file's name stands once.
    pub fn name_caller(&self, lines: &mut [Line], sites: &Sites) {
        let Some(Accused { line: caller, .. }) = &self.accused else { return };
        for line in lines.iter_mut().filter(|line| line.is_called_from(caller, sites)) {
            let at = caller.to_string();
            let at = place(&at);
            let file = at.rsplit_once(':').map_or(at, |(file, _)| file);
            line.name = format!("{at} → {}", line.name.replacen(&format!("{file}:"), "", 1));
        }
    }
}

impl From<Conclusion> for Verdict {
    fn from(conclusion: Conclusion) -> Self {
        let Conclusion { cause, lines, accused } = conclusion;
        if cause == Cause::Nothing {
            return Verdict::default();
        }
        let says = unfold(&lines).into_iter().next().unwrap_or_default();
        Verdict { cause, says, remedy: remedy(&lines), accused }
    }
}

/// A line without its function: what an editor needs.
pub fn place(name: &str) -> &str {
    name.split_once(" in ").map_or(name, |(place, _)| place)
}

#[cfg(test)]
mod tests {
    use gruyere_record::sites::{Frame, Phase, Site, SiteId};

    use super::*;

    #[test]
    fn the_accused_line_is_named_before_the_lines_that_it_called_and_their_backwards() {
        let frame = |file: &str, line, function: &str| Frame {
            file: file.into(),
            function: function.into(),
            line,
        };
        let caller = frame("/a/train.py", 21, "step");
        let inside = Site {
            frames: vec![frame("/a/layers.py", 9, "Block.forward"), caller.clone()],
            phase: Phase::Forward,
            ..Site::default()
        };
        let of_itself = Site { frames: vec![caller.clone()], ..Site::default() };
        let other = Site { frames: vec![frame("/a/train.py", 4, "build")], ..Site::default() };
        let backward = Site { phase: Phase::Backward, forward: SiteId(1), ..Site::default() };
        let beside = Site {
            frames: vec![frame("/a/train.py", 40, "GPT.forward"), caller.clone()],
            phase: Phase::Forward,
            ..Site::default()
        };
        let sites = Sites::new([inside, of_itself, other, backward, beside]);
        let line = |number| {
            let site = SiteId(number);
            Line { name: sites.place(site).to_string(), site, ..Line::default() }
        };
        let mut lines = [1, 2, 3, 4, 5, 99].map(line);
        let accused = Accused { line: caller, bytes_a_step: 1, more: 0 };
        let verdict = Verdict { accused: Some(accused), ..Verdict::default() };
        verdict.name_caller(&mut lines, &sites);
        let expected = [
            "train.py:21 → layers.py:9 in Block.forward",
            "train.py:21 in step",
            "train.py:4 in build",
            "train.py:21 → backward of layers.py:9 in Block.forward",
            "train.py:21 → 40 in GPT.forward",
            "not known",
        ];
        assert_eq!(lines.map(|line| line.name), expected);
    }

    #[test]
    fn a_healthy_process_has_no_verdict() {
        let lines = vec!["Nothing grows (30 steps): 1 GiB live, 2 GiB at the peak".to_owned()];
        let healthy = Conclusion { cause: Cause::Nothing, lines, accused: None };
        assert_eq!(Verdict::from(healthy), Verdict::default());
        let lines = ["a.py:1 keeps 1 MiB a step since step 0: 1 GiB of the", "  2 GiB live (50%)"];
        let lines: Vec<String> =
            lines.into_iter().chain(["To do: find"]).map(str::to_owned).collect();
        let ill = Verdict::from(Conclusion { cause: Cause::Leak, lines, accused: None });
        let sentences = [
            "a.py:1 keeps 1 MiB a step since step 0: 1 GiB of the 2 GiB live (50%)",
            "To do: find",
        ];
        assert_eq!(ill.sentences(), sentences);
    }
}
