//! The command line: its options, and the help text on them.
//!
//! The options that the environment and the configuration file have, too, are declared in `config`.

pub mod cluster;
pub mod rdma;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgMatches, CommandFactory, FromArgMatches as _, Parser, Subcommand, ValueHint};

use crate::apply::ApplyArgs;
use crate::config::{UpArgs, explained};
use crate::error::{self, Error};
use crate::follow::args::FollowArgs;
use crate::logging::LogArgs;
use crate::run::args::RunArgs;
use crate::trace;

/// A parameter server that you mount: a model is a directory, reading `weights` returns the newest
/// version, writing `gradients` contributes to the next one.
#[derive(Debug, Parser)]
#[command(name = "gradfs", version, arg_required_else_help = true, after_help = include_str!("cli/help/gradfs.txt").trim_end(), max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Where log lines go.
    #[command(flatten)]
    pub log: LogArgs,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Load models, mount them and serve until stopped
    #[command(
        after_help = include_str!("cli/help/up.txt").trim_end(),
        override_usage = "gradfs up [OPTIONS] MODEL.safetensors... MOUNT\n       \
                          gradfs up [OPTIONS] --size SIZE MOUNT\n       gradfs up [OPTIONS] --from DIR MOUNT\n       gradfs up [OPTIONS] --state DIR [MODEL.safetensors] MOUNT\n       gradfs up --config FILE"
    )]
    Up(UpArgs),
    /// Start learners of a mounted model on this machine, and look after them
    #[command(
        after_help = include_str!("cli/help/run.txt").trim_end(),
        override_usage = "gradfs run [OPTIONS] -n <N|auto> MODEL -- COMMAND..."
    )]
    Run(RunArgs),
    /// Run a command, or tell a server, for each new version of a mounted model
    #[command(
        after_help = include_str!("cli/help/follow.txt").trim_end(),
        override_usage = "gradfs follow [OPTIONS] PATH [--exec COMMAND | --post URL]"
    )]
    Follow(FollowArgs),
    /// Bring a copy of a version's weights to a newer version, by what has changed between them
    #[command(after_help = include_str!("cli/help/apply.txt").trim_end())]
    Apply(ApplyArgs),
    /// Run a PyTorch script as a data-parallel job: makes the model, mounts it, and starts learners
    #[command(
        after_help = include_str!("cli/help/launch.txt").trim_end(),
        override_usage = "gradfs launch -n N [OPTIONS] SCRIPT [ARGUMENTS]..."
    )]
    Launch {
        /// Options, a script and its arguments, as python -m gradfs.launch takes them
        #[arg(
            value_name = "ARGUMENTS",
            required = true,
            trailing_var_arg = true,
            allow_hyphen_values = true
        )]
        args: Vec<OsString>,
    },
    /// Shards on a network.
    #[command(flatten)]
    Cluster(cluster::ClusterCommand),
    /// Tell what this host has for RDMA
    #[command(subcommand)]
    Rdma(rdma::RdmaCommand),
    /// Record a timeline of a mount, for Perfetto and chrome://tracing
    #[command(after_help = include_str!("cli/help/trace.txt").trim_end())]
    Trace {
        /// The directory it is mounted on
        #[arg(value_name = "MOUNT", value_hint = ValueHint::DirPath)]
        mountpoint: PathBuf,
        /// For how long, up to an hour; Ctrl-C ends it early
        #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = trace::seconds, allow_negative_numbers = true)]
        seconds: Duration,
        /// The file to write; one that is there is replaced
        #[arg(short, long, value_name = "FILE", default_value = "trace.json", value_hint = ValueHint::FilePath)]
        output: PathBuf,
    },
    /// Unmount a gradfs mount, whether its daemon lives or not
    #[command(after_help = include_str!("cli/help/unmount.txt").trim_end())]
    Unmount {
        /// The directory it is mounted on
        #[arg(value_name = "MOUNT", value_hint = ValueHint::DirPath)]
        mountpoint: PathBuf,
        /// Detach it even while files are open; they keep working until closed if its daemon lives
        #[arg(long)]
        lazy: bool,
    },
    /// Print a completion script for a shell
    #[command(after_help = include_str!("cli/help/completions.txt").trim_end())]
    Completions {
        /// The shell it is for
        shell: clap_complete::Shell,
    },
}

/// Whether the process is to go on in the background.
pub fn is_background(given: &ArgMatches) -> bool {
    given.try_get_one("background").ok().flatten() == Some(&true)
}

/// Parses a command line, and gives what it has of the command besides. On `Err`, everything is printed, and it is the
/// exit code.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<(Cli, ArgMatches), u8> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    parsed(arguments).map_err(|error| {
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => {
                crate::printing::printed(error.print());
                if crate::printing::has_failed() {
                    return 1;
                }
            }
            _ => match explained(&error, &[]) {
                Some(error) => eprintln!("{}", error::report(&error)),
                None => eprint!("gradfs: {}", error.render()),
            },
        }
        u8::try_from(error.exit_code()).unwrap_or(2)
    })
}

fn parsed(arguments: impl IntoIterator<Item = OsString>) -> Result<(Cli, ArgMatches), clap::Error> {
    let mut matches = Cli::command().try_get_matches_from(arguments)?;
    let cli = Cli::from_arg_matches(&matches)?;
    let (_, given) = matches.remove_subcommand().unwrap_or_default();
    Ok((cli, given))
}

/// Prints the completion script for `shell`.
pub fn completions(shell: clap_complete::Shell) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gradfs", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Ok(())
}

#[cfg(test)]
mod tests;
