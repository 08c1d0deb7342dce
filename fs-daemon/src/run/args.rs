//! The options of `gradfs run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueHint};
use libmodelio::vocabulary::controls::MAX_LEARNERS;

use super::supervisor::OnFailure;
use crate::error::Error;

/// The arguments of `gradfs run`.
#[derive(Args, Debug)]
pub struct RunArgs {
    /// The directory of a model in a mount
    #[arg(value_name = "MODEL", value_hint = ValueHint::DirPath)]
    pub model: PathBuf,
    /// The command of each process, with its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    #[arg(value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
    /// Processes, each with a learner: 1 to 4096; or auto: begin with one, and add one for as long as contributions
    /// become faster. WORLD_SIZE is then --max
    #[arg(short = 'n', long, value_name = "N|auto", value_parser = number, allow_negative_numbers = true)]
    number: Number,
    /// Call the learners PREFIX-0, PREFIX-1 and so on
    #[arg(long, value_name = "PREFIX", default_value = "run")]
    pub name: String,
    /// Pass lines on as they are; with several processes they have the rank in front
    #[arg(long)]
    pub no_prefix: bool,
    /// Print a line each second: version, versions a second, stall of the learners, their number [default: on a
    /// terminal]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub progress: Option<bool>,
    /// What to do when a process ends with another status than 0, or by a signal
    #[arg(long, value_enum, default_value = "stop")]
    pub on_failure: OnFailure,
    /// How often each process may be started again
    #[arg(long, value_name = "K", default_value = "3")]
    pub restarts: u32,
    /// How long processes that are asked to end may take, before they are killed; up to an hour
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, allow_negative_numbers = true)]
    pub grace: Duration,
    /// -n auto: the most processes [default: the number of cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LEARNERS)))]
    max: Option<u32>,
    /// -n auto: one more must bring so many percent [default: 5]
    #[arg(long, value_name = "PERCENT", value_parser = percent, allow_negative_numbers = true)]
    gain: Option<f64>,
    /// -n auto: measure for at least so long [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    window: Option<Duration>,
}

/// How many processes are asked for.
#[derive(Clone, Copy, Debug)]
enum Number {
    Fixed(u32),
    Auto,
}

/// How many learners there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Count {
    /// So many.
    Fixed(u32),
    /// As many as make the job faster, each by this share, measured for so long.
    Auto { most: u32, gain: f64, window: Duration },
}

impl RunArgs {
    /// # Errors
    /// Options that do not go together.
    pub fn count(&self) -> Result<Count, Error> {
        let options = [
            ("--max", self.max.is_some()),
            ("--gain", self.gain.is_some()),
            ("--window", self.window.is_some()),
        ];
        match (self.number, options.into_iter().find(|(_, is_given)| *is_given)) {
            (Number::Fixed(_), Some((option, _))) => {
                Err(Error::usage(format!("{option} is for -n auto")).hint("leave it out, or say -n auto"))
            }
            (Number::Fixed(count), None) => Ok(Count::Fixed(count)),
            (Number::Auto, _) => Ok(Count::Auto {
                most: self.max.unwrap_or_else(cores),
                gain: self.gain.unwrap_or(5.0) / 100.0,
                window: self.window.unwrap_or(Duration::from_secs(5)),
            }),
        }
    }
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() as u32).min(MAX_LEARNERS))
}

fn number(text: &str) -> Result<Number, String> {
    if text.eq_ignore_ascii_case("auto") {
        return Ok(Number::Auto);
    }
    let count = text.parse().ok().filter(|count| (1..=MAX_LEARNERS).contains(count));
    count.map(Number::Fixed).ok_or_else(|| format!("a number from 1 to {MAX_LEARNERS} is needed, or auto"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let length = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    length
        .filter(|length| *length <= Duration::from_secs(3600))
        .ok_or_else(|| "a number of seconds from 0 to 3600 is needed".into())
}

fn percent(text: &str) -> Result<f64, String> {
    let percent = text.trim_end_matches('%').parse().ok();
    percent
        .filter(|percent| (0.0..=1000.0).contains(percent))
        .ok_or_else(|| "a number of percent from 0 to 1000 is needed".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_checked() {
        assert!(matches!(number("4096"), Ok(Number::Fixed(4096))));
        assert!(matches!(number("auto"), Ok(Number::Auto)));
        for wrong in ["0", "4097", "-1", "", "many"] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
        assert_eq!((percent("5%"), percent("0.5")), (Ok(5.0), Ok(0.5)));
        assert!(percent("-1").is_err() && percent("NaN").is_err() && seconds("-1").is_err());
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
    }
}
