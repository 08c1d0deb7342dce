//! The goodput of jobs of many learners, by consistency; `scripts/bench-goodput` runs this.
//!
//! `goodput [--learners N] [--contributions N] [--deaths N] [--seeds LIST] [--consistencies LIST]` prints a JSON object
//! for each run. LIST of consistencies is separated by `;`. `world.rs` says what goodput is.

mod world;

use std::process::ExitCode;
use std::time::Instant;

use libmodelio::vocabulary::controls::Consistency;
use serde_json::json;
use world::{Settings, run};

/// The settings of all runs.
struct Runs {
    learners: usize,
    contributions: u32,
    deaths: f64,
    seeds: Vec<u64>,
    consistencies: Vec<String>,
}

fn parsed() -> Result<Runs, String> {
    let mut runs = Runs {
        learners: 1000,
        contributions: 60,
        deaths: 3.0,
        seeds: vec![1, 2, 3],
        consistencies: ["sync", "quorum(800)", "grace(800, 0.1)"].map(str::to_owned).to_vec(),
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} needs a value"))?;
        let bad = |_| format!("{word} {value}: not a number");
        match &word[..] {
            "--learners" => runs.learners = value.parse().map_err(bad)?,
            "--contributions" => runs.contributions = value.parse().map_err(bad)?,
            "--deaths" => runs.deaths = value.parse().map_err(|_| format!("{word} {value}: not a number"))?,
            "--seeds" => {
                runs.seeds =
                    value.split(',').map(|seed| seed.parse().map_err(bad)).collect::<Result<_, _>>()?;
            }
            "--consistencies" => runs.consistencies = value.split(';').map(str::to_owned).collect(),
            _ => return Err(format!("there is no option {word}")),
        }
    }
    for consistency in &runs.consistencies {
        consistency.parse::<Consistency>().map_err(|why| format!("{consistency} is {why}"))?;
    }
    if !(1..=4096).contains(&runs.learners)
        || runs.contributions == 0
        || runs.deaths.is_nan()
        || runs.deaths < 0.0
    {
        return Err("learners are 1 to 4096, contributions at least 1, deaths not negative".into());
    }
    Ok(runs)
}

fn main() -> ExitCode {
    let runs = match parsed() {
        Ok(runs) => runs,
        Err(why) => {
            eprintln!("goodput: {why}");
            return ExitCode::from(2);
        }
    };
    for consistency in &runs.consistencies {
        for overlaps in [true, false] {
            for &seed in &runs.seeds {
                let began = Instant::now();
                let outcome = run(Settings {
                    seed,
                    learners: runs.learners,
                    consistency: consistency.clone(),
                    contributions: runs.contributions,
                    deaths: runs.deaths,
                    overlaps,
                });
                let versions = outcome.versions.max(1) as f64;
                let line = json!({
                    "consistency": consistency,
                    "overlaps": overlaps,
                    "seed": seed,
                    "goodput": outcome.goodput,
                    "versions": outcome.versions,
                    "contributions_a_version": outcome.contributions as f64 / versions,
                    "seconds_a_version": outcome.took.as_secs_f64() / versions,
                    "deaths": outcome.deaths,
                    "cpu_seconds": began.elapsed().as_secs_f64(),
                });
                println!("{line}");
            }
        }
    }
    ExitCode::SUCCESS
}
