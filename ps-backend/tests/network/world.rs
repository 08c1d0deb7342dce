//! Shards on loopback, a model on them, and clients of it.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::{Region, RegionKey};
use libmodelio::client::CommitNotice;
use libmodelio::client::{ClientError, ClientOptions, Job, TransportChoice};
use libmodelio::registry::{Registry, RemoteRegistry};
use libmodelio::transport::rdma::RdmaOptions;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{LearnerId, Step, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Checksum, Message, ModelRecord, Refusal, ShardRecord};
use ps_backend::create::{NewModel, create};
use ps_backend::server::{RdmaUse, Server, ServerOptions};
use ps_backend::snapshot::Piece;

pub const LONG: Duration = Duration::from_secs(600);
/// The size of a block of a world's model, in bytes.
pub const BLOCK: u32 = 64 << 10;

pub struct World {
    /// As long as these live, the shards do.
    pub servers: Vec<Server>,
    pub registry: RemoteRegistry,
    pub record: ModelRecord,
    pub io: Choice,
    pub transport: TransportChoice,
    pub rdma: RdmaOptions,
    options: ServerOptions,
}

/// Which way the bytes of a test go.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// Through sockets.
    Tcp(Choice),
    /// Through shared memory.
    Shm,
    /// By RDMA, over the device that this address leads over, used as this says.
    Rdma(std::net::IpAddr, fn(&mut RdmaOptions)),
}

impl Way {
    /// By RDMA, if `GRADFS_RDMA_ADDRESS` names an address that leads over a device.
    pub fn rdma() -> Option<Way> {
        Way::rdma_with(|_| {})
    }

    /// The same, with other options.
    pub fn rdma_with(change: fn(&mut RdmaOptions)) -> Option<Way> {
        let Ok(text) = std::env::var("GRADFS_RDMA_ADDRESS") else {
            eprintln!("skipped: GRADFS_RDMA_ADDRESS names no address of an RDMA device");
            return None;
        };
        Some(Way::Rdma(text.parse().expect("GRADFS_RDMA_ADDRESS is an address"), change))
    }

    pub fn options(self) -> (ServerOptions, TransportChoice) {
        match self {
            Way::Tcp(io) => (ServerOptions { io, ..options() }, TransportChoice::Tcp),
            Way::Shm => (options(), TransportChoice::SharedMemory),
            Way::Rdma(address, change) => {
                let listen = std::net::SocketAddr::new(address, 0);
                let mut rdma_options = RdmaOptions { arena: 16 << 20, ..RdmaOptions::default() };
                change(&mut rdma_options);
                (
                    ServerOptions { listen, rdma: RdmaUse::On, rdma_options, ..options() },
                    TransportChoice::Rdma,
                )
            }
        }
    }
}

pub fn server(registry: Option<String>, io: Choice) -> Server {
    Server::start(ServerOptions { registry, io, ..options() }).unwrap()
}

/// A shard's, on loopback.
pub fn options() -> ServerOptions {
    ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        registry: None,
        registry_state: None,
        holds_blocks: true,
        checksum: Checksum::On,
        threads: 2,
        state: Default::default(),
        io: Choice::Auto,
        rdma: RdmaUse::Off,
        rdma_port: None,
        rdma_options: RdmaOptions::default(),
        device: None,
        device_memory: None,
        snapshot_rate: None,
    }
}

impl World {
    /// `shards` shards with a blank fp32 model of `bytes` bytes.
    pub fn new(shards: usize, bytes: u64, settings: &[(&str, &str)], way: Way) -> World {
        let layout = ModelLayout::blank(bytes, DType::F32, BLOCK).unwrap();
        World::of(shards, &layout, settings, way)
    }

    pub fn of(shards: usize, layout: &ModelLayout, settings: &[(&str, &str)], way: Way) -> World {
        World::with_threads(2, shards, layout, settings, way)
    }

    /// With so many threads of each shard that compute.
    pub fn with_threads(
        threads: usize,
        shards: usize,
        layout: &ModelLayout,
        settings: &[(&str, &str)],
        way: Way,
    ) -> World {
        let (options, transport) = way.options();
        World::with_options(ServerOptions { threads, ..options }, transport, shards, layout, settings)
    }

    /// With these options of the shards.
    pub fn with_options(
        options: ServerOptions,
        transport: TransportChoice,
        shards: usize,
        layout: &ModelLayout,
        settings: &[(&str, &str)],
    ) -> World {
        World::with_each(vec![options; shards], transport, layout, settings)
    }

    /// With these options of each shard.
    pub fn with_each(
        mut each: Vec<ServerOptions>,
        transport: TransportChoice,
        layout: &ModelLayout,
        settings: &[(&str, &str)],
    ) -> World {
        let (shards, options) = (each.len(), each[0].clone());
        let io = options.io;
        let start = |registry, options| started(ServerOptions { registry, ..options });
        let first = start(None, each.remove(0));
        let at = first.address().to_string();
        let mut servers = vec![first];
        servers.extend(each.into_iter().map(|options| start(Some(at.clone()), options)));
        let registry = RemoteRegistry::new(at);
        let record = blank(&registry, "m", layout, settings, shards);
        World { servers, registry, record, io, transport, rdma: options.rdma_options.clone(), options }
    }

    /// One more shard like the others.
    pub fn another(&self) -> Server {
        let registry = Some(self.servers[0].address().to_string());
        started(ServerOptions { registry, ..self.options.clone() })
    }

    pub fn client(&self) -> Client {
        self.client_with(|_| {})
    }

    /// One more client, with a learner.
    pub fn learner(&self, name: &str) -> (Client, Learner) {
        let client = self.client();
        let learner = Learner::join(&client, name);
        (client, learner)
    }

    /// It serves one more client, whose step makes version 1 of a model of one learner.
    #[track_caller]
    pub fn serves(&self) {
        let client = self.client();
        let learner = Learner::join(&client, "l");
        learner.makes(1.0, 1, 1.0);
    }

    pub fn shards(&self) -> Vec<ShardRecord> {
        self.registry.shards(Instant::now() + LONG).unwrap()
    }

    pub fn connect(&self, shards: &[ShardRecord], transport: TransportChoice) -> Result<Job, ClientError> {
        self.connect_within(shards, transport, 3 * LONG)
    }

    pub fn connect_within(
        &self,
        shards: &[ShardRecord],
        transport: TransportChoice,
        patience: Duration,
    ) -> Result<Job, ClientError> {
        let options = ClientOptions { transport, patience, ..self.client_options() };
        Job::connect(&self.record, shards, options)
    }

    fn client_options(&self) -> ClientOptions {
        ClientOptions {
            io: self.io,
            transport: self.transport,
            rdma: self.rdma.clone(),
            // An emulated machine beside other work takes its time.
            patience: 3 * LONG,
            ..ClientOptions::default()
        }
    }

    /// A client that holds nothing of the model.
    pub fn onlooker(&self) -> Job {
        let options = ClientOptions { holds_versions: false, ..self.client_options() };
        Job::connect(&self.record, &self.shards(), options).unwrap()
    }

    pub fn client_with(&self, change: impl FnOnce(&mut ClientOptions)) -> Client {
        let mut options = self.client_options();
        change(&mut options);
        Client::of(Job::connect(&self.record, &self.shards(), options).unwrap())
    }
}

/// A client that takes its leave at its end.
pub struct Client {
    job: Arc<Job>,
    dies: bool,
}

impl Client {
    pub fn of(job: Job) -> Client {
        Client { job: Arc::new(job), dies: false }
    }

    /// It ends without a word.
    pub fn dies(mut self) {
        self.dies = true;
    }
}

impl Deref for Client {
    type Target = Arc<Job>;

    fn deref(&self) -> &Arc<Job> {
        &self.job
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if !self.dies {
            self.job.shut_down();
        }
    }
}

/// Waits until something is so.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is_so() {
        assert!(Instant::now() < deadline, "it does not come about: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[track_caller]
pub fn is_all(weights: &[f32], value: f32) {
    let wrong = weights.iter().position(|&weight| weight != value);
    assert_eq!(wrong.map(|at| (at, weights[at])), None, "{value} is expected");
}

/// No client gets to its shards. `connects` says why once it has waited for long enough to know.
#[track_caller]
pub fn is_unreachable(whys: &[&str], connects: impl Fn(Duration) -> ClientError) {
    let mut patience = Duration::from_millis(300);
    loop {
        let error = connects(patience).to_string();
        let Some(why) = whys.iter().find(|why| !error.contains(**why)) else { return };
        assert!(error.contains("no answer") && patience < LONG, "{error}, not {why}");
        patience *= 2;
    }
}

/// Makes a model of zeros.
pub fn blank(
    registry: &RemoteRegistry,
    name: &str,
    layout: &ModelLayout,
    settings: &[(&str, &str)],
    shards: usize,
) -> ModelRecord {
    let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
    let new = NewModel {
        name,
        layout,
        metadata: BTreeMap::new(),
        controls: &controls,
        shards: Some(shards),
        record: None,
        place: None,
    };
    let zeros = &|(block, _): Piece, bytes: &mut Vec<u8>| {
        let block = layout.block_bytes(block);
        bytes.clear();
        bytes.resize((block.end - block.start) as usize, 0);
        Ok(())
    };
    create(registry, &new, zeros, &|_| Ok(())).unwrap()
}

/// One learner of a client.
pub struct Learner {
    pub client: Arc<Job>,
    pub id: LearnerId,
    staging: Region,
}

pub fn ask(client: &Job, message: Message) -> Result<Message, Refusal> {
    let (sender, receiver) = channel();
    client.request(message, LONG, Box::new(move |result| sender.send(result).unwrap()));
    receiver.recv_timeout(2 * LONG).unwrap()
}

impl Learner {
    pub fn join(client: &Arc<Job>, name: &str) -> Learner {
        let Ok(Message::Joined { learner, .. }) = ask(client, Message::Join { name: name.into() }) else {
            panic!("{name} does not join")
        };
        let memory = Mapping::memfd("staging", client.layout().size() as usize).unwrap();
        let staging = Region::new(Arc::new(memory), RegionKey(u64::from(learner.0)));
        Learner { client: Arc::clone(client), id: learner, staging }
    }

    /// Begins a contribution of `value` everywhere, and sends its commit.
    pub fn push(&self, value: f32) -> std::sync::mpsc::Receiver<Result<Message, Refusal>> {
        let step = self.open();
        // SAFETY: the last contribution is at the shards.
        let floats = unsafe { self.staging.memory().floats_mut(0..self.client.layout().size() as usize / 4) };
        floats.fill(value);
        self.commit(step)
    }

    #[track_caller]
    pub fn pushes(&self, value: f32) {
        push_all([(self, value)]);
    }

    pub fn open(&self) -> Step {
        match ask(&self.client, Message::Open { learner: self.id }) {
            Ok(Message::Opened { step, staging_lent: false }) => step,
            other => panic!("{other:?}"),
        }
    }

    pub fn commit(&self, step: Step) -> std::sync::mpsc::Receiver<Result<Message, Refusal>> {
        let (sender, receiver) = channel();
        let (layout, staging) = (self.client.layout(), self.staging.clone());
        let unchecked = FixedBitSet::with_capacity(layout.blocks() as usize);
        let notice = CommitNotice { unchecked, ..CommitNotice::whole(layout, staging, true) };
        let done = Box::new(move |result: Result<(), ShardError>| {
            drop(sender.send(result.map(|()| Message::Done).map_err(Refusal::Shard)));
        });
        self.client.commit(self.id, step, notice, LONG, done);
        receiver
    }

    /// Waits for the version with the last step, and reads it.
    pub fn pull(&self) -> (Version, Vec<f32>) {
        let (sender, receiver) = channel();
        self.client.await_step(self.id, LONG, Box::new(move |result| sender.send(result).unwrap()));
        let version = receiver.recv_timeout(2 * LONG).unwrap().unwrap();
        read(&self.client, version)
    }

    /// A contribution of the first value makes a version in which all is the other one.
    #[track_caller]
    pub fn makes(&self, value: f32, version: u64, shown: f32) {
        self.pushes(value);
        self.sees(version, shown);
    }

    /// The version with the last step is this one, and all of it is `value`.
    #[track_caller]
    pub fn sees(&self, version: u64, value: f32) {
        let (shown, weights) = self.pull();
        assert_eq!(shown, Version(version));
        is_all(&weights, value);
    }

    pub fn leave(&self) {
        let leave = Message::Leave { learner: self.id, reason: LeaveReason::Asked };
        assert_eq!(ask(&self.client, leave), Ok(Message::Done));
    }
}

/// Each of them contributes its value everywhere, all at the same time.
#[track_caller]
pub fn push_all<'a>(each: impl IntoIterator<Item = (&'a Learner, f32)>) {
    let pushed: Vec<_> = each.into_iter().map(|(learner, value)| learner.push(value)).collect();
    for answer in pushed {
        assert_eq!(answer.recv_timeout(LONG).unwrap(), Ok(Message::Done));
    }
}

pub fn read(client: &Job, version: Version) -> (Version, Vec<f32>) {
    assert!(client.pin(version));
    let view = client.get(version).unwrap();
    // SAFETY: it is pinned.
    let floats = unsafe { view.region.memory().floats(0..client.layout().size() as usize / 4) }.to_vec();
    client.unpin(version, 1);
    (version, floats)
}

/// A server. A port that is free for TCP may be in use for RDMA: then it takes another one.
fn started(options: ServerOptions) -> Server {
    let in_use = |error: &dyn std::fmt::Display| error.to_string().contains("EADDRINUSE");
    for _ in 0..8 {
        match Server::start(options.clone()) {
            Err(error) if in_use(&error) => {}
            started => return started.unwrap(),
        }
    }
    panic!("no port is free")
}
