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

/// A word for a POSIX shell, quoted if it needs to be: the shell gives it to a command as it is.
pub fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "-_./=:,+@%".contains(letter);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A count with its noun: `1 block`, `2 blocks`.
pub fn counted(count: impl Into<u64>, noun: &str) -> String {
    let count = count.into();
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::{plain, quoted};

    #[test]
    fn a_shell_takes_a_quoted_word_as_it_is() {
        for word in ["plain", "", "a b", "$x;ls", "it's", "`id`", "~", "*.py", "a\nb", "-c", "!1"] {
            let script = format!("printf %s {}", quoted(word));
            let shell = std::process::Command::new("sh").args(["-c", &script]).output();
            assert_eq!(shell.expect("sh runs").stdout, word.as_bytes(), "{word:?}");
        }
        assert_eq!(quoted("--lr=3e-4"), "--lr=3e-4");
    }

    #[test]
    fn nothing_is_left_that_a_terminal_obeys() {
        assert_eq!(plain("a\u{1b}[2J\nb\u{202e}c\u{200b}d\u{9b}e"), "a [2J b c d e");
        assert_eq!(plain("Gruyère, 80 GiB"), "Gruyère, 80 GiB");
    }
}
