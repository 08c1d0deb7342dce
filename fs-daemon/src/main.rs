//! `gradfs`: a parameter server that you mount.

// First: its macros are for all others.
#[macro_use]
mod printing;

mod background;
mod checkpoint;
mod cli;
mod cluster;
mod config;
mod crash;
mod device;
mod error;
mod fs;
mod fuse;
mod interrupt;
mod logging;
mod memory;
mod metrics;
mod mountpoint;
mod nbd;
mod own_thread;
mod proc;
mod progress;
mod rdma;
mod run;
mod serve;
mod session;
mod shown;
mod signals;
mod source;
mod sys;
mod trace;
mod up;

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::ExitCode;

use background::Ready;
use cli::cluster::ClusterCommand;
use cli::rdma::RdmaCommand;
use cli::{Cli, Command};
use error::Error;

fn main() -> ExitCode {
    crash::abort_on_panic();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(code) => return code.into(),
    };
    match run(cli) {
        Ok(ExitCode::SUCCESS) if printing::has_failed() => ExitCode::FAILURE,
        Ok(code) => code,
        Err(error) => {
            logging::report_failure(&error);
            error.exit_code().into()
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, Error> {
    logging::init(&cli.log, cli.command.is_background())?;
    let log = cli.log.log_file;
    let done = match cli.command {
        Command::Up(args) => {
            let (background, dry_run) = (args.background.background, args.dry_run);
            let config = args.config(std::env::vars_os())?;
            if dry_run {
                return up::dry_run(&config).map(|()| ExitCode::SUCCESS);
            }
            let ready = ready(background, log, "up", &config.mounting.mountpoint)?;
            up::run(config, ready)
        }
        Command::Run(args) => return run::run(&args.plan()?),
        Command::Cluster(command) => return run_cluster(command, log),
        Command::Rdma(RdmaCommand::Devices { json }) => rdma::devices(json),
        Command::Trace { mountpoint, seconds, output } => trace::run(&mountpoint, seconds, &output),
        Command::Unmount { mountpoint, lazy } => mountpoint::unmount(&mountpoint, lazy),
        Command::Completions { shell } => cli::completions(shell),
    };
    done.map(|()| ExitCode::SUCCESS)
}

/// Goes to the background if that is asked for. No thread may have been started yet.
fn ready(
    background: bool,
    log: Option<PathBuf>,
    command: &str,
    what: impl AsRef<OsStr>,
) -> Result<Ready, Error> {
    if !background {
        return Ok(Ready::in_foreground());
    }
    background::detach(match log {
        Some(log) => log,
        None => background::default_log(command, what.as_ref())?,
    })
}

fn run_cluster(command: ClusterCommand, log: Option<PathBuf>) -> Result<ExitCode, Error> {
    let variables = std::env::vars_os();
    let done = match command {
        ClusterCommand::Registry(args) => {
            let background = args.background.background;
            let config = args.config(variables)?;
            let ready = ready(background, log, "registry", config.listen.to_string())?;
            cluster::shard::run_registry(config, ready)
        }
        ClusterCommand::Shard(args) => {
            let background = args.background.background;
            let config = args.config(variables)?;
            let ready = ready(background, log, "shard", config.listen.to_string())?;
            cluster::shard::run(config, ready)
        }
        ClusterCommand::Create(args) => cluster::upload::create(&args.config(variables)?),
        ClusterCommand::Mount(args) => {
            let background = args.background.background;
            let config = args.config(variables)?;
            let ready = ready(background, log, "mount", &config.mounting.mountpoint)?;
            cluster::mount::run(&config, ready)
        }
        ClusterCommand::Status(args) => return cluster::status::run(&args.config(variables)?),
        ClusterCommand::Save(args) => cluster::save::run(&args.config(variables)?),
        ClusterCommand::Delete(args) => cluster::upload::delete(&args.config(variables)?),
        ClusterCommand::Drain(args) => cluster::drain::run(&args.config(variables)?),
    };
    done.map(|()| ExitCode::SUCCESS)
}
