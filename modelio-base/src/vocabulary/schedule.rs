//! Schedules: how the learning rate changes from version to version. Pure functions of a step's number.
//!
//! The formulas are those of the schedulers with warm-up in Hugging Face's transformers, except that a cosine stays at its
//! end. With a floor, a cosine is torch's `CosineAnnealingLR` up to its end.

use std::f64::consts::PI;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What becomes of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Schedule {
    /// It stays.
    #[default]
    Constant,
    /// It falls in a straight line, and is at its floor after so many steps, those of the warm-up included.
    Linear(u32),
    /// It falls along half a cosine, and is at its floor after so many steps, those of the warm-up included.
    Cosine(u32),
}

/// The values of `schedule`.
pub const SCHEDULES: &str = "constant, linear(n) or cosine(n) with n steps from 1 to 4294967295";

/// The text is no schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not {SCHEDULES}")]
pub struct NoSchedule;

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Schedule::Constant => f.write_str("constant"),
            Schedule::Linear(steps) => write!(f, "linear({steps})"),
            Schedule::Cosine(steps) => write!(f, "cosine({steps})"),
        }
    }
}

impl FromStr for Schedule {
    type Err = NoSchedule;

    fn from_str(text: &str) -> Result<Schedule, NoSchedule> {
        if text == "constant" {
            return Ok(Schedule::Constant);
        }
        let (word, steps) = text.strip_suffix(')').and_then(|text| text.split_once('(')).ok_or(NoSchedule)?;
        // `parse` would take a sign.
        let is_number = steps.bytes().all(|byte| byte.is_ascii_digit());
        let steps = steps.parse().ok().filter(|steps| is_number && *steps > 0).ok_or(NoSchedule)?;
        match word {
            "linear" => Ok(Schedule::Linear(steps)),
            "cosine" => Ok(Schedule::Cosine(steps)),
            _ => Err(NoSchedule),
        }
    }
}

/// A schedule with all that it depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// After the warm-up.
    pub schedule: Schedule,
    /// The number of steps in which the rate rises from zero.
    pub warmup: u32,
    /// The rate at the end of the warm-up.
    pub peak: f64,
    /// The rate at the end of the schedule. The peak is used if it is lower.
    pub floor: f64,
}

impl Rates {
    /// The rate of a step. Steps are counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        let warmup = u64::from(self.warmup);
        if step < warmup {
            return self.peak * (step as f64 / warmup as f64);
        }
        let length = |steps: u32| u64::from(steps).saturating_sub(warmup).max(1) as f64;
        // The share of the way that is left.
        let left = match self.schedule {
            Schedule::Constant => return self.peak,
            Schedule::Linear(steps) => u64::from(steps).saturating_sub(step) as f64 / length(steps),
            Schedule::Cosine(steps) => {
                let progress = ((step - warmup) as f64 / length(steps)).min(1.0);
                (1.0 + (PI * progress).cos()) / 2.0
            }
        };
        let floor = self.floor.min(self.peak);
        floor + (self.peak - floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAK: f64 = 0.25;

    fn rates(schedule: Schedule, warmup: u32, floor: f64) -> Rates {
        Rates { schedule, warmup, peak: PEAK, floor }
    }

    fn close(got: f64, want: f64, what: &str) {
        assert!((got - want).abs() < 1e-15, "{what}: got {got}, want {want}");
    }

    /// `get_linear_schedule_with_warmup` of transformers, as it stands there.
    fn linear(step: f64, warmup: f64, training: f64) -> f64 {
        if step < warmup {
            return step / warmup.max(1.0);
        }
        ((training - step) / (training - warmup).max(1.0)).max(0.0)
    }

    /// `get_cosine_with_min_lr_schedule_with_warmup` of transformers, as it stands there.
    fn cosine(step: f64, warmup: f64, training: f64, least: f64) -> f64 {
        if step < warmup {
            return step / warmup.max(1.0);
        }
        let progress = (step - warmup) / (training - warmup).max(1.0);
        let factor = 0.5 * (1.0 + (PI * 0.5 * 2.0 * progress).cos());
        (factor * (1.0 - least) + least).max(0.0)
    }

    #[test]
    fn rates_are_those_of_transformers() {
        for (warmup, steps) in [(0, 1), (0, 10), (3, 10), (9, 10), (10, 10), (100, 1_000)] {
            for step in 0..=u64::from(steps) {
                let [at, first, last] = [step as f64, f64::from(warmup), f64::from(steps)];
                let what = format!("step {step} of {steps}, {warmup} to warm up");
                let of_line = rates(Schedule::Linear(steps), warmup, 0.0).at(step);
                close(of_line, PEAK * linear(at, first, last), &what);
                for least in [0.0, 0.1] {
                    let of_cosine = rates(Schedule::Cosine(steps), warmup, least * PEAK).at(step);
                    close(of_cosine, PEAK * cosine(at, first, last, least), &what);
                }
                let constant = rates(Schedule::Constant, warmup, 0.1).at(step);
                close(constant, PEAK * if step < warmup.into() { at / first } else { 1.0 }, &what);
            }
        }
    }

    #[test]
    fn a_cosine_is_torchs_annealing() {
        // What `CosineAnnealingLR(SGD(lr=0.25), 8, eta_min=0.01).get_last_lr()` says in torch 1.13.
        let of_torch = [
            0.25,
            0.2408655439013544,
            0.21485281374238568,
            0.1759220118838108,
            0.13,
            0.08407798811618923,
            0.04514718625761431,
            0.019134456098645593,
            0.01,
        ];
        for (step, want) in (0..).zip(of_torch) {
            close(rates(Schedule::Cosine(8), 0, 0.01).at(step), want, &format!("step {step}"));
        }
    }

    #[test]
    fn a_schedule_stays_at_its_end() {
        for schedule in [Schedule::Linear(10), Schedule::Cosine(10)] {
            for step in [10, 11, 15, 20, u64::MAX] {
                assert_eq!(rates(schedule, 2, 0.0).at(step), 0.0);
                assert_eq!(rates(schedule, 2, 0.125).at(step), 0.125);
            }
            // A floor above the peak changes nothing.
            assert_eq!(rates(schedule, 2, 7.0).at(5), PEAK);
        }
        assert_eq!(rates(Schedule::Constant, 2, 0.0).at(u64::MAX), PEAK);
    }

    #[test]
    fn schedules_are_read_as_they_are_written() {
        for text in ["constant", "linear(1)", "cosine(4294967295)"] {
            assert_eq!(text.parse::<Schedule>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "linear",
            "linear()",
            "linear(0)",
            "cosine(+1)",
            "cosine(-1)",
            "cosine(1.5)",
            "cosine(4294967296)",
            "cosine(1",
            "step(3)",
            "constant(3)",
        ] {
            assert_eq!(text.parse::<Schedule>(), Err(NoSchedule), "{text:?}");
        }
    }
}
