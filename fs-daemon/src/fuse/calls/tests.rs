//! The tree over a job that is asked over a network: a job in this process whose answers to what may have to be asked of
//! others are held back until the test lets them go.

use std::ffi::OsStr;
use std::ops::Range;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::client::LastCommit;
use libmodelio::transport::{
    Attached, BlockSlot, Channel, Completion, Device, Message, Placement, Region, Reply, ShardError,
    TransportKind,
};
use libmodelio::vocabulary::controls::{Controls, SETTINGS};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use ps_backend::job::{Job, JobStatus, Listener, SetDone, SetError, VersionView};
use ps_backend::remote::RemoteJob;
use ps_backend::server::local;

use super::*;
use crate::fs::attr::{Attributes, Keep};
use crate::fs::node::{File, Node};
use crate::fs::text;
use crate::fuse::opening::Opened;
use crate::session::model::Snapshots;

const PATIENCE: Duration = Duration::from_secs(20);

type Held = Box<dyn FnOnce() + Send>;

/// A job that takes its time.
struct Late {
    shard: Arc<RemoteJob>,
    /// Takes what is held back.
    held: mpsc::Sender<Held>,
    /// A setting is not answered at all, but with this.
    fault: Mutex<Option<ShardError>>,
    /// Whoever wants this version is too late: there is another one.
    goes: Mutex<Option<Version>>,
    this: std::sync::Weak<Late>,
}

impl Job for Late {
    fn layout(&self) -> &Arc<ModelLayout> {
        self.shard.layout()
    }

    fn version(&self) -> Version {
        self.shard.version()
    }

    fn pin(&self, version: Version) -> bool {
        if *self.goes.lock() == Some(version) {
            self.publish();
            return false;
        }
        self.shard.pin(version)
    }

    fn unpin(&self, version: Version, count: u64) {
        self.shard.unpin(version, count);
    }

    fn get(&self, version: Version) -> Option<VersionView> {
        Job::get(&*self.shard, version)
    }

    fn versions(&self) -> Vec<Version> {
        self.shard.versions()
    }

    fn retained(&self) -> Vec<Version> {
        self.shard.retained()
    }

    fn controls(&self) -> Controls {
        self.shard.controls()
    }

    fn set_control(&self, name: &str, value: &str, timeout: Duration, done: SetDone) {
        let (shard, fault) = (Arc::clone(&self.shard), self.fault.lock().clone());
        let (name, value) = (name.to_owned(), value.to_owned());
        let answer = move || match fault {
            Some(fault) => done(Err(SetError::Unanswered(fault))),
            None => Job::set_control(&*shard, &name, &value, timeout, done),
        };
        self.held.send(Box::new(answer)).unwrap();
    }

    fn may_assign(&self) -> Result<(), ShardError> {
        self.shard.may_assign()
    }

    fn check_finite(&self, buffer: &Region, written: &[Range<u64>]) -> Result<(), ShardError> {
        self.shard.check_finite(buffer, written)
    }

    fn has_learner(&self, learner: LearnerId) -> bool {
        self.shard.has_learner(learner)
    }

    fn last_commit(&self, learner: LearnerId) -> LastCommit {
        self.shard.last_commit(learner)
    }

    fn touch(&self, learner: LearnerId, attached: Option<Attached>) {
        self.shard.touch(learner, attached);
    }

    fn status(&self) -> JobStatus {
        self.shard.status()
    }

    fn subscribe(&self, listener: Listener) {
        self.shard.subscribe(listener);
    }

    fn shut_down(&self) {
        self.shard.shut_down();
    }
}

impl Late {
    /// A version more.
    fn publish(&self) {
        let ask = |message| {
            let (sender, answer) = channel();
            self.shard.send(message, PATIENCE, Box::new(move |reply| sender.send(reply).unwrap()));
            answer.recv_timeout(PATIENCE).unwrap().unwrap()
        };
        let Reply::Buffer(buffer) = ask(Message::Allocate) else { panic!("no buffer") };
        ask(Message::Assign { buffer, written: std::iter::once(0..1 << 16).collect() });
    }
}

impl Device for Late {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn register(&self, memory: Arc<Mapping>) -> Result<Region, ShardError> {
        self.shard.register(memory)
    }

    fn connect(&self) -> Result<Arc<dyn Channel>, ShardError> {
        Ok(self.this.upgrade().unwrap())
    }
}

impl Channel for Late {
    fn write(&self, payload: &[u8], slot: BlockSlot, room: Option<&Region>) -> Result<Placement, ShardError> {
        self.shard.write(payload, slot, room)
    }

    fn read(&self, offset: u64, local: &mut [u8]) -> Result<Version, ShardError> {
        self.shard.read(offset, local)
    }

    fn send(&self, message: Message, timeout: Duration, done: Completion) {
        let shard = Arc::clone(&self.shard);
        let send = move |message| shard.send(message, timeout, done);
        match message {
            Message::Join { .. } | Message::Leave { .. } => {
                self.held.send(Box::new(move || send(message))).unwrap();
            }
            message => send(message),
        }
    }
}

struct Mounted {
    fs: Arc<Fs>,
    calls: Arc<Calls>,
    job: Arc<Late>,
    held: Receiver<Held>,
    _inbox: mpsc::Receiver<Chore>,
}

impl Mounted {
    fn new() -> Mounted {
        Mounted::of(ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap())
    }

    fn of(layout: ModelLayout) -> Mounted {
        let layout = Arc::new(layout);
        let pool = local::pool(1).unwrap();
        let client = local::start("m", &layout, &Controls::default(), &pool, |_| Ok(())).unwrap();
        let shard = RemoteJob::new(client);
        let (sender, held) = channel();
        let job = Arc::new_cyclic(|this| Late {
            shard,
            held: sender,
            fault: Mutex::default(),
            goes: Mutex::default(),
            this: this.clone(),
        });
        let device: Arc<dyn Device> = Arc::clone(&job) as _;
        let own = "host1".to_owned();
        let model = Model::new(
            "m".into(),
            Arc::clone(&job) as _,
            device,
            Default::default(),
            own,
            Snapshots::Here(Default::default()),
        )
        .unwrap();
        let access = Access { owner: (0, 0), umask: None };
        let Started { calls, inbox } = Calls::start(vec![Arc::new(model)], false, access).unwrap();
        Mounted { fs: Arc::clone(&calls.fs), calls, job, held, _inbox: inbox }
    }

    fn model(&self) -> &Model {
        &self.fs.trees()[0].model
    }

    /// Lets the next answer go, once it is held back.
    fn answer(&self) {
        self.held.recv_timeout(PATIENCE).expect("a request to answer")();
    }

    fn open(&self, file: File, flags: i32) -> Receiver<CallResult<Opened>> {
        let (sender, opened) = channel();
        let done = Box::new(move |outcome| sender.send(outcome).unwrap());
        self.calls.open(Node::Model(0, file).ino(), flags, 0, done);
        opened
    }

    /// Writes a setting; the answer.
    fn set(&self, name: &str, value: &str) -> Receiver<CallResult<()>> {
        let index = SETTINGS.iter().position(|(known, _)| *known == name).unwrap() as u32;
        let opened = self.open(File::Control(index), libc::O_WRONLY).try_recv().unwrap().unwrap();
        let (sender, written) = channel();
        let done = move |outcome| sender.send(outcome).unwrap();
        self.calls.write(opened.fh, 0, value.as_bytes(), false, 0, done);
        written
    }
}

#[test]
fn a_setting_is_answered_when_the_job_has_answered() {
    let mounted = Mounted::new();
    let written = mounted.set("learning_rate", "0.5\n");
    assert!(written.try_recv().is_err(), "answered before the job");
    assert_eq!(mounted.job.controls().hyper.learning_rate, 0.01);
    mounted.answer();
    assert_eq!(written.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(mounted.job.controls().hyper.learning_rate, 0.5);

    let refused = mounted.set("learning_rate", "fast");
    mounted.answer();
    let error = refused.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert_eq!((error.errno, error.message.contains("control/learning_rate")), (libc::EINVAL, true));
}

#[test]
fn a_setting_that_nobody_answers_for_is_no_success() {
    let mounted = Mounted::new();
    for (fault, errno) in [
        (ShardError::TimedOut("the coordinator".into()), libc::ETIMEDOUT),
        (ShardError::Unreachable, libc::EIO),
    ] {
        *mounted.job.fault.lock() = Some(fault);
        let written = mounted.set("learning_rate", "0.5");
        mounted.answer();
        assert_eq!(written.recv_timeout(PATIENCE).unwrap().unwrap_err().errno, errno);
    }
}

#[test]
fn a_version_that_goes_while_its_name_is_looked_up_gives_way_to_the_next_one() {
    let mounted = Mounted::new();
    let set = Box::new(|outcome: Result<(), SetError>| outcome.unwrap());
    Job::set_control(&*mounted.job.shard, "reducer", "assign", PATIENCE, set);
    let dir = Node::Model(0, File::Dir).ino();
    *mounted.job.goes.lock() = Some(Version(0));
    let found = mounted.fs.lookup(dir, OsStr::new("weights")).unwrap();
    assert_eq!(mounted.job.shard.version(), Version(1));
    assert_eq!(Node::from_ino(found.ino), Some(Node::Model(0, File::Weights(Version(1)))));
    mounted.fs.forget(found.ino, 1);
    // What names one version ends with it.
    *mounted.job.goes.lock() = Some(Version(1));
    let versions = Node::Model(0, File::Versions).ino();
    let gone = mounted.fs.lookup(versions, OsStr::new("1")).unwrap_err();
    assert_eq!(gone.errno, libc::ENOENT);
}

#[test]
fn directories_of_tensors_are_part_of_their_version() {
    let elements = 1 << 13;
    let tensors = ["a/b/w", "a/v"].map(|name| (name.to_owned(), DType::F32, vec![elements]));
    let mounted = Mounted::of(ModelLayout::new(tensors.into(), 64 << 10).unwrap());
    let (fs, job) = (&mounted.fs, &mounted.job);
    let set = Box::new(|outcome: Result<(), SetError>| outcome.unwrap());
    Job::set_control(&*job.shard, "reducer", "assign", PATIENCE, set);
    let set = Box::new(|outcome: Result<(), SetError>| outcome.unwrap());
    Job::set_control(&*job.shard, "retain", "0", PATIENCE, set);
    let mut seen = std::collections::HashSet::new();
    for (way, top) in
        [("versions", File::RetainedTensors(Version(0), 0)), ("newest", File::Tensors(Version(0), 0))]
    {
        let top = Node::Model(0, top).ino();
        let a = fs.lookup(top, OsStr::new("a")).unwrap();
        let b = fs.lookup(a.ino, OsStr::new("b")).unwrap();
        let w = fs.lookup(b.ino, OsStr::new("w.npy")).unwrap();
        assert!([top, a.ino, b.ino, w.ino].into_iter().all(|ino| seen.insert(ino)), "{way}");
        for (parent, dir, links) in [(top, a, 3), (a.ino, b, 2)] {
            assert!(dir.is_dir && fs.is_fixed(parent, dir.ino), "{way}");
            assert_eq!((dir.links, dir.mode, dir.keep), (links, 0o755, Keep::Forever), "{way}");
            let mut entries = Vec::new();
            fs.list(dir.ino, 0, |entry| {
                entries.push((entry.name, entry.ino));
                true
            })
            .unwrap();
            assert_eq!(entries[..2], [(".".to_owned(), dir.ino), ("..".to_owned(), parent)], "{way}");
        }
        assert!(!w.is_dir && fs.is_fixed(b.ino, w.ino));
        // The kernel's interest in any of the directories keeps the version.
        fs.forget(w.ino, 1);
        fs.forget(a.ino, 1);
    }
    job.publish();
    let held = [File::RetainedTensors(Version(0), 2), File::Tensors(Version(0), 2)];
    for file in held {
        assert!(job.versions().contains(&Version(0)), "{file:?}");
        fs.forget(Node::Model(0, file).ino(), 1);
    }
    job.publish();
    assert!(!job.versions().contains(&Version(0)), "{:?}", job.versions());
    // A path may lead through `tensors` to another version; one with a version's number leads nowhere now.
    for (file, errno) in held.into_iter().zip([libc::ENOENT, libc::ESTALE]) {
        let gone = fs.lookup(Node::Model(0, file).ino(), OsStr::new("w.npy")).unwrap_err();
        assert_eq!(gone.errno, errno, "{file:?}");
    }
}

#[test]
fn learners_join_and_leave_beside_other_requests() {
    let mounted = Mounted::new();
    let learners = Node::Model(0, File::Learners).ino();
    let (sender, made) = channel();
    let done = Box::new(move |outcome: CallResult<Attributes>| sender.send(outcome).unwrap());
    mounted.fs.make_dir(learners, OsStr::new("a"), (1000, 100), done);
    // This thread is free for others, though nobody has answered.
    assert!(made.try_recv().is_err());
    assert_eq!(mounted.fs.lookup(learners, OsStr::new("a")).unwrap_err().errno, libc::ENOENT);
    mounted.answer();
    let dir = made.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!((dir.is_dir, dir.uid, dir.gid), (true, 1000, 100));
    assert!(mounted.fs.lookup(learners, OsStr::new("a")).is_ok());

    let (sender, removed) = channel();
    mounted.fs.remove_dir(learners, OsStr::new("a"), Box::new(move |outcome| sender.send(outcome).unwrap()));
    assert!(removed.try_recv().is_err());
    mounted.answer();
    assert_eq!(removed.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(mounted.fs.lookup(learners, OsStr::new("a")).unwrap_err().errno, libc::ENOENT);
}

#[test]
fn the_own_learner_joins_beside_other_requests_under_its_name() {
    let mounted = Mounted::new();
    for (file, flags) in [(File::Gradients, libc::O_WRONLY), (File::Device, libc::O_RDWR)] {
        let opened = mounted.open(file, flags);
        assert!(opened.try_recv().is_err(), "{file:?}");
        mounted.answer();
        let opened = opened.recv_timeout(PATIENCE).unwrap().unwrap();
        let own = mounted.model().own_learner().unwrap();
        assert_eq!(own.name, "host1");
        // In the job, it need not be asked again.
        let again = mounted.open(file, flags).try_recv().expect("at once").unwrap();
        mounted.calls.release(again.fh);
        mounted.calls.release(opened.fh);
        mounted.model().send_leave(own.id, LeaveReason::Died);
        mounted.answer();
    }
}

#[test]
fn the_status_tells_transport_and_shards() {
    let mounted = Mounted::new();
    let mount = MountStatus { passthrough: false, open_files: 0, watched_processes: 0 };
    let status = text::status(&mounted.fs.trees()[0], &mount);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["transport"], "tcp");
    let only = serde_json::json!([
        { "id": 0, "address": null, "transport": "in-process", "blocks": 1, "connected": true }
    ]);
    assert_eq!(status["shards"], only);
}
