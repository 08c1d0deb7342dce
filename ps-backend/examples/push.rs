//! How fast one learner pushes to one shard on its host, and pulls: over shared memory and over loopback TCP, against a
//! memcpy of the same bytes from one memfd to another by one thread.
//!
//! `cargo run --release -p ps-backend --example push -- [MiB=64] [rounds=31]`
//!
//! A push is timed from the commit to its answer, when its version is complete at the shard; the reducer is `sum`, so
//! that three bytes move for each one that is pushed (read it, read the old weight, write the new one), and a memcpy
//! moves two. A pull is timed from then until the version is here. Transports take turns; medians are printed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixedbitset::FixedBitSet;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::Region;
use libmodelio::client::CommitNotice;
use libmodelio::client::{ClientOptions, Job, TransportChoice, wait_for};
use libmodelio::registry::{Registry, RemoteRegistry};
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::wire::Checksum;
use ps_backend::create::{NewModel, create};
use ps_backend::server::{RdmaUse, Server, ServerOptions};
use ps_backend::snapshot::Piece;

const LONG: Duration = Duration::from_secs(60);

struct Bench {
    client: Job,
    learner: LearnerId,
    staging: Region,
    _server: Server,
}

impl Bench {
    fn new(bytes: usize, transport: TransportChoice) -> Bench {
        let options = ServerOptions {
            listen: "127.0.0.1:0".parse().expect("an address"),
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
            rdma_options: libmodelio::transport::rdma::RdmaOptions::default(),
            device: None,
            device_memory: None,
            snapshot_rate: None,
        };
        let server = Server::start(options).expect("a shard");
        let registry = RemoteRegistry::new(server.address().to_string());
        let layout = ModelLayout::blank(bytes as u64, DType::F32, 256 << 10).expect("a layout");
        let settings = [("reducer", "sum"), ("learners", "1")];
        let controls = Controls::default().with_all(settings).expect("settings");
        let new = NewModel {
            name: "m",
            layout: &layout,
            metadata: BTreeMap::new(),
            controls: &controls,
            shards: Some(1),
            record: None,
            place: None,
        };
        let zeros = &|(block, _): Piece, bytes: &mut Vec<u8>| {
            let block = layout.block_bytes(block);
            bytes.clear();
            bytes.resize((block.end - block.start) as usize, 0);
            Ok(())
        };
        let record = create(&registry, &new, zeros, &|_| Ok(())).expect("a model");
        let shards = registry.shards(Instant::now() + LONG).expect("shards");
        let options = ClientOptions { transport, ..ClientOptions::default() };
        let client = Job::connect(&record, &shards, options).expect("a client");
        let memory = Mapping::memfd("staging", bytes).expect("memory");
        memory.prefault().expect("pages");
        let staging = client.register(Arc::new(memory));
        let joined = wait_for(LONG, |done| client.join("l".into(), LONG, done));
        let (learner, _) = joined.expect("a learner");
        Bench { client, learner, staging, _server: server }
    }

    /// Seconds of a push, and of the pull after it.
    fn round(&self) -> (f64, f64) {
        let opened = wait_for(LONG, |done| self.client.open(self.learner, LONG, done));
        let step = opened.expect("a contribution").step;
        let layout = self.client.layout();
        // Nobody looks for NaN here: the shard does.
        let unchecked = FixedBitSet::with_capacity(layout.blocks() as usize);
        let notice = CommitNotice { unchecked, ..CommitNotice::whole(layout, self.staging.clone(), true) };
        let begin = Instant::now();
        wait_for(LONG, |done| self.client.commit(self.learner, step, notice, LONG, done)).expect("a version");
        let pushed = begin.elapsed().as_secs_f64();
        wait_for(LONG, |done| self.client.await_step(self.learner, LONG, done)).expect("a version");
        (pushed, begin.elapsed().as_secs_f64() - pushed)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number =
        |default: usize| arguments.next().map_or(default, |text| text.parse().expect("a number"));
    let (mib, rounds) = (number(64), number(31));
    let bytes = mib << 20;
    let memfd = || {
        let memory = Mapping::memfd("copy", bytes).expect("memory");
        memory.prefault().expect("pages");
        memory
    };
    let (from, to) = (memfd(), memfd());
    let ways = [("shm", TransportChoice::SharedMemory), ("tcp", TransportChoice::Tcp)];
    let benches: Vec<_> = ways.map(|(name, way)| (name, Bench::new(bytes, way))).into_iter().collect();
    let mut copies = Vec::new();
    let mut taken = vec![(Vec::new(), Vec::new()); benches.len()];
    for round in 0..rounds + 3 {
        let begin = Instant::now();
        // SAFETY: both belong to this thread.
        unsafe { to.write(0, from.bytes(0..bytes)) };
        let copy = begin.elapsed().as_secs_f64();
        for ((_, bench), (pushes, pulls)) in benches.iter().zip(&mut taken) {
            let (push, pull) = bench.round();
            if round >= 3 {
                pushes.push(push);
                pulls.push(pull);
            }
        }
        if round >= 3 {
            copies.push(copy);
        }
    }
    let copy = median(copies);
    let gib = |seconds: f64| bytes as f64 / seconds / f64::from(1 << 30);
    println!("memcpy through memfds: {:.2} GiB/s", gib(copy));
    for ((name, bench), (pushes, pulls)) in benches.iter().zip(taken) {
        let (push, pull) = (median(pushes), median(pulls));
        println!(
            "{name}: push {:.2} GiB/s ({:.3} ms, {:.2} of memcpy), pull {:.2} GiB/s ({:.3} ms, {:.2} of memcpy); {}",
            gib(push),
            push * 1e3,
            copy / push,
            gib(pull),
            pull * 1e3,
            copy / pull,
            bench.client.shards()[0].transport,
        );
        bench.client.shut_down();
    }
}
