//! A Python program as a user starts it: `python -u train.py --lr 3`, `-m package.train`. For
//! commands that run it themselves, each time in a new process (`compare`, `dryrun`).

mod launchers;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::PathBuf;

use gruyere_record::run;
use serde::Serialize;

/// Result of [`read`].
#[derive(Debug, Default, PartialEq, Serialize)]
pub struct Program {
    /// The interpreter, if named.
    #[serde(skip)]
    pub python: Option<PathBuf>,
    /// Options of the interpreter, for each run.
    pub python_options: Vec<String>,
    /// The script or module.
    #[serde(flatten)]
    pub main: Main,
    /// Its arguments.
    pub arguments: Vec<String>,
}

/// The interpreter's target.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Main {
    /// A file, a folder or an archive.
    Script(String),
    /// A module by its name, as `python -m` takes it.
    Module(String),
}

impl Default for Main {
    fn default() -> Self {
        Main::Script(String::new())
    }
}

impl Main {
    /// Default name of its run.
    pub fn name_of_run(&self) -> String {
        match self {
            Main::Script(file) => run::name_of(&format!("python {file}")),
            Main::Module(name) => run::name_of(&format!("python -m {name}")),
        }
    }
}

/// Options of python passed to a run: they change how a program runs, but neither which program
/// runs nor whether the interpreter finds the package (as -E, -I and -S do).
const FLAGS: &str = "bBdOPqRsuv";
const WITH_VALUE: &str = "WX";

/// The options of `gruyere NAME` as the user typed them, before the words of `command`.
pub fn options(command: &[OsString]) -> Vec<String> {
    options_in(std::env::args_os().skip(2), command)
}

fn options_in(words: impl Iterator<Item = OsString>, command: &[OsString]) -> Vec<String> {
    let mut words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    words.truncate(words.len().saturating_sub(command.len()));
    if words.last().is_some_and(|word| word == "--") {
        words.pop();
    }
    words
}

/// Parses the words after `gruyere NAME` and its `options`, which a suggestion repeats. The
/// interpreter is optional, and `-m gruyere` is skipped.
///
/// # Errors
/// Not a Python program, or a launcher: the text has the reason and a suggestion.
pub fn read(command: &[OsString], name: &str, options: &[String]) -> Result<Program, String> {
    let ours = options.iter().fold(format!("gruyere {name}"), |line, word| {
        format!("{line} {}", gruyere_record::quoted(word))
    });
    let mut words = VecDeque::new();
    for word in command {
        let text = word.to_str().ok_or_else(|| {
            format!("{}: not UTF-8; name the program another way", word.to_string_lossy())
        })?;
        words.push_back(text.to_owned());
    }
    if let Some(setting) = words.front().filter(|word| is_setting(word)) {
        return Err(format!(
            "{setting}: put environment settings before the command: {setting} {ours} -- ..."
        ));
    }
    let mut program = Program::default();
    if words.front().is_some_and(|word| is_python(word)) {
        program.python = words.pop_front().map(PathBuf::from);
    }
    let mut module = program.options(&mut words, name)?;
    if module.as_deref() == Some("gruyere") {
        module = Program::default().options(&mut words, name)?;
    }
    program.main = match module {
        Some(module) => Main::Module(module),
        None => Main::Script(words.pop_front().ok_or_else(|| {
            format!(
                "name a program: gruyere {name} -- python train.py, or gruyere {name} -- python \
                 -m package.train"
            )
        })?),
    };
    program.arguments = words.into();
    let has = |word| options.iter().any(|option| option.split('=').next() == Some(word));
    // On a GPU, `compare` takes none.
    let takes_ranks = !has("--ranks") && (name == "dryrun" || has("--stand-in"));
    match launchers::reason(&program, &ours, takes_ranks) {
        Some(reason) => Err(reason),
        None => Ok(program),
    }
}

/// Whether a word names an interpreter.
fn is_python(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.starts_with("python") && !name.ends_with(".py")
}

/// Whether a word is a shell assignment, as in `RANK=0 python train.py`.
fn is_setting(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, _)| {
        !name.is_empty()
            && name.bytes().all(|byte| matches!(byte, b'A'..=b'Z' | b'0'..=b'9' | b'_'))
    })
}

impl Program {
    /// Takes options off `words` as python parses them: letters may share a dash, and a value may
    /// be joined on. Returns the module if the options end with -m.
    fn options(
        &mut self,
        words: &mut VecDeque<String>,
        name: &str,
    ) -> Result<Option<String>, String> {
        while words.front().is_some_and(|word| word.starts_with('-')) {
            let word = words.pop_front().expect("there is one");
            if word == "-" {
                return Err(format!(
                    "-: each run reads the program again, and standard input can be read only \
                     once; name a file: gruyere {name} -- python train.py"
                ));
            }
            for (at, letter) in word.char_indices().skip(1) {
                if FLAGS.contains(letter) {
                    self.python_options.push(format!("-{letter}"));
                    continue;
                }
                let joined = &word[at + letter.len_utf8()..];
                let mut value = || match joined {
                    "" => words.pop_front().ok_or(format!("{word}: a value is missing")),
                    joined => Ok(joined.to_owned()),
                };
                match letter {
                    'm' => return value().map(Some),
                    'c' => {
                        return Err(format!(
                            "-c: the program must be a script or a module, not a line of code; \
                             write it to a file: gruyere {name} -- python train.py"
                        ));
                    }
                    _ if WITH_VALUE.contains(letter) => {
                        let value = value()?;
                        self.python_options.extend([format!("-{letter}"), value]);
                    }
                    _ => {
                        return Err(format!(
                            "{word}: neither an option of gruyere {name} (--help lists them) nor a \
                             python option that it passes to its runs ({}); leave it out",
                            passed_on()
                        ));
                    }
                }
                break;
            }
        }
        Ok(None)
    }
}

/// The options of python passed to a run, for people.
fn passed_on() -> String {
    let letters = FLAGS.chars().chain(WITH_VALUE.chars());
    letters.map(|letter| format!("-{letter}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<Program, String> {
        let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
        read(&words, "compare", &[])
    }

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn program(
        python: &str,
        options: &str,
        main: Main,
        arguments: &str,
    ) -> Result<Program, String> {
        Ok(Program {
            python: Some(python).filter(|name| !name.is_empty()).map(PathBuf::from),
            python_options: words(options),
            main,
            arguments: words(arguments),
        })
    }

    fn script(file: &str) -> Main {
        Main::Script(file.to_owned())
    }

    fn module(name: &str) -> Main {
        Main::Module(name.to_owned())
    }

    #[test]
    fn a_program_is_an_interpreter_a_script_and_its_arguments() {
        let read = of("/opt/bin/python3.12 train.py --lr 3 -m x");
        let wanted = program("/opt/bin/python3.12", "", script("train.py"), "--lr 3 -m x");
        assert_eq!(read, wanted);
        assert_eq!(of("train.py"), program("", "", script("train.py"), ""));
        assert_eq!(of("python_train.py"), program("", "", script("python_train.py"), ""));
        assert!(of("python").unwrap_err().contains("name a program"));
        assert!(of("python -u").unwrap_err().contains("name a program"));
    }

    #[test]
    fn a_module_is_named_as_python_takes_it() {
        let wanted = program("python", "", module("my.package.train"), "--x 1 -u");
        assert_eq!(of("python -m my.package.train --x 1 -u"), wanted);
        assert_eq!(of("python -mmy.package.train --x 1 -u"), wanted);
        assert_eq!(of("-m train"), program("", "", module("train"), ""));
        assert!(of("python -m").unwrap_err().contains("-m: a value is missing"));
    }

    #[test]
    fn gruyeres_own_launcher_is_passed_over() {
        let wanted = program("python", "-u", script("train.py"), "");
        assert_eq!(of("python -u -m gruyere train.py"), wanted);
        let wanted = program("python", "", module("package"), "--limit 3");
        assert_eq!(of("python -m gruyere -m package --limit 3"), wanted);
        assert!(of("python -m gruyere --limit 3 train.py").unwrap_err().starts_with("--limit: "));
    }

    #[test]
    fn the_options_of_the_command_are_the_words_before_the_program() {
        let of = |line: &str, command: &str| {
            let of = |text: &str| text.split_whitespace().map(OsString::from).collect::<Vec<_>>();
            options_in(of(line).into_iter(), &of(command)).join(" ")
        };
        assert_eq!(
            of("--stand-in --steps 3 -- python x.py", "python x.py"),
            "--stand-in --steps 3"
        );
        assert_eq!(of("--gpu a100-40 torchrun -- x.py", "torchrun -- x.py"), "--gpu a100-40");
        assert_eq!(of("x.py", "x.py"), "");
    }

    #[test]
    fn options_of_python_go_to_the_runs() {
        assert_eq!(of("python -u train.py"), program("python", "-u", script("train.py"), ""));
        let wanted = program("python", "-B -O -X utf8 -W ignore", module("package"), "-u");
        assert_eq!(of("python -BO -X utf8 -Wignore -m package -u"), wanted);
        let wanted = program("", "-u -B", module("package"), "");
        assert_eq!(of("-uBm package"), wanted);
        assert_eq!(of("-u train.py"), program("", "-u", script("train.py"), ""));
        assert!(of("python -X").unwrap_err().contains("-X: a value is missing"));
    }

    #[test]
    fn what_no_run_can_be_given_is_refused_by_name() {
        for line in ["python -I train.py", "python -E train.py", "--gpus 3 train.py"] {
            let reason = of(line).unwrap_err();
            let word = line.split(' ').find(|word| word.starts_with('-')).unwrap();
            assert!(reason.starts_with(&format!("{word}: neither")), "{reason}");
            assert!(reason.contains("-u -v -W -X") && reason.contains("leave it out"), "{reason}");
        }
        assert!(of("python -c pass").unwrap_err().contains("write it to a file"));
        assert!(of("python -").unwrap_err().contains("name a file"));
        let reason = of("RANK=0 python train.py").unwrap_err();
        assert!(reason.contains("RANK=0 gruyere compare -- "), "{reason}");
        let words = ["RANK=0".into(), "train.py".into()];
        let reason = read(&words, "compare", &["--stand-in".to_owned()]).unwrap_err();
        assert!(reason.contains("RANK=0 gruyere compare --stand-in -- "), "{reason}");
    }
}
