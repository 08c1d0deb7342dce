//! A model, and versions of it that stay unchanged.

use std::ffi::{c_char, c_int};
use std::os::fd::IntoRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libmodelio::explained::detail;
use libmodelio::{
    ClientOptions, ContributeError, Contributor, EtcdUrl, Event, Job, Reader, ShardError, TransportChoice,
    Version, connect, wait_for,
};
use nix::errno::Errno;
use parking_lot::{Condvar, Mutex};

use crate::handles::{Handle, Open, check_process, either, get, open};
use crate::learner::Learner;
use crate::outcome::{Failure, Outcome, answer, check_place, done, store, string, timeout};

/// The registry's port where a URL names none.
const DEFAULT_PORT: u16 = 7070;
/// How a URL begins.
const SCHEME: &str = "gradfs://";

/// A connection to a model.
pub(crate) struct Model {
    pub job: Arc<Job>,
    published: Arc<(Mutex<()>, Condvar)>,
}

impl Model {
    /// An error of a call, in words of the model.
    pub(crate) fn explained(&self, error: impl Into<ContributeError>) -> Failure {
        let error = error.into();
        let detail = detail(&self.job, &error);
        let failure = Failure::from(error);
        Failure { text: failure.text + &detail, ..failure }
    }
}

impl Open for Model {}

impl Open for Weights {}

impl Drop for Model {
    fn drop(&mut self) {
        self.job.shut_down();
    }
}

/// A version that is held open.
pub(crate) struct Weights {
    pub reader: Reader,
    /// Its learners must not leave before it is closed.
    model: Arc<Model>,
}

/// The options of a connection. Fill it with zeros first: a zero, or NULL, is the default.
#[repr(C)]
pub struct ModelioOptions {
    /// "auto" (the default), "tcp", "shm" or "rdma".
    pub transport: *const c_char,
    /// Threads that move bytes (2).
    pub threads: u32,
    /// The longest wait for the registry, the shards and the first version, in milliseconds (10,000).
    pub connect_timeout_ms: u32,
}

/// A version that is held open.
#[repr(C)]
pub struct ModelioVersion {
    /// The bytes, laid out as `layout` says. They stay unchanged until the handle is closed.
    pub data: *const u8,
    /// Their number.
    pub size: u64,
    /// The number of the version.
    pub version: u64,
    /// The life of the model that it is a version of. A restored job begins another one, and goes on counting.
    pub epoch: u64,
}

/// Connects to a model without a mount. `url` is "gradfs://HOST[:PORT]/MODEL", the place of the registry and the model's
/// name; the port is 7070 if none is given. It is "etcd://A:2379,B:2379[/PREFIX]/MODEL" if the registry is in an
/// etcd. Returns when a first version is here.
///
/// -EINVAL for another URL, -ENOENT for no such model, -EHOSTUNREACH if nobody answers there, -EPROTONOSUPPORT if its
/// shards cannot be reached by `transport`.
///
/// # Safety
/// `url` is a string; `options` is NULL or points to options; `model` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_connect(
    url: *const c_char,
    options: *const ModelioOptions,
    model: *mut Handle,
) -> c_int {
    // SAFETY: the caller's promises, as for all below.
    let url =
        check_place(model).and_then(|()| check_process()).and_then(|()| unsafe { string(url, "the URL") });
    let connected = url.and_then(|url| {
        // SAFETY: as above.
        let options = unsafe { client_options(options) }?;
        let (registry, name) = parsed(url)?;
        let job = connect(&registry, name, options)?;
        let published: Arc<(Mutex<()>, Condvar)> = Arc::default();
        let bell = Arc::clone(&published);
        job.subscribe(Box::new(move |event| {
            if let Event::Published(_) = event {
                drop(bell.0.lock());
                bell.1.notify_all();
            }
        }));
        open(Model { job, published })
    });
    // SAFETY: as above.
    done(connected.map(|handle| unsafe { store(model, handle) }))
}

fn parsed(url: &str) -> Outcome<(String, &str)> {
    let wrong = || {
        let what = format!(
            "{url:?} is no URL of a model: write {SCHEME}HOST:PORT/MODEL, or etcd://HOST:PORT,.../PREFIX/MODEL"
        );
        Failure::invalid(what)
    };
    if EtcdUrl::is_meant(url) {
        return match url.rsplit_once('/') {
            Some((registry, name)) if !registry.ends_with('/') && !name.is_empty() => {
                Ok((registry.to_owned(), name))
            }
            _ => Err(wrong()),
        };
    }
    let (place, name) = url.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).ok_or_else(wrong)?;
    if place.is_empty() || name.is_empty() || name.contains('/') {
        return Err(wrong());
    }
    // An IPv6 address has colons in brackets.
    let has_port = place.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
    Ok((if has_port { place.to_owned() } else { format!("{place}:{DEFAULT_PORT}") }, name))
}

/// # Safety
/// `options` is null, or points to options.
unsafe fn client_options(options: *const ModelioOptions) -> Outcome<ClientOptions> {
    // SAFETY: the caller's promise.
    let Some(given) = (unsafe { options.as_ref() }) else { return Ok(ClientOptions::default()) };
    let mut options = ClientOptions::default();
    if !given.transport.is_null() {
        // SAFETY: as above.
        let transport = unsafe { string(given.transport, "the transport") }?;
        let wrong = |_| Failure::invalid(format!("transport {transport:?}: use auto, tcp, shm or rdma"));
        options.transport = transport.parse::<TransportChoice>().map_err(wrong)?;
    }
    if given.threads != 0 {
        options.threads = given.threads as usize;
    }
    if given.connect_timeout_ms != 0 {
        options.patience = timeout(given.connect_timeout_ms);
    }
    Ok(options)
}

pub(crate) fn model(handle: Handle) -> Outcome<Arc<Model>> {
    get(handle, "model")
}

/// Waits until there is a version newer than `newer_than`, and stores its number. Weights that are opened then are of it, or
/// of a newer one.
///
/// -ETIMEDOUT if there is none in time; the number of the newest one is stored then, too.
/// A job that has failed gives its error: -ENOTCONN for one that was restored as another life, to which the caller
/// connects anew.
///
/// # Safety
/// `version` is NULL or points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_wait_version(
    handle: Handle,
    newer_than: u64,
    timeout_ms: u32,
    version: *mut u64,
) -> c_int {
    done(model(handle).and_then(|model| {
        let newest = wait_version(&model, newer_than, timeout(timeout_ms))?;
        // SAFETY: the caller's promise.
        unsafe { store(version, newest.0) };
        match newest.0 > newer_than {
            true => Ok(()),
            false => {
                Err(Failure::new(Errno::ETIMEDOUT, format!("no version is newer than {newer_than} yet")))
            }
        }
    }))
}

fn wait_version(model: &Model, newer_than: u64, timeout: Duration) -> Result<Version, Failure> {
    // Nothing announces that the job has failed.
    const LOOKS: Duration = Duration::from_millis(100);
    let end = Instant::now() + timeout;
    let (lock, bell) = &*model.published;
    let mut published = lock.lock();
    loop {
        let (newest, now) = (model.job.offered_version(), Instant::now());
        if newest.0 > newer_than || now >= end {
            return Ok(newest);
        }
        if let Some(lost) = model.job.lost() {
            return Err(lost.into());
        }
        bell.wait_until(&mut published, end.min(now + LOOKS));
    }
}

/// Opens the newest version, and holds it unchanged until the handle is closed. Of a learner it is one that has the
/// learner's last step in it, for which this waits.
///
/// -ETIMEDOUT if it does not come in time, -ENOMEM if as many versions are held as `control/max_versions` allows.
///
/// # Safety
/// `weights` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_open_weights(
    model_or_learner: Handle,
    timeout_ms: u32,
    weights: *mut Handle,
) -> c_int {
    let of =
        check_place(weights).and_then(|()| either::<Model, Learner>(model_or_learner, "model or learner"));
    let opened = of.and_then(|of| {
        let learner = of.as_ref().err();
        let model = of.as_ref().unwrap_or_else(|learner| &learner.model);
        let reader = pull(model, learner.map(|learner| &learner.contributor), timeout(timeout_ms))?;
        open(Weights { reader, model: Arc::clone(model) })
    });
    // SAFETY: the caller's promise.
    done(opened.map(|handle| unsafe { store(weights, handle) }))
}

/// Opens a version by its number, and holds it unchanged until the handle is closed. Versions are here that are held open,
/// that `control/retain` keeps, or that is the newest. The newest one may still have to come.
///
/// -ENOENT if it is not here, -ETIMEDOUT if it does not come in time, -ENOMEM if as many versions are held as
/// `control/max_versions` allows.
///
/// # Safety
/// `weights` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_open_version(
    handle: Handle,
    version: u64,
    timeout_ms: u32,
    weights: *mut Handle,
) -> c_int {
    let opened = check_place(weights).and_then(|()| model(handle)).and_then(|model| {
        let reader = by_number(&model, Version(version), timeout(timeout_ms))?;
        open(Weights { reader, model })
    });
    // SAFETY: the caller's promise.
    done(opened.map(|handle| unsafe { store(weights, handle) }))
}

fn by_number(model: &Model, version: Version, timeout: Duration) -> Outcome<Reader> {
    let job = &model.job;
    if let Some(why) = job.refuses_reader(version) {
        return Err(Failure::new(Errno::ENOMEM, why));
    }
    if let Some(reader) = Reader::open(job, version) {
        return Ok(reader);
    }
    if version == job.offered_version() {
        let explained = |error: ShardError| model.explained(error);
        let end = Instant::now() + timeout;
        job.version_opened(None);
        wait_for(timeout, |done| job.await_fresh(None, timeout, done)).map_err(explained)?;
        let left = end.saturating_duration_since(Instant::now());
        wait_for(left, |done| job.await_newest(left, done)).map_err(explained)?;
    }
    let gone = || {
        let here = job.versions().iter().map(Version::to_string).collect::<Vec<_>>().join(", ");
        Failure::new(Errno::ENOENT, format!("version {version} is not here; these are: {here}"))
    };
    Reader::open(job, version).ok_or_else(gone)
}

fn pull(model: &Model, learner: Option<&Arc<Contributor>>, timeout: Duration) -> Outcome<Reader> {
    let (job, id) = (&model.job, learner.map(|learner| learner.learner()));
    job.version_opened(id);
    let fresh = wait_for(timeout, |done| job.await_fresh(id, timeout, done));
    let version = fresh.map_err(|error: ShardError| model.explained(error))?;
    if let Some(why) = job.refuses_reader(version) {
        return Err(Failure::new(Errno::ENOMEM, why));
    }
    let none = || Failure::new(Errno::EAGAIN, "the version is gone already: try again");
    let reader = Reader::open(job, version).or_else(|| Reader::newest(job)).ok_or_else(none)?;
    let Some((learner, id)) = learner.zip(id) else { return Ok(reader) };
    learner.begins_from(reader.version());
    job.has_opened(id, reader.version());
    Ok(match learner.replica(reader.version()) {
        Some(replica) => reader.showing(replica),
        None => reader,
    })
}

/// Stores what `weights` are.
///
/// # Safety
/// `version` points to memory for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_weights(weights: Handle, version: *mut ModelioVersion) -> c_int {
    done(get::<Weights>(weights, "weights").map(|weights| {
        let bytes = weights.reader.bytes(0..weights.reader.region().memory().len() as u64);
        let epoch = weights.model.job.generation().0;
        let of = weights.reader.version().0;
        let is = ModelioVersion { data: bytes.as_ptr(), size: bytes.len() as u64, version: of, epoch };
        // SAFETY: the caller's promise.
        unsafe { store(version, is) };
    }))
}

/// A descriptor of the memory of `weights`, which can be read and mapped, and not written. It is the caller's to close.
/// Its bytes stay unchanged until `weights` is closed; with `passed_on` they never change, so that it may go to other
/// processes: the memory is not used again.
///
/// Returns the descriptor, or -EMFILE.
#[unsafe(no_mangle)]
pub extern "C" fn modelio_memfd(weights: Handle, passed_on: c_int) -> c_int {
    let opened = get::<Weights>(weights, "weights").and_then(|weights| {
        let (loan, memory) = weights.reader.lend()?;
        match passed_on {
            0 => loan.give_back(),
            // Nobody says when it is over.
            _ => drop(loan),
        }
        Ok(memory.into_raw_fd() as usize)
    });
    answer(opened) as c_int
}
