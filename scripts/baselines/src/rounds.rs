//! How a driver has rounds done: lines on standard input, a line of JSON on standard output for each.
//!
//! - `round WHAT`: does it; answers with `what`, `bytes` (moved for this process), `start`, `end`, `seconds` (of
//!   CLOCK_MONOTONIC) and `cpu_seconds` (of this process, meanwhile).
//! - `repeat COUNT WHAT`: does it so many times; answers with `what` and a list of `seconds`.
//! - `check PUSHES`: compares what the last pull brought; answers with `what`.
//! - `usage`: answers with `cpu_seconds` so far.
//!
//! The end of the input is the end of the process.

use std::io::{BufRead, Write};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::usage::{cpu_seconds, now};

/// What a learner can be asked to do; gives the bytes that it moved.
pub trait Learner {
    /// One push, pull, step or whatever else it has a name for.
    fn round(&mut self, what: &str) -> Result<usize>;
    /// Fails unless the weights pulled last are right after so many pushes by every learner.
    fn check(&mut self, pushes: usize) -> Result<()>;
}

/// A line for the driver.
pub fn tell(line: &Value) -> Result<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

/// Does what the driver asks for until it asks for no more.
pub fn learn(learner: &mut dyn Learner) -> Result<()> {
    tell(&json!({"what": "ready"}))?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("round", what) => {
                let (cpu, start) = (cpu_seconds(), now());
                let bytes = learner.round(what).with_context(|| format!("in a {what}"))?;
                let (end, cpu) = (now(), cpu_seconds() - cpu);
                tell(&json!({
                    "what": what, "bytes": bytes, "start": start, "end": end, "seconds": end - start,
                    "cpu_seconds": cpu,
                }))?;
            }
            ("repeat", rest) => {
                let (count, what) = rest.split_once(' ').context("repeat what?")?;
                let mut seconds = Vec::new();
                for _ in 0..count.parse().with_context(|| format!("repeat {count:?} times"))? {
                    let start = now();
                    learner.round(what).with_context(|| format!("in a {what}"))?;
                    seconds.push(now() - start);
                }
                tell(&json!({"what": what, "seconds": seconds}))?;
            }
            ("check", pushes) => {
                learner.check(pushes.parse().with_context(|| format!("pushes: {pushes:?}"))?)?;
                tell(&json!({"what": "check"}))?;
            }
            _ => bail!("unknown request {line:?}"),
        }
    }
    Ok(())
}

/// What a server does for the driver, while its own threads serve learners.
pub fn serve(hello: &Value) -> Result<()> {
    tell(hello)?;
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "usage" => tell(&json!({"what": "usage", "cpu_seconds": cpu_seconds()}))?,
            line => bail!("unknown request {line:?}"),
        }
    }
    Ok(())
}
