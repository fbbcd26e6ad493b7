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
