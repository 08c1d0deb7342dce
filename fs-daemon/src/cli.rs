//! The command line: its options, and the help text on them.
//!
//! Each option is described here once: the environment and the configuration file have the same options, by
//! the same names. Values stay texts, and the configuration parses them all alike.

pub mod cluster;
mod given;
mod parameters;
pub mod rdma;
mod run;

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::{Arg, Args, CommandFactory, Parser, Subcommand, ValueHint};
use libmodelio::vocabulary::reducer::Reducer;
use ps_backend::state_copies::StateCopies;
use strum::VariantNames as _;

pub use self::given::Given;
use self::given::{Variables, options_of};
use self::parameters::ParameterArgs;
use crate::config::{DTYPES, UpConfig, Vocabulary};
use crate::error::Error;
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
            Command::Up(args) => args.background.asked(),
            Command::Cluster(Registry(args)) => args.background.asked(),
            Command::Cluster(Shard(args)) => args.background.asked(),
            Command::Cluster(Mount(args)) => args.background.asked(),
            _ => false,
        }
    }
}

/// Options of the commands that run until they are told to stop.
#[derive(Args, Debug)]
pub struct BackgroundArgs {
    /// Return when everything answers, and go on as a daemon. Its log is the file --log-file, or one in
    /// /var/log/gradfs (without root: ~/.local/state/gradfs)
    #[arg(long)]
    background: bool,
}

impl BackgroundArgs {
    /// Whether the background is asked for.
    pub fn asked(&self) -> bool {
        self.background
    }
}

/// The arguments of `gradfs up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Models to serve: safetensors files, or directories of Hugging Face checkpoints (or their index); then the
    /// empty directory to mount on
    #[arg(value_name = "MODEL.safetensors... MOUNT")]
    models: Vec<PathBuf>,
    /// TOML file with the same options as keys
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Models")]
    blank: BlankArgs,
    #[command(flatten, next_help_heading = "Models")]
    snapshot: FromArgs,
    /// Directory of a model, once per model [default: the file's name; `model` if blank]
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,

    #[command(flatten)]
    job: JobArgs,

    #[command(flatten, next_help_heading = "Daemon")]
    state: StateArgs,
    #[command(flatten, next_help_heading = "Daemon")]
    pub background: BackgroundArgs,
    /// Show what the models take of this machine's memory, and mount nothing; fails if it is not there
    #[arg(long, conflicts_with = "background")]
    pub dry_run: bool,
    #[command(flatten)]
    mounting: MountingArgs,
}

/// The shape of a model that is not loaded.
#[derive(Args, Debug)]
struct BlankArgs {
    /// Start from a blank model of this size, not from files: 1GiB, 1048576
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Element type of the blank model [default: f32]
    #[arg(long, value_parser = Shown(DTYPES))]
    dtype: Option<String>,
    /// Unit of transfer, locking and versioning: a power of two, 64KiB to 4MiB [default: 256KiB]
    #[arg(long, value_name = "SIZE")]
    block_size: Option<String>,
}

/// The memory of optimizers.
#[derive(Args, Debug)]
struct StateArgs {
    /// Copies of optimizer state and fp32 masters: single takes less memory; double computes a block as soon as its last
    /// contribution has come [default: single]
    #[arg(long, value_parser = PossibleValuesParser::new(StateCopies::VARIANTS))]
    state: Option<String>,
    /// Device that computes new versions and has the optimizer state: cpu, or cuda:0 for the first NVIDIA GPU [default: cpu]
    #[arg(long, value_name = "DEVICE", value_hint = ValueHint::Other)]
    device: Option<String>,
}

/// The snapshot that a model goes on from.
#[derive(Args, Debug)]
struct FromArgs {
    /// Go on from this snapshot, which gradfs save has written: with its model and settings, unless others are given. A model
    /// that is named besides has to be the snapshot's
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    from: Option<PathBuf>,
}

/// How models are mounted.
#[derive(Args, Debug)]
struct MountingArgs {
    /// Threads that serve the filesystem [default: 2]
    #[arg(long, value_name = "N")]
    threads: Option<String>,
    /// Let other users use the mount (/etc/fuse.conf may have to permit it)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    allow_other: Option<String>,
    /// User that the files belong to, by name or number; learners belong to whoever made them [default: the daemon's]
    #[arg(long, value_name = "USER")]
    uid: Option<String>,
    /// Group that the files belong to, by name or number [default: the daemon's]
    #[arg(long, value_name = "GROUP")]
    gid: Option<String>,
    /// Permission bits to take away from files, in octal: 007 lets the group write and make learners, 0 everybody [default: only
    /// the owner writes]
    #[arg(long, value_name = "OCTAL")]
    umask: Option<String>,
    /// Serve reads through the daemon even where the kernel could bypass it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    no_passthrough: Option<String>,
    /// Serve metrics for Prometheus here, as host:port; port 0 is any free one [default: none; port 9464]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname)]
    metrics: Option<String>,
    /// Serve the models as network block devices here: a path of a Unix socket, or host:port on loopback [default: none; port 10809]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::AnyPath)]
    nbd: Option<String>,
    /// Let everybody who reaches the address of --nbd read and write the models, from other hosts, too
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    insecure: Option<String>,
}

/// The settings of a job.
#[derive(Args, Debug)]
#[command(next_help_heading = "Job")]
struct JobArgs {
    /// What becomes of contributions [default: sgd]
    #[arg(long, value_parser = PossibleValuesParser::new(Reducer::NAMES), ignore_case = true)]
    reducer: Option<String>,
    /// What a version waits for: sync, all active learners; quorum, K of them; grace, K of them, and for the others
    /// FACTOR times as long as K take on average; async and ssp, one contribution, and with ssp nobody runs more than S
    /// steps ahead of the slowest [default: sync]
    #[arg(long, value_parser = Shown(&["sync", "async", "quorum(K)", "grace(K, FACTOR)", "ssp(S)"]))]
    consistency: Option<String>,
    /// Add up in the order of learners, also what is mapped: runs are bit-for-bit repeatable
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    deterministic: Option<String>,
    /// With async and ssp: divide the learning rate by the versions that a contribution is behind
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    staleness_aware: Option<String>,
    /// Learners to wait for before the first version [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    learners: Option<String>,
    /// Stop below this many active learners [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    min_learners: Option<String>,
    /// Most learners in the job, on all mounts [default: 4096]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_learners: Option<String>,
    /// Silence after which a mount and its learners leave, and a learner that no process uses; 0 is never [default: 60]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    lease: Option<String>,
    /// Seconds for which others wait for a silent learner whose process lives, before it leaves; 0 is never [default: 600]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    patience: Option<String>,
    /// Seconds for which others wait for a learner whose last process has exited [default: 2]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    linger: Option<String>,
    /// Longest wait of an open, fsync or close [default: 120]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    timeout: Option<String>,
    /// Seconds for which calls wait for a shard that is out of reach [default: 20]
    #[arg(long, value_name = "SECONDS", allow_negative_numbers = true)]
    shard_patience: Option<String>,
    /// Older versions to keep under versions/ [default: 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    retain: Option<String>,
    /// Most versions that programs may hold open; twice as many buffers may exist [default: 16]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    max_versions: Option<String>,
    /// When mounts on a network pull versions: at once, just before they are opened, or when they are [default: auto]
    #[arg(long, value_parser = ["auto", "eager", "adaptive", "on-demand"], ignore_case = true)]
    pull: Option<String>,
    /// Whether an open waits for the version with the learner's own step [default: auto]
    #[arg(long, value_parser = ["auto", "true", "false"], ignore_case = true)]
    read_own_step: Option<String>,
    /// What to do with a contribution that holds NaN or Inf [default: reject]
    #[arg(long, value_parser = ["reject", "accept"], ignore_case = true)]
    nonfinite: Option<String>,
    /// Send contributions over TCP as full, bf16, fp16, int8, fp8 or topk(FRACTION) [default: full]
    #[arg(long, value_name = "FORM")]
    wire: Option<String>,
    /// Never reduce tensors whose names match, with * and ?; may be repeated
    #[arg(long, value_name = "PATTERN")]
    frozen: Vec<String>,
    /// What counts for tensors whose names match, in place of the model's settings: PATTERN and some of frozen,
    /// weight_decay=NUMBER, learning_rate_scale=NUMBER, reducer=NAME; may be repeated, the first that matches counts
    #[arg(long, value_name = "RULE")]
    tensors: Vec<String>,
    #[command(flatten)]
    optimizer: OptimizerArgs,
}

/// The settings of the optimizer.
#[derive(Args, Debug)]
#[command(next_help_heading = "Optimizer")]
struct OptimizerArgs {
    #[command(flatten)]
    parameters: ParameterArgs,
    /// How the learning rate changes: it is constant, or falls to its floor in N versions, in a straight line or along
    /// half a cosine [default: constant]
    #[arg(long, value_parser = Shown(&["constant", "linear(N)", "cosine(N)"]))]
    schedule: Option<String>,
    /// Versions in which the learning rate rises from 0 [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    warmup: Option<String>,
    /// The version after which the schedule begins [default: 0]
    #[arg(long, value_name = "VERSION", allow_negative_numbers = true)]
    schedule_start: Option<String>,
    /// What an optimizer sees of several contributions [default: mean]
    #[arg(long, value_parser = ["mean", "sum"], ignore_case = true)]
    aggregation: Option<String>,
}

/// Shows the possible values in the help. The value is checked later, together with those of the environment
/// and the file.
#[derive(Clone, Debug)]
struct Shown(&'static [&'static str]);

impl TypedValueParser for Shown {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.0.iter().map(|form| PossibleValue::new(*form))))
    }
}

/// The vocabulary of `gradfs up`.
pub static UP: LazyLock<Vocabulary> = LazyLock::new(|| {
    let mount = Arg::new("mount").value_hint(ValueHint::DirPath);
    Vocabulary::new(options_of::<UpArgs>().into_iter().chain([mount]), "gradfs up --help")
});

impl Given<UpArgs> {
    /// The configuration that these flags, the environment `variables` and the file they name ask for.
    pub fn config(self, variables: impl Variables) -> Result<UpConfig, Error> {
        let mut layers = self.layers(&UP, variables)?;
        if let Some((mount, models)) = layers[0].take("models").split_last() {
            layers[0].set("mount", [mount]);
            layers[0].set("models", models);
        }
        UpConfig::merge(&layers)
    }
}

/// Parses a command line. On `Err`, everything is printed, and it is the exit code.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Cli, u8> {
    use clap::error::ErrorKind::{DisplayHelp, DisplayHelpOnMissingArgumentOrSubcommand, DisplayVersion};
    Cli::try_parse_from(arguments).map_err(|error| {
        match error.kind() {
            DisplayHelp | DisplayVersion | DisplayHelpOnMissingArgumentOrSubcommand => {
                crate::printing::printed(error.print());
                if crate::printing::has_failed() {
                    return 1;
                }
            }
            _ => eprint!("gradfs: {}", error.render()),
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
