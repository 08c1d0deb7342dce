//! A learner of this process: the regions it writes into, why its last call failed, and who uses it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use libmodelio::bytes::available;
use libmodelio::bytes::region::Region;
use libmodelio::client::Job;
use libmodelio::contributor::Contributor;
use libmodelio::vocabulary::controls::Consistency;
use libmodelio::vocabulary::ids::{LearnerId, Version};
use libmodelio::vocabulary::members::{self, Attached, LeaveReason, LifeSign};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::weight::Weight;
use parking_lot::Mutex;

use super::error::CallError;
use super::error::LastRefusal;
use super::times::ModelTimes;
use super::times::{LearnerTimes, Waits};

/// Longest answer to wait for where a request has no deadline of its own.
pub const PROMPT: Duration = Duration::from_secs(10);

/// A learner cannot be called so.
pub fn wrong_learner_name(name: impl fmt::Debug) -> CallError {
    CallError::new(libc::EINVAL, members::wrong_learner_name(name))
}

/// A learner that is in the job.
pub struct Learner {
    /// Its number.
    pub id: LearnerId,
    /// Its name.
    pub name: String,
    /// When it joined.
    pub joined: SystemTime,
    /// User and group that it belongs to; `None` for the mount's own.
    pub owner: Option<(u32, u32)>,
    /// Why its last call failed.
    pub refusal: Arc<LastRefusal>,
    /// What its program waits for.
    pub times: Arc<LearnerTimes>,
    /// Its way to the shards.
    pub(super) contributor: Arc<Contributor>,
    job: Arc<Job>,
    /// The mapped region has its pages.
    mapped_ready: AtomicBool,
    /// The learner leaves when its last user ends.
    is_guest: AtomicBool,
    /// A hint was logged that what was written may not be what was meant.
    has_hint: AtomicBool,
    users: Mutex<Users>,
    /// Bytes of its open contribution when the job was last told that it goes on.
    told_bytes: AtomicU64,
}

/// What a user of a learner does.
///
/// | event | meaning | the job hears of it |
/// |---|---|---|
/// | `Opens`, `Closes` | a contribution is open from here to there | yes |
/// | `Comes`, `Ends` | somebody uses the learner, whether contributions are open or not | of the end: it may wait for a shorter time |
/// | `Attends`, `Leaves` | a process has opened the learner's weights | of the end |
/// | `Contributes` | a process that attends comes | no |
/// | `Unseen` | somebody uses the learner whose end nobody will see | the first time |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnerUse {
    Opens,
    Closes,
    Comes,
    Ends,
    Attends,
    Leaves,
    Contributes,
    Unseen,
}

/// The users of a learner, which keep it attached to its job.
#[derive(Default)]
struct Users {
    /// Open contributions.
    open: u32,
    /// Users whose end will be reported.
    present: u32,
    /// Processes that have opened its weights, and whose end will be reported.
    attending: u32,
    /// A user has ended, and no other one has come since.
    ended: bool,
    /// There are users whose end will not be reported.
    unseen: bool,
}

impl Users {
    /// Takes an event in, and says whether the job is to hear of it.
    fn take(&mut self, event: LearnerUse) -> bool {
        match event {
            LearnerUse::Opens => self.open += 1,
            LearnerUse::Closes => self.open = self.open.saturating_sub(1),
            LearnerUse::Comes => (self.present, self.ended) = (self.present + 1, false),
            LearnerUse::Ends => (self.present, self.ended) = (self.present.saturating_sub(1), true),
            LearnerUse::Attends => self.attending += 1,
            LearnerUse::Leaves => self.attending = self.attending.saturating_sub(1),
            LearnerUse::Contributes => {
                self.take(LearnerUse::Comes);
                self.take(LearnerUse::Leaves);
            }
            LearnerUse::Unseen => return !std::mem::replace(&mut self.unseen, true),
        }
        !matches!(event, LearnerUse::Comes | LearnerUse::Attends | LearnerUse::Contributes)
    }

    /// Whether the learner is used. `unsettled`: it has something unsettled. `awaited`: others wait for it, sooner or
    /// later, if it is silent.
    fn attached(&self, unsettled: bool, awaited: bool) -> Attached {
        match (self.open, self.present) {
            (1.., _) => Attached::Yes,
            // It lives, and has closed its files. Where nobody waits for it, the lease decides.
            (0, 1..) if awaited => Attached::Yes,
            // The learner's first step may take long.
            (0, 0) if self.attending > 0 && !self.ended && !self.unseen && awaited => Attached::Yes,
            // A contribution that was left open may be about to count.
            (0, 0) if self.ended && !self.unseen && !unsettled => Attached::Exited,
            _ => Attached::No,
        }
    }
}

impl Learner {
    /// A learner that has just joined `job`, and contributes by `contributor`.
    pub(super) fn new(
        name: String,
        contributor: Contributor,
        job: Arc<Job>,
        owner: Option<(u32, u32)>,
        refusal: Arc<LastRefusal>,
        times: Arc<ModelTimes>,
    ) -> Learner {
        let trace = Arc::clone(job.trace());
        let times = Arc::new(LearnerTimes::new(contributor.learner(), times, trace));
        let of_writes = Arc::clone(&times);
        contributor.tell_waits(Box::new(move |waits| match waits {
            true => of_writes.begins(Waits::Write),
            false => of_writes.ends(Waits::Write),
        }));
        Learner {
            id: contributor.learner(),
            name,
            joined: SystemTime::now(),
            owner,
            refusal,
            times,
            contributor: Arc::new(contributor),
            job,
            mapped_ready: AtomicBool::new(false),
            is_guest: AtomicBool::new(false),
            has_hint: AtomicBool::new(false),
            users: Mutex::default(),
            told_bytes: AtomicU64::new(0),
        }
    }

    /// How much the learner's next contributions count.
    pub fn weight(&self) -> Weight {
        self.contributor.weight()
    }

    /// Sets it.
    ///
    /// # Errors
    /// If the reducer takes no weights.
    pub fn set_weight(&self, weight: Weight) -> Result<(), ShardError> {
        self.contributor.set_weight(weight)
    }

    /// Whether [`Self::set_weight`] takes this weight.
    ///
    /// # Errors
    /// As that has them.
    pub fn check_weight(&self, weight: Weight) -> Result<(), ShardError> {
        self.contributor.check_weight(weight)
    }

    /// The learner's replica of the model that `version` shows. None if it shows the model.
    pub fn replica(&self, version: Version) -> Option<Region> {
        self.contributor.replica(version)
    }

    /// Whether something was written since the last commit.
    pub fn is_open(&self) -> bool {
        self.contributor.is_open()
    }

    /// Bytes written since then.
    pub fn open_bytes(&self) -> u64 {
        self.contributor.open_bytes()
    }

    /// The memory that programs map to contribute without a copy.
    pub fn mapping(&self) -> &Region {
        self.contributor.mapped()
    }

    /// Whether the mapping has its pages.
    pub fn is_mapping_ready(&self) -> bool {
        self.mapped_ready.load(Ordering::Relaxed)
    }

    /// Logs, once, that what was written may not be what was meant.
    pub(super) fn hints(&self, what: &str) {
        if !self.has_hint.swap(true, Ordering::Relaxed) {
            tracing::warn!(model = self.job.model(), learner = self.name, "{what}");
        }
    }

    /// Takes its pages now, not one fault at a time in the program that maps it.
    ///
    /// # Errors
    /// When the memory is not there.
    pub fn make_mapping_ready(&self) -> io::Result<()> {
        if self.mapped_ready.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let memory = self.mapping().memory();
        let taken = available::promise_before_spares(memory).and_then(|()| memory.prefault());
        // The next open tries again.
        taken.inspect_err(|_| self.mapped_ready.store(false, Ordering::Relaxed))
    }

    /// The learner is about to write. With others about, blocks will wait in staging: its pages are taken now, beside
    /// the call, for it takes a second a few gigabytes. A shortage shows when they are written.
    pub fn make_staging_ready(&self) {
        if self.job.controls().learners < 2 || !self.contributor.wants_pages() {
            return;
        }
        let (contributor, job, learner) =
            (Arc::clone(&self.contributor), Arc::clone(&self.job), self.name.clone());
        let prefault = move || {
            if let Err(error) = contributor.prefault() {
                tracing::warn!(%error, model = job.model(), learner, "pre-faulting the staging region");
            }
        };
        if let Err(error) = std::thread::Builder::new().name("gradfs-prefault".into()).spawn(prefault) {
            let (model, learner) = (self.job.model(), &self.name);
            tracing::warn!(%error, model, learner, "no thread to pre-fault a staging region");
        }
    }

    /// Notes what a user does, and tells the job if it matters there.
    pub fn note(&self, event: LearnerUse) {
        let is_told = self.users.lock().take(event);
        if is_told {
            self.report_use();
        }
    }

    /// The learner has joined for its present users alone: it leaves when the last one ends.
    pub fn make_guest(&self) {
        self.is_guest.store(true, Ordering::Relaxed);
    }

    /// Whether it matters who attends to the learner: nobody has contributed as it yet. A process that comes later than
    /// the lease after the learner has joined does not count. Otherwise programs that look again and again would keep
    /// it.
    pub fn wants_attendants(&self, lease: Duration) -> bool {
        let users = self.users.lock();
        let is_new = lease.is_zero() || self.joined.elapsed().is_ok_and(|since| since < lease);
        users.present == 0 && !users.ended && !users.unseen && (is_new || users.attending > 0)
    }

    /// Whether it has users whose end nobody will see.
    pub fn has_unseen_users(&self) -> bool {
        self.users.lock().unseen
    }

    /// Tells the job that the open contribution has more bytes than at the last call, if so. The job hears of the first
    /// write by itself. To be called several times a second.
    pub fn report_progress(&self) {
        let bytes = self.contributor.open_bytes();
        if self.told_bytes.swap(bytes, Ordering::Relaxed) < bytes {
            self.job.touch(self.id, LifeSign::Writes);
        }
    }

    /// Tells the job whether the learner is used.
    pub fn report_use(&self) {
        let unsettled = self.contributor.is_open();
        // Sent under the lock, so that the last message is the present state.
        let users = self.users.lock();
        let awaited = self.job.controls().consistency != Consistency::Async;
        self.job.touch(self.id, LifeSign::Process(users.attached(unsettled, awaited)));
        if users.open + users.present == 0 && self.is_guest.load(Ordering::Relaxed) {
            self.job.leave(self.id, LeaveReason::Asked, PROMPT, Box::new(|_| {}));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_known_end_of_all_users_lets_go_of_a_learner() {
        let users = |open, present, ended, unseen| Users { open, present, attending: 0, ended, unseen };
        for awaited in [false, true] {
            assert_eq!(users(1, 0, true, false).attached(false, awaited), Attached::Yes);
            assert_eq!(users(0, 0, true, false).attached(false, awaited), Attached::Exited);
            assert_eq!(
                users(0, 0, true, false).attached(true, awaited),
                Attached::No,
                "it may be about to count"
            );
            assert_eq!(users(0, 0, true, true).attached(false, awaited), Attached::No);
            assert_eq!(users(0, 0, false, false).attached(false, awaited), Attached::No);
        }
        assert_eq!(users(0, 1, true, false).attached(false, true), Attached::Yes);
        assert_eq!(users(0, 1, true, false).attached(false, false), Attached::No, "nobody will wait for it");
    }

    #[test]
    fn who_has_opened_its_weights_uses_a_learner_until_somebody_contributes() {
        let users = |ended| Users { attending: 1, ended, ..Users::default() };
        assert_eq!(users(false).attached(false, true), Attached::Yes);
        assert_eq!(users(false).attached(false, false), Attached::No, "nobody will wait for it");
        assert_eq!(users(true).attached(false, true), Attached::Exited, "who contributed has ended");
    }
}
