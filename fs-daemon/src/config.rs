//! The configuration of commands, merged from flags, environment and file, and checked.
//!
//! The options of the command line are the keys of all sources. Each source is a [`Layer`] of texts by key. They are
//! merged by precedence, and then parsed once, as a command line.

pub mod cluster;
pub mod endpoint;
mod job;
mod layer;
mod mounting;
pub mod rdma;
pub mod registry;
pub mod snapshots;
mod torch_state;
mod values;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::LazyLock;

use clap::builder::TypedValueParser as _;
use clap::{Arg, ArgMatches, Args, ValueHint};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::layout::{DType, MAX_BLOCKS};
use ps_backend::device::DeviceName;
use ps_backend::state_copies::StateCopies;
use strum::VariantNames as _;

use self::job::{Settings, Shown};
pub use self::layer::{Layer, explained};
use self::layer::{Vocabulary, merged, options_of, strongest};
pub use self::mounting::{Mounting, NbdAddress, Permissions};
use self::values::{DTYPES, block_size, device, element_type, size, word};
use crate::checkpoint;
use crate::error::Error;

const UP_MOUNT: &str = "the last argument is the directory to mount on: gradfs up model.safetensors /mnt/job";
/// Most models of one mount: each has its own versions in memory.
pub const MAX_MODELS: usize = 256;
/// Most bytes of a name that a directory entry can hold.
const MAX_NAME: usize = 255;

/// Options of the commands that run until they are told to stop.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct BackgroundArgs {
    /// Return when everything answers, and go on as a daemon. Its log is the file --log-file, or one in
    /// /var/log/gradfs (without root: ~/.local/state/gradfs)
    #[arg(long)]
    pub background: bool,
}

/// The arguments of `gradfs up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Models to serve: safetensors files, or directories of Hugging Face checkpoints (or their index); then the
    /// empty directory to mount on
    #[arg(value_name = "MODEL.safetensors... MOUNT")]
    models: Vec<PathBuf>,
    /// TOML file with the same options as keys
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Models")]
    blank: BlankArgs,
    #[command(flatten, next_help_heading = "Models")]
    snapshot: FromArgs,
    /// Directory of a model, once per model [default: the file's name; `model` if blank]
    #[arg(long, value_name = "NAME")]
    name: Vec<String>,

    #[command(flatten)]
    settings: Settings,

    /// Keep the job's snapshots in this directory, or s3://bucket/prefix, gs:// or az://, and go on from the newest if there
    /// is one; what else is said of the model is for the first time
    #[arg(long, value_name = "DIR|URL", value_hint = ValueHint::AnyPath, help_heading = "Models")]
    state: Option<PathBuf>,

    #[command(flatten, next_help_heading = "Daemon")]
    of_state: StateArgs,
    #[command(flatten, next_help_heading = "Daemon")]
    pub background: BackgroundArgs,
    /// Show what the models take of this machine's memory, and mount nothing; fails if it is not there
    #[arg(long, conflicts_with = "background")]
    pub dry_run: bool,
    #[command(flatten)]
    mounting: Mounting,
}

/// The shape of a model that is not loaded.
#[derive(Args, Debug)]
struct BlankArgs {
    /// Start from a blank model of this size, not from files: 1GiB, 1048576
    #[arg(long, value_name = "SIZE", value_parser = size)]
    size: Option<u64>,
    /// Element type of the blank model [default: f32]
    #[arg(long, value_parser = Shown(DTYPES).try_map(|text: String| element_type(&text)))]
    dtype: Option<DType>,
    /// Unit of transfer, locking and versioning: a power of two, 64KiB to 4MiB
    #[arg(long, value_name = "SIZE", default_value = "256KiB", value_parser = block_size)]
    block_size: u32,
}

/// The memory of optimizers.
#[derive(Args, Debug)]
struct StateArgs {
    /// Copies of optimizer state and fp32 masters: single takes less memory; double computes a block as soon as its last
    /// contribution has come
    #[arg(long, default_value = "single", value_parser = word::<StateCopies>(StateCopies::VARIANTS))]
    state_copies: StateCopies,
    /// Device that computes new versions and has the optimizer state: cpu, or cuda:0 for the first NVIDIA GPU
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_hint = ValueHint::Other, value_parser = device)]
    device: DeviceName,
}

/// The snapshot that a model goes on from.
#[derive(Args, Debug)]
struct FromArgs {
    /// Go on from this snapshot, a directory of gradfs save or a store of gradfs snapshot: with its model and settings,
    /// unless others are given. A model that is named besides has to be the snapshot's
    #[arg(long, value_name = "DIR|URL", value_hint = ValueHint::AnyPath)]
    from: Option<PathBuf>,
}

/// The vocabulary of `gradfs up`.
pub static UP: LazyLock<Vocabulary> = LazyLock::new(|| {
    let mount = Arg::new("mount").value_hint(ValueHint::DirPath);
    Vocabulary::new(options_of::<UpArgs>().into_iter().chain([mount]), "gradfs up --help")
});

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
    /// The job has the store of its snapshots, whoever has had it before.
    pub owns_store: bool,
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
        let UpArgs { blank, settings, name, of_state: state, mounting, .. } = merged(layers)?;
        let controls = settings.controls(layers)?;
        let (device, state) = state.checked()?;
        let mounting = mounting.at(layers, UP_MOUNT, false)?;
        let usage = "name safetensors files before the mountpoint, or make a blank one with --size 1GiB";
        let sources = blank.sources(layers, "models", usage)?;
        if sources.len() > MAX_MODELS {
            let message = format!("{} models are more than a daemon serves ({MAX_MODELS})", sources.len());
            return Err(Error::usage(message).hint("start several daemons"));
        }
        let models = named(sources, name, layers)?;
        let (block_size, owns_store) = (blank.block_size, strongest(layers, "state").is_some());
        Ok(UpConfig { mounting, models, block_size, controls, state, device, owns_store })
    }

    /// The configuration that a command line, the environment `variables` and the file they name ask for.
    pub fn of(
        given: &ArgMatches,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<UpConfig, Error> {
        let mut layers = UP.layers(given, variables)?;
        // The last of the paths is the directory to mount on.
        if let Some((mount, models)) = layers[0].take("models").split_last() {
            layers[0].set("mount", [mount]);
            layers[0].set("models", models);
        }
        let config = UpConfig::merge(&layers)?;
        if !config.controls.snapshots.to.is_empty() && config.models.len() > 1 {
            let what = "one place is for the snapshots of one model, and several are named";
            return Err(Error::usage(what).hint("start a daemon for each"));
        }
        Ok(config)
    }
}

impl StateArgs {
    /// The device that computes versions, and the copies of optimizer state that the host's memory has otherwise.
    fn checked(self) -> Result<(DeviceName, StateCopies), Error> {
        let StateArgs { device, state_copies: state } = self;
        if matches!(device, DeviceName::Cuda(_)) && state == StateCopies::Double {
            let what = "with --state-copies double: a GPU has one copy of optimizer state";
            return Err(Error::usage(format!("--device {device} {what}")).hint("leave one of them out"));
        }
        Ok((device, state))
    }
}

impl BlankArgs {
    /// The sources of the models: the files under `key`, or a blank model, whichever the strongest of `layers` has.
    fn sources(&self, layers: &[Layer], key: &str, usage: &str) -> Result<Vec<ModelSource>, Error> {
        let first = |keys: &[&str]| layers.iter().position(|l| keys.iter().any(|key| l.get(key).is_some()));
        // A weaker source may have it for blank models.
        let no_dtype = |chosen: usize, of: &str, what: &str| match strongest(&layers[..=chosen], "dtype") {
            None => Ok(()),
            Some((origin, _)) => Err(Error::usage(format!("{origin} is of no use with {of}"))
                .hint(format!("the tensors of a {what} have their own types; leave it out"))),
        };
        if let (Some(chosen), Some((origin, [.., dir]))) = (first(&["from"]), strongest(layers, "from")) {
            if let Some((size, _)) = strongest(layers, "size") {
                return Err(Error::usage(format!("{origin} and {size} exclude each other"))
                    .hint("a model goes on from a snapshot, or is blank"));
            }
            no_dtype(chosen, &origin, "snapshot")?;
            let expected = match strongest(layers, key) {
                None => None,
                Some((_, [file])) => Some(file.into()),
                Some(_) => {
                    return Err(Error::usage("a snapshot is of one model, and several are named")
                        .of(&origin)
                        .hint("leave the models out: the snapshot has all of its model"));
                }
            };
            return Ok(vec![ModelSource::Snapshot { dir: dir.into(), expected }]);
        }
        let chosen = first(&[key, "size"]).ok_or_else(|| Error::usage("no model is given").hint(usage))?;
        let layer = &layers[chosen];
        match (layer.get(key), layer.get("size")) {
            (Some(_), Some(_)) => {
                let message = format!("model files and {} exclude each other", layer.origin("size"));
                Err(Error::usage(message).hint("a model is loaded from a file, or blank"))
            }
            (Some(files), None) => {
                no_dtype(chosen, "model files", "file")?;
                Ok(files.iter().map(|file| ModelSource::File(file.into())).collect())
            }
            (None, _) => Ok(vec![self.blank().map_err(|error| error.of(&layer.origin("size")))?]),
        }
    }

    fn blank(&self) -> Result<ModelSource, Error> {
        let (bytes, dtype) = (self.size.unwrap_or_default(), self.dtype.unwrap_or(DType::F32));
        let element = dtype.size_bytes().map_or(1, |bytes| bytes as u64);
        if bytes == 0 {
            return Err(Error::usage("a model cannot be empty").hint("try 1GiB"));
        }
        if bytes % element != 0 {
            let near = (bytes - bytes % element).max(element);
            let message = format!("{bytes} bytes is not a multiple of the element size, {element}");
            return Err(Error::usage(message).hint(format!("{near} bytes is")));
        }
        let block_size = self.block_size;
        if bytes.div_ceil(u64::from(block_size)) > u64::from(MAX_BLOCKS) {
            let message = format!("{bytes} bytes is more than {MAX_BLOCKS} blocks of {block_size} bytes");
            return Err(Error::usage(message).hint("choose a larger --block-size"));
        }
        Ok(ModelSource::Blank { bytes, dtype })
    }
}

fn named(sources: Vec<ModelSource>, names: Vec<String>, layers: &[Layer]) -> Result<Vec<ModelSpec>, Error> {
    let names = match strongest(layers, "name") {
        Some((origin, _)) if names.len() != sources.len() => {
            let message = format!("{} name(s) for {} model(s)", names.len(), sources.len());
            return Err(Error::usage(message).of(&origin).hint("give one name per model, in the same order"));
        }
        Some(_) => names,
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

#[cfg(test)]
mod tests;
