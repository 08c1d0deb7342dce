//! A trace of the models of a mount: it runs from its opening to its first read, which brings the events as JSON for
//! Perfetto and chrome://tracing.
//!
//! One trace at a time runs in a mount. Its events are in bounded memory, and the text is made piece by piece as it is
//! read.

mod chrome;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use libmodelio::observe::trace::MOST_EVENTS;
use libmodelio::vocabulary::ids::LearnerId;
use parking_lot::Mutex;

use self::chrome::{Document, Traced};
use super::error::{CallError, CallResult};
use super::model::{Model, OnlyOne};

/// The name of the file in the mount's root. It is in no listing: a program that reads all files of a mount starts no
/// trace.
pub const TRACE_FILE: &str = ".trace";

/// A trace that runs, or that is being read. Dropping it ends it.
pub struct Trace {
    models: Vec<Arc<Model>>,
    since: Instant,
    started: SystemTime,
    names: Mutex<Names>,
    document: Mutex<Option<Document>>,
    _only: Arc<()>,
}

/// The names of each model's learners, those that have left during the trace included.
type Names = Vec<BTreeMap<LearnerId, String>>;

impl Trace {
    /// Begins a trace.
    ///
    /// # Errors
    /// EBUSY while another one is open.
    pub fn begin(models: Vec<Arc<Model>>, one: &OnlyOne) -> CallResult<Trace> {
        let only = one.take().ok_or_else(|| {
            let why = "a trace of this mount runs already: one at a time can (gradfs trace runs one)";
            CallError::new(libc::EBUSY, why)
        })?;
        let (since, most) = (Instant::now(), MOST_EVENTS / models.len().max(1));
        for model in &models {
            model.job.trace().begin(since, most);
        }
        tracing::info!("a trace begins");
        let names = Mutex::new(models.iter().map(|model| names(model)).collect());
        let started = SystemTime::now();
        Ok(Trace { models, since, started, names, document: Mutex::default(), _only: only })
    }

    /// Gives at most `len` bytes of the document from `offset` on to `with`; none at its end. The first read ends the
    /// trace.
    pub fn read<R>(&self, offset: u64, len: usize, with: impl FnOnce(&[u8]) -> R) -> R {
        let mut document = self.document.lock();
        let document = document.get_or_insert_with(|| self.end());
        with(document.part(offset, len))
    }

    fn end(&self) -> Document {
        let took = self.since.elapsed();
        let mut known = self.names.lock();
        let traced = self.models.iter().zip(known.iter_mut()).map(|(model, known)| {
            model.learners().iter().for_each(|learner| learner.times.trace_rest());
            known.extend(names(model));
            let recording = model.job.end_trace();
            Traced { model: model.name.clone(), learners: std::mem::take(known), recording }
        });
        let began = self.started.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let document = Document::new(traced.collect(), began, took);
        tracing::info!(events = document.len(), lost = document.lost(), "a trace has ended");
        document
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if self.document.get_mut().is_none() {
            for model in &self.models {
                model.job.trace().end();
            }
            tracing::info!("a trace was closed before it was read");
        }
    }
}

fn names(model: &Model) -> BTreeMap<LearnerId, String> {
    model.learners().iter().map(|learner| (learner.id, learner.name.clone())).collect()
}
