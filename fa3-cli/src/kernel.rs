//! The kernel that a verb is about: its name and its options, as the catalogue has them.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use clap::{Arg, ArgMatches, Command};
use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::catalogue::{self, CatalogueError, Domain, OptionInfo};
use fa3_ir::{Kernel, Program};

/// A kernel's name and the options that are given, unchecked.
#[derive(Clone, Debug)]
pub(crate) struct KernelArgs {
    name: String,
    given: Vec<(&'static str, String)>,
}

impl KernelArgs {
    /// The program of its problem.
    ///
    /// # Errors
    /// A name, an option or a value that the catalogue does not have.
    pub(crate) fn program(&self) -> Result<Program<Kernel>, CatalogueError> {
        let entry = catalogue::find(&self.name)?;
        let chosen = self.given.iter().map(|(name, text)| entry.option(name)?.parse(text));
        let program = entry.program(&chosen.collect::<Result<Vec<_>, _>>()?)?;
        Ok(program.map(Spec::kernel))
    }
}

/// As it was typed.
impl fmt::Display for KernelArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        self.given.iter().try_for_each(|(name, text)| write!(f, " --{name} {text}"))
    }
}

/// The kernels of a program, in the order of its steps and each once.
pub(crate) fn distinct(program: Program<Kernel>) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for step in program.steps {
        if !kernels.contains(&step.kernel) {
            kernels.push(step.kernel);
        }
    }
    kernels
}

/// Every option that some kernel has, by name.
fn options() -> BTreeMap<&'static str, &'static OptionInfo> {
    let options = catalogue::ALL.iter().flat_map(|entry| entry.options);
    options.map(|option| (option.name, option)).collect()
}

impl clap::Args for KernelArgs {
    fn augment_args(command: Command) -> Command {
        let kernel = Arg::new("KERNEL").required(true).help("Which kernel, see below");
        let options = options().into_values().map(|option| {
            let value = match option.domain {
                Domain::Number { .. } => "N",
                Domain::OneOf(_) | Domain::Word(_) => "NAME",
            };
            Arg::new(option.name).long(option.name).value_name(value).help(option.about)
        });
        command.arg(kernel).args(options.map(|arg| arg.allow_negative_numbers(true)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        KernelArgs::augment_args(command)
    }
}

impl clap::FromArgMatches for KernelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<KernelArgs, clap::Error> {
        let text = |id| matches.get_one::<String>(id).cloned();
        let given = options().into_keys().filter_map(|name| Some((name, text(name)?))).collect();
        Ok(KernelArgs { name: text("KERNEL").unwrap_or_default(), given })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = KernelArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// `examples`, and all kernels with their options and the values that these have if they are not given.
pub(crate) fn help(examples: &str) -> String {
    let mut help = format!("{examples}\n\nKernels, with what their options are if not given:");
    for entry in catalogue::ALL {
        _ = write!(help, "\n  {:14}{}\n  {:14}", entry.name, entry.about, "");
        let options = entry.options.iter().map(|option| format!("--{} {}", option.name, option.default()));
        help += &options.collect::<Vec<_>>().join(" ");
    }
    help
}
