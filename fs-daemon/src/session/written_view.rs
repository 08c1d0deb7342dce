//! A view that is written: its bytes are one part of new weights of its model. The part names its set, and the parts of a
//! set become a version together.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use libmodelio::client::{Job, PartError};
use libmodelio::contributor::ContributeError;
use libmodelio::explained::detail;
use libmodelio::publisher::Publisher;
use libmodelio::view::{self, Share, ViewPlan};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::members::{is_learner_name, wrong_set_name};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::PartOf;
use parking_lot::Mutex;

use super::error::{CallError, CallResult, Done};
use super::view::not_sent;
use crate::own_thread::on_own_thread;

/// A set by its name, and how long this part waits for the others, if that is not `control/timeout`.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedSet {
    name: String,
    timeout: Option<Duration>,
}

impl fmt::Display for NamedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        self.timeout.map_or(Ok(()), |timeout| write!(f, " {}", timeout.as_secs_f64()))
    }
}

/// How a view is written.
pub struct WrittenView {
    source: Weak<Job>,
    plan: Arc<ViewPlan>,
    /// The set of the next part, once it is named.
    set: Mutex<Option<NamedSet>>,
    /// Whether a part is being published.
    under_way: AtomicBool,
}

fn invalid(why: impl Into<String>) -> CallError {
    CallError::new(libc::EINVAL, why)
}

/// Why the job refuses a part, in words of its model.
fn refused(job: &Job, error: ShardError) -> CallError {
    let error = ContributeError::from(error);
    let detail = detail(job, &error);
    let plain = CallError::from(error);
    CallError::new(plain.errno, plain.message + &detail)
}

impl WrittenView {
    /// A view of the model of this job by this plan.
    pub fn new(source: &Arc<Job>, plan: &Arc<ViewPlan>) -> WrittenView {
        let (source, plan) = (Arc::downgrade(source), Arc::clone(plan));
        WrittenView { source, plan, set: Mutex::default(), under_way: AtomicBool::new(false) }
    }

    /// Whether a part may be written now.
    ///
    /// # Errors
    /// EINVAL if the plan has no inverse or does not say which part it is, EACCES where weights may not be written now.
    pub fn may_publish(&self) -> CallResult<()> {
        self.share()?;
        let source = self.source()?;
        Ok(source.may_publish_parts()?)
    }

    fn source(&self) -> CallResult<Arc<Job>> {
        self.source.upgrade().ok_or_else(CallError::not_found)
    }

    fn share(&self) -> CallResult<Share> {
        self.plan.check_inverse().map_err(|error| invalid(error.to_string()))?;
        let what =
            "the view's plan does not say which part it is: give it \"publish\": {\"part\": 0, \"of\": 2}";
        self.plan.share().ok_or_else(|| invalid(what))
    }

    /// The next part's set, as the file shows it.
    pub fn set(&self) -> String {
        self.set.lock().as_ref().map_or_else(String::new, |set| format!("{set}\n"))
    }

    /// The set that a text names.
    ///
    /// # Errors
    /// EINVAL for a wrong name or number of seconds, and for a view that cannot be published.
    pub fn read_set(&self, text: &[u8]) -> CallResult<NamedSet> {
        self.share()?;
        let text = std::str::from_utf8(text).map_err(|_| invalid("set: not text"))?.trim();
        let (name, seconds) = text.split_once(' ').map_or((text, None), |(name, rest)| (name, Some(rest)));
        if !is_learner_name(name) {
            return Err(invalid(wrong_set_name(name)));
        }
        let read = |seconds| Controls::default().with("timeout", seconds);
        let timeout = seconds.map(read).transpose().map_err(|error| invalid(format!("set: {error}")))?;
        Ok(NamedSet { name: name.to_owned(), timeout: timeout.map(|read| read.timeout) })
    }

    /// The next part is one of this set.
    ///
    /// # Errors
    /// Those of [`Self::read_set`].
    pub fn name_set(&self, text: &[u8]) -> CallResult<()> {
        *self.set.lock() = Some(self.read_set(text)?);
        Ok(())
    }

    /// Publishes what was written as one part. `done` hears of it once all parts of its set are a version, or none is.
    pub fn publish(self: &Arc<Self>, publisher: Arc<Publisher>, meta: Meta, done: Done<()>) {
        let this = Arc::clone(self);
        on_own_thread("gradfs-publish", move || done(this.publish_here(&publisher, meta)));
    }

    fn publish_here(&self, publisher: &Publisher, meta: Meta) -> CallResult<()> {
        let (source, Share { part, of, all }) = (self.source()?, self.share()?);
        let named = self.set.lock().clone();
        let set = named
            .ok_or_else(|| invalid("the part has no set: write its name to the view's file set first"))?;
        if !publisher.is_complete() {
            let (size, written) = (self.plan.layout().size(), publisher.written());
            let written: u64 = written.iter().map(|range| range.end - range.start).sum();
            let what = format!("{written} of the view's {size} bytes were written");
            return Err(invalid(format!("a part is written whole, and {what}; nothing has changed")));
        }
        if self.under_way.swap(true, Ordering::AcqRel) {
            return Err(CallError::new(libc::EBUSY, "this view's part is being published"));
        }
        let timeout = set.timeout.unwrap_or_else(|| source.controls().timeout);
        let name = source.name_part();
        let goes_on = || !publisher.is_withdrawn();
        let part_of = PartOf { set: set.name.clone(), number: part, of, all };
        let published = publisher.commit_part(timeout, |bytes, newest| {
            let newest = newest.filter(|_| source.controls().delta);
            let pieces = (view::inverse(&self.plan), bytes, newest);
            source.publish_part((name, part_of), pieces, meta, timeout, &goes_on)
        });
        self.under_way.store(false, Ordering::Release);
        match published {
            Ok(Ok(())) => {
                self.set.lock().take_if(|now| *now == set);
                Ok(())
            }
            Ok(Err(PartError::Sending(error))) => Err(not_sent(error)),
            Ok(Err(PartError::Shard(error))) | Err(error) => Err(refused(&source, error)),
        }
    }
}
