//! Text of conclusions: sizes, places, lines that fit.

use std::collections::{HashMap, HashSet};

use crate::dump::concluded::MOST_COLUMNS;
use crate::sites::{At, Frame, Phase, Site, SiteId, Sites};
use crate::{cut, plain};

/// Characters per place name at most: the rest of a line must fit beside it.
const MOST_PLACE: usize = 60;

/// Bytes in few digits.
pub fn bytes(bytes: u64) -> String {
    let units = [(60, "EiB"), (50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = units.into_iter().find(|&(shift, _)| bytes >= 1 << shift) else {
        return format!("{bytes} B");
    };
    let value = bytes as f64 / (1u64 << shift) as f64;
    let text = format!("{value:.1}");
    match text.strip_suffix(".0") {
        Some(whole) => format!("{whole} {unit}"),
        None if value >= 100.0 => format!("{value:.0} {unit}"),
        None => format!("{text} {unit}"),
    }
}

/// A part in percent of the whole.
pub fn percent(part: u64, whole: u64) -> u64 {
    if whole == 0 { 0 } else { (100.0 * part as f64 / whole as f64).round() as u64 }
}

/// A part, and its share of live memory.
pub fn of(part: u64, live: u64) -> String {
    format!("{} of the {} live ({}%)", bytes(part), bytes(live), percent(part, live))
}

/// `line`, cut if too long.
pub fn fit(line: &str) -> String {
    cut(&plain(line), MOST_COLUMNS)
}

/// Names of files, as short as keeps them distinct.
#[derive(Clone, Debug, Default)]
pub struct Names(HashMap<String, String>);

impl Names {
    /// The files of all of the program's own frames in these sites.
    pub fn of(sites: &Sites) -> Self {
        let frames = sites.iter().flat_map(|(_, site)| &site.frames);
        let files: HashSet<&str> =
            frames.filter(|frame| frame.is_own()).map(|frame| &*frame.file).collect();
        let mut by_name: HashMap<&str, Vec<&str>> = HashMap::new();
        for file in files {
            by_name.entry(tail(file, 1)).or_default().push(file);
        }
        let mut names = HashMap::new();
        for (name, files) in by_name {
            let deepest = files.iter().map(|file| file.matches('/').count()).max().unwrap_or(0) + 1;
            let are_apart = |parts: &usize| {
                let tails: HashSet<&str> = files.iter().map(|file| tail(file, *parts)).collect();
                tails.len() == files.len()
            };
            let parts = (1..=deepest).find(are_apart).unwrap_or(deepest);
            for file in files {
                let short = if parts == 1 { name } else { tail(file, parts) };
                names.insert(file.to_owned(), short.to_owned());
            }
        }
        Self(names)
    }

    /// A frame: `train.py:42 in step`, or where only a node is known `the backward (MmBackward0)`.
    pub fn frame(&self, frame: &Frame) -> String {
        if let Some(node) = frame.node() {
            return cut(&format!("the backward ({node})"), MOST_PLACE);
        }
        let file = match frame.is_own() {
            true => self.0.get(&frame.file).map_or(tail(&frame.file, 1), |name| name),
            // As it is imported.
            false => ["/site-packages/", "/dist-packages/"]
                .iter()
                .find_map(|part| frame.file.split_once(part))
                .map_or(&*frame.file, |(_, inside)| inside),
        };
        let at = At { file, line: frame.line, function: &frame.function };
        cut(&at.to_string(), MOST_PLACE)
    }

    /// A site's line, else its module.
    pub fn place(&self, sites: &Sites, id: SiteId) -> Option<String> {
        let site = sites.get(id)?;
        match sites.line(id) {
            Some(line) => Some(self.frame(line)),
            None if !site.module.is_empty() => Some(cut(&site.module, MOST_PLACE)),
            None => None,
        }
    }

    /// [`Names::place`] with the module and the phase, if known.
    pub fn holder(&self, sites: &Sites, id: SiteId) -> String {
        let Some(place) = self.place(sites, id) else {
            return "code that is not known".to_owned();
        };
        // A node has its phase in its name.
        let has_phase = sites.line(id).is_some_and(|line| line.node().is_some());
        let about = sites.get(id).filter(|_| !has_phase).map(about).unwrap_or_default();
        format!("{place}{about}")
    }
}

/// The running module, or else the phase, in brackets.
fn about(site: &Site) -> String {
    let has_line = site.line().is_some();
    match (site.phase, &*site.module) {
        (Phase::Unknown, "") => String::new(),
        (phase, "") => format!(" ({})", phase.name()),
        (_, module) if has_line => format!(" (module {})", cut(module, 24)),
        (phase, _) => format!(" ({})", phase.name()),
    }
}

/// The last `parts` parts of a path.
fn tail(path: &str, parts: usize) -> &str {
    let mut slashes = path.rmatch_indices('/').map(|(at, _)| at);
    slashes.nth(parts - 1).map_or(path, |at| &path[at + 1..])
}

/// A sentence, which may begin with a place that has no name of a file.
pub fn sentence(says: &str) -> String {
    match says.strip_prefix("the ") {
        Some(rest) => format!("The {rest}"),
        None => says.to_owned(),
    }
}

/// `text` in lines, the later ones indented.
pub fn wrap(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        let line = &mut lines[last];
        if line.chars().count() + 1 + word.chars().count() > MOST_COLUMNS {
            lines.push(format!("  {word}"));
        } else {
            if !line.is_empty() {
                line.push(' ');
            }
            line.push_str(word);
        }
    }
    lines
}
