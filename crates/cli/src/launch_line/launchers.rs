//! Launchers, which start the processes of a training. The launcher's process cannot watch these,
//! and a run has a single process and device, so the user must name the program itself.
//!
//! We do not unwrap a launcher: only its own parser knows which words are values of its options,
//! and a configuration file may add more. We only suggest a replacement.

use gruyere_record::quoted;

use super::{Main, Program};

/// Settings that launchers like torch's give to the only process of a job. Port 0: each run gets a
/// free port.
const ONE_RANK: &str = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 ";

/// How a launcher starts a program as its only process.
struct Launcher {
    /// Variables in its environment.
    environment: &'static str,
    /// Its first argument.
    argument: Option<&'static str>,
    /// If one of these words is present, the launcher omits that argument.
    without: &'static [&'static str],
    /// Its options that become variables of the program's environment.
    settings: &'static [Setting],
    /// Its options, with `_` in their names, for the ranks of a node (or of all nodes) and for the
    /// nodes.
    ranks: (&'static str, &'static str),
}

/// An option of a launcher, with `_` in its name, and the variable that its value becomes.
struct Setting {
    option: &'static str,
    variable: &'static str,
    value: fn(&str) -> String,
}

const TORCHRUN: Launcher = Launcher {
    environment: ONE_RANK,
    argument: None,
    without: &[],
    settings: &[],
    ranks: ("--nproc_per_node", "--nnodes"),
};

const TORCH_LAUNCH: Launcher = Launcher {
    argument: Some("--local-rank=0"),
    without: &["--use-env", "--use_env", "--use-env=True", "--use_env=True"],
    ..TORCHRUN
};

const DEEPSPEED: Launcher = Launcher {
    argument: Some("--local_rank=0"),
    without: &["--no_local_rank"],
    ranks: ("--num_gpus", "--num_nodes"),
    ..TORCHRUN
};

/// It gives a single process no ranks.
const ACCELERATE: Launcher = Launcher {
    environment: "",
    settings: &[
        Setting {
            option: "--mixed_precision",
            variable: "ACCELERATE_MIXED_PRECISION",
            value: str::to_lowercase,
        },
        Setting {
            option: "--dynamo_backend",
            variable: "ACCELERATE_DYNAMO_BACKEND",
            value: str::to_uppercase,
        },
    ],
    // Of all nodes.
    ranks: ("--num_processes", ""),
    ..TORCHRUN
};

/// The launcher, if `program` is one.
fn known(program: &Program) -> Option<Launcher> {
    let launches = program.arguments.first().is_some_and(|word| word == "launch");
    Some(match &program.main {
        Main::Script(file) => match file.rsplit('/').next()? {
            "torchrun" => TORCHRUN,
            "accelerate-launch" => ACCELERATE,
            "accelerate" if launches => ACCELERATE,
            "deepspeed" | "ds" => DEEPSPEED,
            _ => return None,
        },
        Main::Module(name) => match name.as_str() {
            "torch.distributed.run" => TORCHRUN,
            "torch.distributed.launch" => TORCH_LAUNCH,
            "accelerate.commands.launch" => ACCELERATE,
            "accelerate.commands.accelerate_cli" if launches => ACCELERATE,
            "deepspeed.launcher.runner" | "deepspeed.launcher.launch" => DEEPSPEED,
            _ => return None,
        },
    })
}

/// Why Gruyère's command `ours` cannot run the program, if it is a launcher, with a suggestion.
/// `takes_ranks`: the command can be given `--ranks`.
pub fn reason(program: &Program, ours: &str, takes_ranks: bool) -> Option<String> {
    let launcher = known(program)?;
    let said = match &program.main {
        Main::Script(file) => file.clone(),
        Main::Module(module) => format!("-m {module}"),
    };
    let (launched, arguments) = launched(&program.arguments);
    let leaves_out = |word: &String| launcher.without.contains(&word.as_str());
    let argument = launcher.argument.filter(|_| !program.arguments.iter().any(leaves_out));
    let mut line: Vec<String> =
        program.python.iter().map(|file| file.display().to_string()).collect();
    line.extend_from_slice(&program.python_options);
    line.extend(launched);
    line.extend(argument.map(str::to_owned));
    line.extend_from_slice(arguments);
    let own = &program.arguments[..program.arguments.len() - arguments.len()];
    let given: Vec<_> = launcher.settings.iter().filter_map(|each| each.given(own)).collect();
    let note = match given.first() {
        _ if launcher.settings.is_empty() => "",
        None => {
            "\nPut the settings of accelerate's options and configuration (`accelerate env`) \
             before it, as in ACCELERATE_MIXED_PRECISION=bf16"
        }
        Some(_) => {
            "\nPut the settings of accelerate's other options and of its configuration \
             (`accelerate env`) before it too"
        }
    };
    let (each, nodes) = launcher.ranks(own);
    let ranks = each.saturating_mul(nodes);
    let (how, environment, option) = if ranks > 1 && takes_ranks {
        // Else `gruyere._job` takes nodes of eight; accelerate's number is of all nodes.
        let is_of_node = !launcher.ranks.1.is_empty() && (nodes > 1 || each > 8);
        let node = if is_of_node { format!("LOCAL_WORLD_SIZE={each} ") } else { String::new() };
        ("the first of its ranks then runs alone", node, format!(" --ranks {ranks}"))
    } else {
        let environment = launcher.environment.to_owned();
        ("it then runs as one process on one device", environment, String::new())
    };
    Some(format!(
        "{said}: a launcher; Gruyère cannot watch the processes that it starts. Name the program \
         itself; {how}:\n    {environment}{}{ours}{option} -- {}{note}",
        given.concat(),
        line.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "),
    ))
}

impl Launcher {
    /// The ranks of a node and the nodes that the launcher's `words` ask for, each 1 where they do
    /// not say a number.
    fn ranks(&self, words: &[String]) -> (u32, u32) {
        let number = |option| value(option, words).and_then(|text| text.parse().ok()).unwrap_or(1);
        (number(self.ranks.0), number(self.ranks.1))
    }
}

impl Setting {
    /// The variable as a shell reads it before a command, with a space, if the option is among the
    /// launcher's `words`.
    fn given(&self, words: &[String]) -> Option<String> {
        let value = value(self.option, words)?;
        Some(format!("{}={} ", self.variable, quoted(&(self.value)(value))))
    }
}

/// The value of the option (with `_` in its name) among the launcher's `words`; of several, the
/// last counts.
fn value<'a>(option: &str, words: &'a [String]) -> Option<&'a str> {
    words.iter().enumerate().rev().find_map(|(at, word)| {
        let (name, joined) = match word.split_once('=') {
            Some((name, joined)) => (name, Some(joined)),
            None => (word.as_str(), None),
        };
        let is_this = name.starts_with("--") && name.replace('-', "_") == option.replace('-', "_");
        let next = || words.get(at + 1).map(String::as_str);
        if is_this { joined.or_else(next) } else { None }
    })
}

/// The program that the launcher's words appear to start, as python's words, and its arguments: the
/// first named module, or the first Python file.
fn launched(words: &[String]) -> (Vec<String>, &[String]) {
    let mut at = 0;
    while at < words.len() {
        let next = words.get(at + 1).filter(|word| !word.starts_with('-'));
        match (words[at].as_str(), next) {
            ("-m" | "--module", Some(module)) if module == "gruyere" => at += 2,
            ("-m" | "--module", Some(module)) => {
                return (vec!["-m".to_owned(), module.clone()], &words[at + 2..]);
            }
            (word, _) if word.ends_with(".py") && !word.starts_with('-') => {
                return (vec![word.to_owned()], &words[at + 1..]);
            }
            _ => at += 1,
        }
    }
    (vec!["train.py".to_owned()], &[])
}

#[cfg(test)]
mod tests {
    use super::super::read;
    use std::ffi::OsString;

    /// The suggestion for a launch line.
    fn proposed(line: &[&str]) -> String {
        with_options(&[], line)
    }

    fn with_options(options: &[&str], line: &[&str]) -> String {
        let words: Vec<_> = line.iter().map(OsString::from).collect();
        let options: Vec<_> = options.iter().map(|&word| word.to_owned()).collect();
        let reason = read(&words, "dryrun", &options).unwrap_err();
        assert!(reason.contains(": a launcher; "), "{reason}");
        reason.lines().nth(1).unwrap().trim().to_owned()
    }

    fn of(line: &str) -> String {
        proposed(&line.split_whitespace().collect::<Vec<_>>())
    }

    const RANK: &str =
        "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 gruyere dryrun --";

    #[test]
    fn a_launcher_is_told_with_the_line_of_its_one_process() {
        assert_eq!(
            of("torchrun --nproc_per_node=1 train.py --x 1"),
            format!("{RANK} train.py --x 1")
        );
        let line = "python3 -u -m torch.distributed.run --nproc-per-node 1 train.py --x 1";
        assert_eq!(of(line), format!("{RANK} python3 -u train.py --x 1"));
        assert_eq!(
            of("/venv/bin/torchrun -m pkg.train --x 1"),
            format!("{RANK} -m pkg.train --x 1")
        );
        // This project's own launch line.
        let line = "torchrun --nproc-per-node 1 -m gruyere train.py";
        assert_eq!(of(line), format!("{RANK} train.py"));
        assert_eq!(of("torchrun -m --nproc-per-node 1 pkg.train"), format!("{RANK} train.py"));
    }

    #[test]
    fn what_a_launcher_adds_to_the_arguments_is_told() {
        let line = "python -m torch.distributed.launch --nproc_per_node=1 train.py --x 1";
        assert_eq!(of(line), format!("{RANK} python train.py --local-rank=0 --x 1"));
        let line = "python -m torch.distributed.launch --use_env train.py --x 1";
        assert_eq!(of(line), format!("{RANK} python train.py --x 1"));
        let line = "deepspeed --num_gpus 1 train.py --deepspeed ds.json";
        assert_eq!(of(line), format!("{RANK} train.py --local_rank=0 --deepspeed ds.json"));
    }

    #[test]
    fn ranks_are_proposed_where_the_launcher_starts_several() {
        assert_eq!(
            of("torchrun --nproc-per-node=8 train.py --x 1"),
            "gruyere dryrun --ranks 8 -- train.py --x 1"
        );
        assert_eq!(
            of("torchrun --nnodes 2 --nproc_per_node 4 train.py"),
            "LOCAL_WORLD_SIZE=4 gruyere dryrun --ranks 8 -- train.py"
        );
        assert_eq!(
            of("torchrun --nproc_per_node 16 train.py"),
            "LOCAL_WORLD_SIZE=16 gruyere dryrun --ranks 16 -- train.py"
        );
        assert_eq!(
            of("accelerate launch --num_processes 16 train.py"),
            "gruyere dryrun --ranks 16 -- train.py"
        );
        assert_eq!(
            of("accelerate launch --mixed_precision bf16 --num_processes 4 train.py"),
            "ACCELERATE_MIXED_PRECISION=bf16 gruyere dryrun --ranks 4 -- train.py"
        );
        assert_eq!(
            of("deepspeed --num_gpus 4 train.py --deepspeed ds.json"),
            "gruyere dryrun --ranks 4 -- train.py --local_rank=0 --deepspeed ds.json"
        );
        // The number of GPUs here, a range, the program's own option.
        for line in
            ["--nproc_per_node gpu train.py", "--nnodes 1:4 train.py", "train.py --nnodes 2"]
        {
            assert!(of(&format!("torchrun {line}")).starts_with("RANK=0 "), "{line}");
        }
    }

    #[test]
    fn accelerate_sets_no_rank_for_one_process() {
        let plain = "gruyere dryrun -- train.py --x 1";
        assert_eq!(of("accelerate launch --num_processes 1 train.py --x 1"), plain);
        assert_eq!(of("accelerate-launch train.py --x 1"), plain);
        let line = "python -m accelerate.commands.launch -m pkg.train --x 1";
        assert_eq!(of(line), "gruyere dryrun -- python -m pkg.train --x 1");
    }

    #[test]
    fn what_accelerate_makes_of_its_options_is_told() {
        let plain = "gruyere dryrun -- train.py --x 1";
        for option in ["--mixed_precision bf16", "--mixed-precision=BF16"] {
            let line = of(&format!("accelerate launch {option} --num_processes 1 train.py --x 1"));
            assert_eq!(line, format!("ACCELERATE_MIXED_PRECISION=bf16 {plain}"));
        }
        assert_eq!(
            of("accelerate launch --dynamo_backend inductor --mixed_precision fp16 -m pkg --x 1"),
            "ACCELERATE_MIXED_PRECISION=fp16 ACCELERATE_DYNAMO_BACKEND=INDUCTOR gruyere dryrun -- \
             -m pkg --x 1"
        );
        // The program's own.
        let line = of("accelerate launch train.py --mixed_precision bf16");
        assert_eq!(line, "gruyere dryrun -- train.py --mixed_precision bf16");
    }

    #[test]
    fn the_users_own_options_are_proposed_again() {
        let options = ["--gpu", "a100-40", "--sweep", "batch=--bs:1..64", "--html", "a page.html"];
        assert_eq!(
            with_options(&options, &["accelerate", "launch", "train.py"]),
            "gruyere dryrun --gpu a100-40 --sweep batch=--bs:1..64 --html 'a page.html' -- train.py"
        );
    }

    #[test]
    fn words_are_proposed_as_a_shell_reads_them() {
        let line = ["torchrun", "train.py", "--name", "it's a run", "--pattern=*.txt"];
        let wanted = format!(r"{RANK} train.py --name 'it'\''s a run' '--pattern=*.txt'");
        assert_eq!(proposed(&line), wanted);
    }

    #[test]
    fn what_only_looks_like_a_launcher_runs() {
        for line in
            ["accelerate estimate-memory", "torchrun.py", "-m torchrun", "python deepspeed.py"]
        {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            assert!(read(&words, "dryrun", &[]).is_ok(), "{line}");
        }
    }
}
