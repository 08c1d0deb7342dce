//! A learner of `scripts/bench`: contributes to a model on shards through [`libmodelio::client::Job`], as a
//! program with the library does, with a staging region to push from and a version's buffer to pull into.
//!
//! It obeys lines on standard input, and answers each with a line of JSON:
//!
//! - `round WHAT`: `push` commits a contribution of the whole model and waits until it is at the shards for good;
//!   `pull` has the version with it in memory; `step` is both; `read_step` also copies the weights to a buffer of the
//!   program's own; `newest` has the newest version in memory, whoever made it, which a process without learners (`--here 0`)
//!   can be asked for, too. Answers with `what`, `bytes` (moved for the learners of this process), `start`, `end`,
//!   `seconds` (of CLOCK_MONOTONIC) and `cpu_seconds` (of this process, meanwhile).
//! - `repeat COUNT WHAT`: does it so many times; answers with `what` and a list of `seconds`.
//! - `payload`: answers with `what` and what this process has pushed, pulled and copied of payload, all in all.
//! - `check PUSHES`: the weights must be the sum of so many pushes of all learners; answers with `what`.
//!
//! With `--overlap` it does steps at once instead, and answers with one line: a list of the parts of each in seconds, as
//! scripts/lib/work/hosts.py does.
//!
//! The end of the input is the end of the process. Several learners of one process are added up before they cross
//! the network. This file holds `unsafe`: staging regions as numbers.

use std::error::Error;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use clap::Parser;
use fixedbitset::FixedBitSet;
use libmodelio::bytes::mmap::Mapping;
use libmodelio::bytes::region::Region;
use libmodelio::client::CommitNotice;
use libmodelio::client::{self, ClientOptions, Opening, TransportChoice, wait_for};
use libmodelio::registry;
use libmodelio::transport::rdma::{Notice, Placement, Polling, RdmaOptions};
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::block_slot::BlockSlot;
use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Step};
use libmodelio::wire::Checksum;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use serde_json::json;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Nothing that is waited for takes longer than this.
const DEADLINE: Duration = Duration::from_secs(60);
/// Gradients repeat after so many elements: small whole numbers, whose sums are exact in whatever order.
const PERIOD: usize = 97;
/// Steps with `--overlap` that fill buffers, and are not counted.
const WARM: usize = 2;

#[derive(Parser)]
#[command(about = "A learner of scripts/bench")]
struct Options {
    /// Where the registry is
    #[arg(long)]
    registry: String,
    /// The model
    #[arg(long)]
    model: String,
    /// Which learner it is, or the first of several
    #[arg(long, default_value_t = 0)]
    rank: usize,
    /// Learners in this process
    #[arg(long, default_value_t = 1)]
    here: usize,
    /// Learners in the job
    #[arg(long, default_value_t = 1)]
    learners: usize,
    /// How bytes go through sockets: auto, uring or poll
    #[arg(long, default_value = "auto")]
    io: Choice,
    /// Shared memory instead of TCP
    #[arg(long, conflicts_with = "rdma")]
    shm: bool,
    /// RDMA instead of TCP, in a build with it
    #[arg(long)]
    rdma: bool,
    /// How blocks are pushed by RDMA: auto, static or dynamic
    #[arg(long, default_value_t)]
    placement: Placement,
    /// How the peer learns of what was written: auto, immediate or flag
    #[arg(long, default_value_t)]
    notice: Notice,
    /// How this end learns of what is done: busy, event or adaptive [default: the library's]
    #[arg(long)]
    polling: Option<Polling>,
    /// Bytes of registered memory for rings, whole MiB [default: the library's]
    #[arg(long)]
    arena_mib: Option<usize>,
    /// Pieces of work outstanding on a queue pair [default: the library's]
    #[arg(long)]
    depth: Option<u32>,
    /// READs outstanding on a queue pair [default: the library's]
    #[arg(long)]
    reads: Option<u8>,
    /// Every how many pieces of work the device reports one [default: the library's]
    #[arg(long)]
    report_every: Option<u32>,
    /// Whether blocks are sent with a checksum: on or off
    #[arg(long, default_value = "on")]
    checksum: Checksum,
    /// Threads that move bytes [default: the library's]
    #[arg(long)]
    threads: Option<usize>,
    /// Connections to each shard [default: the library's]
    #[arg(long)]
    connections: Option<usize>,
    /// When versions are pulled: on-demand, eager or adaptive
    #[arg(long, default_value_t = PullPolicy::OnDemand)]
    pulls: PullPolicy,
    /// Does so many steps, with blocks offered in chunks, each after its share of computing (it sleeps), and ends
    #[arg(long, num_args = 3, value_names = ["STEPS", "CHUNKS", "SECONDS"])]
    overlap: Option<Vec<f64>>,
    /// Bytes that may be on their way from one shard [default: the library's]
    #[arg(long)]
    window: Option<usize>,
}

struct Learner {
    id: LearnerId,
    incarnation: Incarnation,
    staging: Region,
}

struct Job {
    client: client::Job,
    learners: Vec<Learner>,
    all: usize,
    size: usize,
    /// A buffer of the program's own, where a version is copied to.
    copy: Vec<f32>,
}

fn gradient(index: usize, rank: usize) -> f32 {
    (index % PERIOD + rank + 1) as f32
}

impl Options {
    fn transport(&self) -> TransportChoice {
        match (self.rdma, self.shm) {
            (true, _) => TransportChoice::Rdma,
            (_, true) => TransportChoice::SharedMemory,
            _ => TransportChoice::Tcp,
        }
    }

    fn rdma(&self) -> RdmaOptions {
        let usual = RdmaOptions::default();
        RdmaOptions {
            placement: self.placement,
            notice: self.notice,
            polling: self.polling.unwrap_or(usual.polling),
            arena: self.arena_mib.map_or(usual.arena, |mib| mib << 20),
            depth: self.depth.unwrap_or(usual.depth),
            reads: self.reads.unwrap_or(usual.reads),
            report_every: self.report_every.unwrap_or(usual.report_every),
            ..usual
        }
    }
}

impl Job {
    fn join(options: &Options) -> Outcome<Job> {
        let registry = registry::open(&options.registry)?;
        let deadline = Instant::now() + DEADLINE;
        let record = registry.model(&options.model, deadline)?;
        let shards = registry.shards(deadline)?;
        let usual = ClientOptions::default();
        let layout = record.layout()?;
        let client = ClientOptions {
            reactor: None,
            threads: options.threads.unwrap_or(usual.threads),
            connections: options.connections.unwrap_or(usual.connections),
            window: options.window.unwrap_or(usual.window),
            io: options.io,
            transport: options.transport(),
            checksum: options.checksum,
            holds_versions: true,
            pulls: Some(options.pulls),
            patience: DEADLINE,
            rdma: options.rdma(),
            registry: Some(registry),
            ..usual
        };
        let client = client::Job::connect(&record, &shards, client)?;
        let size = layout.size() as usize;
        let mut job = Job { client, learners: Vec::new(), all: options.learners, size, copy: Vec::new() };
        for rank in options.rank..options.rank + options.here {
            let learner = job.learner(rank)?;
            job.learners.push(learner);
        }
        Ok(job)
    }

    fn learner(&self, rank: usize) -> Outcome<Learner> {
        let memory = Mapping::memfd("staging", self.size)?;
        memory.prefault()?;
        let staging = self.client.register(Arc::new(memory));
        self.store_gradients(&staging, rank);
        let join = |done| self.client.join(format!("bench{rank}"), DEADLINE, done);
        let (id, incarnation) = wait_for(DEADLINE, join)?;
        Ok(Learner { id, incarnation, staging })
    }

    /// Stores a learner's gradients into its staging region, as backpropagation does.
    fn store_gradients(&self, staging: &Region, rank: usize) {
        // SAFETY: no contribution is open, so nobody else uses the region.
        let values = unsafe { staging.memory().floats_mut(0..self.size / 4) };
        values.iter_mut().enumerate().for_each(|(index, value)| *value = gradient(index, rank));
    }

    /// What a learner does before it contributes.
    fn prepare(&self, first: usize) {
        for (at, learner) in self.learners.iter().enumerate() {
            self.store_gradients(&learner.staging, first + at);
        }
    }

    /// Every learner contributes its whole staging region.
    fn push(&self) -> Outcome<()> {
        let steps = self.learners.iter().map(|learner| self.open(learner)).collect::<Outcome<Vec<_>>>()?;
        self.commit(&steps)
    }

    /// Ends every learner's contribution to its step. Blocks that were offered are on their way.
    fn commit(&self, steps: &[Step]) -> Outcome<()> {
        let mut answers = Vec::new();
        for (learner, &step) in self.learners.iter().zip(steps) {
            let (sender, receiver) = channel();
            let done = Box::new(move |result| drop(sender.send(result)));
            let layout = self.client.layout();
            // Nobody looks for NaN here: the shard does.
            let unchecked = FixedBitSet::with_capacity(layout.blocks() as usize);
            let whole = CommitNotice::whole(layout, learner.staging.clone(), true);
            self.client.commit(learner.id, step, CommitNotice { unchecked, ..whole }, DEADLINE, done);
            answers.push(receiver);
        }
        for answer in answers {
            answer.recv_timeout(2 * DEADLINE)??;
        }
        Ok(())
    }

    /// A step whose blocks travel while it computes: the seconds of its parts.
    fn overlapped(&self, chunks: u32, compute: f64) -> Outcome<serde_json::Value> {
        let begin = Instant::now();
        let steps = self.learners.iter().map(|learner| self.open(learner)).collect::<Outcome<Vec<_>>>()?;
        let blocks = self.client.layout().blocks();
        let (mut computed, mut offered) = (Duration::ZERO, Duration::ZERO);
        for chunk in 0..chunks {
            let computing = Instant::now();
            std::thread::sleep(Duration::from_secs_f64(compute / f64::from(chunks)));
            let slept = Instant::now();
            computed += slept - computing;
            for (learner, &step) in self.learners.iter().zip(&steps) {
                for block in blocks * chunk / chunks..blocks * (chunk + 1) / chunks {
                    self.offer(learner, step, BlockId(block))?;
                }
            }
            offered += slept.elapsed();
        }
        let all_out = Instant::now();
        self.commit(&steps)?;
        let ended = Instant::now();
        self.pull()?;
        Ok(json!({
            "step": begin.elapsed().as_secs_f64(), "compute": computed.as_secs_f64(),
            "write": offered.as_secs_f64(), "end": (ended - all_out).as_secs_f64(),
            "open": ended.elapsed().as_secs_f64(),
        }))
    }

    /// One block of a learner's staging region is what it is to be.
    fn offer(&self, learner: &Learner, step: Step, block: BlockId) -> Outcome<()> {
        let slot = BlockSlot { learner: learner.id, incarnation: learner.incarnation, step, block };
        let extent = self.client.layout().block_bytes(block);
        // SAFETY: nobody writes to the region.
        let payload = unsafe { learner.staging.memory().bytes(extent.start as usize..extent.end as usize) };
        self.client.write(payload, slot, None)?;
        self.client.staged_in(slot, &learner.staging);
        Ok(())
    }

    /// The learner's next step, when the payload of its last one is its own again.
    fn open(&self, learner: &Learner) -> Outcome<Step> {
        match wait_for(DEADLINE, |done| self.client.open(learner.id, DEADLINE, done))? {
            Opening { step, staging_lent: false } => Ok(step),
            other => Err(format!("opening was answered with {other:?}").into()),
        }
    }

    /// Has the version with every learner's last contribution in memory.
    fn pull(&self) -> Outcome<()> {
        let awaited: Vec<Receiver<_>> = self
            .learners
            .iter()
            .map(|learner| {
                let (sender, receiver) = channel();
                let done = Box::new(move |result| drop(sender.send(result)));
                self.client.await_step(learner.id, DEADLINE, done);
                receiver
            })
            .collect();
        for version in awaited {
            version.recv_timeout(2 * DEADLINE)??;
        }
        Ok(())
    }

    /// Has the newest version in memory.
    fn newest(&self) -> Outcome<()> {
        let (sender, receiver) = channel();
        self.client.await_newest(DEADLINE, Box::new(move |result| drop(sender.send(result))));
        receiver.recv_timeout(2 * DEADLINE)??;
        Ok(())
    }

    /// Copies the newest version that is here.
    fn read(&mut self) -> Outcome<()> {
        let version = self.client.version();
        if !self.client.pin(version) {
            return Err("no version is here".into());
        }
        let weights = self.client.get(version).ok_or("the version is gone")?.region;
        // SAFETY: it is pinned.
        let values = unsafe { weights.memory().floats(0..self.size / 4) };
        self.copy.resize(values.len(), 0.0);
        self.copy.copy_from_slice(values);
        self.client.unpin(version, 1);
        Ok(())
    }

    fn round(&mut self, what: &str) -> Outcome<usize> {
        let moved = self.size * self.learners.len();
        match what {
            "push" => self.push().map(|()| moved),
            "pull" => self.pull().map(|()| moved),
            "step" => self.push().and_then(|()| self.pull()).map(|()| 2 * moved),
            "read_step" => {
                self.push().and_then(|()| self.pull()).and_then(|()| self.read()).map(|()| 2 * moved)
            }
            "newest" => self.newest().map(|()| self.size),
            other => Err(format!("unknown round {other:?}").into()),
        }
    }

    fn check(&self, pushes: usize) -> Outcome<()> {
        let version = self.client.version();
        if !self.client.pin(version) {
            return Err("no version is here".into());
        }
        let weights = self.client.get(version).ok_or("the version is gone")?.region;
        // SAFETY: it is pinned.
        let values = unsafe { weights.memory().floats(0..self.size / 4) };
        let right = |index| (0..self.all).map(|rank| gradient(index, rank)).sum::<f32>() * pushes as f32;
        let wrong = values.iter().enumerate().find(|&(index, value)| *value != right(index));
        let outcome = match wrong {
            None => Ok(()),
            Some((index, value)) => {
                Err(format!("element {index} is {value} after {pushes} pushes, not {}", right(index)).into())
            }
        };
        self.client.unpin(version, 1);
        outcome
    }
}

fn now() -> Outcome<f64> {
    Ok(clock_gettime(ClockId::CLOCK_MONOTONIC)?.num_nanoseconds() as f64 * 1e-9)
}

fn cpu_seconds() -> Outcome<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    Ok((usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 * 1e-6)
}

fn tell(line: &serde_json::Value) -> Outcome<()> {
    let mut output = std::io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

fn main() -> Outcome<()> {
    let options = Options::parse();
    let mut job = Job::join(&options)?;
    if let Some([steps, chunks, compute]) = options.overlap.as_deref() {
        let mut found = Vec::new();
        for number in 0..WARM + *steps as usize {
            let parts = job.overlapped(*chunks as u32, *compute)?;
            if number >= WARM {
                found.push(parts);
            }
        }
        job.client.shut_down();
        return tell(&json!(found));
    }
    tell(&json!({"what": "ready", "io": job.client.backend()}))?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("round", what) => {
                if what == "read_step" {
                    job.prepare(options.rank);
                }
                let (cpu, start) = (cpu_seconds()?, now()?);
                let bytes = job.round(what)?;
                let (end, cpu) = (now()?, cpu_seconds()? - cpu);
                tell(&json!({
                    "what": what, "bytes": bytes, "start": start, "end": end, "seconds": end - start,
                    "cpu_seconds": cpu,
                }))?;
            }
            ("repeat", rest) => {
                let (count, what) = rest.split_once(' ').ok_or("repeat what?")?;
                let mut seconds = Vec::new();
                for _ in 0..count.parse()? {
                    let start = now()?;
                    job.round(what)?;
                    seconds.push(now()? - start);
                }
                tell(&json!({"what": what, "seconds": seconds}))?;
            }
            ("payload", "") => {
                let mut counts = json!(job.client.payload().unwrap_or_default());
                counts["what"] = json!("payload");
                tell(&counts)?;
            }
            ("check", pushes) => {
                job.check(pushes.parse()?)?;
                tell(&json!({"what": "check"}))?;
            }
            _ => return Err(format!("unknown request {line:?}").into()),
        }
    }
    job.client.shut_down();
    Ok(())
}
