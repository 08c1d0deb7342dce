//! How fast versions are computed, beside the memory that bounds it; `scripts/bench-reduce` runs this.
//!
//! `bench_reduce [--quick] [--cpu | --gpu NUMBER]` prints a JSON object: the name of the device, and seconds and bytes of
//! each measurement. The bytes are those that are read and written. A GPU's seconds are medians. The CPU's are of all
//! rounds: each round measures everything once, so that the figures of a round can be compared on a machine that is not
//! quiet.
//!
//! `bench_reduce --adam ELEMENTS` computes a step of Adam on the CPU for each line that it reads, and answers with its
//! seconds. So the caller can alternate it with another program.

use std::error::Error;
use std::process::ExitCode;

use libmodelio::vocabulary::reducer::{Reducer, Step};
use serde_json::Value;

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

/// Samples of each measurement.
const SAMPLES: usize = 7;

type Outcome<T> = Result<T, Box<dyn Error>>;

fn step(reducer: Reducer) -> Step {
    Step { reducer, contributions: 1, t: 2, ..Step::default() }
}

/// The bytes that a step reads and writes of each fp32 element: the sum, and the weights and state twice.
fn bytes_of(reducer: Reducer) -> usize {
    4 + 8 * (1 + reducer.state_slots())
}

fn measured() -> Outcome<Value> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (quick, rest) = match arguments[..] {
        ["--quick", ref rest @ ..] => (true, rest),
        ref rest => (false, rest),
    };
    match rest {
        [] | ["--cpu"] => cpu::measured(quick),
        ["--adam", elements] => cpu::adam_by_turns(elements.parse()?),
        #[cfg(feature = "cuda")]
        ["--gpu", number] => gpu::measured(number.parse()?, quick),
        #[cfg(not(feature = "cuda"))]
        ["--gpu", _] => Err("this program was built without the feature cuda".into()),
        _ => Err("usage: bench_reduce [--quick] [--cpu | --gpu NUMBER | --adam ELEMENTS]".into()),
    }
}

fn main() -> ExitCode {
    match measured() {
        Ok(measured) => {
            if !measured.is_null() {
                println!("{measured}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
