//! The configuration of `gradfs up`, merged from flags, environment and file, and checked.
//!
//! Each source is a [`Layer`] of texts by key, and the options of the command line are the keys. The layers are merged
//! by precedence and then parsed once, so that a value means the same wherever it comes from and every complaint names
//! its source.

pub mod cluster;
pub mod endpoint;
mod layer;

use std::ffi::OsString;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use libmodelio::vocabulary::controls::{ControlError, Controls, SETTINGS};
use libmodelio::vocabulary::layout::{DType, MAX_BLOCKS};
use ps_backend::device::DeviceName;
use ps_backend::state_copies::StateCopies;
use strum::VariantNames as _;

use self::endpoint::{Endpoint, METRICS_PORT, NBD_PORT};
pub use self::layer::{CONFIG_VARIABLE, Layer, Vocabulary};
use crate::checkpoint;
use crate::error::Error;

/// Element types of a blank model.
pub const DTYPES: &[&str] = &["f32", "f64", "f16", "bf16", "f8_e4m3", "f8_e5m2", "u8"];
const DEFAULT_BLOCK_SIZE: u32 = 256 << 10;
const MIN_BLOCK_SIZE: u64 = 64 << 10;
const MAX_BLOCK_SIZE: u64 = 4 << 20;
const DEFAULT_THREADS: usize = 2;
const MAX_THREADS: usize = 256;
const THREADS_OF_MOUNT: &str = "threads serve the filesystem; two suffice for most machines";
const UP_MOUNT: &str = "the last argument is the directory to mount on: gradfs up model.safetensors /mnt/job";
/// Most models of one mount: each has its own versions in memory.
pub const MAX_MODELS: usize = 256;
/// Most bytes of a name that a directory entry can hold.
const MAX_NAME: usize = 255;

/// How to mount.
#[derive(Clone, Debug, PartialEq)]
pub struct Mounting {
    /// The directory to mount at, as given and not yet checked.
    pub mountpoint: PathBuf,
    /// Threads that serve the filesystem, at least one.
    pub threads: usize,
    /// Whether other users may use the mount.
    pub allow_other: bool,
    /// Owner and mode of its files.
    pub permissions: Permissions,
    /// Whether reads may bypass the daemon (FUSE passthrough) where the system allows it.
    pub passthrough: bool,
    /// The address where metrics are served, if they are.
    pub metrics: Option<Endpoint>,
    /// The address where the models are block devices, if they are.
    pub nbd: Option<NbdAddress>,
    /// That address may be open to other hosts.
    pub insecure: bool,
}

/// Where clients of block devices connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(Endpoint),
}

/// Everything `gradfs up` needs to know, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct UpConfig {
    /// How to mount.
    pub mounting: Mounting,
    /// The models to serve, at least one, with unique names.
    pub models: Vec<ModelSpec>,
    /// Bytes of a block: a power of two, 64 KiB to 4 MiB.
    pub block_size: u32,
    /// The settings of the jobs.
    pub controls: Controls,
    /// Copies of optimizer state.
    pub state: StateCopies,
    /// The device that computes versions.
    pub device: DeviceName,
}

/// Owner and mode of a mount's files, if they differ from those of a mount that only the daemon's user writes
/// to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    /// Their user.
    pub uid: Option<u32>,
    /// Their group.
    pub gid: Option<u32>,
    /// Permission bits that are taken away from them.
    pub umask: Option<u16>,
}

/// One model to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Its directory under the mount.
    pub name: String,
    /// The source of its first weights.
    pub source: ModelSource,
}

/// The source of a model's first weights.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A safetensors file.
    File(PathBuf),
    /// A snapshot, which is of the model of this file, if one is named.
    Snapshot {
        /// Its directory.
        dir: PathBuf,
        /// The file.
        expected: Option<PathBuf>,
    },
    /// One flat tensor of zeros.
    Blank {
        /// Its size, a positive multiple of the element size.
        bytes: u64,
        /// Its element type: one that is reduced, or `U8`.
        dtype: DType,
    },
}

impl UpConfig {
    /// Merges `layers`, the strongest first, fills in defaults, and checks all of it.
    pub fn merge(layers: &[Layer]) -> Result<UpConfig, Error> {
        let merged = Merged(layers);
        let controls = merged.controls()?;
        let block_size = merged.block_size()?;
        let (device, state) = merged.device()?;
        Ok(UpConfig {
            mounting: merged.mounting(UP_MOUNT)?,
            models: merged.models(block_size)?,
            block_size,
            controls,
            state,
            device,
        })
    }
}

struct Merged<'a>(&'a [Layer]);

impl<'a> Merged<'a> {
    /// The strongest values of `key`, and the name of their origin.
    fn get(&self, key: &str) -> Option<(String, &'a [OsString])> {
        self.0.iter().find_map(|layer| layer.get(key).map(|values| (layer.origin(key), values)))
    }

    /// The strongest text of `key`. If one source has several, the last counts.
    fn text(&self, key: &str) -> Result<Option<(String, &'a str)>, Error> {
        let Some((origin, [.., value])) = self.get(key) else { return Ok(None) };
        let text = utf8(&origin, value)?.trim();
        Ok(Some((origin, text)))
    }

    /// The result of `parse` on the origin and the strongest text of `key`.
    fn parsed<T>(
        &self,
        key: &str,
        parse: impl FnOnce(&str, &'a str) -> Result<T, Error>,
    ) -> Result<Option<T>, Error> {
        self.text(key)?.map(|(origin, text)| parse(&origin, text)).transpose()
    }

    /// A whole number, if one is given.
    fn whole<T: FromStr + PartialOrd + Display>(
        &self,
        key: &str,
        range: RangeInclusive<T>,
        hint: &str,
    ) -> Result<Option<T>, Error> {
        self.parsed(key, |origin, text| number(origin, text, "a whole number", range, hint))
    }

    /// The one of `words` that was given, as a `T`; `default` if none was.
    fn word<T: FromStr>(&self, key: &str, words: &[&str], default: T) -> Result<T, Error> {
        let word = |origin: &str, text: &str| text.parse().map_err(|_| not_a_word(origin, text, words));
        Ok(self.parsed(key, word)?.unwrap_or(default))
    }

    /// The device that computes versions, and the copies of optimizer state that the host's memory has otherwise.
    fn device(&self) -> Result<(DeviceName, StateCopies), Error> {
        let device = self.parsed("device", |origin, text| {
            text.parse().map_err(|error| Error::usage(format!("{origin}: {error}")))
        })?;
        let state = self.word("state", StateCopies::VARIANTS, StateCopies::default())?;
        match device {
            Some(device @ DeviceName::Cuda(_)) if state == StateCopies::Double => Err(Error::usage(format!(
                "--device {device} with --state double: a GPU has one copy of optimizer state"
            ))
            .hint("leave one of them out")),
            device => Ok((device.unwrap_or_default(), state)),
        }
    }

    fn switch(&self, key: &str) -> Result<bool, Error> {
        let switch =
            |origin: &str, text: &str| match text {
                "true" | "1" | "yes" | "on" => Ok(true),
                "false" | "0" | "no" | "off" => Ok(false),
                _ => Err(Error::usage(format!("{origin}: {text:?} is not true or false"))
                    .hint("use true or false")),
            };
        Ok(self.parsed(key, switch)?.unwrap_or(false))
    }

    fn metrics(&self) -> Result<Option<Endpoint>, Error> {
        self.parsed("metrics", |origin, text| Endpoint::parse(origin, text, METRICS_PORT))
    }

    fn nbd(&self) -> Result<Option<NbdAddress>, Error> {
        self.parsed("nbd", |origin, text| match text.strip_prefix("unix:") {
            Some("") => {
                Err(Error::usage(format!("{origin}: no path is given")).hint("write unix:/run/gradfs.sock"))
            }
            Some(path) => Ok(NbdAddress::Unix(path.into())),
            None if text.contains('/') => Ok(NbdAddress::Unix(text.into())),
            None => Ok(NbdAddress::Tcp(Endpoint::parse(origin, text, NBD_PORT)?)),
        })
    }

    fn threads(&self, what_for: &str) -> Result<usize, Error> {
        Ok(self.whole("threads", 1..=MAX_THREADS, what_for)?.unwrap_or(DEFAULT_THREADS))
    }

    /// Users and groups go by number or name.
    fn permissions(&self) -> Result<Permissions, Error> {
        use nix::unistd::{Group, User};
        let user = |name: &str| Ok(User::from_name(name)?.map(|user| user.uid.as_raw()));
        let group = |name: &str| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()));
        let umask = |origin: &str, text: &str| match u16::from_str_radix(text, 8) {
            Ok(umask @ 0..=0o777) => Ok(umask),
            _ => Err(Error::usage(format!("{origin}: {text:?} is not an octal number from 0 to 777"))
                .hint("--umask 007 lets the group write, --umask 0 everybody")),
        };
        Ok(Permissions {
            uid: self.parsed("uid", |origin, text| id(origin, text, "user", user))?,
            gid: self.parsed("gid", |origin, text| id(origin, text, "group", group))?,
            umask: self.parsed("umask", umask)?,
        })
    }

    fn block_size(&self) -> Result<u32, Error> {
        let block_size = |origin: &str, text: &str| match size(origin, text)? {
            bytes @ MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE if bytes.is_power_of_two() => Ok(bytes as u32),
            bytes => {
                let message = format!("{origin}: {bytes} bytes is not a power of two from 64KiB to 4MiB");
                Err(Error::usage(message)
                    .hint("use 64KiB, 128KiB, 256KiB (the default), 512KiB, 1MiB, 2MiB or 4MiB"))
            }
        };
        Ok(self.parsed("block_size", block_size)?.unwrap_or(DEFAULT_BLOCK_SIZE))
    }

    /// How to mount; `usage` says how the directory is given.
    fn mounting(&self, usage: &str) -> Result<Mounting, Error> {
        // A file or an environment has it for the shards of this host. It opens nothing of a mount.
        let is_flag = self.get("insecure").is_some_and(|(origin, _)| origin.starts_with("--"));
        let (nbd, insecure) = (self.nbd()?, self.switch("insecure")? && is_flag);
        if insecure && nbd.is_none() {
            return Err(Error::usage(
                "insecure opens the address of nbd to other hosts, and there is no nbd",
            ));
        }
        Ok(Mounting {
            mountpoint: self.mountpoint(usage)?,
            threads: self.threads(THREADS_OF_MOUNT)?,
            allow_other: self.switch("allow_other")?,
            permissions: self.permissions()?,
            passthrough: !self.switch("no_passthrough")?,
            metrics: self.metrics()?,
            nbd,
            insecure,
        })
    }

    fn mountpoint(&self, usage: &str) -> Result<PathBuf, Error> {
        let path = self.get("mount").and_then(|(_, values)| values.last()).filter(|path| !path.is_empty());
        let path = Path::new(path.ok_or_else(|| Error::usage("no mountpoint is given").hint(usage))?);
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let message = format!("the mountpoint {} looks like a model file", path.display());
            return Err(Error::usage(message).hint(usage));
        }
        Ok(path.to_owned())
    }

    fn models(&self, block_size: u32) -> Result<Vec<ModelSpec>, Error> {
        let usage = "name safetensors files before the mountpoint, or make a blank one with --size 1GiB";
        let sources = self.sources("models", block_size, usage)?;
        if sources.len() > MAX_MODELS {
            let message = format!("{} models are more than a daemon serves ({MAX_MODELS})", sources.len());
            return Err(Error::usage(message).hint("start several daemons"));
        }
        self.named(sources)
    }

    /// The sources of the models: the files under `key`, or a blank model of `size`, whichever the strongest
    /// layer has.
    fn sources(&self, key: &str, block_size: u32, usage: &str) -> Result<Vec<ModelSource>, Error> {
        if let Some((origin, [.., dir])) = self.get("from") {
            return Ok(vec![self.snapshot(&origin, dir.into(), key)?]);
        }
        let chosen = self.0.iter().position(|l| l.get(key).is_some() || l.get("size").is_some());
        let Some(chosen) = chosen else { return Err(Error::usage("no model is given").hint(usage)) };
        let layer = &self.0[chosen];
        Ok(match (layer.get(key), layer.get("size")) {
            (Some(_), Some(_)) => {
                let message = format!("model files and {} exclude each other", layer.origin("size"));
                return Err(Error::usage(message).hint("a model is loaded from a file, or blank"));
            }
            (Some(files), None) => {
                // Settings of a weaker source about blank models do not matter here. Settings of this or a
                // stronger source are a mistake.
                if let Some(layer) = self.0[..=chosen].iter().find(|layer| layer.get("dtype").is_some()) {
                    let origin = layer.origin("dtype");
                    return Err(Error::usage(format!("{origin} is of no use with model files"))
                        .hint("the tensors of a file have their own types; leave it out"));
                }
                files.iter().map(|file| ModelSource::File(file.into())).collect()
            }
            (None, _) => vec![self.blank(block_size)?],
        })
    }

    fn snapshot(&self, origin: &str, dir: PathBuf, key: &str) -> Result<ModelSource, Error> {
        if let Some((size, _)) = self.get("size") {
            return Err(Error::usage(format!("{origin} and {size} exclude each other"))
                .hint("a model goes on from a snapshot, or is blank"));
        }
        // A weaker source may have it for blank models.
        let chosen = self.0.iter().position(|layer| layer.get("from").is_some()).unwrap_or(0);
        if let Some(layer) = self.0[..=chosen].iter().find(|layer| layer.get("dtype").is_some()) {
            return Err(Error::usage(format!("{} is of no use with {origin}", layer.origin("dtype")))
                .hint("the tensors of a snapshot have their own types; leave it out"));
        }
        let expected = match self.get(key) {
            None => None,
            Some((_, [file])) => Some(file.into()),
            Some(_) => {
                return Err(Error::usage(format!(
                    "{origin}: a snapshot is of one model, and several are named"
                ))
                .hint("leave the models out: the snapshot has all of its model"));
            }
        };
        Ok(ModelSource::Snapshot { dir, expected })
    }

    fn blank(&self, block_size: u32) -> Result<ModelSource, Error> {
        let dtype = self.parsed("dtype", element_type)?.unwrap_or(DType::F32);
        let element = dtype.size_bytes().map_or(1, |bytes| bytes as u64);
        let (origin, text) = self.text("size")?.unwrap_or_default();
        let bytes = size(&origin, text)?;
        if bytes == 0 {
            return Err(Error::usage(format!("{origin}: a model cannot be empty")).hint("try 1GiB"));
        }
        if bytes % element != 0 {
            let near = (bytes - bytes % element).max(element);
            return Err(Error::usage(format!(
                "{origin}: {bytes} bytes is not a multiple of the element size, {element}"
            ))
            .hint(format!("{near} bytes is")));
        }
        if bytes.div_ceil(u64::from(block_size)) > u64::from(MAX_BLOCKS) {
            let message = format!("{origin}: {text} is more than {MAX_BLOCKS} blocks of {block_size} bytes");
            return Err(Error::usage(message).hint("choose a larger --block-size"));
        }
        Ok(ModelSource::Blank { bytes, dtype })
    }

    fn named(&self, sources: Vec<ModelSource>) -> Result<Vec<ModelSpec>, Error> {
        let names = match self.get("name") {
            Some((origin, names)) if names.len() != sources.len() => {
                let message = format!("{origin}: {} name(s) for {} model(s)", names.len(), sources.len());
                return Err(Error::usage(message).hint("give one name per model, in the same order"));
            }
            Some((origin, names)) => {
                let names = names.iter().map(|name| utf8(&origin, name).map(str::to_owned));
                names.collect::<Result<_, _>>()?
            }
            None => own_names(&sources)?,
        };
        let mut models: Vec<ModelSpec> = Vec::with_capacity(sources.len());
        for (source, name) in sources.into_iter().zip(names) {
            if let Some(fault) = name_fault(&name) {
                return Err(Error::usage(format!("{name:?} cannot name a model: {fault}"))
                    .hint("the name becomes a directory under the mount; choose one with --name"));
            }
            if models.iter().any(|other| other.name == name) {
                return Err(Error::usage(format!("two models are called {name}"))
                    .hint("choose different names with --name, once per model"));
            }
            models.push(ModelSpec { name, source });
        }
        Ok(models)
    }

    /// The settings of a job: those that `control/` has, under the same names.
    fn controls(&self) -> Result<Controls, Error> {
        let mut given = Vec::new();
        for (name, _) in SETTINGS.iter() {
            let Some((origin, values)) = self.get(name) else { continue };
            let texts: Result<Vec<&str>, Error> = values.iter().map(|value| utf8(&origin, value)).collect();
            let texts = texts?;
            // Patterns and rules are one a line.
            let has_lines = ["frozen", "tensors"].contains(name);
            let text = if has_lines { texts.join("\n") } else { texts[texts.len() - 1].to_owned() };
            given.push((*name, origin, text));
        }
        let find = |name: &str| given.iter().find(|(of, ..)| *of == name);
        let number = |name: &str| {
            find(name).and_then(|(_, origin, text)| Some((origin, text.trim().parse::<u32>().ok()?)))
        };
        let texts = given.iter().map(|(name, _, text)| (*name, text.as_str()));
        let controls = Controls::default().with_all(texts).map_err(|error| match &error {
            ControlError::Invalid { name, .. } => {
                let origin = find(name).map_or(*name, |(_, origin, _)| origin);
                let help = self.0.first().map_or("gradfs --help", Layer::help);
                Error::usage(format!("{origin}: {}", error.without_name()))
                    .hint(format!("{help} tells what each setting does, and its default"))
            }
            _ => {
                let learners = number("learners").map_or(1, |(_, learners)| learners);
                match number("min_learners") {
                    Some((origin, least)) if least > learners => {
                        Error::usage(format!("{origin}: {least} is more than there are learners"))
                            .hint(format!("learners is {learners}: raise it, or lower min_learners"))
                    }
                    _ => Error::usage(error.to_string()),
                }
            }
        })?;
        Ok(match find("patience") {
            None => controls.with_patience_of_lease(),
            Some(_) => controls,
        })
    }
}

/// Names for models that were given none.
fn own_names(sources: &[ModelSource]) -> Result<Vec<String>, Error> {
    let of_file = |source: &ModelSource| match source {
        ModelSource::File(path) => checkpoint::name_of(path),
        // A snapshot says what its model is called.
        ModelSource::Snapshot { .. } | ModelSource::Blank { .. } => None,
    };
    let names: Vec<Option<String>> = sources.iter().map(of_file).collect();
    let named = sources.iter().zip(&names).map(|(source, name)| {
        let ModelSource::File(path) = source else { return Ok("model".to_owned()) };
        // Checkpoints all call their file the same: then their folders tell them apart.
        let is_shared = name.is_some() && names.iter().filter(|other| *other == name).count() > 1;
        let name = if is_shared { checkpoint::folder_of(path) } else { name.clone() };
        name.ok_or_else(|| {
            Error::usage(format!("no name can be made from {}", path.display()))
                .hint("choose one with --name")
        })
    });
    named.collect()
}

/// The number of the user or group (`what`) that `text` is, or names.
fn id(
    origin: &str,
    text: &str,
    what: &str,
    named: impl Fn(&str) -> nix::Result<Option<u32>>,
) -> Result<u32, Error> {
    // The highest number means nobody to the kernel.
    if let Some(id) = text.parse().ok().filter(|id| *id != u32::MAX) {
        return Ok(id);
    }
    let found =
        named(text).map_err(|error| Error::new(format!("{origin}: looking up {text:?}")).caused_by(error))?;
    found.ok_or_else(|| {
        Error::usage(format!("{origin}: there is no {what} {text:?}")).hint("use its name or its number")
    })
}

/// A number in `range`; `what` it is to be, in words.
fn number<T: FromStr + PartialOrd + Display>(
    origin: &str,
    text: &str,
    what: &str,
    range: RangeInclusive<T>,
    hint: &str,
) -> Result<T, Error> {
    text.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| {
        let (least, most) = range.into_inner();
        Error::usage(format!("{origin}: {text:?} is not {what} from {least} to {most}")).hint(hint)
    })
}

/// The type of the elements of a blank model: as in [`DTYPES`], or as torch and NumPy call it, in any case.
fn element_type(origin: &str, text: &str) -> Result<DType, Error> {
    let plain = text.to_ascii_lowercase();
    match DType::parse(plain.strip_prefix("torch.").unwrap_or(&plain)) {
        Ok(dtype) if dtype.name() == "U8" => Ok(dtype),
        Ok(DType::Opaque(_)) | Err(_) => Err(not_a_word(origin, text, DTYPES)),
        Ok(dtype) => Ok(dtype),
    }
}

fn not_a_word(origin: &str, text: &str, words: &[&str]) -> Error {
    Error::usage(format!("{origin}: {text:?} is not valid")).hint(format!("use one of {}", words.join(", ")))
}

fn utf8<'a>(origin: &str, value: &'a OsString) -> Result<&'a str, Error> {
    value.to_str().ok_or_else(|| Error::usage(format!("{origin}: {value:?} is not valid UTF-8")))
}

/// Why `name` cannot be a directory under the mount, if so.
fn name_fault(name: &str) -> Option<&'static str> {
    match name {
        "" => Some("it is empty"),
        "." | ".." => Some("every directory has that entry"),
        "README" => Some("the mount has a file of that name"),
        _ if name.contains('/') => Some("it holds a slash"),
        _ if name.contains(char::is_control) => Some("it holds a control character"),
        _ if name.len() > MAX_NAME => Some("it is longer than 255 bytes"),
        _ => None,
    }
}

/// Bytes from `65536`, `64KiB`, `64K`, `1 GiB`: units are powers of 1024.
fn size(origin: &str, text: &str) -> Result<u64, Error> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "kb" | "mb" | "gb" | "tb" => {
            return Err(Error::usage(format!("{origin}: {text:?} uses a unit that has two meanings"))
                .hint("write KiB, MiB, GiB or TiB for powers of 1024, or plain bytes"));
        }
        _ => return Err(not_a_size(origin, text)),
    };
    let number: u64 = number.replace('_', "").parse().map_err(|_| not_a_size(origin, text))?;
    number
        .checked_mul(1 << shift)
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| Error::usage(format!("{origin}: {text} is more than a file can hold")))
}

fn not_a_size(origin: &str, text: &str) -> Error {
    Error::usage(format!("{origin}: {text:?} is not a size"))
        .hint("write a whole number of bytes, or one with KiB, MiB, GiB or TiB: 1048576, 256KiB, 1GiB")
}

#[cfg(test)]
mod tests;
