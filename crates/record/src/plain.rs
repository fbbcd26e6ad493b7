//! Text of another process, on one line of a terminal.
#![deny(unsafe_code)]

/// `text`, safe for a terminal: control characters, and those that hide text or turn the direction
/// of writing, become spaces.
pub fn plain(text: &str) -> String {
    let obeyed = |c: char| {
        c.is_control()
            || matches!(
                c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
            )
    };
    text.chars().map(|c| if obeyed(c) { ' ' } else { c }).collect()
}

/// `text` in at most `columns` characters; an ellipsis replaces the rest.
pub fn cut(text: &str, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text.to_owned();
    }
    text.chars().take(columns.saturating_sub(1)).chain(['…']).collect()
}

/// A count with its noun: `1 block`, `2 blocks`.
pub fn counted(count: impl Into<u64>, noun: &str) -> String {
    let count = count.into();
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn nothing_is_left_that_a_terminal_obeys() {
        assert_eq!(plain("a\u{1b}[2J\nb\u{202e}c\u{200b}d\u{9b}e"), "a [2J b c d e");
        assert_eq!(plain("Gruyère, 80 GiB"), "Gruyère, 80 GiB");
    }
}
