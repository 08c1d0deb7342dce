//! `gradfs`: a parameter server that you mount.

mod cli;
mod config;
mod error;
mod fs;
mod fuse;
mod logging;
mod memory;
mod mountpoint;
mod process;
mod progress;
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
