//! What `gradfs up` is asked to do, merged from flags, environment and file, and checked.
//!
//! Each source is a [`Layer`] of texts by key; the layers are merged by precedence and then parsed
//! once, so that a value means the same wherever it comes from and every complaint names its source.
//! Job settings stay texts: their names and their parser are those of the `control/` files, and what
//! is checked here is what can be said without a job.

pub mod cluster;
pub mod endpoint;
mod layer;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use libmodelio::vocabulary::controls::{Consistency, ControlError, Controls};
use libmodelio::vocabulary::layout::{DType, MAX_BLOCKS};

use self::endpoint::{Endpoint, METRICS_PORT};
pub use self::layer::{
    AGGREGATIONS, CONFIG_VARIABLE, CONSISTENCIES, DTYPE_ALIASES, DTYPES, KEYS, Kind, Layer, NONFINITES,
    REDUCERS, UP, Vocabulary,
};
use crate::checkpoint;
use crate::error::Error;

const DEFAULT_BLOCK_SIZE: u64 = 256 << 10;
const MIN_BLOCK_SIZE: u64 = 64 << 10;
const MAX_BLOCK_SIZE: u64 = 4 << 20;
const DEFAULT_THREADS: usize = 2;
const MAX_THREADS: usize = 256;
const THREADS_OF_MOUNT: &str = "threads serve the filesystem; two suffice for most machines";
const UP_MOUNT: &str = "the last argument is the directory to mount on: gradfs up model.safetensors /mnt/job";
/// Most models of one daemon: each has its own versions in memory.
const MAX_MODELS: usize = crate::fs::node::MAX_MODELS;
/// Most bytes of a name that a directory entry can hold.
const MAX_NAME: usize = 255;

/// Everything `gradfs up` needs to know, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct UpConfig {
    /// Where to mount, as given; not yet looked at.
    pub mountpoint: PathBuf,
    /// The models to serve, at least one, with unique names.
    pub models: Vec<ModelSpec>,
    /// Bytes of a block: a power of two, 64 KiB to 4 MiB.
    pub block_size: u32,
    /// Threads that serve the filesystem, at least one.
    pub threads: usize,
    /// Whether other users may use the mount.
    pub allow_other: bool,
    /// Owner and mode of its files.
    pub permissions: Permissions,
    /// Whether reads may bypass the daemon (FUSE passthrough) where the system allows it.
    pub passthrough: bool,
    /// Where metrics are served, if they are.
    pub metrics: Option<Endpoint>,
    /// Control-file name to text, for what the user gave, plus `reducer` and `consistency` always.
    pub settings: BTreeMap<String, String>,
    /// Control-file name to where its text came from (`--learning-rate`, `GRADFS_LEARNING_RATE`, …).
    pub origins: BTreeMap<String, String>,
}

/// Owner and mode of a mount's files, where they are not those of a mount that only the daemon's user writes to.
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
    /// What it starts from.
    pub source: ModelSource,
}

/// What a model starts from.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelSource {
    /// A safetensors file.
    File(PathBuf),
    /// One flat tensor of zeros.
    Blank {
        /// Its size, a positive multiple of the element size.
        bytes: u64,
        /// Its element type: `F32`, `F64`, `F16` or `BF16`.
        dtype: DType,
    },
}

impl UpConfig {
    /// Merges `layers`, the strongest first, fills in defaults, and checks all of it.
    pub fn merge(layers: &[Layer]) -> Result<UpConfig, Error> {
        let merged = Merged(layers);
        let (settings, origins) = merged.settings()?;
        let block_size = merged.block_size()?;
        Ok(UpConfig {
            mountpoint: merged.mountpoint(UP_MOUNT)?,
            models: merged.models(block_size)?,
            block_size,
            threads: merged.threads(THREADS_OF_MOUNT)?,
            allow_other: merged.switch("allow_other")?,
            permissions: merged.permissions()?,
            passthrough: !merged.switch("no_passthrough")?,
            metrics: merged.metrics()?,
            settings,
            origins,
        })
    }

    /// The settings as a job takes them.
    ///
    /// # Errors
    /// With where the setting that is refused comes from.
    pub fn controls(&self) -> Result<Controls, Error> {
        controls(&self.settings, &self.origins)
    }
}

/// Settings as a job takes them, from texts by name; complaints name the text's origin.
fn controls(texts: &BTreeMap<String, String>, origins: &BTreeMap<String, String>) -> Result<Controls, Error> {
    let settings = texts.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    Controls::default().with_all(settings).map_err(|error| {
        let name = match &error {
            ControlError::Invalid { name, .. } => name,
            ControlError::Unknown(name) => name.as_str(),
            ControlError::Conflict(_) => "",
        };
        match origins.contains_key(name) {
            true => setting_error(origins, name, error.without_name()),
            false => setting_error(origins, name, &error),
        }
    })
}

/// The error that the text of setting `name` is refused because of `why`, naming its origin.
fn setting_error(origins: &BTreeMap<String, String>, name: &str, why: impl Display) -> Error {
    match origins.get(name) {
        Some(origin) => Error::usage(format!("{origin}: {why}")),
        None => Error::usage(why.to_string()),
    }
}

struct Merged<'a>(&'a [Layer]);

impl<'a> Merged<'a> {
    /// The strongest values of `key`, and what to call their origin.
    fn get(&self, key: &str) -> Option<(String, &'a [OsString])> {
        self.0.iter().find_map(|layer| layer.get(key).map(|values| (layer.origin(key), values)))
    }

    /// The strongest text of `key`. Of several in one source the last counts.
    fn text(&self, key: &str) -> Result<Option<(String, &'a str)>, Error> {
        let Some((origin, values)) = self.get(key) else { return Ok(None) };
        let Some(value) = values.last() else { return Ok(None) };
        Ok(Some((origin.clone(), utf8(&origin, value)?.trim())))
    }

    /// The command that tells what can be given.
    fn help(&self) -> &'static str {
        self.0.first().map_or(UP.help, Layer::help)
    }

    fn switch(&self, key: &str) -> Result<bool, Error> {
        match self.text(key)? {
            None => Ok(false),
            Some((_, "true" | "1" | "yes" | "on")) => Ok(true),
            Some((_, "false" | "0" | "no" | "off")) => Ok(false),
            Some((origin, text)) => {
                Err(Error::usage(format!("{origin}: {text:?} is not true or false"))
                    .hint("use true or false"))
            }
        }
    }

    fn metrics(&self) -> Result<Option<Endpoint>, Error> {
        let Some((origin, text)) = self.text("metrics")? else { return Ok(None) };
        Endpoint::parse(&origin, text, METRICS_PORT).map(Some)
    }

    fn threads(&self, what_for: &str) -> Result<usize, Error> {
        let Some((origin, text)) = self.text("threads")? else { return Ok(DEFAULT_THREADS) };
        match text.parse() {
            Ok(threads @ 1..=MAX_THREADS) => Ok(threads),
            _ => {
                Err(Error::usage(format!("{origin}: {text:?} is not a whole number from 1 to {MAX_THREADS}"))
                    .hint(what_for))
            }
        }
    }

    /// Users and groups go by number or name.
    fn permissions(&self) -> Result<Permissions, Error> {
        let user =
            |name: &str| nix::unistd::User::from_name(name).map(|found| found.map(|user| user.uid.as_raw()));
        let group = |name: &str| {
            nix::unistd::Group::from_name(name).map(|found| found.map(|group| group.gid.as_raw()))
        };
        let umask = self.text("umask")?.map(|(origin, text)| match u16::from_str_radix(text, 8) {
            Ok(umask @ 0..=0o777) => Ok(umask),
            _ => Err(Error::usage(format!("{origin}: {text:?} is not an octal number from 0 to 777"))
                .hint("--umask 007 lets the group write, --umask 0 everybody")),
        });
        Ok(Permissions {
            uid: self.id("uid", "user", user)?,
            gid: self.id("gid", "group", group)?,
            umask: umask.transpose()?,
        })
    }

    fn id(
        &self,
        key: &str,
        what: &str,
        named: impl Fn(&str) -> nix::Result<Option<u32>>,
    ) -> Result<Option<u32>, Error> {
        let Some((origin, text)) = self.text(key)? else { return Ok(None) };
        // The highest number means nobody to the kernel.
        if let Ok(id) = text.parse::<u32>()
            && id != u32::MAX
        {
            return Ok(Some(id));
        }
        let found = named(text)
            .map_err(|error| Error::new(format!("{origin}: looking up {text:?}")).caused_by(error))?;
        let missing = || {
            Error::usage(format!("{origin}: there is no {what} {text:?}")).hint("use its name or its number")
        };
        found.map(Some).ok_or_else(missing)
    }

    fn block_size(&self) -> Result<u32, Error> {
        let (origin, bytes) = match self.text("block_size")? {
            None => return Ok(DEFAULT_BLOCK_SIZE as u32),
            Some((origin, text)) => (origin.clone(), size(&origin, text)?),
        };
        if bytes.is_power_of_two() && (MIN_BLOCK_SIZE..=MAX_BLOCK_SIZE).contains(&bytes) {
            Ok(bytes as u32)
        } else {
            Err(Error::usage(format!("{origin}: {bytes} bytes is not a power of two from 64KiB to 4MiB"))
                .hint("use 64KiB, 128KiB, 256KiB (the default), 512KiB, 1MiB, 2MiB or 4MiB"))
        }
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

    /// What the models start from: the files under `key`, or one of `size`, whichever the strongest layer has.
    fn sources(&self, key: &str, block_size: u32, usage: &str) -> Result<Vec<ModelSource>, Error> {
        let chosen = self.0.iter().position(|l| l.get(key).is_some() || l.get("size").is_some());
        let Some(chosen) = chosen else { return Err(Error::usage("no model is given").hint(usage)) };
        let layer = &self.0[chosen];
        Ok(match (layer.get(key), layer.get("size")) {
            (Some(_), Some(_)) => {
                let message = format!("model files and {} exclude each other", layer.origin("size"));
                return Err(Error::usage(message).hint("a model is loaded from a file, or blank"));
            }
            (Some(files), None) => {
                // What a weaker source says about blank models is moot here; what this or a stronger
                // one says is a mistake.
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

    fn blank(&self, block_size: u32) -> Result<ModelSource, Error> {
        let (dtype, element) = match self.text("dtype")? {
            None => (DType::F32, 4),
            Some((origin, text)) => match element_type(text) {
                Some("f32") => (DType::F32, 4),
                Some("f64") => (DType::F64, 8),
                Some("f16") => (DType::F16, 2),
                Some("bf16") => (DType::BF16, 2),
                _ => return Err(not_a_word(&origin, text, DTYPES)),
            },
        };
        let (origin, text) = self.text("size")?.unwrap_or_default();
        let bytes = size(&origin, text)?;
        if bytes == 0 {
            return Err(Error::usage(format!("{origin}: a model cannot be empty")).hint("try 1GiB"));
        }
        if bytes % element != 0 {
            let below = bytes - bytes % element;
            let near = if below == 0 { element } else { below };
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
        let given = self.get("name");
        if let Some((origin, names)) = &given
            && names.len() != sources.len()
        {
            let message = format!("{origin}: {} name(s) for {} model(s)", names.len(), sources.len());
            return Err(Error::usage(message).hint("give one name per model, in the same order"));
        }
        let stems: Vec<Option<String>> = sources
            .iter()
            .map(|source| match source {
                ModelSource::File(path) if given.is_none() => checkpoint::name_of(path),
                _ => None,
            })
            .collect();
        let mut models = Vec::with_capacity(sources.len());
        let mut seen = BTreeSet::new();
        for (i, source) in sources.into_iter().enumerate() {
            let name = match (&given, &source) {
                (Some((origin, names)), _) => utf8(origin, &names[i])?.to_owned(),
                (None, ModelSource::Blank { .. }) => "model".to_owned(),
                (None, ModelSource::File(path)) => {
                    let own = checkpoint::name_of(path);
                    // Checkpoints all call their file the same: then their folders tell them apart.
                    let name = if own.is_some() && stems.iter().filter(|stem| **stem == own).count() > 1 {
                        checkpoint::folder_of(path)
                    } else {
                        own
                    };
                    name.ok_or_else(|| {
                        Error::usage(format!("no name can be made from {}", path.display()))
                            .hint("choose one with --name")
                    })?
                }
            };
            if let Some(fault) = name_fault(&name) {
                return Err(Error::usage(format!("{name:?} cannot name a model: {fault}"))
                    .hint("the name becomes a directory under the mount; choose one with --name"));
            }
            if !seen.insert(name.clone()) {
                return Err(Error::usage(format!("two models are called {name}"))
                    .hint("choose different names with --name, once per model"));
            }
            models.push(ModelSpec { name, source });
        }
        Ok(models)
    }

    #[allow(clippy::type_complexity)]
    fn settings(&self) -> Result<(BTreeMap<String, String>, BTreeMap<String, String>), Error> {
        let mut settings: BTreeMap<_, _> =
            [("reducer", "sgd"), ("consistency", "sync")].map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        let mut origins = BTreeMap::new();
        for key in KEYS.iter().filter(|key| key.setting) {
            let Some((origin, text)) = self.text(key.name)? else { continue };
            check_setting(&origin, text, key.kind, self.help())?;
            let text = match (key.kind, self.get(key.name)) {
                // One a line.
                (Kind::Names, Some((_, all))) => {
                    let all: Result<Vec<&str>, Error> = all.iter().map(|one| utf8(&origin, one)).collect();
                    all?.join("\n")
                }
                _ => text.to_owned(),
            };
            settings.insert(key.name.to_owned(), text);
            origins.insert(key.name.to_owned(), origin);
        }
        let learners = settings.get("learners").and_then(|text| text.parse::<u64>().ok()).unwrap_or(1);
        let min_learners = settings.get("min_learners").and_then(|text| text.parse::<u64>().ok());
        if let Some(min_learners) = min_learners.filter(|min| *min > learners) {
            let origin = &origins["min_learners"];
            return Err(Error::usage(format!("{origin}: {min_learners} is more than there are learners"))
                .hint(format!("learners is {learners}: raise it, or lower min_learners")));
        }
        Ok((settings, origins))
    }
}

fn check_setting(origin: &str, text: &str, kind: Kind, help: &str) -> Result<(), Error> {
    let wanted = match kind {
        Kind::Whole(least) => match text.parse::<u64>() {
            Ok(number) if number >= least => return Ok(()),
            _ => format!("a whole number, {least} or more"),
        },
        Kind::Number => match text.parse::<f64>() {
            Ok(number) if number.is_finite() => return Ok(()),
            _ => "a finite number".into(),
        },
        Kind::Seconds => match text.parse::<f64>() {
            Ok(number) if number.is_finite() && number >= 0.0 => return Ok(()),
            _ => "a finite number of seconds, 0 or more".into(),
        },
        Kind::Consistency => match text.parse::<Consistency>() {
            Ok(_) => return Ok(()),
            Err(error) => return Err(Error::usage(format!("{origin}: {text:?} is {error}"))),
        },
        Kind::Word(words) if !words.iter().any(|word| word.eq_ignore_ascii_case(text)) => {
            return Err(not_a_word(origin, text, words));
        }
        _ => return Ok(()),
    };
    Err(Error::usage(format!("{origin}: {text:?} is not {wanted}"))
        .hint(format!("{help} tells what each setting does, and its default")))
}

/// The element type that `text` names, in any case, as `f32`, `float32` or `torch.float32`.
fn element_type(text: &str) -> Option<&'static str> {
    let plain = text.to_ascii_lowercase();
    let plain = plain.strip_prefix("torch.").unwrap_or(&plain);
    let known = DTYPE_ALIASES.iter().find(|(name, aliases)| *name == plain || aliases.contains(&plain));
    known.map(|(name, _)| *name)
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
