//! `gradfs`: a parameter server that you mount.

mod cli;
mod cluster;
mod config;
mod error;
mod fs;
mod fuse;
mod logging;
mod memory;
mod metrics;
mod mountpoint;
mod process;
mod progress;
mod rdma;
mod serve;
mod signals;
mod source;
mod sys;
mod up;

use std::process::ExitCode;

use cli::cluster::ClusterCommand;
use cli::rdma::RdmaCommand;
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
        Command::Cluster(command) => run_cluster(command),
        Command::Rdma(RdmaCommand::Devices { json }) => rdma::devices(json),
        Command::Unmount { mountpoint, lazy } => mountpoint::unmount(&mountpoint, lazy),
        Command::Completions { shell } => cli::completions(shell),
    }
}

fn run_cluster(command: ClusterCommand) -> Result<(), Error> {
    let variables = std::env::vars_os();
    match command {
        ClusterCommand::Registry(args) => cluster::shard::run_registry(args.config(variables)?),
        ClusterCommand::Shard(args) => cluster::shard::run(args.config(variables)?),
        ClusterCommand::Create(args) => cluster::upload::create(&args.config(variables)?),
        ClusterCommand::Mount(args) => cluster::mount::run(&args.config(variables)?),
        ClusterCommand::Status(args) => cluster::status::run(&args.config(variables)?),
        ClusterCommand::Delete(args) => cluster::upload::delete(&args.config(variables)?),
        ClusterCommand::Drain(args) => cluster::drain::run(&args.config(variables)?),
    }
}
