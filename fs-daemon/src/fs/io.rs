//! Reading, writing, committing and closing open files.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use libmodelio::contributor::ContributeError;
use libmodelio::publisher::Publisher;
use libmodelio::transport::{Message, ShardError};
use libmodelio::vocabulary::ids::Version;

use super::doubts::{Settled, Then};
use super::errno::{FsError, FsResult};
use super::handle::{ContributionHandle, Handle, PublishHandle, VersionHandle};
use super::node::{File, Node};
use super::refusal::{explained, refuse_header};
use super::waits::Asked;
use super::{Caller, Chore, DEATH_PATIENCE, Done, Fs, Wake};
use crate::fuse::process::{Exit, is_killed_or_kernel};

impl Fs {
    /// Reads up to `len` bytes at `offset` and gives them to `with`, without a copy where possible.
    pub fn read<R>(&self, fh: u64, offset: u64, len: usize, with: impl FnOnce(FsResult<&[u8]>) -> R) -> R {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return with(Err(error)),
        };
        match &*handle {
            Handle::Version(version) => read_version(version, offset, len, with),
            Handle::Publish(publish) => read_version(&publish.reads, offset, len, with),
            Handle::Contribution(contribution) => match &contribution.version {
                Some(version) => {
                    let version = Arc::clone(&version.lock());
                    read_version(&version, offset, len, with)
                }
                None => {
                    let size = contribution.model.layout.size();
                    let end = offset.saturating_add(len as u64).min(size);
                    let mut bytes = vec![0; end.saturating_sub(offset) as usize];
                    contribution.learner.contributor.load_mapped(offset, &mut bytes);
                    with(Ok(&bytes))
                }
            },
            Handle::Text(text) => {
                // As in sysfs: a read from the start shows the present state.
                if offset == 0 {
                    match self.render(text) {
                        Ok(new) => *text.text.lock() = new.into(),
                        Err(error) => return with(Err(error)),
                    }
                }
                let text = Arc::clone(&text.text.lock());
                with(Ok(part(text.as_bytes(), offset, len)))
            }
        }
    }

    /// Writes. `from_mapping`: the kernel writes back pages that a program stored through mmap. Settings are
    /// answered when the job has answered; all else before this returns.
    ///
    /// # Errors
    /// With nothing changed: EFBIG past the end, EINVAL for bytes already sent or for an unfit setting,
    /// EBUSY while a commit runs, ECANCELED below `min_learners`, EBADF for a file not open for writing. ETIMEDOUT
    /// and EIO when nobody said whether a setting was changed.
    pub fn write(
        &self,
        fh: u64,
        offset: u64,
        data: &[u8],
        from_mapping: bool,
        caller: Caller,
        done: impl FnOnce(FsResult<()>) + Send + 'static,
    ) {
        match self.handle(fh) {
            Err(error) => done(Err(error)),
            Ok(handle) => match &*handle {
                Handle::Text(text) => self.set(text, offset, data, caller, Box::new(done)),
                handle => done(write_data(handle, offset, data, from_mapping, caller)),
            },
        }
    }

    /// fsync(2): ends the contribution, whoever calls.
    pub fn fsync(&self, fh: u64, caller: Caller, done: Done<()>) {
        match self.handle(fh) {
            Err(error) => done(Err(error)),
            Ok(handle) => {
                let done = self.guard(&handle, caller, done);
                match &*handle {
                    Handle::Contribution(_) => commit_when_settled(fh, handle, Closing::No, done),
                    Handle::Publish(_) => publish(&handle, done),
                    _ => done(Ok(())),
                }
            }
        }
    }

    /// Ends the wait of fsync or close with its caller: what it waits for is withdrawn, so that an answer says
    /// whether it counts. A success tells of the version that it has made.
    fn guard(&self, handle: &Arc<Handle>, caller: Caller, done: Done<()>) -> Done<()> {
        let done = match &**handle {
            Handle::Contribution(ContributionHandle { model, .. })
            | Handle::Publish(PublishHandle { model, .. }) => model.done_when_told(done),
            _ => done,
        };
        let asked = match &**handle {
            Handle::Contribution(contribution) => {
                let contributor = Arc::clone(&contribution.learner.contributor);
                Asked::Call(Arc::new(move || contributor.withdraw()))
            }
            Handle::Publish(publish) => match publish.publisher.lock().clone() {
                Some(publisher) => Asked::Call(Arc::new(move || publisher.withdraw())),
                None => Asked::Answer,
            },
            _ => Asked::Answer,
        };
        self.waits.guard(caller, done, asked, |()| {})
    }

    /// close(2) of one descriptor. It ends the contribution if it is the opener's own, so that a shell
    /// can hand its redirected output to several programs in turn; what a program leaves to its exit is
    /// settled when the last descriptor is gone.
    pub fn flush(&self, fh: u64, caller: Caller, done: Done<()>) {
        let handle = match self.handle(fh) {
            Ok(handle) => handle,
            Err(error) => return done(Err(error)),
        };
        match &*handle {
            Handle::Contribution(contribution) => {
                if !contribution.wrote.load(Ordering::Relaxed) {
                    return done(Ok(()));
                }
                if is_killed_or_kernel(caller.tid) {
                    contribution.learner.doubts.begin(fh, Instant::now());
                    return done(Ok(()));
                }
                if owns(contribution.opener, &contribution.users, caller) {
                    let done = self.guard(&handle, caller, done);
                    commit_when_settled(fh, handle, Closing::Yes, done);
                } else {
                    done(Ok(()));
                }
            }
            Handle::Publish(publisher) => {
                if !is_killed_or_kernel(caller.tid) && owns(publisher.opener, &publisher.users, caller) {
                    let done = self.guard(&handle, caller, done);
                    publish(&handle, done);
                } else {
                    done(Ok(()));
                }
            }
            Handle::Text(text) if text.emptied.load(Ordering::Relaxed) => {
                self.set(text, 0, b"", caller, done)
            }
            _ => done(Ok(())),
        }
    }

    /// The last descriptor of an open file is gone.
    pub fn release(&self, fh: u64) {
        let Some(handle) = self.handles.remove(fh) else { return };
        self.pollers.lock().remove(&fh);
        let (unsettled, settled) = match &*handle {
            Handle::Contribution(contribution) => {
                let learner = &contribution.learner;
                contribution.model.count_handle(learner, false);
                let wrote = contribution.wrote.load(Ordering::Relaxed);
                (wrote && learner.contributor.is_open(), Some(Settled::when_dropped(learner, fh)))
            }
            Handle::Publish(publish) => {
                (publish.publisher.lock().as_ref().is_some_and(|p| p.is_open()), None)
            }
            _ => (false, None),
        };
        if unsettled {
            // Finding out how the program ended may take a moment.
            let _ = self.chores.send(Chore::Settle(handle, settled));
        }
    }

    /// truncate(2) and the truncation of open(2). The size is fixed; what is asked for may only be
    /// "nothing yet".
    ///
    /// # Errors
    /// EINVAL.
    pub fn truncate(&self, ino: u64, fh: Option<u64>, size: u64, caller: Caller) -> FsResult<()> {
        let Node::Model(_, file) = self.node(ino)? else {
            return Err(FsError::new(libc::EACCES, "README is read-only"));
        };
        match file {
            File::Control(_) => {
                if size == 0 {
                    self.mark_truncated(ino, fh, caller);
                }
                Ok(())
            }
            File::Gradients | File::LearnerGradients(_) | File::Device | File::Weights(_) => {
                let whole = self.attributes(ino)?.size;
                if size != 0 && size != whole {
                    return Err(FsError::new(
                        libc::EINVAL,
                        format!("the size is fixed at {whole} bytes by the model"),
                    ));
                }
                if size == 0 {
                    self.mark_truncated(ino, fh, caller);
                }
                Ok(())
            }
            _ => Err(FsError::new(libc::EACCES, "read-only")),
        }
    }

    /// A `weights` opened with O_TRUNC is meant to be written whole, and a setting to be empty if nothing is written.
    fn mark_truncated(&self, ino: u64, fh: Option<u64>, caller: Caller) {
        // The truncation of open(2) does not say which handle it is of.
        let handles = fh.map_or_else(|| self.handles.all(), |fh| self.handles.get(fh).into_iter().collect());
        for handle in handles {
            if let Handle::Text(text) = &*handle
                && text.node.ino() == ino
                && text.opener == caller.tid
            {
                text.emptied.store(true, Ordering::Relaxed);
            }
            if let Handle::Publish(publish) = &*handle
                && publish.ino == ino
                && publish.opener == publish.users.lock().note(caller.tid)
                && publish.publisher.lock().as_ref().is_some_and(|publisher| !publisher.is_open())
            {
                publish.truncated.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether a read would show something new; if not, `wake` is called when it does.
    ///
    /// # Errors
    /// EBADF.
    pub fn poll(&self, fh: u64, wake: Option<Wake>) -> FsResult<bool> {
        let handle = self.handle(fh)?;
        let Handle::Text(text) = &*handle else { return Ok(true) };
        let (Some(model), Node::Model(_, File::VersionText | File::LearnerVersion(_))) =
            (&text.model, text.node)
        else {
            return Ok(true);
        };
        let is_new = || model.version_to_tell() != Version(text.seen.load(Ordering::Relaxed));
        if !is_new()
            && let Some(wake) = wake
        {
            self.wake_later(model.index, fh, wake);
        }
        // Asked again: a version may have come between the look and the registration.
        Ok(is_new())
    }
}

fn part(bytes: &[u8], offset: u64, len: usize) -> &[u8] {
    let start = (offset.min(bytes.len() as u64)) as usize;
    &bytes[start..bytes.len().min(start + len)]
}

fn read_version<R>(
    handle: &VersionHandle,
    offset: u64,
    len: usize,
    with: impl FnOnce(FsResult<&[u8]>) -> R,
) -> R {
    let header = handle.header.len() as u64;
    let size = header + (handle.bytes.end - handle.bytes.start);
    let end = offset.saturating_add(len as u64).min(size);
    let data = |from: u64, to: u64| {
        handle.memory.bytes(handle.bytes.start + from - header..handle.bytes.start + to - header)
    };
    if offset >= end {
        with(Ok(&[]))
    } else if end <= header {
        with(Ok(part(&handle.header, offset, len)))
    } else if offset >= header {
        with(Ok(data(offset, end)))
    } else {
        let mut bytes = part(&handle.header, offset, len).to_vec();
        bytes.extend_from_slice(data(header, end));
        with(Ok(&bytes))
    }
}

/// Writes what is not a setting.
fn write_data(handle: &Handle, offset: u64, data: &[u8], from_mapping: bool, caller: Caller) -> FsResult<()> {
    match handle {
        Handle::Contribution(contribution) => {
            let contributor = &contribution.learner.contributor;
            if from_mapping {
                if !contribution.mappable {
                    return Err(FsError::new(libc::EIO, "device cannot be mapped to write: map gradients"));
                }
                return Ok(contributor.store_mapped(offset, data)?);
            }
            contribution.note_writer(caller.tid);
            let mut share = contribution.share();
            let model = &contribution.model;
            let outcome = refuse_header(offset, data).and_then(|()| {
                let outcome = contributor.write(&mut share, offset, data, model.timeout());
                outcome.map_err(|error| explained(model, error))
            });
            contribution.set_share(share);
            outcome.inspect_err(|error| contribution.learner.refusal.note(error, true))
        }
        Handle::Publish(publish) => {
            publish.users.lock().note(caller.tid);
            let publisher = {
                let mut publisher = publish.publisher.lock();
                match &*publisher {
                    Some(publisher) => Arc::clone(publisher),
                    None => {
                        publish.model.job.may_assign()?;
                        let channel = Arc::clone(&publish.model.channel);
                        let new = Publisher::new(channel, publish.model.timeout())?;
                        Arc::clone(publisher.insert(Arc::new(new)))
                    }
                }
            };
            let written = refuse_header(offset, data).and_then(|()| {
                publisher.write(offset, data).map_err(|error| explained(&publish.model, error))
            });
            written.inspect_err(|error| publish.model.own_refusal.note(error, true))
        }
        Handle::Version(_) | Handle::Text(_) => Err(FsError::new(libc::EBADF, "not open for writing")),
    }
}

/// Whether closing a descriptor is the opener's own doing. (Whether it is its death's is asked before.)
fn owns(opener: Option<u32>, users: &parking_lot::Mutex<super::handle::Users>, caller: Caller) -> bool {
    let mut users = users.lock();
    let (Some(opener), Some(caller)) = (opener, users.note(caller.tid)) else { return true };
    // A child that was handed the file and outlived its parent is its owner now.
    caller == opener
        || users.processes().iter().any(|process| process.tgid() == opener && process.exited().is_some())
}

/// Longest wait of a close for what fsync has waited for in vain.
const SECOND_WAIT: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Closing {
    Yes,
    No,
}

/// Ends the contribution of a handle's learner, once it is known what comes of a program that shared it and is ending
/// just now.
fn commit_when_settled(fh: u64, handle: Arc<Handle>, closing: Closing, done: Done<()>) {
    let Handle::Contribution(contribution) = &*handle else { return done(Ok(())) };
    let learner = Arc::clone(&contribution.learner);
    let refusal = Arc::clone(&learner.refusal);
    let deadline = Instant::now() + contribution.model.timeout();
    let then: Then = Box::new(move |outcome| match outcome {
        Ok(()) => commit(handle, closing, done),
        Err(error) => {
            refusal.note(&error, true);
            done(Err(error));
        }
    });
    if let Some(then) = learner.doubts.wait(Some(fh), deadline, then) {
        then(Ok(()));
    }
}

/// Ends the contribution of a handle's learner.
fn commit(handle: Arc<Handle>, closing: Closing, done: Done<()>) {
    let Handle::Contribution(contribution) = &*handle else { return done(Ok(())) };
    let model = &contribution.model;
    let contributor = Arc::clone(&contribution.learner.contributor);
    let controls = model.job.controls();
    let mapped = closing == Closing::No && contribution.mappable && !contributor.is_open();
    let takes = mapped || contributor.is_open();
    let timed_out = closing == Closing::Yes && contribution.timed_out.load(Ordering::Relaxed);
    let timeout = if timed_out { controls.timeout.min(SECOND_WAIT) } else { controls.timeout };
    let of_closure = Arc::clone(&handle);
    let of_abort = Arc::clone(&contributor);
    let finished = move |result: Result<(), ContributeError>| {
        let Handle::Contribution(contribution) = &*of_closure else { return };
        let refusal = &contribution.learner.refusal;
        let mut is_open = false;
        match &result {
            Ok(()) => {
                contribution.ended();
                refusal.ended(takes);
                return refresh(&of_closure, done);
            }
            // Still open: fsync can be called again.
            Err(ContributeError::Shard(ShardError::TimedOut(_))) if closing == Closing::No && !mapped => {
                contribution.timed_out.store(true, Ordering::Relaxed);
                is_open = true;
            }
            Err(
                ContributeError::Busy
                | ContributeError::Shard(ShardError::TimedOut(_) | ShardError::Interrupted),
            ) if closing == Closing::No => is_open = true,
            // What is open by now is somebody else's.
            Err(ContributeError::Dropped) => contribution.ended(),
            Err(_) => {
                contribution.ended();
                of_abort.abort();
            }
        }
        let error = result.map_err(|error| explained(&contribution.model, error));
        done(error.inspect_err(|error| refusal.note(error, is_open)));
    };
    if mapped {
        contributor.commit_mapped(controls.timeout, finished);
    } else {
        contributor.commit(contribution.share(), timeout, finished);
    }
}

/// After a commit, `device` reads the newest version, the one with the commit included if that is complete.
fn refresh(handle: &Arc<Handle>, done: Done<()>) {
    let Handle::Contribution(contribution) = &**handle else { return done(Ok(())) };
    let (model, learner) = (&contribution.model, contribution.learner.id);
    let of_closure = Arc::clone(handle);
    let show = move || {
        if let Handle::Contribution(contribution) = &*of_closure
            && let (Some(version), Some(newest)) =
                (&contribution.version, VersionHandle::pin_newest(&contribution.model))
        {
            *version.lock() = Arc::new(newest);
        }
        // It counts, whatever can be shown.
        done(Ok(()));
    };
    if contribution.version.is_none() || !model.job.is_coming(learner) {
        return show();
    }
    model.channel.send(Message::AwaitStep { learner }, model.timeout(), Box::new(move |_| show()));
}

/// Publishes what was written to `weights`.
fn publish(handle: &Arc<Handle>, done: Done<()>) {
    let Handle::Publish(publish) = &**handle else { return done(Ok(())) };
    let refusal = Arc::clone(&publish.model.own_refusal);
    let of_model = Arc::clone(&publish.model);
    let publisher = publish.publisher.lock().take_if(|publisher| publisher.is_open());
    let takes = publisher.is_some();
    let whole = publisher.as_ref().is_some_and(|publisher| publisher.is_complete());
    let was_refused = refusal.is_in_open();
    let done: Done<()> = Box::new(move |outcome| {
        match &outcome {
            Ok(()) => refusal.ended(takes),
            // That not all was written has a reason, which was noted.
            Err(_) if !whole && was_refused => refusal.ended(false),
            Err(error) => refusal.note(error, false),
        }
        done(outcome);
    });
    let truncated = publish.truncated.swap(false, Ordering::Relaxed);
    if let Some(refused) = publisher.as_ref().and_then(|publisher| publisher.spoiled()) {
        return done(Err(explained(&publish.model, refused)));
    }
    if truncated && !whole {
        let size = publish.model.layout.size();
        return done(Err(FsError::new(
            libc::EINVAL,
            format!(
                "weights was truncated but not all of its {size} bytes were written; nothing has changed"
            ),
        )));
    }
    let Some(publisher) = publisher else { return done(Ok(())) };
    let written = publisher.written();
    let cuts = written.iter().flat_map(|range| [range.start, range.end]);
    if let Some(half) = cuts.into_iter().find(|&cut| publish.model.layout.splits_element(cut)) {
        let message = format!("what was written ends at byte {half}, in the middle of an element");
        return done(Err(FsError::new(libc::EINVAL, message)));
    }
    if let Err(error) = check_finite(publish, &publisher) {
        return done(Err(error));
    }
    publisher.commit(publish.model.timeout(), move |result| {
        done(result.map_err(|error| explained(&of_model, error)));
    });
}

/// NaN and Inf are refused in new weights as in gradients.
fn check_finite(publish: &PublishHandle, publisher: &Publisher) -> FsResult<()> {
    let outcome = publish.model.job.check_finite(publisher.buffer(), &publisher.written());
    outcome.map_err(|error| explained(&publish.model, error))
}

/// Commits or drops what a handle left open when its last descriptor went; `settled` is dropped after it.
pub(super) fn settle(handle: &Arc<Handle>, settled: Option<Settled>) {
    let users = match &**handle {
        Handle::Contribution(contribution) => contribution.users.lock().processes(),
        Handle::Publish(publish) => publish.users.lock().processes(),
        _ => return,
    };
    let handle = Arc::clone(handle);
    let settle = move || {
        let violent = users
            .iter()
            .filter_map(|process| process.wait_exit(DEATH_PATIENCE).map(|exit| (process.tgid(), exit)))
            .find(|(_, exit)| matches!(exit, Exit::Signal(_) | Exit::Unknown));
        match (&*handle, violent) {
            (Handle::Contribution(contribution), Some((pid, exit))) => {
                let learner = &contribution.learner;
                // Of the files that the program had open, the first one that is settled drops the contribution.
                if learner.contributor.abort() {
                    let what = format!("process {pid} {exit} in mid-write: its contribution is dropped");
                    learner.refusal.note(&FsError::new(libc::EIO, what), false);
                    tracing::warn!(
                        learner = learner.name,
                        pid,
                        "{exit} in mid-write: its contribution is dropped"
                    );
                }
                contribution.model.tell_use(learner);
            }
            (Handle::Contribution(contribution), None) => {
                let name = contribution.learner.name.clone();
                let (model, learner) = (Arc::clone(&contribution.model), Arc::clone(&contribution.learner));
                let report = move |result: FsResult<()>| {
                    model.tell_use(&learner);
                    if let Err(error) = result {
                        tracing::warn!(
                            learner = name,
                            "closed at exit: {error}; its contribution is dropped"
                        );
                    }
                    drop(settled);
                };
                commit(Arc::clone(&handle), Closing::Yes, Box::new(report));
            }
            (Handle::Publish(_), Some((pid, exit))) => {
                tracing::warn!(pid, "{exit} while it wrote weights: nothing has changed");
            }
            (Handle::Publish(_), None) => publish(
                &handle,
                Box::new(|result| {
                    if let Err(error) = result {
                        tracing::warn!("weights closed at exit: {error}");
                    }
                }),
            ),
            _ => {}
        }
    };
    // Rare, short, and not to hold up the other chores.
    if let Err(error) = std::thread::Builder::new().name("gradfs-settle".into()).spawn(settle) {
        tracing::error!(%error, "cannot settle a contribution left open; its lease will");
    }
}
