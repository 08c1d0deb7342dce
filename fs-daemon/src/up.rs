//! `gradfs up`: load the models, mount, serve until told to stop.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::layout::ModelLayout;
use libmodelio::safetensors_file;
use libmodelio::transport::Device;
use ps_backend::controls::Controls;
use ps_backend::embedded::{EmbeddedShard, InProcess};

use crate::config::{ModelSource, ModelSpec, UpConfig};
use crate::error::{self, Error};
use crate::fs::Fs;
use crate::fs::model::{Model, OWN_LEARNER};
use crate::fuse::{self, MountSettings};
use crate::memory;
use crate::mountpoint::Mountpoint;
use crate::progress::Progress;
use crate::signals;

/// How long open requests may take to end after the mount is detached.
const FAREWELL: Duration = Duration::from_secs(2);

/// Bytes read from a model file at once.
const CHUNK: usize = 8 << 20;

/// Runs the daemon described by `config` until it is told to stop.
///
/// # Errors
/// Anything that keeps it from mounting; nothing is left mounted then.
pub fn run(config: UpConfig) -> Result<(), Error> {
    let stops = signals::install()?;
    let controls = config.controls()?;
    memory::raise_file_limit();
    // The mountpoint first: a mistake there should not cost the loading of a model.
    let mountpoint = Mountpoint::prepare(&config.mountpoint)?;
    let detach = mountpoint.detacher();
    stops.before_forced_exit(move || {
        if let Err(error) = detach() {
            tracing::error!("{}", error::report(&error));
        }
    });
    let hindrance = if config.passthrough { no_passthrough() } else { None };
    let passthrough = config.passthrough && hindrance.is_none();
    let mut models = Vec::new();
    for (index, spec) in config.models.iter().enumerate() {
        let index = u8::try_from(index).map_err(|_| Error::usage("more than 256 models"))?;
        models.push(Arc::new(load(spec, index, &config, &controls)?));
    }
    let owner = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    let started = Fs::start(models, passthrough, owner)
        .map_err(|error| Error::new("cannot start the filesystem's threads").caused_by(error))?;
    let fs = Arc::clone(&started.fs);
    let settings = MountSettings { threads: config.threads, allow_other: config.allow_other };
    let mounted = fuse::mount(Arc::clone(&fs), mountpoint.path(), &settings).map_err(|error| {
        Error::new(format!("cannot mount on {}", mountpoint.path().display())).caused_by(error).hint(
            "gradfs needs /dev/fuse, and root or the fusermount3 program (Debian: apt-get install fuse3)",
        )
    })?;
    let kernel = Arc::clone(&mounted.kernel);
    started
        .run_chores(kernel)
        .map_err(|error| Error::new("cannot start the filesystem's threads").caused_by(error))?;
    let stopper = stops.stopper();
    let (ended, gone) = std::sync::mpsc::channel();
    let serving = mounted.serve(move || {
        let _ = ended.send(());
        stopper.stop("the mount is gone");
    });
    serving.map_err(|error| Error::new("cannot start the FUSE threads").caused_by(error))?;
    if let Some(why) = hindrance {
        tracing::warn!(
            "{why}: weights are read through the daemon (--no-passthrough says that this is meant)"
        );
    }
    announce(&fs, &mountpoint, passthrough);
    let why = stops.wait();
    tracing::info!("stopping: {why}");
    fs.shut_down();
    mountpoint.detach()?;
    // Files may still be open; their programs get errors once the process is gone.
    let _ = gone.recv_timeout(FAREWELL);
    Ok(())
}

/// Why reads cannot bypass the daemon, if they cannot. Everything works through it as well, slower.
fn no_passthrough() -> Option<&'static str> {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    if bits & (1 << CAP_SYS_ADMIN) == 0 {
        return Some("no CAP_SYS_ADMIN (run as root)");
    }
    // The capability has to be that of the whole machine, not of a user namespace.
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    if map.split_whitespace().ne(["0", "0", "4294967295"]) {
        return Some("CAP_SYS_ADMIN holds only in a user namespace");
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < (6, 9) { Some("the kernel is older than 6.9") } else { None }
}

fn load(spec: &ModelSpec, index: u8, config: &UpConfig, controls: &Controls) -> Result<Model, Error> {
    let name = &spec.name;
    let failed = |error: std::io::Error| Error::new(format!("model {name}")).caused_by(error);
    let memory = |error: std::io::Error| {
        Error::new(format!("model {name}: not enough memory"))
            .caused_by(error)
            .hint("a model takes its size at least twice, and optimizer state twice more per moment")
    };
    let mut metadata = BTreeMap::new();
    let (layout, plan) = match &spec.source {
        ModelSource::Blank { bytes, dtype } => {
            memory::check_size(name, *bytes, controls)?;
            let layout = ModelLayout::blank(*bytes, *dtype, config.block_size);
            (layout.map_err(|error| Error::usage(format!("model {name}: {error}")))?, None)
        }
        ModelSource::File(path) => {
            let shown = path.display();
            let bad = |error: safetensors_file::ModelFileError| {
                Error::new(format!("cannot load {shown}")).caused_by(error)
            };
            let file = File::options()
                .read(true)
                // Opening a FIFO would wait for its writer; what is not a file is refused by the reader.
                .custom_flags(libc::O_NONBLOCK)
                .open(path)
                .map_err(|error| Error::new(format!("cannot open {shown}")).caused_by(error))?;
            let header = safetensors_file::read_header(&file).map_err(bad)?;
            let (layout, ranges) = safetensors_file::plan_load(&header, config.block_size).map_err(bad)?;
            metadata = header.metadata;
            (layout, Some((file, ranges)))
        }
    };
    memory::check(name, &layout, controls)?;
    let shard = EmbeddedShard::new(Arc::new(layout), controls.clone(), config.threads).map_err(memory)?;
    if let (Some((file, ranges)), Some(target)) = (plan, shard.initial()) {
        let progress = Progress::bytes(shard.layout().size(), format!("loading {name}"));
        for range in ranges {
            let mut done = 0;
            while done < range.len {
                let len = (range.len - done).min(CHUNK as u64) as usize;
                target
                    .fill_from(&file, range.file_offset + done, (range.flat_offset + done) as usize, len)
                    .map_err(failed)?;
                done += len as u64;
                progress.inc(len as u64);
            }
        }
        progress.finish();
    }
    shard.initialised().map_err(memory)?;
    shard.warm_up();
    let device: Arc<dyn Device> = Arc::new(InProcess::new(Arc::clone(&shard)));
    Model::new(name.clone(), index, shard, device, metadata, OWN_LEARNER.to_owned())
        .map_err(|error| Error::new(format!("model {name}: {error}")))
}

/// Says what is mounted where. Printed when everything works, so that scripts can wait for it.
fn announce(fs: &Fs, mountpoint: &Mountpoint, passthrough: bool) {
    let mut out = std::io::stdout().lock();
    for model in fs.models() {
        let controls = model.job.controls();
        let get = |name| controls.get(name).unwrap_or_default();
        let _ = writeln!(
            out,
            "gradfs: {}/{}: {} bytes, {} tensors; reducer {}, {}, {} learner(s); {} shard; reads {}",
            mountpoint.path().display(),
            model.name,
            model.layout.size(),
            model.layout.tensors().len(),
            get("reducer"),
            get("consistency"),
            get("learners"),
            model.device.kind(),
            if passthrough { "bypass the daemon" } else { "go through the daemon" },
        );
    }
    let _ = writeln!(out, "gradfs: ready (Ctrl-C or gradfs unmount {} ends it)", mountpoint.path().display());
    let _ = out.flush();
}
