//! The command line: its options, and the help text on them.
//!
//! Each option is described here once: the environment and the configuration file have the same options, by
//! the same names. Values stay texts, and the configuration parses them all alike.

pub mod cluster;
mod given;
pub mod rdma;
mod run;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand, ValueHint};

pub use self::given::Given;
use self::given::Variables;
use crate::config::{UP, UpArgs, UpConfig, explained};
use crate::error::{self, Error};
use crate::logging::LogArgs;
use crate::trace;

const EXAMPLES: &str = "\
Examples:
  Serve a model, and train it with two processes that only open files:
    gradfs up --learners 2 --reducer adamw --learning-rate 3e-4 llama.safetensors /mnt/job
    ls /mnt/job/llama

  Try it without a model:
    gradfs up --size 1GiB --reducer sum /mnt/job

  A Hugging Face checkpoint, whose several files are one model:
    gradfs up Qwen2.5-7B/ /mnt/job

  What a model would take of this machine's memory:
    gradfs up --dry-run --learners 2 --reducer adamw llama.safetensors /mnt/job

  In the background; the command returns when the mount answers:
    gradfs up --background --learners 2 --reducer adamw llama.safetensors /mnt/job

  Start four learners of a model that is mounted:
    gradfs run -n 4 /mnt/job/llama -- python train.py

  Stop it, from anywhere:
    gradfs unmount /mnt/job

Run gradfs COMMAND --help for all options of a command.";

const UP_EXAMPLES: &str = "\
Examples:
  One model, four learners, synchronous Adam; at least three must stay:
    gradfs up --learners 4 --min-learners 3 --reducer adam llama.safetensors /mnt/job

  Two models side by side, as /mnt/job/policy and /mnt/job/value:
    gradfs up --name policy --name value a.safetensors b.safetensors /mnt/job

  Eight learners, of whom a version waits for six; late ones count in the next:
    gradfs up --learners 8 --consistency 'quorum(6)' llama.safetensors /mnt/job

  A blank model of 1 GiB of bf16 zeros, contributions added up as they come:
    gradfs up --size 1GiB --dtype bf16 --reducer sum --consistency async /mnt/job

  A job that goes on from a snapshot (gradfs save --help), with a smaller learning rate:
    gradfs up --from /backup/llama --learning-rate 1e-4 /mnt/job

  In a script, with a log for machines to read:
    gradfs up --background --log-file /var/log/job.json --log-format json llama.safetensors /mnt/job

  The same from a file; a flag or GRADFS_REDUCER=sgd would override its line:
    printf 'size = \"1GiB\"\\ndtype = \"bf16\"\\nreducer = \"sum\"\\nmount = \"/mnt/job\"\\n' > job.toml
    gradfs up --config job.toml

Every option has a key for the file (--block-size: block_size; the arguments: models and mount) and \
an environment variable (GRADFS_BLOCK_SIZE). Flags beat the environment, which beats the file.

Settings of the job can be changed while it runs:
    echo 0.01 > /mnt/job/llama/control/learning_rate";

const UNMOUNT_EXAMPLES: &str = "\
Examples:
  It returns when the daemon has ended:
    gradfs unmount /mnt/job

  While programs still have files open there:
    gradfs unmount --lazy /mnt/job";

const TRACE_EXAMPLES: &str = "\
Examples:
  What learners, plans, blocks and versions of all models do for ten seconds; then open the file in \
https://ui.perfetto.dev or chrome://tracing:
    gradfs trace /mnt/job --seconds 10 -o trace.json

  Until Ctrl-C, for an hour at most:
    gradfs trace /mnt/job --seconds 3600 -o long.json

One trace of a mount runs at a time. While none runs, recording costs nothing. At most 262144 events are kept; the oldest \
give way.";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  For all users of bash, as root:
    gradfs completions bash > /etc/bash_completion.d/gradfs

  For yourself, with zsh and a directory of your own in fpath:
    gradfs completions zsh > ~/.zfunc/_gradfs";

/// A parameter server that you mount: a model is a directory, reading `weights` returns the newest
/// version, writing `gradients` contributes to the next one.
#[derive(Debug, Parser)]
#[command(name = "gradfs", version, arg_required_else_help = true, after_help = EXAMPLES, max_term_width = 100)]
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
        after_help = UP_EXAMPLES,
        override_usage = "gradfs up [OPTIONS] MODEL.safetensors... MOUNT\n       \
                          gradfs up [OPTIONS] --size SIZE MOUNT\n       gradfs up [OPTIONS] --from DIR MOUNT\n       gradfs up --config FILE"
    )]
    Up(Given<UpArgs>),
    /// Start learners of a mounted model on this machine, and look after them
    #[command(
        after_help = run::EXAMPLES,
        override_usage = "gradfs run [OPTIONS] -n <N|auto> MODEL -- COMMAND..."
    )]
    Run(run::RunArgs),
    /// Shards on a network.
    #[command(flatten)]
    Cluster(cluster::ClusterCommand),
    /// Tell what this host has for RDMA
    #[command(subcommand)]
    Rdma(rdma::RdmaCommand),
    /// Record a timeline of a mount, for Perfetto and chrome://tracing
    #[command(after_help = TRACE_EXAMPLES)]
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
    #[command(after_help = UNMOUNT_EXAMPLES)]
    Unmount {
        /// The directory it is mounted on
        #[arg(value_name = "MOUNT", value_hint = ValueHint::DirPath)]
        mountpoint: PathBuf,
        /// Detach it even while files are open; they keep working until closed if its daemon lives
        #[arg(long)]
        lazy: bool,
    },
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell it is for
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// Whether the process is to go on in the background.
    pub fn is_background(&self) -> bool {
        use cluster::ClusterCommand::{Mount, Registry, Shard};
        match self {
            Command::Up(args) => args.background.background,
            Command::Cluster(Registry(args)) => args.background.background,
            Command::Cluster(Shard(args)) => args.background.background,
            Command::Cluster(Mount(args)) => args.background.background,
            _ => false,
        }
    }
}

impl Given<UpArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<UpConfig, Error> {
        let mut layers = self.layers(&UP, variables)?;
        UpConfig::take_mount(&mut layers[0]);
        UpConfig::merge(&layers)
    }
}

/// Parses a command line. On `Err`, everything is printed, and it is the exit code.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, u8> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    Cli::try_parse_from(arguments).map_err(|error: clap::Error| {
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

/// Prints the completion script for `shell`.
pub fn completions(shell: clap_complete::Shell) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "gradfs", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Ok(())
}

#[cfg(test)]
mod tests;
