//! The options of `gradfs follow`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};

/// The arguments of `gradfs follow`.
#[derive(Args, Debug)]
pub struct FollowArgs {
    /// The directory of a model in a mount, or a mount with one model
    #[arg(value_name = "PATH", value_hint = ValueHint::DirPath)]
    pub path: PathBuf,
    /// Run this with sh -c for each new version [default: print its number]
    #[arg(long, value_name = "COMMAND", value_hint = ValueHint::CommandString)]
    pub exec: Option<OsString>,
    /// POST each new version to this address, as JSON
    #[arg(long, value_name = "URL", value_parser = url, conflicts_with = "exec", value_hint = ValueHint::Url)]
    pub post: Option<String>,
    /// Begin with the version that is there, and not with the next one
    #[arg(long)]
    pub now: bool,
    /// Begin with a version above this number
    #[arg(long, value_name = "VERSION", conflicts_with = "now")]
    pub from: Option<u64>,
    /// End after one version
    #[arg(long)]
    pub once: bool,
    /// How long one command or request may take, up to a day; a command is then ended, and has failed
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds, allow_negative_numbers = true)]
    pub timeout: Duration,
    /// How often a failed command or request is repeated, after 1, 2, 4 and at most 60 seconds
    #[arg(long, value_name = "N", default_value = "0")]
    pub retries: u32,
}

fn url(text: &str) -> Result<String, String> {
    let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_lowercase());
    match scheme.as_deref() {
        Some("http") => Ok(text.to_owned()),
        Some("https") => Err("there is no TLS here: use --exec 'curl ...'".into()),
        _ => Err("an address as http://127.0.0.1:8000/reload is needed".into()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let length = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    length
        .filter(|length| !length.is_zero() && *length <= Duration::from_secs(86_400))
        .ok_or_else(|| "a number of seconds above 0 and up to 86400 is needed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_seconds_are_checked() {
        assert_eq!(url("HTTP://[::1]:1/x"), Ok("HTTP://[::1]:1/x".into()));
        assert!(url("https://a").unwrap_err().contains("curl") && url("a:1").is_err() && url("").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "86401", "NaN", "inf", "1e300", "", "5s"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
