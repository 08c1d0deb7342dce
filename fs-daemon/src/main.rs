//! `gradfs`: a parameter server that you mount.

// First: its macros are for all others.
#[macro_use]
mod printing;

mod apply;
mod background;
mod checkpoint;
mod cli;
mod cluster;
mod companions;
mod config;
mod crash;
mod device;
mod error;
mod follow;
mod fs;
mod fuse;
mod launch;
mod lending;
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
use std::process::ExitCode;

use background::Ready;
use clap::ArgMatches;
use cli::cluster::ClusterCommand;
use cli::rdma::RdmaCommand;
use cli::{Cli, Command};
use config::cluster::{
    CLUSTER, CreateConfig, DeleteConfig, DrainArgs, DrainConfig, MountConfig, RegistryAction, RegistryArgs,
    RegistryConfig, SaveConfig, ShardConfig, StatusConfig,
};
use config::snapshots::{SnapshotConfig, SnapshotsAction, SnapshotsArgs};
use config::{Layer, UpConfig};
use error::Error;
use libmodelio::bytes::mmap::limit_heaps;

fn main() -> ExitCode {
    crash::abort_on_panic();
    limit_heaps();
    let (cli, given) = match cli::parse(std::env::args_os()) {
        Ok(parsed) => parsed,
        Err(code) => return code.into(),
    };
    match run(cli, &given) {
        Ok(ExitCode::SUCCESS) if printing::has_failed() => ExitCode::FAILURE,
        Ok(code) => code,
        Err(error) => {
            logging::report_failure(&error);
            error.exit_code().into()
        }
    }
}

fn run(cli: Cli, given: &ArgMatches) -> Result<ExitCode, Error> {
    let is_background = cli::is_background(given);
    logging::init(&cli.log, is_background)?;
    // Goes to the background if that is asked for. No thread may have been started yet.
    let ready = |command: &str, what: &OsStr| match cli.log.log_file {
        _ if !is_background => Ok(Ready::in_foreground()),
        Some(log) => background::detach(log),
        None => background::detach(background::default_log(command, what)?),
    };
    let done = match cli.command {
        Command::Up(args) => {
            let config = UpConfig::of(given, std::env::vars_os())?;
            if args.dry_run {
                up::dry_run(&config)
            } else {
                let ready = ready("up", config.mounting.mountpoint.as_os_str())?;
                up::run(config, ready)
            }
        }
        Command::Run(args) => return run::run(&args),
        Command::Follow(args) => return follow::run(&args),
        Command::Apply(args) => apply::run(&args),
        Command::Launch { args } => launch::run(&args),
        Command::Cluster(command) => {
            return run_cluster(command, &CLUSTER.layers(given, std::env::vars_os())?, ready);
        }
        Command::Rdma(RdmaCommand::Devices { json }) => rdma::devices(json),
        Command::Trace { mountpoint, seconds, output } => trace::run(&mountpoint, seconds, &output),
        Command::Unmount { mountpoint, lazy } => mountpoint::unmount(&mountpoint, lazy),
        Command::Completions { shell } => cli::completions(shell),
    };
    done.map(|()| ExitCode::SUCCESS)
}

fn run_cluster(
    command: ClusterCommand,
    layers: &[Layer],
    ready: impl FnOnce(&str, &OsStr) -> Result<Ready, Error>,
) -> Result<ExitCode, Error> {
    let done = match command {
        ClusterCommand::Registry(RegistryArgs {
            action: Some(RegistryAction::Copy { from, to }), ..
        }) => cluster::copy::run(&from, &to),
        ClusterCommand::Registry(_) => {
            let config = RegistryConfig::merge(layers)?;
            let ready = ready("registry", config.listen.to_string().as_ref())?;
            cluster::shard::run_registry(config, ready)
        }
        ClusterCommand::Shard(_) => {
            let config = ShardConfig::merge(layers)?;
            let ready = ready("shard", config.listen.to_string().as_ref())?;
            cluster::shard::run(config, ready)
        }
        ClusterCommand::Create(_) => cluster::upload::create(&CreateConfig::merge(layers)?),
        ClusterCommand::Mount(_) => {
            let config = MountConfig::merge(layers)?;
            let ready = ready("mount", config.mounting.mountpoint.as_os_str())?;
            cluster::mount::run(&config, ready)
        }
        ClusterCommand::Status(args) => {
            return cluster::status::run(&StatusConfig::merge(args.of.as_deref(), layers, args.json)?);
        }
        ClusterCommand::Save(args) => cluster::save::run(&SaveConfig::merge(&args, layers)?),
        ClusterCommand::Snapshot(args) => cluster::snapshots::take(&SnapshotConfig::merge(&args, layers)?),
        ClusterCommand::Snapshots(SnapshotsArgs {
            action: Some(SnapshotsAction::Export { url, dir, replace, piece_size }),
            ..
        }) => cluster::snapshots::export(&url, &dir, (replace, piece_size)),
        ClusterCommand::Snapshots(SnapshotsArgs { url, json, .. }) => {
            cluster::snapshots::list(&url.unwrap_or_default(), json)
        }
        ClusterCommand::Verify(args) => cluster::snapshots::verify(&args.place),
        ClusterCommand::Delete(args) => {
            cluster::upload::delete(&DeleteConfig::merge(&args.name, args.snapshots, layers)?)
        }
        ClusterCommand::Drain(DrainArgs { shard, timeout, hold, cancel, .. }) => {
            cluster::drain::run(&DrainConfig::merge(&shard, &timeout, hold.as_deref(), cancel, layers)?)
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}
