//! `gruyere compare`: one script under torch's allocators and under Gruyère, and the table that
//! people post. It is `bench --torch` made one word.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::bench::torch;
use crate::failure::say;

/// Runs a script under torch's default allocator, under expandable segments and under Gruyère, one
/// after the other, and prints a table in Markdown.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere compare -- python train.py --batch-size 8
  gruyere compare --steps 20 -- python train.py     20 steps of it under each
  gruyere compare --phantom -- python train.py      without a GPU, on the stand-in

Each run is a process of its own, with the real code of its allocator, on this machine's GPU, or \
on the stand-in where there is
none. `gruyere bench --torch` has more: built-in programs, the smallest device, rows for \
settings.

Exit codes: 0 all well; 1 a run failed; 2 wrong usage, or no GPU and no stand-in; 3 the driver's \
books found a fault; 4 out of memory.")]
pub struct Arguments {
    /// The script ends after so many steps of its optimiser (default: when it ends).
    #[arg(long, value_name = "COUNT")]
    steps: Option<NonZeroU32>,
    /// Run on the stand-in GPU, also where there is a real one.
    #[arg(long)]
    phantom: bool,
    /// Seconds after which a run is taken for hung.
    #[arg(long, value_name = "SECONDS", default_value_t = NonZeroU32::new(86_400).unwrap())]
    timeout: NonZeroU32,
    /// Write every number to FILE too.
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
    /// The interpreter, the script, its arguments: as you would run it.
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

/// Runs it. Returns only where nothing could be started.
pub fn main(arguments: &Arguments) -> ExitCode {
    match read(&arguments.command, "compare") {
        Ok((python, script, rest)) => torch::compare(torch::OneScript {
            python,
            script,
            arguments: rest,
            steps: arguments.steps,
            phantom: arguments.phantom,
            timeout: arguments.timeout,
            json: arguments.json.clone(),
        }),
        Err(reason) => {
            say("compare", reason);
            ExitCode::from(torch::WRONG)
        }
    }
}

/// What [`read`] finds.
pub type Read = (Option<PathBuf>, String, Vec<String>);

/// The interpreter, the script and its arguments, of what is given to `gruyere NAME`. The first may
/// be left out, and `-m gruyere` is passed over.
///
/// # Errors
/// It is none: the text says why.
pub fn read(command: &[OsString], name: &str) -> Result<Read, String> {
    let mut words: Vec<String> = Vec::new();
    for word in command {
        let text = word.to_str().ok_or_else(|| {
            format!("{}: no UTF-8; name the script another way", word.to_string_lossy())
        })?;
        words.push(text.to_owned());
    }
    let is_python = |word: &String| {
        let name = word.rsplit('/').next().unwrap_or(word);
        name.starts_with("python") && !name.ends_with(".py")
    };
    let mut python = None;
    if words.first().is_some_and(is_python) {
        python = Some(PathBuf::from(words.remove(0)));
    }
    if words.len() >= 2 && words[0] == "-m" && words[1] == "gruyere" {
        words.drain(..2);
    }
    match words.first() {
        Some(script) if script.starts_with('-') => Err(format!(
            "{script}: what runs is a script, not a module or a line of code, and options of \
             python itself are not passed on; write: gruyere {name} -- python train.py"
        )),
        Some(_) => {
            let script = words.remove(0);
            Ok((python, script, words))
        }
        None => Err(format!("name a script: gruyere {name} -- python train.py")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_an_interpreter_a_script_and_its_arguments() {
        let of = |line: &str| {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            read(&words, "compare")
        };
        let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(
            of("/opt/bin/python3.12 train.py --lr 3"),
            Ok((Some("/opt/bin/python3.12".into()), "train.py".into(), words(&["--lr", "3"])))
        );
        assert_eq!(of("train.py"), Ok((None, "train.py".into(), words(&[]))));
        let launched = of("python -m gruyere train.py");
        assert_eq!(launched, Ok((Some("python".into()), "train.py".into(), words(&[]))));
        assert!(of("python -m torch.distributed.run x.py").unwrap_err().contains("a module"));
        assert!(of("python").unwrap_err().contains("name a script"));
    }
}
