//! Mounting models and serving them until told to stop: the common part of `gradfs up` and `gradfs mount`.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use libmodelio::client::ShardView;

use crate::background::Ready;
use crate::config::{MAX_MODELS, Mounting, Permissions};
use crate::error::{self, Error};
use crate::fs::Access;
use crate::fs::model_tree::Kernel;
use crate::fs::node;
use crate::fuse;
use crate::fuse::calls::Calls;
use crate::lending::Lending;
use crate::memory;
use crate::metrics;
use crate::mountpoint::Mountpoint;
use crate::nbd;
use crate::session::model::Model;
use crate::signals;

const _: () = assert!(MAX_MODELS <= node::MAX_MODELS, "inode numbers have room for as many models");

/// How long open requests may take to end after the mount is detached.
const FAREWELL: Duration = Duration::from_secs(2);

/// How often it is looked whether models have come or gone, unless somebody asks for one that is not there.
const LOOKS: Duration = Duration::from_secs(5);
/// The time between two such looks at least.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// Models to serve.
pub struct Loaded {
    /// Those that are there.
    pub models: Vec<Arc<Model>>,
    /// Who brings those that come later, and knows of those that go, if they can.
    pub later: Option<Box<dyn Later>>,
    /// What is left to do once nothing is mounted any more. The models live until then.
    pub at_end: Option<Box<dyn FnOnce() -> Result<(), Error>>>,
}

/// Knows which models come and go.
pub trait Later: Send {
    /// The models that have come since, `room` says whether they can be shown, and those of `shown` that are gone. May
    /// wait for others.
    fn look(&mut self, shown: &[Arc<Model>], room: bool) -> Changes;
}

/// Models that have come, and those that are gone.
#[derive(Default)]
pub struct Changes {
    /// To be shown.
    pub come: Vec<Arc<Model>>,
    /// Of those that are shown.
    pub gone: Vec<Arc<Model>>,
    /// Of those that are shown, each with the one that takes its place.
    pub replaced: Vec<(Arc<Model>, Arc<Model>)>,
}

/// Mounts the models that `load` brings and serves them until told to stop.
///
/// # Errors
/// Anything that keeps it from mounting; nothing is left mounted then.
pub fn serve(
    mounting: &Mounting,
    ready: Ready,
    load: impl FnOnce() -> Result<Loaded, Error>,
) -> Result<(), Error> {
    let stops = signals::install()?;
    memory::raise_file_limit();
    // These first: a mistake there should not cost the loading of a model.
    let bound = mounting.metrics.as_ref().map(metrics::bind).transpose()?;
    let bound_nbd = mounting.nbd.as_ref().map(|at| nbd::bind(at, mounting.insecure)).transpose()?;
    fuse::access::check(mounting.allow_other)?;
    let mountpoint = Mountpoint::prepare(&mounting.mountpoint)?;
    let detach = mountpoint.detacher();
    stops.before_forced_exit(move || {
        if let Err(error) = detach() {
            tracing::error!("{}", error::report(&error));
        }
    });
    let hindrance = if !mounting.no_passthrough { no_passthrough() } else { None };
    let passthrough = !mounting.no_passthrough && hindrance.is_none();
    let Loaded { models, later, at_end } = load()?;
    let Permissions { uid, gid, umask } = mounting.permissions;
    let uid = uid.unwrap_or_else(|| nix::unistd::geteuid().as_raw());
    let gid = gid.unwrap_or_else(|| nix::unistd::getegid().as_raw());
    let started = Calls::start(models.clone(), passthrough, Access { owner: (uid, gid), umask })
        .map_err(|error| Error::new("cannot start the filesystem's threads").caused_by(error))?;
    let calls = Arc::clone(&started.calls);
    let lending = Lending::start(&calls.fs)
        .map_err(|error| Error::new("cannot lend the memory of versions").caused_by(error))?;
    let shown = || {
        let fs = Arc::clone(&calls.fs);
        move || fs.shown().iter().map(|tree| Arc::clone(&tree.model)).collect::<Vec<_>>()
    };
    let of_metrics = shown();
    let scraped = bound.map(|bound| bound.serve(move || metrics::mount::page(&of_metrics()))).transpose()?;
    let devices = bound_nbd.map(|bound| bound.serve(Box::new(shown()))).transpose()?;
    let stopper = stops.stopper();
    let (ended, gone) = mpsc::channel();
    let mounts = || {
        let mounted = fuse::mount(Arc::clone(&calls), mountpoint.path(), mounting).map_err(|error| {
            let hint = fuse::access::hint(&error);
            Error::new(format!("cannot mount on {}", mountpoint.path().display())).caused_by(error).hint(hint)
        })?;
        calls.mounted_as(mountpoint.device());
        if let Some(later) = later {
            follow(&calls, Arc::clone(&mounted.kernel), later).map_err(|error| {
                Error::new("cannot start the thread that looks for models").caused_by(error)
            })?;
        }
        started
            .run_chores(Arc::clone(&mounted.kernel))
            .map_err(|error| Error::new("cannot start the filesystem's threads").caused_by(error))?;
        let serving = mounted.serve(move || {
            let _ = ended.send(());
            stopper.stop("the mount is gone");
        });
        serving.map_err(|error| Error::new("cannot start the FUSE threads").caused_by(error))
    };
    if let Err(error) = mounts() {
        mountpoint.detach()?;
        return Err(error);
    }
    if let Some(why) = hindrance {
        tracing::warn!(
            "{why}: weights are read through the daemon (--no-passthrough says that this is meant)"
        );
    }
    let answers = mountpoint.await_answer().and_then(|()| {
        let served: [Option<&dyn fmt::Display>; 2] =
            [scraped.as_ref().map(|it| it as _), devices.as_ref().map(|it| it as _)];
        announce(&models, &mountpoint, passthrough, &served, &ready);
        ready.announce()
    });
    // A model that is deleted is not kept here.
    drop(models);
    if let Err(error) = answers {
        mountpoint.detach()?;
        return Err(error);
    }
    let why = stops.wait();
    tracing::info!("stopping: {why}");
    drop((scraped, devices, lending));
    calls.shut_down();
    mountpoint.detach()?;
    // Files may still be open; their programs get errors once the process is gone.
    let _ = gone.recv_timeout(FAREWELL);
    // The models live until here.
    at_end.map_or(Ok(()), |at_end| at_end())
}

/// Has a thread of its own look for models that come and go: it may wait for others, and the kernel's requests never
/// do.
fn follow(calls: &Arc<Calls>, kernel: Arc<dyn Kernel>, mut later: Box<dyn Later>) -> io::Result<()> {
    // One request is as good as many.
    let (wake, asked) = mpsc::sync_channel(1);
    calls.fs.on_unknown(wake);
    let calls = Arc::downgrade(calls);
    let look = move || {
        loop {
            std::thread::sleep(BETWEEN_LOOKS);
            if asked.recv_timeout(LOOKS) == Err(mpsc::RecvTimeoutError::Disconnected) {
                return;
            }
            let shown = calls.upgrade().map(|calls| (calls.fs.shown(), calls.fs.has_room()));
            let Some((shown, room)) = shown else { return };
            let shown: Vec<Arc<Model>> = shown.iter().map(|tree| Arc::clone(&tree.model)).collect();
            let Changes { come, gone, replaced } = later.look(&shown, room);
            drop(shown);
            let Some(calls) = calls.upgrade() else { return };
            gone.iter().for_each(|model| calls.remove(model, &*kernel));
            drop(gone);
            for (before, model) in replaced {
                calls.replace(&before, model, &*kernel);
            }
            for model in come {
                let name = model.name.clone();
                match calls.add(model) {
                    true => tracing::info!(model = name, "shown from now on"),
                    false => {
                        tracing::warn!(model = name, "not shown: {MAX_MODELS} models have been: mount again")
                    }
                }
            }
            calls.end_unused(&*kernel);
        }
    };
    std::thread::Builder::new().name("gradfs-models".into()).spawn(look).map(drop)
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

/// Why bytes do not go by RDMA to shards that take it, each reason once.
fn not_by_rdma(shards: &[ShardView]) -> String {
    let reasons: BTreeSet<&str> = shards.iter().filter_map(|shard| shard.no_rdma.as_deref()).collect();
    reasons.iter().map(|why| format!(", no rdma: {why}")).collect()
}

/// Says what is mounted where. Printed when everything works, so that scripts can wait for it.
fn announce(
    models: &[Arc<Model>],
    mountpoint: &Mountpoint,
    passthrough: bool,
    served: &[Option<&dyn fmt::Display>],
    ready: &Ready,
) {
    for model in models {
        let controls = model.job.controls();
        let get = |name| controls.get(name).unwrap_or_default();
        println!(
            "gradfs: {}/{}: {} bytes, {} tensors; reducer {}, {}, {} learner(s); {} shard{}; reads {}",
            mountpoint.path().display(),
            model.name,
            model.layout.size(),
            model.layout.tensors().len(),
            get("reducer"),
            get("consistency"),
            get("learners"),
            model.job.kind(),
            not_by_rdma(&model.job.status().shards),
            if passthrough { "bypass the daemon" } else { "go through the daemon" },
        );
    }
    for served in served.iter().flatten() {
        println!("gradfs: {served}");
    }
    let by_command = format!("gradfs unmount {}", mountpoint.path().display());
    let by_key = format!("Ctrl-C or {by_command}");
    println!("gradfs: {}", ready.announcement(&by_key, &by_command));
}
