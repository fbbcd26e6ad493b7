//! A process's command line in a table's column: as short as possible, yet distinct for processes
//! that run different things.

use std::collections::{BTreeMap, BTreeSet};

use gruyere_record::run::{program_at, shown_command};
use gruyere_record::{cut, plain};

/// The most parts of a script's path to show.
const MOST_PARTS: usize = 4;

/// What a process that `multiprocessing` spawned is called: its command line has numbers of pipes
/// only.
const SPAWNED: &str = "spawned worker";

/// The program and its arguments: a script or a module without its interpreter, the interpreter's
/// options and `-m gruyere`; a script or a binary without its path.
pub fn short(command: &str) -> String {
    with_path(command, 1)
}

/// As [`short`], with `parts` parts of the script's path.
fn with_path(command: &str, parts: usize) -> String {
    let command = shown_command(&plain(command));
    let words: Vec<&str> = command.split(' ').collect();
    if !words[0].starts_with("python") {
        return command;
    }
    let Some(at) = program_at(&words) else {
        let is_spawned = command.contains(" -c from multiprocessing.spawn import spawn_main");
        // Code, or a shell, has no other name.
        return if is_spawned { SPAWNED.to_owned() } else { command };
    };
    let (program, rest) = match words[at].strip_prefix('-') {
        None => {
            let start =
                words[at].rmatch_indices('/').nth(parts - 1).map_or(0, |(slash, _)| slash + 1);
            (&words[at][start..], &words[at + 1..])
        }
        // The module is the next word, or joined on.
        Some(letters) => match letters.split_once('m') {
            Some((_, module)) if !module.is_empty() => (module, &words[at + 1..]),
            _ => (words[at + 1], &words[at + 2..]),
        },
    };
    [&[program], rest].concat().join(" ")
}

/// The commands in at most `columns` characters each: if two different ones would look the same,
/// their common part is left out.
pub fn told_apart(commands: &[&str], columns: usize) -> Vec<String> {
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
    let mut told: Vec<String> = texts.iter().map(|text| cut(text, columns)).collect();
    tell_apart(&texts, &mut told, columns);
    told
}

/// Replaces those of `told` that look the same, although their `texts` differ, by what differs.
fn tell_apart(texts: &[String], told: &mut [String], columns: usize) {
    let mut alike: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, look) in told.iter().enumerate() {
        alike.entry(look).or_default().push(at);
    }
    let alike: Vec<Vec<usize>> = alike.into_values().collect();
    for places in alike {
        let group: Vec<String> = places.iter().map(|&at| texts[at].clone()).collect();
        if different(&group) < 2 {
            continue;
        }
        let mut best: Vec<String> = places.iter().map(|&at| told[at].clone()).collect();
        for same in commons(&group) {
            let shown: Vec<String> =
                group.iter().map(|text| without(text, same, columns)).collect();
            if different(&shown) > different(&best) {
                best = shown;
            }
        }
        // Each of the groups that still look the same is smaller, so this ends.
        if different(&best) > 1 {
            tell_apart(&group, &mut best, columns);
        }
        for (at, look) in places.into_iter().zip(best) {
            told[at] = look;
        }
    }
}

fn different(texts: &[String]) -> usize {
    texts.iter().collect::<BTreeSet<_>>().len()
}

/// Lengths in bytes of what different `texts` begin with in common, the best to leave out first: up
/// to the option whose value differs, up to the word that differs, the whole.
fn commons(texts: &[String]) -> [usize; 3] {
    let first = texts[0].as_str();
    let agree = |text: &String| {
        let pairs = first.char_indices().zip(text.chars());
        let differs = pairs.into_iter().find(|((_, one), other)| one != other);
        differs.map_or(first.len().min(text.len()), |((at, _), _)| at)
    };
    let same = texts.iter().map(agree).min().unwrap_or(0);
    let begin = |end: usize| first[..end].rfind(' ').map_or(0, |space| space + 1);
    let word = begin(same);
    let before = begin(word.saturating_sub(1));
    let is_value = word > 0 && first[before..word].starts_with('-');
    [if is_value { before } else { word }, word, same]
}

/// `text` without its first `same` bytes, except the first word if there is room.
fn without(text: &str, same: usize, columns: usize) -> String {
    let (rest, first) = (&text[same..], text.split(' ').next().unwrap_or(text));
    if text.chars().count() <= columns || same == 0 {
        return cut(text, columns);
    }
    match first.chars().count() + 3 + rest.chars().count() <= columns && first.len() < same {
        true => format!("{first} … {rest}"),
        false => cut(&format!("…{rest}"), columns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_shown_without_its_interpreter_and_its_path() {
        for (command, shown) in [
            ("/usr/bin/python3 /work/me/train.py --lr 1", "train.py --lr 1"),
            ("python3 -u -X dev a/train.py", "train.py"),
            ("python3 -u a/train.py b.py", "train.py b.py"),
            ("python3 -m gruyere train.py", "train.py"),
            ("python3 -m package.train x.py", "package.train x.py"),
            ("python -um package.train", "package.train"),
            ("python -mpackage.train x.py", "package.train x.py"),
            ("python3.11 /venv/bin/gunicorn app:x -w 2", "gunicorn app:x -w 2"),
            (
                "/usr/bin/python3 -u -c from multiprocessing.spawn import spawn_main; \
                 spawn_main(tracker_fd=5, pipe_handle=7) --multiprocessing-fork",
                "spawned worker",
            ),
            ("python3 -c import train", "python3 -c import train"),
            ("python3 -m", "python3 -m"),
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

    #[test]
    fn servers_are_told_apart_by_app_and_port_in_ten_columns() {
        let of = |commands: &[&str]| {
            let commands: Vec<String> =
                commands.iter().map(|command| format!("/usr/bin/python3.11 {command}")).collect();
            let commands: Vec<&str> = commands.iter().map(String::as_str).collect();
            told_apart(&commands, 10)
        };
        let port = "-m uvicorn app:x --port";
        let [one, two] = [8001, 8002].map(|number| format!("{port} {number}"));
        assert_eq!(of(&[&one, &two]), ["…8001", "…8002"]);
        let gunicorn = ["/venv/bin/gunicorn chat:x -w 2", "/venv/bin/gunicorn embed:x -w 2"];
        assert_eq!(of(&gunicorn), ["…chat:x -…", "…embed:x …"]);
        // Each is told from every other.
        let told = of(&[&one, &two, "-m uvicorn admin:y --port 8003", "train.py"]);
        assert_eq!(told, ["…8001", "…8002", "…admin:y …", "train.py"]);
    }
}
