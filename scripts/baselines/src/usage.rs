//! Clocks.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};

/// Seconds of CLOCK_MONOTONIC, which all processes share.
pub fn now() -> f64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(f64::NAN, |time| time.num_nanoseconds() as f64 * 1e-9)
}

/// Seconds that this process has had of any processor, in the kernel or not.
pub fn cpu_seconds() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(f64::NAN, |usage| {
        (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 * 1e-6
    })
}
