//! A process's command line in a table's column: as short as possible, yet distinct for processes
//! that run different things.

use std::collections::{BTreeMap, BTreeSet};

use gruyere_record::run::shown_command;
use gruyere_record::{cut, plain};

/// The most parts of a script's path to show.
const MOST_PARTS: usize = 4;

/// The program: a script without its interpreter and `-m gruyere`, both without their paths.
pub fn short(command: &str) -> String {
    with_path(command, 1)
}

/// As [`short`], with `parts` parts of the script's path.
fn with_path(command: &str, parts: usize) -> String {
    let command = shown_command(&plain(command));
    let words: Vec<&str> = command.split(' ').collect();
    let is_python = words[0].starts_with("python");
    // Skips the interpreter's own options; -c and -m run no file.
    let is_option = |word: &&&str| word.starts_with('-') && !["-c", "-m"].contains(*word);
    let at = 1 + words.iter().skip(1).take_while(is_option).count();
    match words.get(at).filter(|word| is_python && word.ends_with(".py")) {
        Some(script) => {
            let start = script.rmatch_indices('/').nth(parts - 1).map_or(0, |(slash, _)| slash + 1);
            let mut shown = vec![&script[start..]];
            shown.extend(&words[at + 1..]);
            shown.join(" ")
        }
        None => command,
    }
}

/// The commands in at most `columns` characters each: if two different ones would look the same,
/// their common part is left out.
pub fn told_apart(commands: &[&str], columns: usize) -> Vec<String> {
    let different = |texts: &[String]| texts.iter().collect::<BTreeSet<_>>().len();
    let shown = |parts| -> Vec<String> {
        commands.iter().map(|command| with_path(command, parts)).collect()
    };
    let mut texts = shown(1);
    for parts in 2..=MOST_PARTS {
        let longer = shown(parts);
        if different(&longer) > different(&texts) {
            texts = longer;
        }
    }
    let mut alike: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for text in &texts {
        alike.entry(cut(text, columns)).or_default().push(text);
    }
    let told = |text: &String| {
        let short = cut(text, columns);
        match alike.get(&short).map(|alike| common(alike)) {
            Some(same) if text.chars().count() > columns && same < text.len() => {
                without(text, same, columns)
            }
            _ => short,
        }
    };
    texts.iter().map(told).collect()
}

/// Length in bytes of the common prefix of `texts`, up to the start of a word; an option goes with
/// its value. If all are the same: the whole length.
fn common(texts: &[&str]) -> usize {
    let first = texts[0];
    let agree = |text: &&str| {
        let pairs = first.char_indices().zip(text.chars());
        let differs = pairs.into_iter().find(|((_, one), other)| one != other);
        differs.map_or(first.len().min(text.len()), |((at, _), _)| at)
    };
    let same = texts.iter().map(agree).min().unwrap_or(0);
    if texts.iter().all(|text| text.len() == same) {
        return same;
    }
    let begin = |end: usize| first[..end].rfind(' ').map_or(0, |space| space + 1);
    let word = begin(same);
    let before = begin(word.saturating_sub(1));
    if word > 0 && first[before..word].starts_with('-') { before } else { word }
}

/// `text` without its first `same` bytes, except the first word if there is room.
fn without(text: &str, same: usize, columns: usize) -> String {
    let (rest, first) = (&text[same..], text.split(' ').next().unwrap_or(text));
    match first.chars().count() + 3 + rest.chars().count() <= columns && first.len() < same {
        true => format!("{first} … {rest}"),
        false => cut(&format!("…{rest}"), columns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_shown_without_its_interpreter_and_its_path() {
        for (command, shown) in [
            ("/usr/bin/python3 /work/me/train.py --lr 1", "train.py --lr 1"),
            ("python3 -u -X dev a/train.py", "python3 -u -X dev a/train.py"),
            ("python3 -u a/train.py b.py", "train.py b.py"),
            ("python3 -m gruyere train.py", "train.py"),
            ("python3 -m package.train x.py", "python3 -m package.train x.py"),
            ("/opt/bin/simulation", "simulation"),
            ("", ""),
        ] {
            assert_eq!(short(command), shown);
        }
    }

    #[test]
    fn commands_that_differ_look_different_in_ten_columns() {
        let of = |commands: &[&str]| told_apart(commands, 10);
        let lr = ["python3 /me/train.py --lr 1e-3", "python3 /me/train.py --lr 3e-4"];
        assert_eq!(of(&lr), ["…--lr 1e-3", "…--lr 3e-4"]);
        assert_eq!(told_apart(&lr, 30), ["train.py --lr 1e-3", "train.py --lr 3e-4"]);
        let long = lr.map(|command| command.replace("--lr", "--model llama-7b --batch 8 --lr"));
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        assert_eq!(told_apart(&long, 24), ["train.py … --lr 1e-3", "train.py … --lr 3e-4"]);
        assert_eq!(of(&["python3 a/train.py", "python3 b/train.py"]), ["a/train.py", "b/train.py"]);
        assert_eq!(of(&["python3 first.py", "python3 second.py"]), ["first.py", "second.py"]);
        assert_eq!(of(&[lr[0], lr[0]]), ["train.py …", "train.py …"], "they are the same");
        assert_eq!(of(&["a train.py --x", "a train.py --x --é"]), ["a … --x", "…--x --é"]);
    }
}
