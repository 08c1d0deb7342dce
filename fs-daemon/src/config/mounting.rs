//! How models are mounted: the options that `gradfs up` and `gradfs mount` share.

use std::path::{Path, PathBuf};

use clap::{ArgAction, Args, ValueHint};

use super::endpoint::{Endpoint, METRICS_PORT, NBD_PORT};
use super::layer::{Layer, strongest};
use super::values::{group, switch, umask, user, whole};
use crate::error::Error;

const MAX_THREADS: usize = 256;
const THREADS: &str = "threads serve the filesystem; two suffice for most machines";

/// How to mount.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct Mounting {
    /// The directory to mount at, as given and not yet checked.
    #[arg(skip)]
    pub mountpoint: PathBuf,
    /// Threads that serve the filesystem
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=MAX_THREADS, THREADS))]
    pub threads: usize,
    /// Let other users use the mount (/etc/fuse.conf may have to permit it)
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, action = ArgAction::Set, value_parser = switch)]
    pub allow_other: bool,
    #[command(flatten)]
    pub permissions: Permissions,
    /// Serve reads through the daemon even where the kernel could bypass it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, action = ArgAction::Set, value_parser = switch)]
    pub no_passthrough: bool,
    /// Show the files of this directory in hf/, beside the weights: config.json, tokenizer [default: those of the
    /// directory that the model is loaded from, if it is one]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub with_files: Option<PathBuf>,
    /// Serve metrics for Prometheus here, as host:port; port 0 is any free one [default: none; port 9464]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::Hostname, value_parser = |text: &str| Endpoint::parse(text, METRICS_PORT))]
    pub metrics: Option<Endpoint>,
    /// Serve the models as network block devices here: a path of a Unix socket, or host:port on loopback [default: none; port 10809]
    #[arg(long, value_name = "ADDR", value_hint = ValueHint::AnyPath, value_parser = nbd_address)]
    pub nbd: Option<NbdAddress>,
    /// Let everybody who reaches the address of --nbd read and write the models, from other hosts, too; and of a mount's
    /// --via-listen read them
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", hide_default_value = true, action = ArgAction::Set, value_parser = switch)]
    pub insecure: bool,
}

/// Owner and mode of a mount's files, if they differ from those of a mount that only the daemon's user writes
/// to.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    /// User that the files belong to, by name or number; learners belong to whoever made them [default: the daemon's]
    #[arg(long, value_name = "USER", value_parser = user)]
    pub uid: Option<u32>,
    /// Group that the files belong to, by name or number [default: the daemon's]
    #[arg(long, value_name = "GROUP", value_parser = group)]
    pub gid: Option<u32>,
    /// Permission bits to take away from files, in octal: 007 lets the group write and make learners, 0 everybody [default: only
    /// the owner writes]
    #[arg(long, value_name = "OCTAL", value_parser = umask)]
    pub umask: Option<u16>,
}

/// Where clients of block devices connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(Endpoint),
}

fn nbd_address(text: &str) -> Result<NbdAddress, Error> {
    match text.strip_prefix("unix:") {
        Some("") => Err(Error::usage("no path is given").hint("write unix:/run/gradfs.sock")),
        Some(path) => Ok(NbdAddress::Unix(path.into())),
        None if text.contains('/') => Ok(NbdAddress::Unix(text.into())),
        None => Ok(NbdAddress::Tcp(Endpoint::parse(text, NBD_PORT)?)),
    }
}

impl Mounting {
    /// This at the directory that `layers` name; `usage` says how it is given. Other mounts pull from one that `listens`.
    pub fn at(self, layers: &[Layer], usage: &str, listens: bool) -> Result<Mounting, Error> {
        let path =
            strongest(layers, "mount").and_then(|(_, values)| values.last()).filter(|path| !path.is_empty());
        let path = Path::new(path.ok_or_else(|| Error::usage("no mountpoint is given").hint(usage))?);
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let message = format!("the mountpoint {} looks like a model file", path.display());
            return Err(Error::usage(message).hint(usage));
        }
        // A file or an environment has it for the shards of this host. It opens nothing of a mount.
        let is_flag = strongest(layers, "insecure").is_some_and(|(origin, _)| origin.starts_with("--"));
        let insecure = self.insecure && is_flag;
        if insecure && self.nbd.is_none() && !listens {
            return Err(Error::usage(
                "insecure opens the addresses of nbd and via to other hosts, and there is neither",
            ));
        }
        Ok(Mounting { mountpoint: path.to_owned(), insecure, ..self })
    }
}
