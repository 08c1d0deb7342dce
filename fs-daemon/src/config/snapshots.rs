//! The configuration of the commands about snapshots in stores.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use ps_backend::stores::absolute_url;

use super::cluster::{CommonArgs, model_name, piece_size, registry, utf8};
use super::layer::Layer;
use super::registry::RegistryAt;
use crate::error::Error;

/// The arguments of `gradfs snapshot`.
#[derive(Args, Debug)]
pub struct SnapshotArgs {
    /// The model, by its name in the registry
    name: String,
    /// The store: a directory that all hosts see, or s3://bucket/prefix, gs:// or az:// [default: control/snapshot_to]
    #[arg(long, value_name = "URL", value_hint = ValueHint::AnyPath)]
    to: Option<PathBuf>,
    /// Return when the snapshot is in the store. Otherwise it goes on without this command
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    common: CommonArgs,
}

/// Everything `gradfs snapshot` needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotConfig {
    /// The model.
    pub name: String,
    /// The registry.
    pub registry: RegistryAt,
    /// The address of the store. `None` for the job's own.
    pub to: Option<String>,
    /// Whether it waits.
    pub wait: bool,
}

impl SnapshotConfig {
    /// Merges `args` and `layers`, the strongest first.
    ///
    /// # Errors
    /// A name or an address that is none.
    pub fn merge(args: &SnapshotArgs, layers: &[Layer]) -> Result<SnapshotConfig, Error> {
        let to = args.to.as_ref().map(|to| utf8("--to", to).map(absolute_url)).transpose()?;
        let name = model_name("NAME", &args.name)?;
        Ok(SnapshotConfig { name, registry: registry(layers)?.unwrap_or_default(), to, wait: args.wait })
    }
}

/// The arguments of `gradfs snapshots`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct SnapshotsArgs {
    /// The store whose snapshots are listed: a directory, or s3://bucket/prefix, gs:// or az://
    #[arg(required = true, value_hint = ValueHint::AnyPath)]
    pub url: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// What else to do with snapshots
    #[command(subcommand)]
    pub action: Option<SnapshotsAction>,
}

/// What to do with snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapshotsAction {
    /// Write one as a directory with model.safetensors, as gradfs save does
    #[command(after_help = include_str!("../cli/help/snapshots_export.txt").trim_end())]
    Export {
        /// The store, or URL#VERSION for a version that is not the newest
        #[arg(value_hint = ValueHint::AnyPath)]
        url: PathBuf,
        /// The directory to write; made if it is not there
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
        /// Put it in the place of the snapshot that is there, and of all files with names as a snapshot's
        #[arg(long)]
        replace: bool,
        /// Most bytes of tensors in one file of the model
        #[arg(long, value_name = "SIZE", default_value = "5000000000", value_parser = piece_size)]
        piece_size: u64,
    },
}

/// The arguments of `gradfs verify`.
#[derive(Args, Debug)]
pub struct VerifyArgs {
    /// A directory of gradfs save, or a store: its newest snapshot, or that of a version by URL#VERSION
    #[arg(value_name = "URL", value_hint = ValueHint::AnyPath)]
    pub place: PathBuf,
}
