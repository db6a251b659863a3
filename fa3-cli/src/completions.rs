//! `fa3 completions`: completion scripts for shells.

use clap_complete::Shell;

use crate::console;

pub(crate) const ABOUT: &str = "\
Prints a script that completes commands and options. bash reads it from \
~/.local/share/bash-completion/completions/fa3, zsh from a file _fa3 in a folder of $fpath, fish from \
~/.config/fish/completions/fa3.fish.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 completions bash > ~/.local/share/bash-completion/completions/fa3
  fa3 completions zsh > ~/.zfunc/_fa3")]
pub(crate) struct Options {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script. Always true, since nothing is checked.
pub(crate) fn run(options: &Options, mut command: clap::Command) -> bool {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut command, "fa3", &mut script);
    console::print(&String::from_utf8_lossy(&script).trim_end());
    true
}
