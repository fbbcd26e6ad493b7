//! `gruyere completions`: a shell's completions of this command, made by clap's own tool.

use clap_complete::Shell;

use crate::failure::{Ended, Exit};
use crate::output;

/// Prints the completions of this command for a shell.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  gruyere completions bash > ~/.local/share/bash-completion/completions/gruyere
  gruyere completions zsh > ~/.zfunc/_gruyere    (a folder of $fpath)
  gruyere completions fish > ~/.config/fish/completions/gruyere.fish

Exit codes: 0 printed; 2 wrong usage, or an unknown shell.")]
pub struct Arguments {
    /// The shell.
    shell: Shell,
}

/// Prints the completions for `command`, the whole command line.
pub fn run(arguments: &Arguments, mut command: clap::Command) -> Ended {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "gruyere", &mut script);
    output::print(String::from_utf8_lossy(&script))?;
    Ok(Exit::Fine)
}
