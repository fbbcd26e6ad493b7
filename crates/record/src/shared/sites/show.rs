//! Sites as text, the same in every view: `train.py:42 in step`, `model.layers.3.mlp`,
//! `backward of train.py:42 in step`.

use std::fmt;

use super::{Frame, Phase, Site, SiteId, Sites};
use crate::{LIFETIME_NAMES, LIFETIMES};

/// Text for an unknown site, in every view.
pub const NOT_KNOWN: &str = "not known";
/// Text for sites without room in the table.
pub const BEYOND: &str = "sites beyond the table";

/// A line of a file: `train.py:42 in step`.
pub struct At<'a> {
    /// The file, as written.
    pub file: &'a str,
    /// 0: no line, as in a node of autograd's.
    pub line: u32,
    /// The function, by the interpreter's name; written without the enclosing ones, or in full with
    /// `{:#}`.
    pub function: &'a str,
}

impl<'a> At<'a> {
    /// The file without its folders.
    fn short(file: &'a str, line: u32, function: &'a str) -> Self {
        At { file: after(file, "/"), line, function }
    }
}

/// The text after the last `mark`, or all of it.
fn after<'a>(text: &'a str, mark: &str) -> &'a str {
    text.rsplit_once(mark).map_or(text, |(_, behind)| behind)
}

impl fmt::Display for At<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = self.function;
        let function = if out.alternate() { whole } else { after(whole, "<locals>.") };
        out.write_str(self.file)?;
        if self.line > 0 {
            write!(out, ":{}", self.line)?;
        }
        if !function.is_empty() && function != "<module>" {
            write!(out, " in {function}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Frame {
    /// `train.py:42 in step`: the file without its folders, the function without those around it;
    /// `{:#}`: both in full.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Frame { file, line, function } = self;
        match out.alternate() {
            true => At { file, line: *line, function }.fmt(out),
            false => At::short(file, *line, function).fmt(out),
        }
    }
}

/// The text for a site in a view. Sites with the same place are shown together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Place<'a> {
    /// A line of the program.
    Line(&'a str, u32, &'a str),
    /// The backward of a line of the program.
    BackwardOf(&'a str, u32, &'a str),
    /// A module's path.
    Module(&'a str),
    /// Neither line nor module, only the program's activity.
    Phase(Phase),
    /// See [`BEYOND`].
    Beyond,
    /// See [`NOT_KNOWN`].
    NotKnown,
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Line(file, line, function) => At::short(file, line, function).fmt(out),
            Self::BackwardOf(file, line, function) => {
                write!(out, "backward of {}", At::short(file, line, function))
            }
            Self::Module(path) => out.write_str(path),
            Self::Phase(phase) => write!(out, "{}, no Python", phase.name()),
            Self::Beyond => out.write_str(BEYOND),
            Self::NotKnown => out.write_str(NOT_KNOWN),
        }
    }
}

impl Sites {
    /// The line shown for a site.
    pub fn place(&self, id: SiteId) -> Place<'_> {
        let Some(site) = self.get(id) else {
            return if id == SiteId::OTHER { Place::Beyond } else { Place::NotKnown };
        };
        if let Some(line) = self.get(site.forward).and_then(Site::line) {
            return Place::BackwardOf(&line.file, line.line, &line.function);
        }
        match site.line() {
            Some(line) => Place::Line(&line.file, line.line, &line.function),
            None if !site.module.is_empty() => Place::Module(&site.module),
            None if site.phase != Phase::Unknown => Place::Phase(site.phase),
            None => Place::NotKnown,
        }
    }

    /// The module shown for a site; its line if the module is unknown.
    pub fn module(&self, id: SiteId) -> Place<'_> {
        let of = |id| self.get(id).map(|site| site.module.as_str()).filter(|path| !path.is_empty());
        let forward = self.get(id).map_or(SiteId::NONE, |site| site.forward);
        of(id).or_else(|| of(forward)).map_or_else(|| self.place(id), Place::Module)
    }

    /// The program's activity at a site.
    pub fn phase(&self, id: SiteId) -> Phase {
        self.get(id).map_or(Phase::Unknown, |site| site.phase)
    }

    /// The block's lifetime by its tag; without a tag (`auto`, nearly all) the program's activity,
    /// if known.
    pub fn lifetime_or_phase(&self, lifetime: u8, id: SiteId) -> &'static str {
        match (usize::from(lifetime) % LIFETIMES, self.phase(id)) {
            (0, phase) if phase != Phase::Unknown => phase.name(),
            (lifetime, _) => LIFETIME_NAMES[lifetime],
        }
    }

    /// Everything known about a site, a line each: the full stack from the innermost frame on, and
    /// for a backward the stack of its forward.
    pub fn stack(&self, id: SiteId) -> Vec<String> {
        let frames = |id| {
            let frames = self.get(id).map_or(&[][..], |site| &site.frames);
            frames.iter().map(|frame| format!("{frame:#}"))
        };
        let forward = self.get(id).map_or(SiteId::NONE, |site| site.forward);
        let mut lines: Vec<String> = frames(id).collect();
        if self.get(forward).is_some() {
            lines.push("of the forward:".to_owned());
            lines.extend(frames(forward));
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(file: &str, function: &str, line: u32) -> Frame {
        Frame { file: file.into(), function: function.into(), line }
    }

    fn sites() -> Sites {
        let torch = frame("/venv/lib/python3.12/site-packages/torch/nn/linear.py", "forward", 9);
        let own = frame("/home/me/train.py", "main.<locals>.step", 42);
        let forward = Site {
            frames: vec![torch, own, frame("/home/me/train.py", "<module>", 80)],
            module: "model.mlp".into(),
            phase: Phase::Forward,
            ..Site::default()
        };
        let backward = Site { phase: Phase::Backward, forward: SiteId(1), ..Site::default() };
        let collective = Site { phase: Phase::Collective, ..Site::default() };
        Sites::new([forward, backward, collective, Site::default()])
    }

    #[test]
    fn a_site_is_told_by_the_programs_own_line_and_a_backward_by_that_of_its_forward() {
        let sites = sites();
        let told = [0, 1, 2, 3, 4, 99, u32::MAX].map(|id| sites.place(SiteId(id)).to_string());
        let expected = [
            "not known",
            "train.py:42 in step",
            "backward of train.py:42 in step",
            "collective, no Python",
            "not known",
            "not known",
            "sites beyond the table",
        ];
        assert_eq!(told, expected);
        let modules = [1, 2, 3].map(|id| sites.module(SiteId(id)).to_string());
        assert_eq!(modules, ["model.mlp", "model.mlp", "collective, no Python"]);
        assert_eq!(frame("/a/train.py", "<module>", 80).to_string(), "train.py:80");
    }

    #[test]
    fn the_stack_is_told_in_full_and_that_of_the_forward_behind_it() {
        let stack = sites().stack(SiteId(2));
        assert_eq!(stack[0], "of the forward:");
        assert_eq!(stack[2], "/home/me/train.py:42 in main.<locals>.step");
        assert_eq!(stack.len(), 4);
    }

    #[test]
    fn what_was_being_done_stands_in_place_of_auto_and_of_nothing_else() {
        let sites = sites();
        let told = |lifetime, id| sites.lifetime_or_phase(lifetime, SiteId(id));
        assert_eq!([told(0, 2), told(0, 0), told(3, 2)], ["backward", "auto", "persistent"]);
    }
}
