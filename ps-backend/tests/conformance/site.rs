//! The site of a test: a job over one path, ends of that job, learners, and their contributions.

use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fixedbitset::FixedBitSet;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::CommitNotice;
use libmodelio::client::{Done, Job, Opening, SetError, wait_for};
use libmodelio::contributor::{ContributeError, Contributor, Share, Wrote};
use libmodelio::reader::Reader;
use libmodelio::transport::rdma::RdmaOptions;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::block_slot::{BlockSlot, Placement};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::transport_kind::TransportKind;
use ps_backend::device::Accelerator;
use ps_backend::partition::executor::Pool;
use ps_backend::server::local;

use crate::c_abi;
pub use crate::world::until;
use crate::world::{self, World};
use test_devices::software_device::{Software, software};

/// The longest wait for an outcome that must come. Devices in software on emulated machines take their time.
pub const LONG: Duration = Duration::from_secs(600);

/// For what does not come.
pub const SHORT: Duration = Duration::from_millis(100);

pub const BLOCK: usize = 64 << 10;

/// Of most models here, the last one shorter than the others.
pub const BLOCKS: u32 = 5;
const BYTES: u64 = 4 * BLOCK as u64 + 20_004;

/// A way for the bytes to go.
pub struct Way {
    kind: TransportKind,
    /// None if that is none.
    over: Option<world::Way>,
    /// The device in software that has the state.
    on_device: Option<(Arc<Software>, Arc<Accelerator>)>,
    /// Ends call the C library.
    by_c: bool,
}

impl Way {
    pub fn in_process() -> Option<Way> {
        Some(Way { kind: TransportKind::InProcess, over: None, on_device: None, by_c: false })
    }

    /// In this process, with the state on a device in software.
    pub fn on_device() -> Option<Way> {
        Some(Way { on_device: Some(software(1 << 30)), ..Way::in_process()? })
    }

    pub fn device(&self) -> &Software {
        &self.on_device.as_ref().expect("a way with a device").0
    }

    pub fn shm() -> Option<Way> {
        let over = Some(world::Way::Shm);
        Some(Way { kind: TransportKind::SharedMemory, over, on_device: None, by_c: false })
    }

    pub fn tcp(io: Choice) -> Option<Way> {
        Some(Way { kind: TransportKind::Tcp, over: Some(world::Way::Tcp(io)), on_device: None, by_c: false })
    }

    /// By the C library, which chooses its own path.
    pub fn c_abi() -> Option<Way> {
        Some(Way { by_c: true, ..Way::tcp(Choice::Auto)? })
    }

    pub fn rdma(change: fn(&mut RdmaOptions)) -> Option<Way> {
        let over = Some(world::Way::rdma_with(change)?);
        Some(Way { kind: TransportKind::Rdma, over, on_device: None, by_c: false })
    }

    /// A job with a small fp32 model of zeros.
    pub fn job(&self, settings: &[(&str, &str)]) -> Site {
        self.job_of(ModelLayout::blank(BYTES, DType::F32, BLOCK as u32).unwrap(), settings)
    }

    pub fn job_of(&self, layout: ModelLayout, settings: &[(&str, &str)]) -> Site {
        self.start(1, layout, settings)
    }

    /// The same on as many as two shards, where a job can have several.
    pub fn striped_job(&self, settings: &[(&str, &str)]) -> Site {
        self.start(2, ModelLayout::blank(BYTES, DType::F32, BLOCK as u32).unwrap(), settings)
    }

    fn start(&self, shards: usize, layout: ModelLayout, settings: &[(&str, &str)]) -> Site {
        // A machine that is slow is not dead.
        let settings = [&[("lease", "0")], settings].concat();
        let place = match self.over {
            None => {
                let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
                let device = self.on_device.as_ref().map(|(_, accelerator)| Arc::clone(accelerator));
                let executor = Pool::start(2, device).unwrap();
                let client = local::start("m", &Arc::new(layout), &controls, &executor, |_| Ok(())).unwrap();
                Place::Here(Arc::new(client))
            }
            Some(way) => Place::There(Box::new(World::of(shards, &layout, &settings, way))),
        };
        Site { kind: self.kind, place, by_c: self.by_c, ends: Mutex::default() }
    }
}

enum Place {
    Here(Arc<Job>),
    There(Box<World>),
}

/// A job, wherever it is.
pub struct Site {
    pub kind: TransportKind,
    place: Place,
    by_c: bool,
    ends: Mutex<Vec<Arc<End>>>,
}

impl Site {
    /// One more end of the job.
    pub fn end(&self) -> Arc<End> {
        let job = match &self.place {
            Place::Here(job) => Arc::clone(job),
            Place::There(world) => Arc::new(world.connect(&world.shards(), world.transport).unwrap()),
        };
        self.with(job)
    }

    /// One that holds nothing of the model, where the model is elsewhere.
    pub fn onlooker(&self) -> Arc<End> {
        let job = match &self.place {
            Place::Here(job) => Arc::clone(job),
            Place::There(world) => Arc::new(world.onlooker()),
        };
        self.with(job)
    }

    fn with(&self, job: Arc<Job>) -> Arc<End> {
        let c = match &self.place {
            Place::There(world) if self.by_c => {
                let url = format!("gradfs://{}/m", world.servers[0].address());
                Some(c_abi::Model::connect(&url, job.layout()))
            }
            _ => None,
        };
        let end = Arc::new(End { job, c });
        self.ends.lock().unwrap().push(Arc::clone(&end));
        end
    }

    /// With an end of the job.
    pub fn one_end(self) -> (Site, Arc<End>) {
        let end = self.end();
        (self, end)
    }

    pub fn two_ends(self) -> (Site, [Arc<End>; 2]) {
        let ends = [self.end(), self.end()];
        (self, ends)
    }

    /// With an end and its learner.
    pub fn one(self) -> (Site, Arc<End>, Learner) {
        let (site, end) = self.one_end();
        let learner = end.join("a");
        (site, end, learner)
    }

    /// With two ends, and a learner of each.
    pub fn two(self) -> (Site, [Arc<End>; 2], [Learner; 2]) {
        let (site, [a, b]) = self.two_ends();
        let learners = [a.join("a"), b.join("b")];
        (site, [a, b], learners)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Those of C take their leave when they are dropped, while the shards are there.
        self.ends.get_mut().unwrap().drain(..).for_each(|end| end.job.shut_down());
    }
}

/// What an end can be asked.
#[derive(Debug)]
pub enum Message {
    Join { name: String },
    Leave { learner: LearnerId, reason: LeaveReason },
    Open { learner: LearnerId },
    Commit { learner: LearnerId, step: Step, notice: CommitNotice },
    Abort { learner: LearnerId },
    Withdraw { learner: LearnerId },
    WithdrawAssign { buffer: RegionKey },
    AwaitStep { learner: LearnerId },
    Allocate,
    Assign { buffer: Region, written: Vec<std::ops::Range<u64>> },
}

/// The answer to a request.
#[derive(Debug)]
pub enum Reply {
    Done,
    Joined { learner: LearnerId, incarnation: Incarnation },
    Opened { step: Step, staging_lent: bool },
    Version(Version),
    Buffer(Region),
}

/// The answer to a message, when it comes.
pub type Answer = Receiver<Result<Reply, ShardError>>;

pub fn answer(answer: &Answer) -> Result<Reply, ShardError> {
    answer.recv_timeout(2 * LONG).expect("an answer")
}

#[track_caller]
pub fn done(result: Result<Reply, ShardError>) {
    assert!(matches!(result, Ok(Reply::Done)), "{result:?}");
}

#[track_caller]
pub fn timed_out(result: Result<Reply, ShardError>) {
    assert!(matches!(result, Err(ShardError::TimedOut(_))), "{result:?}");
}

#[track_caller]
pub fn is_unknown(result: Result<Reply, ShardError>, learner: LearnerId) {
    assert_eq!(result.unwrap_err(), ShardError::UnknownLearner(learner));
}

/// An end of a job: what a mount has of it.
pub struct End {
    /// Where calls go by C, it looks on.
    pub job: Arc<Job>,
    c: Option<Arc<c_abi::Model>>,
}

impl End {
    pub fn send(&self, message: Message, timeout: Duration) -> Answer {
        let (sender, receiver) = channel();
        // Nobody need listen.
        self.ask_within(message, timeout, Box::new(move |result| drop(sender.send(result))));
        receiver
    }

    pub fn ask(&self, message: Message) -> Result<Reply, ShardError> {
        wait_for(LONG, |done| self.ask_within(message, LONG, done))
    }

    pub fn ask_within(&self, message: Message, timeout: Duration, done: Done<Reply>) {
        fn then<T: 'static>(done: Done<Reply>, reply: fn(T) -> Reply) -> Done<T> {
            Box::new(move |result| done(result.map(reply)))
        }
        let plain = |()| Reply::Done;
        let job = &self.job;
        if let Some(c) = self.c.as_ref().filter(|_| !matches!(message, Message::Allocate)) {
            return c.ask(message, timeout, done);
        }
        match message {
            Message::Join { name } => {
                let joined = |(learner, incarnation)| Reply::Joined { learner, incarnation };
                job.join(name, timeout, then(done, joined));
            }
            Message::Leave { learner, reason } => job.leave(learner, reason, timeout, then(done, plain)),
            Message::Open { learner } => {
                let opened = |Opening { step, staging_lent }| Reply::Opened { step, staging_lent };
                job.open(learner, timeout, then(done, opened));
            }
            Message::Commit { learner, step, notice } => {
                job.commit(learner, step, notice, timeout, then(done, plain));
            }
            Message::Abort { learner } => job.abort(learner, timeout, then(done, plain)),
            Message::Withdraw { learner } => done(job.withdraw(learner).map(plain)),
            Message::WithdrawAssign { buffer } => {
                job.withdraw_assign(buffer);
                done(Ok(Reply::Done));
            }
            Message::AwaitStep { learner } => job.await_step(learner, timeout, then(done, Reply::Version)),
            Message::Allocate => done(job.allocate().map(Reply::Buffer)),
            Message::Assign { buffer, written } => job.assign(buffer, &written, timeout, then(done, plain)),
        }
    }

    pub fn region(&self, name: &str) -> Region {
        let memory = Mapping::memfd(name, self.job.layout().size() as usize).unwrap();
        self.job.register(Arc::new(memory))
    }

    fn rooms(&self) -> [Region; 2] {
        ["even", "odd"].map(|name| self.region(name))
    }

    pub fn try_join(&self, name: &str) -> Result<(LearnerId, Incarnation), ShardError> {
        match self.ask(Message::Join { name: name.into() })? {
            Reply::Joined { learner, incarnation } => Ok((learner, incarnation)),
            other => panic!("{other:?}"),
        }
    }

    pub fn join(self: &Arc<Self>, name: &str) -> Learner {
        let (id, incarnation) = self.try_join(name).unwrap();
        Learner { end: Arc::clone(self), id, incarnation, rooms: Mutex::new(self.rooms()) }
    }

    pub fn has(&self, learner: LearnerId) -> bool {
        self.c.as_ref().map_or_else(|| self.job.has_learner(learner), |c| c.has(learner))
    }

    /// The value of a setting, as this end knows it.
    pub fn setting(&self, name: &str) -> String {
        match &self.c {
            Some(c) => c.setting(name),
            None => self.job.controls().get(name).unwrap(),
        }
    }

    pub fn set(&self, name: &str, value: &str) -> Result<(), SetError> {
        if let Some(c) = &self.c {
            return c.set(name, value);
        }
        let (sender, receiver) = channel();
        self.job.set_control(name, value, LONG, Box::new(move |result| sender.send(result).unwrap()));
        receiver.recv_timeout(2 * LONG).expect("an answer")
    }

    /// The newest version here, and its bytes.
    pub fn bytes(&self) -> (Version, Vec<u8>) {
        if let Some(c) = &self.c {
            return c.newest();
        }
        let mut bytes = vec![0; self.job.layout().size() as usize];
        (self.job.read(0, &mut bytes).unwrap(), bytes)
    }

    pub fn weights(&self) -> (Version, Vec<f32>) {
        let (version, bytes) = self.bytes();
        (version, floats(&bytes))
    }

    /// The weights of a version, if it is kept here.
    pub fn opens(&self, version: Version) -> Option<Vec<f32>> {
        if let Some(c) = &self.c {
            return c.version(version).map(|bytes| floats(&bytes));
        }
        let reader = Reader::open(&self.job, version)?;
        Some(floats(reader.bytes(0..self.job.layout().size())))
    }

    /// All weights of the newest version are `value`.
    #[track_caller]
    pub fn shows(&self, version: u64, value: f32) {
        let (shown, weights) = self.weights();
        assert_eq!(shown, Version(version));
        let other = weights.iter().position(|&weight| weight != value);
        assert_eq!(other.map(|at| (at, weights[at])), None, "not {value} in version {version}");
    }

    /// Waits until a version is here.
    #[track_caller]
    pub fn sees(&self, version: u64) {
        if let Some(c) = &self.c {
            c.sees(version);
        }
        until("a version", || self.job.version() >= Version(version));
    }
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// A learner of an end.
pub struct Learner {
    pub end: Arc<End>,
    pub id: LearnerId,
    pub incarnation: Incarnation,
    /// What one step has staged may be needed while the next one is.
    rooms: Mutex<[Region; 2]>,
}

impl Learner {
    pub fn ask_to_open(&self) -> Result<(Step, bool), ShardError> {
        match self.end.ask(Message::Open { learner: self.id })? {
            Reply::Opened { step, staging_lent } => Ok((step, staging_lent)),
            other => panic!("{other:?}"),
        }
    }

    /// Begins a contribution.
    pub fn open(&self) -> Contribution<'_> {
        let (step, _) = self.ask_to_open().unwrap();
        let mut rooms = self.rooms.lock().unwrap();
        // Blocks that were sent for a plan that was dropped may still be read.
        if self.end.job.take_strays(self.id) {
            *rooms = self.end.rooms();
        }
        let none = FixedBitSet::with_capacity(self.end.job.layout().blocks() as usize);
        let notice = CommitNotice {
            sent: none.clone(),
            deferred: none.clone(),
            unchecked: none,
            tensors: FixedBitSet::with_capacity(self.end.job.layout().tensors().len()),
            partly: Some(Default::default()),
            contents: Default::default(),
            weight: Default::default(),
            staging: rooms[step.0 as usize % 2].clone(),
            lendable: true,
        };
        Contribution { learner: self, step, notice }
    }

    /// A contribution of `value` everywhere, all of it offered.
    pub fn all_of(&self, value: f32) -> Contribution<'_> {
        let mut contribution = self.open();
        for block in 0..self.end.job.layout().blocks() {
            contribution.offer_all_of(block, value);
        }
        contribution
    }

    /// Contributes `value` everywhere.
    #[track_caller]
    pub fn push(&self, value: f32) {
        done(self.all_of(value).commit());
    }

    /// Waits for the version with the last step.
    #[track_caller]
    pub fn pull(&self) -> u64 {
        match self.end.ask(Message::AwaitStep { learner: self.id }) {
            Ok(Reply::Version(version)) => {
                match self.end.c {
                    Some(_) => until("who looks on has it", || self.end.job.version() >= version),
                    None => assert!(self.end.job.version() >= version),
                }
                version.0
            }
            other => panic!("{other:?}"),
        }
    }

    /// Waits for a version with the last step, in which all weights are `value`.
    #[track_caller]
    pub fn pulls(&self, version: u64, value: f32) {
        assert_eq!(self.pull(), version);
        self.end.shows(version, value);
    }

    /// Contributes the first value everywhere, and waits for a version in which all weights are the other one.
    #[track_caller]
    pub fn makes(&self, value: f32, version: u64, shown: f32) {
        self.push(value);
        self.pulls(version, shown);
    }

    pub fn leave(&self, reason: libmodelio::vocabulary::members::LeaveReason) {
        done(self.end.ask(Message::Leave { learner: self.id, reason }));
    }

    /// What a mount writes to for it.
    pub fn contributor(&self) -> Arc<Contributor> {
        let new = Contributor::new(Arc::clone(&self.end.job), (self.id, self.incarnation), Arc::default());
        Arc::new(new.unwrap())
    }

    pub fn slot(&self, step: Step, block: u32) -> BlockSlot {
        BlockSlot { learner: self.id, incarnation: self.incarnation, step, block: BlockId(block) }
    }
}

/// What a learner contributes to a step.
pub struct Contribution<'a> {
    pub learner: &'a Learner,
    pub step: Step,
    /// With the blocks that were offered and staged so far.
    pub notice: CommitNotice,
}

impl Contribution<'_> {
    /// Bytes of a block in which all is `value`.
    pub fn filled(&self, block: u32, value: f32) -> Vec<u8> {
        let extent = self.learner.end.job.layout().block_bytes(BlockId(block));
        value.to_le_bytes().repeat((extent.end - extent.start) as usize / 4)
    }

    /// Offers a block; staged by the channel, if it is to be.
    pub fn offer(&mut self, block: u32, bytes: &[u8]) -> Result<Placement, ShardError> {
        let slot = self.learner.slot(self.step, block);
        let placement = match &self.learner.end.c {
            Some(c) => c.write(self.learner.id, block as u64 * BLOCK as u64, bytes)?,
            None => self.learner.end.job.write(bytes, slot, Some(&self.notice.staging))?,
        };
        if placement != Placement::Duplicate {
            self.notice.sent.insert(block as usize);
            self.notice.deferred.set(block as usize, placement == Placement::Deferred);
            self.write(block as usize * BLOCK, bytes.len());
        }
        Ok(placement)
    }

    /// Notes that so many bytes are written somewhere.
    fn write(&mut self, at: usize, len: usize) {
        let bytes = at as u64..(at + len) as u64;
        self.notice.tensors.insert_range(self.learner.end.job.layout().tensors_in(&bytes));
    }

    #[track_caller]
    pub fn offer_all_of(&mut self, block: u32, value: f32) {
        let placement = self.offer(block, &self.filled(block, value)).unwrap();
        assert_ne!(placement, Placement::Duplicate);
    }

    /// Puts a block where it is read at the commit, which nobody looks at before.
    pub fn stage(&mut self, block: u32, bytes: &[u8]) {
        store(&self.notice.staging, block as usize * BLOCK, bytes);
        for set in [&mut self.notice.sent, &mut self.notice.deferred, &mut self.notice.unchecked] {
            set.insert(block as usize);
        }
        self.write(block as usize * BLOCK, bytes.len());
    }

    pub fn stage_all_of(&mut self, block: u32, value: f32) {
        let bytes = self.filled(block, value);
        self.stage(block, &bytes);
    }

    /// Sends the commit.
    pub fn send(&self, timeout: Duration) -> Answer {
        let (learner, step, notice) = (self.learner.id, self.step, self.notice.clone());
        self.learner.end.send(Message::Commit { learner, step, notice }, timeout)
    }

    pub fn commit(&self) -> Result<Reply, ShardError> {
        answer(&self.send(LONG))
    }

    pub fn abort(self) {
        done(self.learner.end.ask(Message::Abort { learner: self.learner.id }));
    }
}

/// Writes bytes, and waits for the coordinator where that has to name the step first.
pub fn write(contributor: &Arc<Contributor>, at: usize, bytes: &[u8]) -> Result<(), ContributeError> {
    while contributor.write(&mut Share::None, at as u64, bytes, LONG)? == Wrote::Asks {
        let (sender, receiver) = channel();
        contributor.ask_step(LONG, move |outcome| sender.send(outcome).unwrap());
        receiver.recv_timeout(2 * LONG).expect("an answer")?;
    }
    Ok(())
}

/// The outcome of a contributor's commit, when it comes.
pub type Outcome = Receiver<Result<(), ContributeError>>;

pub fn begin_commit(contributor: &Arc<Contributor>) -> Outcome {
    let (sender, receiver) = channel();
    contributor.commit(Share::None, LONG, move |result| drop(sender.send(result)));
    receiver
}

/// Stores bytes at the beginning of the mapping, and ships all of it.
pub fn commit_mapped(contributor: &Arc<Contributor>, bytes: &[u8]) -> Result<(), ContributeError> {
    store(contributor.mapped(), 0, bytes);
    let (sender, receiver) = channel();
    contributor.commit_mapped(LONG, move |result| drop(sender.send(result)));
    outcome(&receiver)
}

pub fn outcome(receiver: &Outcome) -> Result<(), ContributeError> {
    receiver.recv_timeout(2 * LONG).expect("an answer")
}

/// Stores bytes into memory that is the test's just now.
pub fn store(region: &Region, at: usize, bytes: &[u8]) {
    // SAFETY: no commit of what lies there is under way, so nobody reads it.
    unsafe { region.memory().write(at, bytes) };
}
