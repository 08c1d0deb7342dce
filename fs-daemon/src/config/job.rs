//! The settings of a job on the command line: those that `control/` has, under the same names.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use libmodelio::vocabulary::controls::{ControlError, Controls, SETTINGS};
use libmodelio::vocabulary::reducer::{PARAMETERS, Parameter, Reducer};

use super::layer::{Layer, strongest};
use crate::error::Error;

/// Short names of parameters, as torch has them.
const SHORT: [(&str, &str); 2] = [("lr", "learning_rate"), ("wd", "weight_decay")];

/// The texts of those settings that are given.
#[derive(Clone, Debug)]
pub struct Settings(Vec<(&'static str, String)>);

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
    /// Newest versions of which shards know what has changed in them; 0 is none [default: 16]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    changes: Option<String>,
    /// Whether mounts on a network pull what has changed, where that is less than all [default: auto]
    #[arg(long, value_parser = ["auto", "off"], ignore_case = true)]
    delta: Option<String>,
    /// Versions that the next one may be ahead of what readers have applied; 0 is no limit [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    hold_for_readers: Option<String>,
    /// Where shards write snapshots: an absolute path, or s3://bucket/prefix, gs:// or az:// [default: nowhere]
    #[arg(long, value_name = "URL")]
    snapshot_to: Option<String>,
    /// How often they do: after so many versions, or a time as 30s, 10m or 2h; 0 is never [default: 10m]
    #[arg(long, value_name = "N|TIME")]
    snapshot_every: Option<String>,
    /// How many of the newest snapshots stay in their store [default: 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    snapshot_keep: Option<String>,
    /// Of each such time, the first snapshot stays besides, as 1h; 0 is none [default: 0]
    #[arg(long, value_name = "TIME")]
    snapshot_keep_every: Option<String>,
    /// Of so many snapshots, one writes all data anew; 0 is none after the first [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    snapshot_full_every: Option<String>,
    /// What becomes of the job when blocks are lost: it goes on from its newest snapshot, also with newer weights that a
    /// mount has, or fails [default: restore]
    #[arg(long, value_parser = ["restore", "restore-newest", "fail"], ignore_case = true)]
    on_loss: Option<String>,
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

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        JobArgs::augment_args(command).args(PARAMETERS.iter().map(parameter))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Settings::augment_args(command)
    }
}

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Settings, clap::Error> {
        // Patterns and rules are one a line.
        let lines =
            |name: &str| Some(matches.get_many::<String>(name)?.cloned().collect::<Vec<_>>().join("\n"));
        Ok(Settings(SETTINGS.iter().filter_map(|(name, _)| Some((*name, lines(name)?))).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Settings::from_arg_matches(matches)?;
        Ok(())
    }
}

fn parameter(of: &Parameter) -> Arg {
    let (first, rest) = of.meaning.split_at(1);
    let meaning = first.to_uppercase() + rest;
    let short = SHORT.iter().filter(|(_, name)| *name == of.name).map(|(short, _)| *short);
    Arg::new(of.name)
        // clap borrows names for as long as the program runs.
        .long(&*of.name.replace('_', "-").leak())
        .visible_aliases(short.collect::<Vec<_>>())
        .value_name("X")
        .help_heading("Optimizer")
        .allow_negative_numbers(true)
        .help(format!("{meaning} ({}) [default: {}]", of.readers(), of.defaults()))
}

impl Settings {
    /// The settings, with defaults for what is not given; `layers` say where it was.
    pub fn controls(&self, layers: &[Layer]) -> Result<Controls, Error> {
        let find = |name: &str| self.0.iter().find(|(of, _)| *of == name).map(|(_, text)| text.trim());
        let origin =
            |name: &str| strongest(layers, name).map_or_else(|| name.to_owned(), |(origin, _)| origin);
        let number = |name: &str| find(name)?.parse::<u32>().ok();
        let texts = self.0.iter().map(|(name, text)| (*name, text.as_str()));
        let controls = Controls::default().with_all(texts).map_err(|error| match &error {
            ControlError::Invalid { name, .. } => {
                let help = layers.first().map_or("gradfs --help", Layer::help);
                Error::usage(error.without_name())
                    .of(&origin(name))
                    .hint(format!("{help} tells what each setting does, and its default"))
            }
            _ => {
                let learners = number("learners").unwrap_or(1);
                match number("min_learners").filter(|least| *least > learners) {
                    Some(least) => Error::usage(format!("{least} is more than there are learners"))
                        .of(&origin("min_learners"))
                        .hint(format!("learners is {learners}: raise it, or lower min_learners")),
                    None => Error::usage(error.to_string()),
                }
            }
        })?;
        Ok(if find("patience").is_none() { controls.with_patience_of_lease() } else { controls })
    }
}

/// Shows the possible values in the help. The value is checked later, together with those of the environment
/// and the file.
#[derive(Clone, Debug)]
pub struct Shown(pub &'static [&'static str]);

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
