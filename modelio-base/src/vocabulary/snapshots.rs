//! Where and how often a job's snapshots are taken.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use strum::{Display, EnumString};

/// The most bytes of an address.
const MAX_PLACE: usize = 1024;

/// How often something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Every {
    /// Not at all.
    Never,
    /// After so many versions.
    Versions(u64),
    /// After this time.
    Time(Duration),
}

/// A text that says not how often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoEvery;

/// What [`Every`] is written as.
pub const EVERY: &str = "a number of versions, or a time as 30s, 10m or 2h; 0 is never";

const UNITS: [(char, u64); 3] = [('h', 3600), ('m', 60), ('s', 1)];

impl FromStr for Every {
    type Err = NoEvery;

    fn from_str(text: &str) -> Result<Every, NoEvery> {
        let unit = UNITS.iter().find(|(unit, _)| text.ends_with(*unit));
        let digits = text.trim_end_matches(|c: char| unit.is_some_and(|(unit, _)| *unit == c));
        let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
        let number: u64 = if is_number { digits.parse().map_err(|_| NoEvery)? } else { return Err(NoEvery) };
        match unit {
            _ if number == 0 => Ok(Every::Never),
            None => Ok(Every::Versions(number)),
            Some((_, seconds)) if digits.len() + 1 == text.len() => {
                let seconds = number.checked_mul(*seconds).filter(|seconds| *seconds <= 365 * 24 * 3600);
                seconds.map(|seconds| Every::Time(Duration::from_secs(seconds))).ok_or(NoEvery)
            }
            Some(_) => Err(NoEvery),
        }
    }
}

impl fmt::Display for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Every::Never => write!(f, "0"),
            Every::Versions(versions) => write!(f, "{versions}"),
            Every::Time(time) => {
                let seconds = time.as_secs();
                let (unit, of) = UNITS.into_iter().find(|(_, of)| seconds % of == 0).unwrap_or(UNITS[2]);
                write!(f, "{}{unit}", seconds / of)
            }
        }
    }
}

/// What becomes of a job when a shard has lost its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, EnumString, Display)]
#[strum(serialize_all = "kebab-case")]
pub enum OnLoss {
    /// It goes on from its newest snapshot, if it has one.
    #[default]
    Restore,
    /// It has failed.
    Fail,
    /// It goes on from its newest snapshot, with the weights of a newer version if a mount that lives has one.
    RestoreNewest,
}

/// The snapshots of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotSettings {
    /// The address of their store. Empty if none are taken.
    pub to: String,
    /// How often one is taken.
    pub every: Every,
    /// How many of the newest are kept.
    pub keep: u32,
    /// Of each such time, one is kept besides. [`Every::Versions`] is not meant here.
    pub keep_every: Every,
    /// The most snapshots in a row that have data in common. 0 is no limit.
    #[serde(default)]
    pub full_every: u32,
    /// What becomes of the job when blocks are lost.
    #[serde(default)]
    pub on_loss: OnLoss,
}

impl SnapshotSettings {
    /// Whether the job goes on from a snapshot of its store when blocks are lost.
    pub fn restores(&self) -> bool {
        !self.to.is_empty() && self.on_loss != OnLoss::Fail
    }

    /// Whether it then takes newer weights from a mount.
    pub fn restores_newest(&self) -> bool {
        self.restores() && self.on_loss == OnLoss::RestoreNewest
    }
}

impl Default for SnapshotSettings {
    fn default() -> SnapshotSettings {
        let every = Every::Time(Duration::from_secs(600));
        let on_loss = OnLoss::default();
        SnapshotSettings {
            to: String::new(),
            every,
            keep: 3,
            keep_every: Every::Never,
            full_every: 0,
            on_loss,
        }
    }
}

/// What an address is written as.
pub const PLACE: &str = "an absolute path, or s3://bucket/prefix, gs:// or az://; nothing for no snapshots";

/// Whether a text can be the address of a store, as all hosts understand it. An empty one names none.
pub fn is_place(text: &str) -> bool {
    let is_known = ["/", "file:///", "s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://", "https://"]
        .iter()
        .any(|begin| text.starts_with(begin));
    text.is_empty()
        || is_known && text.len() <= MAX_PLACE && !text.contains(|c: char| c.is_control() || c == '#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_often_reads_back_as_it_was_written() {
        let minutes = |minutes: u64| Every::Time(Duration::from_secs(60 * minutes));
        for (text, every, shown) in [
            ("0", Every::Never, "0"),
            ("0m", Every::Never, "0"),
            ("100", Every::Versions(100), "100"),
            ("10m", minutes(10), "10m"),
            ("600s", minutes(10), "10m"),
            ("90s", Every::Time(Duration::from_secs(90)), "90s"),
            ("120m", minutes(120), "2h"),
        ] {
            assert_eq!(text.parse(), Ok(every), "{text}");
            assert_eq!(every.to_string(), shown);
            assert_eq!(shown.parse(), Ok(every));
        }
        for text in ["", "m", "-1", "1.5m", "10mm", "10d", "m10", "9000h", "99999999999999999999", " 1"] {
            assert_eq!(text.parse::<Every>(), Err(NoEvery), "{text}");
        }
    }

    #[test]
    fn an_address_is_one_that_all_hosts_understand() {
        for place in ["", "/shared/llama", "file:///shared", "s3://bucket/prefix", "gs://b", "az://c/d"] {
            assert!(is_place(place), "{place}");
        }
        for place in
            ["llama", "./llama", "file://llama", "s5://bucket", "/a\nb", &format!("/{}", "x".repeat(2000))]
        {
            assert!(!is_place(place), "{place}");
        }
    }
}
