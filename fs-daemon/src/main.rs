//! `gradfs`: a parameter server that you mount.

mod cli;
// The attributes below go once `up` uses what they cover.
#[allow(dead_code)]
mod config;
mod error;
mod logging;
#[allow(dead_code)]
mod mountpoint;
#[allow(dead_code)]
mod process;
#[allow(dead_code)]
mod progress;
#[allow(dead_code)]
mod signals;
mod sys;
mod up;

use std::process::ExitCode;

use cli::{Cli, Command};
use error::Error;

fn main() -> ExitCode {
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(code) => return code.into(),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}", error::report(&error));
            error.exit_code().into()
        }
    }
}

fn run(cli: Cli) -> Result<(), Error> {
    logging::init(cli.verbose)?;
    match cli.command {
        Command::Up(args) => up::run(args.config(std::env::vars_os())?),
        Command::Unmount { mountpoint, lazy } => mountpoint::unmount(&mountpoint, lazy),
        Command::Completions { shell } => cli::completions(shell),
    }
}
