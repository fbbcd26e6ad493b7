//! Fits text into cells; an ellipsis marks a cut.

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph};

use crate::wrap as sentences;

/// `text` in exactly `width` cells (text other than a number loses its end).
pub fn fit(text: &str, width: usize, to_the_right: bool) -> String {
    let cells = |text: &str| Span::raw(text).width();
    let mut text = text.to_owned();
    if cells(&text) > width {
        while cells(&text) + 1 > width && text.pop().is_some() {}
        if width > 0 {
            text.push('…');
        }
    }
    let room = " ".repeat(width.saturating_sub(cells(&text)));
    if to_the_right { room + &text } else { text + &room }
}

/// A number with its unit in exactly `width` cells, to the right: where both do not fit, without
/// decimals. Neither a unit nor a digit before the point is cut.
pub fn number(text: &str, width: usize) -> String {
    let text = match text.split_once('.') {
        Some((whole, rest)) if Span::raw(text).width() > width => {
            whole.to_owned() + rest.trim_start_matches(|c: char| c.is_ascii_digit())
        }
        _ => text.to_owned(),
    };
    fit(&text, width, true)
}

/// The name of a line of the program in exactly `width` cells. Of a line with its caller, the
/// caller's name loses its beginning first: what follows tells lines apart. A line's number is
/// kept.
pub fn name(text: &str, width: usize) -> String {
    let cells = |text: &str| Span::raw(text).width();
    if cells(text) <= width {
        return fit(text, width, false);
    }
    match text.split_once(" → ") {
        // The arrow, and the ellipsis before it.
        Some((_, called)) if cells(called) + 3 > width => numbered(called, width),
        Some(_) => end(text, width),
        None => numbered(text, width),
    }
}

/// `train.py:35 in step` in exactly `width` cells: the function goes first, then the beginning.
fn numbered(text: &str, width: usize) -> String {
    let place = text.split(" in ").next().unwrap_or(text);
    let has_number = place.contains(':') && place.ends_with(|c: char| c.is_ascii_digit());
    match has_number && Span::raw(place).width() + 1 > width {
        true => end(place, width),
        false => fit(text, width, false),
    }
}

/// The end of `text` in exactly `width` cells.
fn end(text: &str, width: usize) -> String {
    let mut rest = text;
    while Span::raw(rest).width() + 1 > width && !rest.is_empty() {
        rest = &rest[rest.chars().next().map_or(0, char::len_utf8)..];
    }
    fit(&format!("…{rest}"), width, false)
}

/// `line` in at most `width` cells; an ellipsis marks a cut.
pub fn cut(mut line: Line<'_>, width: usize) -> Line<'_> {
    if line.width() <= width {
        return line;
    }
    let mut room = width.saturating_sub(1);
    let mut spans = Vec::new();
    for span in std::mem::take(&mut line.spans) {
        let style = span.style;
        if span.width() <= room {
            room -= span.width();
            spans.push(span);
            continue;
        }
        // Without the spaces that `fit` pads with.
        let kept = if width > 0 { fit(&span.content, room + 1, false) } else { String::new() };
        let kept = kept.trim_end().to_owned();
        let mark = if kept.ends_with('…') || width == 0 { "" } else { "…" };
        spans.push(Span::styled(format!("{kept}{mark}"), style));
        break;
    }
    line.spans = spans;
    line
}

/// `text` in at most `most` lines of at most `width` cells, all indented.
pub fn wrap(text: &str, width: usize, most: usize) -> Vec<String> {
    let mut lines = sentences::wrap(&format!(" {text}"), width, "   ");
    let is_cut = lines.len() > most;
    lines.truncate(most);
    if let Some(last) = lines.last_mut().filter(|_| is_cut) {
        *last = fit(&format!("{last} …"), width, false).trim_end().to_owned();
    }
    lines
}

/// Puts lines of text into a block, a row each.
pub fn put(frame: &mut Frame, area: Rect, lines: Vec<Line<'_>>, block: Block<'_>) {
    let width = usize::from(block.inner(area).width);
    let lines: Vec<Line> = lines.into_iter().map(|line| cut(line, width)).collect();
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_and_its_unit_are_never_cut() {
        assert_eq!(number("1004.00 MiB", 10), "  1004 MiB");
        assert_eq!(number("959.90 MiB", 10), "959.90 MiB");
        assert_eq!(number("1004.00 MiB/s", 12), "  1004 MiB/s");
    }

    #[test]
    fn the_number_of_a_line_is_never_cut() {
        let long = "backward of slow_mining.py:35 in Net.forward";
        assert_eq!(name(long, 30), "backward of slow_mining.py:35…");
        assert_eq!(name(long, 20), "…f slow_mining.py:35");
        assert_eq!(name("4 other lines of it", 10), "4 other l…");
    }

    #[test]
    fn lines_that_one_caller_called_can_be_told_apart_in_few_cells() {
        let names = [
            "a2_hook.py:61 → 20 in Residual.forward",
            "a2_hook.py:61 → 18 in Residual.forward",
            "a2_hook.py:61 → backward of 18 in Residual.forward",
            "a2_hook.py:61 → backward of 20 in Residual.forward",
        ];
        let shown = names.map(|text| name(text, 29));
        assert_eq!(shown[0], "…:61 → 20 in Residual.forward");
        assert!(shown.iter().all(|text| Span::raw(text.as_str()).width() == 29), "{shown:?}");
        let mut different = shown.to_vec();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), 4, "{shown:?}");
        assert_eq!(name("train.py:12 in f", 20), "train.py:12 in f    ");
    }
}
