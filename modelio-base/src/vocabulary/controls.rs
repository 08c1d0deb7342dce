//! The settings of a job, one text value each, as `control/<name>` shows and takes them.
//!
//! Pure: parsing and validation only. A value that does not parse, or that contradicts another,
//! is refused and the old one stays.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::LazyLock;
use std::time::Duration;

use fixedbitset::FixedBitSet;
use serde::{Deserialize, Serialize};
use strum::EnumString;

use crate::vocabulary::coding::{CODINGS, Coding, NoCoding};
use crate::vocabulary::dtype::{DType, REDUCIBLE};
use crate::vocabulary::frozen::{Frozen, NoMatch};
use crate::vocabulary::groups::{Groups, widest};
use crate::vocabulary::ids::Version;
use crate::vocabulary::norm::MOST_MEASURED;
use crate::vocabulary::reducer::{Aggregation, Content, Domain, Hyper, PARAMETERS, Reducer, decimal};
use crate::vocabulary::schedule::{NoSchedule, Rates, SCHEDULES, Schedule};
use crate::vocabulary::snapshots::{EVERY, Every, OnLoss, PLACE, SnapshotSettings, is_place};
use crate::vocabulary::tensor_rules::{RuleError, TensorRules};

/// The contributions that a version waits for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Consistency {
    /// All active learners.
    Sync,
    /// Any one: every contribution makes a version.
    Async,
    /// This number of contributions, or all active learners if they are fewer. The version has every
    /// contribution that is in by then.
    Quorum(u32),
    /// Any one contribution, as with `Async`; but a learner that is more than this many steps ahead of the
    /// slowest one waits.
    Ssp(u32),
    /// As `Quorum`, but when so many contributions are in, the version waits for the others a while longer: this factor
    /// times the mean time that it takes until so many are in.
    Grace(u32, f32),
}

impl fmt::Display for Consistency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Consistency::Sync => f.write_str("sync"),
            Consistency::Async => f.write_str("async"),
            Consistency::Quorum(contributions) => write!(f, "quorum({contributions})"),
            Consistency::Ssp(steps) => write!(f, "ssp({steps})"),
            Consistency::Grace(contributions, factor) => write!(f, "grace({contributions}, {factor})"),
        }
    }
}

/// The values of `consistency`.
const CONSISTENCY: &str = "sync, async, quorum(k) with k from 1 to 65536, grace(k, factor) with such a k and a \
                           factor above 0 and up to 10, or ssp(s) with s from 0 to 65536";

/// The text is no consistency. The message also says what was probably meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoConsistency(String);

impl NoConsistency {
    fn of(text: &str) -> NoConsistency {
        let meant = match probably_meant(text) {
            Some(meant) => format!(": did you mean {meant}?"),
            None => String::new(),
        };
        NoConsistency(format!("not {CONSISTENCY}{meant}"))
    }
}

/// `quorum 2`, `quorum=2` and `quorum2` name the right word and number in the wrong form. A shell takes brackets
/// for its own, so these are what people try next.
fn probably_meant(text: &str) -> Option<String> {
    let word_ends = text.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (word, rest) = text.split_at(word_ends);
    if !["quorum", "ssp", "grace"].contains(&word) {
        return None;
    }
    let between = [' ', '(', ')', '[', ']', '=', ':', ',', '_'];
    let meant = if word == "grace" {
        let mut numbers = rest.split(between).filter(|number| !number.is_empty());
        let [contributions, factor] = ["2", "0.5"].map(|usual| numbers.next().unwrap_or(usual));
        if numbers.next().is_some() {
            return None;
        }
        format!("{word}({contributions}, {factor})")
    } else {
        let number = rest.trim_matches(between);
        format!("{word}({})", if number.is_empty() { "2" } else { number })
    };
    (meant != text && meant.parse::<Consistency>().is_ok()).then_some(meant)
}

/// The factor of [`Consistency::Grace`], if it is one.
fn factor_of(text: &str) -> Option<f32> {
    // `parse` would take a sign.
    let factor = text.parse().ok().filter(|_| !text.starts_with('+'));
    factor.filter(|factor| *factor > 0.0 && *factor <= 10.0)
}

impl FromStr for Consistency {
    type Err = NoConsistency;

    /// Takes words in any case.
    fn from_str(text: &str) -> Result<Consistency, NoConsistency> {
        let number = |least: u32, text: &str| {
            // `parse` would take a sign.
            let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            digits
                .and_then(|digits| digits.parse().ok())
                .filter(|number| (least..=MAX_COUNT).contains(number))
        };
        let plain = text.to_ascii_lowercase();
        let parsed = match (plain.as_str(), plain.strip_suffix(')').and_then(|text| text.split_once('('))) {
            ("sync", _) => Some(Consistency::Sync),
            ("async", _) => Some(Consistency::Async),
            (_, Some(("quorum", argument))) => number(1, argument).map(Consistency::Quorum),
            (_, Some(("ssp", argument))) => number(0, argument).map(Consistency::Ssp),
            (_, Some(("grace", arguments))) => {
                arguments.split_once(',').and_then(|(contributions, factor)| {
                    Some(Consistency::Grace(number(1, contributions)?, factor_of(factor.trim_start())?))
                })
            }
            _ => None,
        };
        parsed.ok_or_else(|| NoConsistency::of(&plain))
    }
}

/// The value of a setting whose meaning depends on the consistency.
const AUTO: &str = "auto";
/// The value of `delta` without it.
const OFF: &str = "off";
/// The value of `wire` without a coding.
const FULL: &str = "full";
/// The greatest count that a setting takes.
const MAX_COUNT: u32 = 65_536;
/// The most versions of which it is known what has changed in them.
const MAX_CHANGES: u32 = 1024;
/// The highest number of a version that a setting takes.
const LAST_VERSION: u64 = 1 << 48;
/// Most learners of a job at a time.
pub const MAX_LEARNERS: u32 = 4096;

/// Bytes of patterns in `frozen`, and of rules in `tensors`, at most: enough for a rule for each tensor of a large model.
pub const MAX_TEXT: usize = 64 << 10;

/// Characters of a wrong value that its refusal repeats.
pub const MOST_QUOTED: usize = 200;

/// The treatment of NaN and Inf in a contribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NonFinite {
    /// The contribution fails with EINVAL and counts nowhere.
    Reject,
    /// They are reduced like any number.
    Accept,
}

/// When clients pull versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, EnumString, strum::Display)]
#[strum(serialize_all = "kebab-case")]
pub enum PullPolicy {
    /// When a program opens the newest version, which waits for it.
    OnDemand,
    /// Every version, as soon as it is out.
    Eager,
    /// So late that the pull ends just before a program opens the version, as the opens before predict it.
    Adaptive,
}

/// All settings of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Controls {
    /// The work of a shard on contributions.
    pub reducer: Reducer,
    /// Its hyper-parameters.
    pub hyper: Hyper,
    /// How the learning rate changes.
    pub schedule: Schedule,
    /// Versions in which the learning rate rises from zero.
    pub warmup: u32,
    /// The version that the first step of the schedule goes on from.
    pub schedule_start: Version,
    /// The contributions that a version waits for.
    pub consistency: Consistency,
    /// Contributions are added up in the order of learners, mapped ones too: none is accumulated ahead of the
    /// others of its version.
    pub deterministic: bool,
    /// Learners to wait for before the first version.
    pub learners: u32,
    /// Below this many active learners the job stops.
    pub min_learners: u32,
    /// The most learners.
    #[serde(default = "most_learners")]
    pub max_learners: u32,
    /// Silence after which a learner leaves that no process is known to use, and a client with its learners; zero: never.
    pub lease: Duration,
    /// How long others wait for a silent learner whose process lives, before it leaves; zero: for ever.
    #[serde(default = "patience")]
    pub patience: Duration,
    /// The time for which others wait for a learner whose last process has exited.
    pub linger: Duration,
    /// Longest wait of an open, fsync or close.
    pub timeout: Duration,
    /// How long calls wait for a shard that is out of reach.
    #[serde(default = "shard_patience")]
    pub shard_patience: Duration,
    /// Older versions to keep under `versions/`.
    pub retain: u32,
    /// Versions that programs may hold open; see [`Self::most_buffers`].
    pub max_versions: u32,
    /// Versions of which shards know what has changed in them.
    #[serde(default = "kept_changes")]
    pub changes: u32,
    /// Whether clients pull what has changed, and not all.
    #[serde(default = "yes")]
    pub delta: bool,
    /// By how many versions the next version may be ahead of what readers have applied. 0: versions wait for no reader.
    #[serde(default)]
    pub hold_for_readers: u32,
    /// Snapshots in a store.
    #[serde(default)]
    pub snapshots: SnapshotSettings,
    /// When clients pull versions. `None`: see [`Self::pull_policy`].
    pub pull: Option<PullPolicy>,
    /// Whether an open waits for the version with the learner's own step. `None`: see [`Self::reads_own_step`].
    pub read_own_step: Option<bool>,
    /// The learning rate of a contribution is divided by its staleness.
    #[serde(default)]
    pub staleness_aware: bool,
    /// NaN and Inf.
    pub nonfinite: NonFinite,
    /// The form in which contributions cross the network. `None`: in full.
    pub wire: Option<Coding>,
    /// Tensors that are never reduced.
    pub frozen: Frozen,
    /// What counts for single tensors in place of the settings of the model.
    #[serde(default)]
    pub tensors: TensorRules,
}

/// The longest time that a setting may have: a year.
const LONGEST_TIME: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The default of [`Controls::lease`].
const LEASE: Duration = Duration::from_secs(60);

/// The usual patience, in leases: as long as an evaluation or a checkpoint of one learner may take.
const PATIENCE_IN_LEASES: u32 = 10;

/// The default of [`Controls::patience`].
fn patience() -> Duration {
    LEASE * PATIENCE_IN_LEASES
}

/// The default of [`Controls::shard_patience`].
fn shard_patience() -> Duration {
    Duration::from_secs(20)
}

/// The default of [`Controls::changes`].
fn kept_changes() -> u32 {
    16
}

fn yes() -> bool {
    true
}

fn most_learners() -> u32 {
    MAX_LEARNERS
}

impl Default for Controls {
    fn default() -> Controls {
        Controls {
            reducer: Reducer::Sgd,
            hyper: Hyper::default(),
            schedule: Schedule::Constant,
            warmup: 0,
            schedule_start: Version(0),
            consistency: Consistency::Sync,
            deterministic: false,
            learners: 1,
            min_learners: 1,
            max_learners: MAX_LEARNERS,
            lease: LEASE,
            linger: Duration::from_secs(2),
            patience: patience(),
            // It is longer than the lease, so that waiting learners outlast one that is gone.
            timeout: Duration::from_secs(120),
            shard_patience: shard_patience(),
            retain: 0,
            max_versions: 16,
            changes: kept_changes(),
            delta: yes(),
            hold_for_readers: 0,
            snapshots: SnapshotSettings::default(),
            pull: None,
            read_own_step: None,
            staleness_aware: false,
            nonfinite: NonFinite::Reject,
            wire: None,
            frozen: Frozen::default(),
            tensors: TensorRules::default(),
        }
    }
}

/// Why a setting is refused. The message names what is valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlError {
    /// No such setting.
    #[error("there is no setting {0:?}")]
    Unknown(String),
    /// The value does not parse or is out of range.
    #[error("{name}: {value:?} is not {expected}")]
    Invalid {
        /// The setting.
        name: &'static str,
        /// The given value.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// The value contradicts another setting.
    #[error("{0}")]
    Conflict(String),
}

impl From<NoMatch> for ControlError {
    fn from(error: NoMatch) -> ControlError {
        ControlError::Conflict(error.to_string())
    }
}

impl From<RuleError> for ControlError {
    fn from(error: RuleError) -> ControlError {
        ControlError::Conflict(format!("tensors: {error}"))
    }
}

impl ControlError {
    /// The message, for a sentence that has the setting's name already.
    pub fn without_name(&self) -> String {
        match self {
            ControlError::Invalid { value, expected, .. } => format!("{value:?} is not {expected}"),
            ControlError::Unknown(_) | ControlError::Conflict(_) => self.to_string(),
        }
    }
}

/// Name and meaning of every setting, in the order `control/` lists them.
pub static SETTINGS: LazyLock<Vec<(&str, String)>> = LazyLock::new(|| {
    let owned = |&(name, meaning): &(&'static str, &str)| (name, meaning.to_owned());
    let parameters = PARAMETERS.iter().map(|of| (of.name, format!("{}: {}", of.readers(), of.meaning)));
    let first = [("reducer", reducers())].into_iter().chain(VERSIONS.iter().map(owned));
    first.chain(parameters).chain(OTHERS.iter().map(owned)).collect()
});

const VERSIONS: &[(&str, &str)] = &[
    (
        "consistency",
        "a version needs: sync, all active learners; quorum(k), k of them; grace(k, factor), k of them, and a wait \
         for the others; async, one contribution; ssp(s), one, but nobody runs more than s steps ahead",
    ),
    ("deterministic", "true: sync adds up in the order of learners, also what is mapped; or false"),
    (
        "staleness_aware",
        "true: async and ssp divide the learning rate by the versions that a contribution is behind; or false",
    ),
];

const OTHERS: &[(&str, &str)] = &[
    (
        "schedule",
        "the learning rate is constant, or falls to its floor in n versions: linear(n), or cosine(n)",
    ),
    ("warmup", "versions in which the learning rate rises from 0"),
    (
        "schedule_start",
        "the version after which the schedule begins; a new schedule sets it to the newest one",
    ),
    ("aggregation", "optimizers: mean or sum over the contributions"),
    ("learners", "learners to wait for before the first version"),
    ("min_learners", "below this many active learners the job stops"),
    ("max_learners", "learners that may be in the job, on all mounts"),
    (
        "lease",
        "seconds after which a silent mount and its learners leave, and a learner that no process uses; 0 is never",
    ),
    (
        "patience",
        "seconds for which others wait for a silent learner whose process lives, before it leaves; 0 is never",
    ),
    ("linger", "seconds for which others wait for a learner whose last process has exited"),
    ("timeout", "longest wait in seconds of an open, fsync or close"),
    ("shard_patience", "seconds for which calls wait for a shard that is out of reach"),
    ("retain", "older versions kept under versions/"),
    ("max_versions", "versions that programs may hold open; twice as many buffers may exist"),
    ("changes", "newest versions of which shards know what has changed in them; 0 is none"),
    ("delta", "auto: what has changed is pulled in place of all, where that is less; or off"),
    (
        "hold_for_readers",
        "versions that the next one may be ahead of what readers have applied; 0 is no limit",
    ),
    ("snapshot_to", "where shards write snapshots: an absolute path, or s3://bucket/prefix, gs:// or az://"),
    ("snapshot_every", "how often they do: after so many versions, or a time as 30s, 10m or 2h; 0 is never"),
    ("snapshot_keep", "how many of the newest snapshots stay in their store"),
    ("snapshot_keep_every", "of each such time, the first snapshot stays besides, as 1h; 0 is none"),
    ("snapshot_full_every", "of so many snapshots, one writes all data anew; 0 is none after the first"),
    (
        "on_loss",
        "when blocks are lost: restore (from the newest snapshot), restore-newest (with newer weights of a mount) or fail",
    ),
    (
        "pull",
        "versions are pulled eager (at once), adaptive (just before they are opened), or on-demand; or auto",
    ),
    ("read_own_step", "true: an open waits for the version with the learner's own step; false; or auto"),
    ("nonfinite", "NaN and Inf in a contribution: reject or accept"),
    (
        "wire",
        "contributions cross a network by TCP as full (in the model's types), bf16, fp16, int8, fp8 or topk(f); what \
         a form loses is added to the next contribution",
    ),
    ("frozen", "tensors that are never reduced: name patterns with * and ?, one a line"),
    (
        "tensors",
        "rules for single tensors, one a line: PATTERN and frozen, weight_decay=, learning_rate_scale=, reducer=",
    ),
];

/// The names of the reducers.
fn reducers() -> String {
    let (last, others) = Reducer::NAMES.split_last().unwrap_or((&"", &[]));
    format!("{} or {last}", others.join(", "))
}

impl Controls {
    /// Checks that the reducer changes anything of the model. `is_trainable`: the model has a tensor that can
    /// be reduced.
    ///
    /// # Errors
    /// Training would change nothing.
    pub fn check_trainable(&self, is_trainable: bool) -> Result<(), ControlError> {
        if is_trainable || self.reducer.takes_all_types() {
            return Ok(());
        }
        Err(ControlError::Conflict(format!(
            "no tensor can be trained: reducer {} takes {REDUCIBLE}",
            self.reducer
        )))
    }

    /// The present value of `name`, as text; `None` for an unknown name.
    pub fn get(&self, name: &str) -> Option<String> {
        if let Some(parameter) = PARAMETERS.iter().find(|known| known.name == name) {
            return Some(parameter.text(&self.hyper));
        }
        Some(match name {
            "reducer" => self.reducer.to_string(),
            "consistency" => self.consistency.to_string(),
            "deterministic" => self.deterministic.to_string(),
            "staleness_aware" => self.staleness_aware.to_string(),
            "schedule" => self.schedule.to_string(),
            "warmup" => self.warmup.to_string(),
            "schedule_start" => self.schedule_start.to_string(),
            "aggregation" => self.hyper.aggregation.to_string(),
            "learners" => self.learners.to_string(),
            "min_learners" => self.min_learners.to_string(),
            "max_learners" => self.max_learners.to_string(),
            "lease" => self.lease.as_secs_f64().to_string(),
            "patience" => self.patience.as_secs_f64().to_string(),
            "linger" => self.linger.as_secs_f64().to_string(),
            "timeout" => self.timeout.as_secs_f64().to_string(),
            "shard_patience" => self.shard_patience.as_secs_f64().to_string(),
            "retain" => self.retain.to_string(),
            "max_versions" => self.max_versions.to_string(),
            "changes" => self.changes.to_string(),
            "delta" => if self.delta { AUTO } else { OFF }.to_owned(),
            "hold_for_readers" => self.hold_for_readers.to_string(),
            "snapshot_to" => self.snapshots.to.clone(),
            "snapshot_every" => self.snapshots.every.to_string(),
            "snapshot_keep" => self.snapshots.keep.to_string(),
            "snapshot_keep_every" => self.snapshots.keep_every.to_string(),
            "snapshot_full_every" => self.snapshots.full_every.to_string(),
            "on_loss" => self.snapshots.on_loss.to_string(),
            "pull" => self.pull.map_or_else(|| AUTO.to_owned(), |policy| policy.to_string()),
            "read_own_step" => self.read_own_step.map_or_else(|| AUTO.to_owned(), |reads| reads.to_string()),
            "nonfinite" => match self.nonfinite {
                NonFinite::Reject => "reject".into(),
                NonFinite::Accept => "accept".into(),
            },
            "wire" => self.wire.map_or_else(|| FULL.to_owned(), |coding| coding.to_string()),
            "frozen" => self.frozen.to_string(),
            "tensors" => self.tensors.to_string(),
            _ => return None,
        })
    }

    /// A copy with `name` set to `value` (surrounding white space is ignored).
    ///
    /// # Errors
    /// [`ControlError`]; `self` is not changed in any case.
    pub fn with(&self, name: &str, value: &str) -> Result<Controls, ControlError> {
        let (name, _) = SETTINGS
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| ControlError::Unknown(name.to_owned()))?;
        let field = Field { name, value: value.trim() };
        let mut new = self.clone();
        if let Some(parameter) = PARAMETERS.iter().find(|known| known.name == *name) {
            let Domain { holds, text } = &parameter.domain;
            let value = field.parse(text)?;
            if !holds(value) {
                return Err(field.invalid(text));
            }
            *(parameter.of)(&mut new.hyper) = value;
            return new.validated();
        }
        match *name {
            "reducer" => {
                new.reducer = field.word(&reducers())?;
                new.hyper.follow(self.reducer, new.reducer);
            }
            "consistency" => {
                let parsed = field.value.parse::<Consistency>();
                // The error begins with "not", as the setting's own message does.
                new.consistency = parsed.map_err(|NoConsistency(why)| field.invalid(&why["not ".len()..]))?;
            }
            "deterministic" => new.deterministic = field.word("true or false")?,
            "staleness_aware" => new.staleness_aware = field.word("true or false")?,
            "schedule" => {
                let parsed = field.value.to_ascii_lowercase().parse();
                new.schedule = parsed.map_err(|NoSchedule| field.invalid(SCHEDULES))?;
            }
            "warmup" => new.warmup = field.count(0, u32::MAX)?,
            "schedule_start" => new.schedule_start = field.version()?,
            "aggregation" => new.hyper.aggregation = field.word("mean or sum")?,
            "learners" => new.learners = field.count(1, MAX_LEARNERS)?,
            "min_learners" => new.min_learners = field.count(1, MAX_LEARNERS)?,
            "max_learners" => new.max_learners = field.count(1, MAX_LEARNERS)?,
            "lease" => new.lease = field.seconds(0.0, "a number of seconds from 0 to a year")?,
            "patience" => new.patience = field.seconds(0.0, "a number of seconds from 0 to a year")?,
            "linger" => new.linger = field.seconds(0.0, "a number of seconds from 0 to a year")?,
            "timeout" => new.timeout = field.seconds(0.001, "a number of seconds from 0.001 to a year")?,
            "shard_patience" => {
                new.shard_patience = field.seconds(0.0, "a number of seconds from 0 to a year")?;
            }
            "retain" => new.retain = field.count(0, MAX_COUNT)?,
            "max_versions" => new.max_versions = field.count(3, MAX_COUNT)?,
            "changes" => new.changes = field.count(0, MAX_CHANGES)?,
            "hold_for_readers" => new.hold_for_readers = field.count(0, MAX_COUNT)?,
            "snapshot_to" => match is_place(field.value) {
                true => new.snapshots.to = field.value.to_owned(),
                false => return Err(field.invalid(PLACE)),
            },
            "snapshot_every" => new.snapshots.every = field.parse(EVERY)?,
            "snapshot_keep" => new.snapshots.keep = field.count(1, MAX_COUNT)?,
            "snapshot_keep_every" => match field.parse(EVERY)? {
                Every::Versions(_) => return Err(field.invalid("a time as 30s, 10m or 2h; 0 is none")),
                every => new.snapshots.keep_every = every,
            },
            "snapshot_full_every" => new.snapshots.full_every = field.count(0, MAX_COUNT)?,
            "on_loss" => new.snapshots.on_loss = field.parse("restore, restore-newest or fail")?,
            "delta" => {
                new.delta = match field.value.to_ascii_lowercase().as_str() {
                    AUTO => true,
                    OFF => false,
                    _ => return Err(field.invalid("auto or off")),
                }
            }
            "pull" => new.pull = field.word_or_auto("auto, eager, adaptive or on-demand")?,
            "read_own_step" => new.read_own_step = field.word_or_auto("auto, true or false")?,
            "nonfinite" => {
                new.nonfinite = match field.value.to_ascii_lowercase().as_str() {
                    "reject" => NonFinite::Reject,
                    "accept" => NonFinite::Accept,
                    _ => return Err(field.invalid("reject or accept")),
                }
            }
            "wire" if field.value.eq_ignore_ascii_case(FULL) => new.wire = None,
            "wire" => {
                new.wire = Some(field.value.parse().map_err(|NoCoding| field.invalid(CODINGS))?);
            }
            "frozen" => {
                field.check_length("patterns")?;
                new.frozen = field.parse("patterns, one a line")?;
            }
            "tensors" => {
                field.check_length("rules")?;
                new.tensors = field.value.parse()?;
            }
            _ => return Err(ControlError::Unknown((*name).to_owned())),
        }
        new.validated()
    }

    /// The policy of pulling in force: adaptive where learners do not wait for each other, else eager.
    pub fn pull_policy(&self) -> PullPolicy {
        self.pull.unwrap_or(match self.consistency {
            Consistency::Async => PullPolicy::Adaptive,
            _ => PullPolicy::Eager,
        })
    }

    /// The most version buffers: as many as programs may hold versions, and as many again, so that training goes on when
    /// they do.
    pub fn most_buffers(&self) -> usize {
        2 * self.max_versions as usize
    }

    /// Whether an open waits for the version with the learner's own step: unless said otherwise, in all consistencies
    /// but async.
    pub fn reads_own_step(&self) -> bool {
        // Without its last contribution a replica would be corrected twice for the same.
        self.reducer.content() == Content::Replica
            || self.read_own_step.unwrap_or(self.consistency != Consistency::Async)
    }

    /// The hyper-parameters of the step that goes on from this version: with the learning rate that the schedule has
    /// then.
    pub fn hyper_after(&self, version: Version) -> Hyper {
        let mut hyper = self.hyper.clone();
        if self.schedule != Schedule::Constant || self.warmup > 0 {
            let [peak, floor] = [hyper.learning_rate, hyper.learning_rate_floor].map(decimal);
            let rates = Rates { schedule: self.schedule, warmup: self.warmup, peak, floor };
            hyper.learning_rate = rates.at(version.0.saturating_sub(self.schedule_start.0)) as f32;
        }
        hyper
    }

    /// The learning rate of that step, if the reducer has one.
    pub fn learning_rate_after(&self, version: Version) -> Option<f64> {
        let rate = || decimal(self.hyper_after(version).learning_rate);
        self.reducer.reads("learning_rate").then(rate)
    }

    /// The tensors that are never reduced, and the groups of all tensors. `tensors` are the names and types of the
    /// model's, in order.
    ///
    /// # Errors
    /// A pattern or a rule that means none of them, or one that averages what is no number. Or the model has too many
    /// tensors for a layer-wise reducer.
    pub fn of_tensors<'a>(
        &self,
        tensors: impl ExactSizeIterator<Item = (&'a str, DType)> + Clone,
    ) -> Result<(FixedBitSet, Groups), ControlError> {
        let layerwise = self.reducers().find(|reducer| reducer.is_layerwise());
        if let Some(reducer) = layerwise.filter(|_| tensors.len() > MOST_MEASURED) {
            let count = tensors.len();
            return Err(ControlError::Conflict(format!(
                "reducer {reducer} measures each tensor, of {MOST_MEASURED} at most; the model has {count}"
            )));
        }
        let names = tensors.clone().map(|(name, _)| name);
        let mut frozen = self.frozen.tensors(names.clone())?;
        let (by_rules, groups) = self.tensors.resolve(names)?;
        let mut averaged = FixedBitSet::with_capacity(tensors.len());
        groups.averaged(self.reducer).for_each(|range| averaged.insert_range(range));
        let mut averaged = tensors.enumerate().filter(|(tensor, _)| averaged.contains(*tensor));
        if let Some((_, (name, dtype))) = averaged.find(|(_, (_, dtype))| !dtype.is_reducible()) {
            return Err(ControlError::Conflict(format!(
                "tensors: a rule with reducer=average counts for {name:?}, which is {dtype}: a mean is of floats \
                 ({REDUCIBLE}), so leave that tensor out"
            )));
        }
        frozen.union_with(&by_rules);
        Ok((frozen, groups))
    }

    /// The reducer of the model and those of rules.
    pub fn reducers(&self) -> impl Iterator<Item = Reducer> {
        std::iter::once(self.reducer).chain(self.tensors.reducers())
    }

    /// Whether a step must know norms before it can change a block: all of its contributions are added up first.
    pub fn measures(&self) -> bool {
        self.reducer.measures(&self.hyper) || self.reducers().any(Reducer::is_layerwise)
    }

    /// The one of them that keeps the most state.
    pub fn widest_reducer(&self) -> Reducer {
        widest(self.reducers()).unwrap_or(self.reducer)
    }

    /// The version of this number has another one from now on, and the schedule goes on as it was.
    pub fn renumber(&mut self, from: Version, to: Version) {
        let begun = from.0.saturating_sub(self.schedule_start.0);
        self.schedule_start = Version(to.0.saturating_sub(begun));
    }

    /// After a change: a new schedule begins now, unless its start was set at the same time.
    pub fn begin_schedule(&mut self, before: &Controls, newest: Version) {
        if self.schedule != before.schedule && self.schedule_start == before.schedule_start {
            self.schedule_start = newest;
        }
    }

    fn validated(self) -> Result<Controls, ControlError> {
        if self.max_learners < self.learners {
            return Err(ControlError::Conflict(format!(
                "max_learners ({}) is below learners ({})",
                self.max_learners, self.learners
            )));
        }
        if self.min_learners > self.learners {
            return Err(ControlError::Conflict(format!(
                "min_learners ({}) is above learners ({})",
                self.min_learners, self.learners
            )));
        }
        if self.deterministic && self.consistency != Consistency::Sync {
            return Err(ControlError::Conflict(format!(
                "deterministic (true) needs consistency sync, and it is {}",
                self.consistency
            )));
        }
        if self.deterministic && self.snapshots.on_loss == OnLoss::RestoreNewest {
            return Err(ControlError::Conflict(
                "on_loss (restore-newest) goes on with optimizer state that is older than the weights, which deterministic \
                 (true) excludes: set on_loss to restore"
                    .to_owned(),
            ));
        }
        if self.staleness_aware && !matches!(self.consistency, Consistency::Async | Consistency::Ssp(_)) {
            return Err(ControlError::Conflict(format!(
                "staleness_aware (true) needs consistency async or ssp(s), and it is {}",
                self.consistency
            )));
        }
        if self.staleness_aware && (!self.reducer.reads("learning_rate") || self.reducer.restarts()) {
            return Err(ControlError::Conflict(format!(
                "staleness_aware (true) divides the learning rate, and reducer {} has none",
                self.reducer
            )));
        }
        if let Schedule::Linear(steps) | Schedule::Cosine(steps) = self.schedule
            && self.warmup > steps
        {
            return Err(ControlError::Conflict(format!(
                "warmup ({}) is longer than schedule ({})",
                self.warmup, self.schedule
            )));
        }
        let default = Hyper::default();
        for of in PARAMETERS.iter().filter(|of| ["clip_norm", "clip_value", "loss_scale"].contains(&of.name))
        {
            let ignores = |reducer: &Reducer| !reducer.reads(of.name);
            // Rules may name another one that ignores it: `average` takes values of single tensors as they are.
            let ignoring = Some(&self.reducer).filter(|reducer| ignores(reducer));
            if let Some(reducer) = ignoring.filter(|_| of.get(&self.hyper) != of.get(&default)) {
                return Err(ControlError::Conflict(format!(
                    "{} ({}) is for gradients, and reducer {reducer} takes none: set it to {} first",
                    of.name,
                    of.text(&self.hyper),
                    of.text(&default)
                )));
            }
        }
        self.check_rules()?;
        if self.reducer.content().is_weights()
            && self.consistency != Consistency::Sync
            && self.max_versions < self.learners.saturating_add(3)
        {
            return Err(ControlError::Conflict(format!(
                "max_versions ({}) must be at least learners + 3 ({}) with reducer {} and consistency {}: each learner holds what it began from",
                self.max_versions,
                self.learners.saturating_add(3),
                self.reducer,
                self.consistency
            )));
        }
        if self.max_versions < self.retain.saturating_add(3) {
            return Err(ControlError::Conflict(format!(
                "max_versions ({}) must be at least retain + 3 ({})",
                self.max_versions,
                self.retain.saturating_add(3)
            )));
        }
        Ok(self)
    }

    /// Whether the reducers of rules can be together with the model's.
    fn check_rules(&self) -> Result<(), ControlError> {
        if let Some(other) = self.tensors.reducers().find(|other| !other.mixes_with(self.reducer)) {
            return Err(ControlError::Conflict(format!(
                "reducer {} is for whole models, and a rule in tensors has reducer={other}: take that out first",
                self.reducer
            )));
        }
        let sums =
            |reducer: &Reducer| reducer.averages() != self.reducer.averages() && !reducer.averages_values();
        let has_mean = self.hyper.aggregation == Aggregation::Mean;
        match self.tensors.reducers().find(sums).filter(|_| has_mean && self.hyper.clip_norm > 0.0) {
            Some(other) => Err(ControlError::Conflict(format!(
                "clip_norm ({}) is for one gradient, and only one of reducers {} and {other} takes the mean of \
                 contributions: set aggregation to sum, clip_norm to 0, or take reducer={other} out of tensors first",
                self.hyper.clip_norm, self.reducer
            ))),
            None => Ok(()),
        }
    }

    /// The same with the patience that goes with its lease: ten times as long. A lease that never ends leaves it as it is.
    #[must_use]
    pub fn with_patience_of_lease(mut self) -> Controls {
        if !self.lease.is_zero() {
            self.patience = self.lease.saturating_mul(PATIENCE_IN_LEASES).min(LONGEST_TIME);
        }
        self
    }

    /// Applies several settings at once; order does not matter for contradictions between them.
    ///
    /// # Errors
    /// The first [`ControlError`].
    pub fn with_all<'a>(
        &self,
        settings: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Controls, ControlError> {
        let settings: Vec<_> = settings.into_iter().collect();
        let mut left = settings.clone();
        let mut controls = self.clone();
        // A conflict may be resolved by a later setting (learners before min_learners), so go round
        // until a round brings nothing.
        loop {
            let before = left.len();
            let mut conflict = None;
            let mut again = Vec::new();
            for (name, value) in left {
                match controls.with(name, value) {
                    Ok(new) => controls = new,
                    Err(error @ ControlError::Conflict(_)) => {
                        conflict = Some(error);
                        again.push((name, value));
                    }
                    Err(error) => return Err(error),
                }
            }
            match conflict {
                // A reducer that came after them has replaced those that are its predecessor's defaults.
                None => {
                    let given = |(name, _): &&(&str, &str)| PARAMETERS.iter().any(|of| of.name == *name);
                    let mut given = settings.iter().filter(given);
                    return given.try_fold(controls, |controls, (name, value)| controls.with(name, value));
                }
                Some(error) if again.len() == before => return Err(error),
                Some(_) => left = again,
            }
        }
    }

    /// Checks that each setting has an allowed value: settings from elsewhere may have any.
    ///
    /// # Errors
    /// The first [`ControlError`].
    pub fn check(&self) -> Result<(), ControlError> {
        SETTINGS
            .iter()
            .try_for_each(|(name, _)| self.with(name, &self.get(name).unwrap_or_default()).map(drop))
    }

    /// One `name value` line a setting, for people.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for (name, meaning) in SETTINGS.iter() {
            let value = self.get(name).unwrap_or_default();
            let _ = writeln!(text, "{name:<19} {value:<9} {meaning}");
        }
        text
    }
}

/// A value under its setting's name, for errors.
struct Field<'a> {
    name: &'static str,
    value: &'a str,
}

impl Field<'_> {
    fn invalid(&self, expected: &str) -> ControlError {
        let value = self.value.chars().take(MOST_QUOTED).collect();
        ControlError::Invalid { name: self.name, value, expected: expected.to_owned() }
    }

    /// One of some words, in any case: `AdamW` and Python's `True` are clear enough.
    fn word<T: FromStr>(&self, expected: &str) -> Result<T, ControlError> {
        self.value.to_ascii_lowercase().parse().map_err(|_| self.invalid(expected))
    }

    /// Like [`Self::word`]; `auto` is `None`.
    fn word_or_auto<T: FromStr>(&self, expected: &str) -> Result<Option<T>, ControlError> {
        if self.value.eq_ignore_ascii_case(AUTO) { Ok(None) } else { self.word(expected).map(Some) }
    }

    fn parse<T: FromStr>(&self, expected: &'static str) -> Result<T, ControlError> {
        self.value.parse().map_err(|_| self.invalid(expected))
    }

    fn count(&self, least: u32, most: u32) -> Result<u32, ControlError> {
        let value: u32 = self.parse("a whole number")?;
        if (least..=most).contains(&value) {
            return Ok(value);
        }
        Err(self.invalid(&format!("a whole number from {least} to {most}")))
    }

    /// Refuses a text of so many bytes that not every state of the job can tell it.
    fn check_length(&self, what: &str) -> Result<(), ControlError> {
        match self.value.len() {
            got if got > MAX_TEXT => Err(ControlError::Conflict(format!(
                "{got} bytes of {what} in {}, the limit is {MAX_TEXT}",
                self.name
            ))),
            _ => Ok(()),
        }
    }

    fn version(&self) -> Result<Version, ControlError> {
        let value: u64 = self.parse("the number of a version")?;
        if value <= LAST_VERSION { Ok(Version(value)) } else { Err(self.invalid("the number of a version")) }
    }

    fn seconds(&self, least: f64, expected: &'static str) -> Result<Duration, ControlError> {
        let value: f64 = self.parse(expected)?;
        if (least..=LONGEST_TIME.as_secs_f64()).contains(&value) {
            Ok(Duration::from_secs_f64(value))
        } else {
            Err(self.invalid(expected))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_reads_back_what_was_written() {
        let mut controls = Controls::default();
        for (name, value) in [
            ("learners", "4"),
            ("min_learners", "2"),
            ("max_learners", "12"),
            ("reducer", "adam"),
            ("consistency", "async"),
            ("consistency", "quorum(2)"),
            ("consistency", "ssp(3)"),
            ("consistency", "ssp(0)"),
            ("consistency", "grace(2, 0.25)"),
            ("consistency", "grace(65536, 10)"),
            ("consistency", "sync"),
            ("deterministic", "true"),
            ("learning_rate", "0.25"),
            ("momentum", "0.5"),
            ("dampening", "0.1"),
            ("beta1", "0.8"),
            ("beta2", "0.99"),
            ("alpha", "0.5"),
            ("epsilon", "1e-6"),
            ("weight_decay", "0.01"),
            ("carry", "0"),
            ("clip_norm", "1"),
            ("clip_value", "0.5"),
            ("loss_scale", "1024"),
            ("learning_rate_floor", "0.001"),
            ("schedule", "linear(100)"),
            ("schedule", "cosine(1000)"),
            ("schedule", "constant"),
            ("warmup", "10"),
            ("schedule_start", "77"),
            ("aggregation", "sum"),
            ("lease", "2.5"),
            ("patience", "0"),
            ("patience", "900"),
            ("linger", "0"),
            ("linger", "7.5"),
            ("timeout", "0.5"),
            ("shard_patience", "3"),
            ("retain", "3"),
            ("max_versions", "9"),
            ("changes", "4"),
            ("delta", "off"),
            ("delta", "auto"),
            ("hold_for_readers", "2"),
            ("snapshot_to", "s3://bucket/prefix"),
            ("snapshot_to", "/shared/llama"),
            ("snapshot_to", ""),
            ("snapshot_every", "100"),
            ("snapshot_every", "10m"),
            ("snapshot_every", "0"),
            ("snapshot_keep", "5"),
            ("snapshot_keep_every", "1h"),
            ("snapshot_full_every", "24"),
            ("on_loss", "fail"),
            ("nonfinite", "accept"),
            ("frozen", "*.running_*\nhead"),
            ("tensors", "*.bias weight_decay=0\nhead.* frozen learning_rate_scale=0.1 reducer=sgd"),
            ("tensors", ""),
        ] {
            controls = controls.with(name, &format!("{value}\n")).unwrap();
            assert_eq!(controls.get(name).as_deref(), Some(value), "{name}");
        }
        assert!(SETTINGS.iter().all(|(name, _)| controls.get(name).is_some()));
    }

    #[test]
    fn settings_that_nobody_has_set_follow_the_reducer() {
        let get = |controls: &Controls| {
            ["learning_rate", "weight_decay", "epsilon"].map(|name| controls.get(name).unwrap())
        };
        let adamw = Controls::default().with("reducer", "adamw").unwrap();
        assert_eq!(get(&adamw), ["0.001", "0.01", "1e-8"]);
        let adagrad = adamw.with("reducer", "adagrad").unwrap();
        assert_eq!(get(&adagrad), ["0.01", "0", "1e-10"]);
        assert_eq!(adagrad.with("reducer", "sgd").unwrap(), Controls::default());
        // What is set stays, also if it is given together with the reducer and is the default of the one before.
        let set = adamw.with("weight_decay", "0.1").unwrap().with("reducer", "adam").unwrap();
        assert_eq!(get(&set), ["0.001", "0.1", "1e-8"]);
        let mut both = [("learning_rate", "0.001"), ("reducer", "adagrad"), ("epsilon", "1e-8")];
        for _ in 0..2 {
            assert_eq!(get(&Controls::default().with_all(both).unwrap()), ["0.001", "0", "1e-8"]);
            both.reverse();
        }
        // All settings of a job are those of a snapshot.
        let all: Vec<_> = SETTINGS.iter().map(|(name, _)| (*name, set.get(name).unwrap())).collect();
        let again = Controls::default().with_all(all.iter().map(|(name, value)| (*name, &**value)));
        assert_eq!(again.unwrap(), set);
    }

    #[test]
    fn bad_values_are_refused_with_what_would_do() {
        let controls = Controls::default();
        let error = controls.with("learning_rate", "fast").unwrap_err();
        assert_eq!(error.to_string(), "learning_rate: \"fast\" is not a finite number >= 0");
        for (name, value) in [
            ("learning_rate", "-1"),
            ("learning_rate", "NaN"),
            ("learning_rate", "inf"),
            ("learning_rate", ""),
            ("beta1", "1"),
            ("epsilon", "0"),
            ("clip_value", "-1"),
            ("clip_value", "inf"),
            ("loss_scale", "0"),
            ("loss_scale", "-2"),
            ("learning_rate_floor", "-1"),
            ("schedule", "cosine"),
            ("schedule", "linear(0)"),
            ("schedule", "exponential(3)"),
            ("warmup", "-1"),
            ("warmup", "1.5"),
            ("schedule_start", "-1"),
            ("schedule_start", "281474976710657"),
            ("loss_scale", "NaN"),
            ("reducer", "SGD2"),
            ("reducer", "adam w"),
            ("learners", "4097"),
            ("changes", "1025"),
            ("changes", "-1"),
            ("hold_for_readers", "-1"),
            ("snapshot_to", "shared/llama"),
            ("snapshot_every", "often"),
            ("snapshot_keep", "0"),
            ("snapshot_keep_every", "5"),
            ("snapshot_full_every", "1h"),
            ("on_loss", "retry"),
            ("hold_for_readers", "1.5"),
            ("delta", "on"),
            ("consistency", "maybe"),
            ("consistency", "quorum"),
            ("consistency", "quorum()"),
            ("consistency", "quorum(0)"),
            ("consistency", "quorum(+2)"),
            ("consistency", "quorum( 2)"),
            ("consistency", "quorum(2"),
            ("consistency", "quorum(65537)"),
            ("consistency", "quorum(99999999999)"),
            ("consistency", "grace"),
            ("consistency", "grace(2)"),
            ("consistency", "grace(0, 1)"),
            ("consistency", "grace(2, 0)"),
            ("consistency", "grace(2, 10.5)"),
            ("consistency", "grace(2, +1)"),
            ("consistency", "grace(2, -1)"),
            ("consistency", "grace(2, nan)"),
            ("consistency", "grace(2, inf)"),
            ("consistency", "grace(2, 1, 1)"),
            ("consistency", "grace(2,)"),
            ("consistency", "grace(65537, 1)"),
            ("staleness_aware", "1"),
            ("consistency", "ssp(-1)"),
            ("consistency", "ssp(1.5)"),
            ("consistency", "sync(1)"),
            ("deterministic", "yes"),
            ("learners", "0"),
            ("learners", "-1"),
            ("lease", "-1"),
            ("patience", "-1"),
            ("linger", "-0.5"),
            ("linger", "NaN"),
            ("linger", "1e9"),
            ("timeout", "0"),
            ("shard_patience", "-1"),
            ("timeout", "1e300"),
            ("max_versions", "2"),
            ("nonfinite", "yes"),
            ("wire", "int4"),
            ("wire", "topk(0)"),
            ("wire", "topk(1.5)"),
            ("nothing", "1"),
        ] {
            assert!(controls.with(name, value).is_err(), "{name}={value}");
        }
    }

    #[test]
    fn a_bad_consistency_gets_a_list_of_the_good_ones() {
        let error = Controls::default().with("consistency", "quorum(0)").unwrap_err();
        let expected = "consistency: \"quorum(0)\" is not sync, async, quorum(k) with k from 1 to 65536, \
                        grace(k, factor) with such a k and a factor above 0 and up to 10, or ssp(s) with s from 0 \
                        to 65536";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn words_are_taken_in_any_case_and_read_back_in_one() {
        let mut controls = Controls::default();
        for (name, value, shown) in [
            ("reducer", "AdamW", "adamw"),
            ("reducer", "SGD", "sgd"),
            ("consistency", "Async", "async"),
            ("consistency", "QUORUM(2)", "quorum(2)"),
            ("consistency", "Grace(2,1e-1)", "grace(2, 0.1)"),
            ("consistency", "Sync", "sync"),
            ("deterministic", "True", "true"),
            ("aggregation", "Sum", "sum"),
            ("nonfinite", "ACCEPT", "accept"),
            ("wire", "Int8", "int8"),
            ("wire", "TOPK(0.250)", "topk(0.25)"),
            ("wire", "FULL", "full"),
            ("schedule", "Cosine(9)", "cosine(9)"),
            ("pull", "Adaptive", "adaptive"),
            ("pull", "on-demand", "on-demand"),
            ("pull", "AUTO", "auto"),
            ("read_own_step", "False", "false"),
        ] {
            controls = controls.with(name, value).unwrap();
            assert_eq!(controls.get(name).as_deref(), Some(shown), "{name}={value}");
        }
    }

    #[test]
    fn a_consistency_in_the_wrong_form_gets_the_right_form() {
        for (text, meant) in [
            ("quorum 2", Some("quorum(2)")),
            ("Quorum=3", Some("quorum(3)")),
            ("quorum: 4", Some("quorum(4)")),
            ("quorum5", Some("quorum(5)")),
            ("quorum(6", Some("quorum(6)")),
            ("quorum( 7)", Some("quorum(7)")),
            ("quorum", Some("quorum(2)")),
            ("ssp 0", Some("ssp(0)")),
            ("grace 3 0.75", Some("grace(3, 0.75)")),
            ("grace(3)", Some("grace(3, 0.5)")),
            ("grace", Some("grace(2, 0.5)")),
            ("Grace=3,1", Some("grace(3, 1)")),
            ("grace( 3, 1)", Some("grace(3, 1)")),
            ("grace(3, 11)", None),
            ("grace(0, 1)", None),
            ("grace(2, 1, 1)", None),
            ("quorum(0)", None),
            ("ssp(-1)", None),
            ("ssp(1.5)", None),
            ("maybe", None),
            ("sync(1)", None),
        ] {
            let error = Controls::default().with("consistency", text).unwrap_err().to_string();
            let said = error.split_once(": did you mean ").map(|(_, meant)| meant.trim_end_matches('?'));
            assert_eq!(said, meant, "{error}");
        }
    }

    #[test]
    fn learners_beyond_what_a_job_takes_are_refused() {
        let error = Controls::default().with("learners", "4097").unwrap_err();
        assert_eq!(error.to_string(), "learners: \"4097\" is not a whole number from 1 to 4096");
        assert_eq!(Controls::default().with("learners", "4096").unwrap().learners, 4096);
    }

    #[test]
    fn only_jobs_whose_contributions_make_versions_are_aware_of_staleness() {
        let controls = Controls::default();
        for other in ["sync", "quorum(2)", "grace(2, 1)"] {
            let error = controls.with_all([("consistency", other), ("staleness_aware", "true")]).unwrap_err();
            assert!(error.to_string().contains("needs consistency async or ssp(s), and it is"), "{error}");
        }
        for consistency in ["async", "ssp(1)"] {
            let both = [("staleness_aware", "true"), ("consistency", consistency)];
            let aware = controls.with_all(both).unwrap();
            assert!(aware.staleness_aware);
            assert!(matches!(aware.with("consistency", "sync"), Err(ControlError::Conflict(_))));
            let error = aware.with("reducer", "sum").unwrap_err();
            assert!(
                error.to_string().contains("divides the learning rate, and reducer sum has none"),
                "{error}"
            );
        }
    }

    #[test]
    fn only_a_synchronous_job_is_deterministic() {
        let controls = Controls::default();
        let deterministic = controls.with("deterministic", "true").unwrap();
        for other in ["async", "quorum(2)", "grace(2, 1)", "ssp(1)"] {
            assert!(matches!(deterministic.with("consistency", other), Err(ControlError::Conflict(_))));
            let other = controls.with("consistency", other).unwrap();
            let error = other.with("deterministic", "true").unwrap_err();
            assert!(error.to_string().contains("needs consistency sync"), "{error}");
        }
        // Together, in either order, they are no contradiction.
        let asynchronous = controls.with("consistency", "async").unwrap();
        let both = [("deterministic", "true"), ("consistency", "sync")];
        assert!(asynchronous.with_all(both).unwrap().deterministic);
        let both = [("consistency", "ssp(1)"), ("deterministic", "false")];
        assert_eq!(deterministic.with_all(both).unwrap().consistency, Consistency::Ssp(1));
    }

    #[test]
    fn only_what_is_added_up_is_clipped_or_scaled() {
        for (name, value, default) in
            [("clip_norm", "1.5", "0"), ("clip_value", "0.5", "0"), ("loss_scale", "8", "1")]
        {
            let set = Controls::default().with(name, value).unwrap();
            for reducer in Reducer::all() {
                let (first, then) = (set.with("reducer", reducer.name()), Controls::default());
                let then = then.with("reducer", reducer.name()).unwrap().with(name, value);
                assert_eq!(first.is_ok(), reducer.content() == Content::Gradient, "{reducer}");
                assert_eq!(first, then);
                let said = format!(
                    "{name} ({value}) is for gradients, and reducer {reducer} takes none: set it to {default} first"
                );
                let is_refused = |error| matches!(error, ControlError::Conflict(why) if why == said);
                assert!(first.is_ok() || first.is_err_and(is_refused));
            }
            let both = [("reducer", "assign"), (name, default)];
            assert_eq!(set.with_all(both).unwrap().reducer, Reducer::Assign);
        }
    }

    #[test]
    fn a_warm_up_ends_before_its_schedule() {
        let controls = Controls::default().with("schedule", "linear(10)").unwrap();
        assert_eq!(controls.with("warmup", "10").unwrap().warmup, 10);
        let error = controls.with("warmup", "11").unwrap_err();
        assert_eq!(error.to_string(), "warmup (11) is longer than schedule (linear(10))");
        let both = [("warmup", "11"), ("schedule", "cosine(20)")];
        assert_eq!(controls.with_all(both).unwrap().schedule, Schedule::Cosine(20));
    }

    #[test]
    fn a_deterministic_job_is_restored_from_snapshots_alone() {
        for [first, then] in [0, 1].map(|at| {
            let both = [("deterministic", "true"), ("on_loss", "restore-newest")];
            [both[at], both[1 - at]]
        }) {
            let set = Controls::default().with_all([("consistency", "sync"), first]).unwrap();
            assert_eq!(set.get(first.0).as_deref(), Some(first.1));
            let error = set.with(then.0, then.1).unwrap_err();
            assert!(error.to_string().ends_with("set on_loss to restore"), "{error}");
        }
    }

    #[test]
    fn rates_follow_the_versions_since_the_start() {
        let settings =
            [("learning_rate", "0.1"), ("warmup", "4"), ("schedule", "linear(8)"), ("schedule_start", "100")];
        let controls = Controls::default().with_all(settings).unwrap();
        let rate = |version| controls.hyper_after(Version(version)).learning_rate;
        let want = [(0, 0.0), (100, 0.0), (101, 0.025), (104, 0.1), (106, 0.05), (108, 0.0), (200, 0.0)];
        want.into_iter().for_each(|(version, want)| assert_eq!(rate(version), want, "{version}"));
        // Nothing but the rate is another.
        let hyper = Hyper { learning_rate: 0.05, ..controls.hyper.clone() };
        assert_eq!(controls.hyper_after(Version(106)), hyper);
        // A constant rate is exactly what was set.
        let constant = Controls::default().with("learning_rate", "0.1").unwrap();
        assert_eq!(constant.hyper_after(Version(9)), constant.hyper);
    }

    #[test]
    fn a_new_schedule_begins_at_the_newest_version() {
        let before = Controls::default();
        let start = |name: &str, value: &str, from: &Controls| {
            let mut after = from.with(name, value).unwrap();
            after.begin_schedule(from, Version(7));
            after
        };
        let set = start("schedule", "linear(9)", &before);
        assert_eq!(set.schedule_start, Version(7));
        assert_eq!(start("warmup", "3", &before).schedule_start, Version(0));
        // The same one goes on, and so does one whose start was set.
        let mut again = set.with("schedule", "linear(9)").unwrap();
        again.begin_schedule(&set, Version(8));
        assert_eq!(again.schedule_start, Version(7));
        let both = [("schedule", "cosine(9)"), ("schedule_start", "5")];
        let mut both = set.with_all(both).unwrap();
        both.begin_schedule(&set, Version(8));
        assert_eq!(both.schedule_start, Version(5));
    }

    #[test]
    fn settings_that_contradict_each_other_are_refused() {
        let controls = Controls::default();
        assert!(matches!(controls.with("min_learners", "2"), Err(ControlError::Conflict(_))));
        assert!(matches!(controls.with("retain", "14"), Err(ControlError::Conflict(_))));
        let both = controls.with_all([("min_learners", "2"), ("learners", "2")]).unwrap();
        assert_eq!((both.learners, both.min_learners), (2, 2));
        assert!(controls.with_all([("min_learners", "3"), ("learners", "2")]).is_err());
    }
}
