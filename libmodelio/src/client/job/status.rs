//! The status of a job as this client sees it: its phase, its learners, and the path to each shard.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Job;
use crate::client::core::{PullReport, ToldLearners};
use crate::client::options::TransportChoice;
use crate::client::payloads::wire_form::FullBecause;
use crate::client::peers::fallback::FastPath;
use crate::client::peers::peer::Peer;
use crate::client::peers::routes::ShardRoute;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::controls::PullPolicy;
use crate::vocabulary::ids::{ShardId, Version};
use crate::vocabulary::members::{MemberView, WaitedFor};
use crate::vocabulary::norm::Norm;
use crate::vocabulary::phase::{AWAY, JobPhase};
use crate::vocabulary::transport_kind::TransportKind;
use crate::wire::{Checksum, JobState, LearnerState};

/// How versions are pulled by relays, and by this client as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayView {
    /// The address of the relay, if the client has one.
    pub relay: Option<String>,
    /// Whether it is connected.
    pub connected: bool,
    /// Where followers reach this client, if they may.
    pub listens: Option<SocketAddr>,
    /// The addresses of their connections.
    pub followers: Vec<SocketAddr>,
    /// Payload that was sent to them, in bytes.
    pub relayed_bytes: u64,
    /// Blocks that were taken from shards in place of a relay.
    pub replaced_blocks: u64,
}

/// One of the model's shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardView {
    /// Its number in the model's block map.
    pub shard: ShardId,
    /// Its host and port. `None` if it is in this process.
    pub address: Option<String>,
    /// The transport of its blocks.
    pub transport: TransportKind,
    /// Whether blocks are sent to it with a checksum. `None` if they do not go over TCP.
    pub checksum: Option<Checksum>,
    /// The form in which contributions go to it, if not in full.
    pub coding: Option<Coding>,
    /// Why they go in full, though the setting names another form.
    pub full_because: Option<FullBecause>,
    /// The number of blocks that it owns.
    pub blocks: u32,
    /// Why the transport is not shared memory, though the shard is on this host.
    pub no_memory: Option<String>,
    /// Why the transport is not RDMA, though the shard offers it, or though the options require it.
    pub no_rdma: Option<String>,
    /// Why a connection to it was last lost, or did not come about.
    pub lost: Option<String>,
    /// Whether there is a connection to it now.
    pub connected: bool,
    /// How long this process or the coordinator has been unable to reach it, if that is long.
    pub away: Option<Duration>,
}

/// The status of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobStatus {
    /// The phase of the job.
    pub state: JobPhase,
    /// The learners that others have been waiting for, and for how long, if that is long.
    pub late: Option<(WaitedFor, Duration)>,
    /// The newest version that can be opened here.
    pub version: Version,
    /// The learners in the job, on all mounts.
    pub members: Vec<MemberView>,
    /// The number of learners whose contribution to the coming version is in.
    pub committed: usize,
    /// The number of contributions that are part of a version.
    pub contributions: u64,
    /// The norm of the gradient behind the newest version, if its step had to know it.
    pub norm: Option<Norm>,
    /// The number of contributions that the newest version has added.
    pub newest_of: u32,
    /// The length of the newest grace window.
    pub grace_window: Option<Duration>,
    /// The learning rate of the newest version, if the staleness of its contribution counted.
    pub rate: Option<f32>,
    /// The number of blocks that were reduced on arrival.
    pub blocks_on_arrival: u64,
    /// The number of version buffers in this process, and of free ones.
    pub buffers: (usize, usize),
    /// The versions in this process's memory.
    pub versions: Vec<Version>,
    /// When versions are pulled, and the blocks of the last one that came whole, and not as what has changed in them.
    /// `None` if the only shard is in this process.
    pub pull: Option<(PullPolicy, PullReport, usize)>,
    /// The model's shards, in the order of their numbers. There is at least one.
    pub shards: Vec<ShardView>,
}

impl Job {
    /// The status at this moment.
    pub fn status(&self) -> JobStatus {
        let state = self.state();
        // The coordinator may be in this process, and is asked without a lock.
        let silences: Vec<Duration> =
            state.learners.iter().map(|learner| self.silence(learner.learner)).collect();
        let (buffers, shards) = (self.buffers(), self.shards());
        let is_away = shards.iter().any(|shard| shard.away.is_some());
        let inner = self.shared.inner.lock();
        let member = |(learner, silent): (&LearnerState, Duration)| {
            let (name, incarnation) = inner.core.identity(learner.learner)?;
            Some(MemberView {
                learner: learner.learner,
                name: name.to_owned(),
                incarnation,
                step: learner.step,
                unpublished: learner.unpublished,
                published_in: learner.published_in,
                phase: match inner.core.is_writing(learner.learner) {
                    true => "writing",
                    false if learner.unpublished => "committed",
                    false => "idle",
                },
                silent,
                joined_at: learner.joined_at,
                attached: learner.attached,
            })
        };
        JobStatus {
            state: match state.phase {
                ends @ (JobPhase::Failed | JobPhase::Restoring) => ends,
                _ if is_away => JobPhase::Waiting,
                phase => phase,
            },
            late: inner.peers.late.learners.map(|since| {
                let late = WaitedFor { learners: state.late.clone(), more: state.late_more as usize };
                (late, since.elapsed())
            }),
            version: inner.core.offered_version(),
            members: state.learners.iter().zip(silences).filter_map(member).collect(),
            committed: state.committed as usize,
            contributions: state.contributions,
            norm: state.norm,
            newest_of: state.newest_of,
            grace_window: state.grace_window,
            rate: state.rate,
            blocks_on_arrival: self.on_arrival.load(Ordering::Relaxed),
            buffers,
            versions: inner.versions.numbers().collect(),
            pull: (!self.shared.shards.show_their_buffers()).then(|| {
                let (policy, report) = inner.core.pull_report();
                let whole = inner.versions.pulled_whole().unwrap_or(self.layout().blocks() as usize);
                (policy, report, whole)
            }),
            shards,
        }
    }

    /// What the job knew of learners as of a version, if it was told lately.
    pub fn told_learners(&self, version: Version) -> Option<ToldLearners> {
        self.shared.inner.lock().core.told_learners(version).cloned()
    }

    /// The state of the job: of this moment if the coordinator is in this process, else as last received.
    pub fn state(&self) -> JobState {
        match self.shared.shards.local() {
            Some(local) => local.shard.state(),
            None => self.shared.inner.lock().core.state().clone(),
        }
    }

    /// The transport of the job: TCP if one of the shards is reached by it, else RDMA if one is.
    pub fn kind(&self) -> TransportKind {
        let shards = self.shards();
        let any = |kind| shards.iter().any(|shard| shard.transport == kind);
        let kinds = [TransportKind::Tcp, TransportKind::Rdma, TransportKind::InProcess];
        kinds.into_iter().find(|kind| any(*kind)).unwrap_or(TransportKind::SharedMemory)
    }

    /// The relays, if the client uses any.
    pub fn relays(&self) -> Option<RelayView> {
        let options = &self.shared.options;
        if options.relay.is_none() && options.via.is_none() {
            return None;
        }
        let inner = self.shared.inner.lock();
        Some(RelayView {
            relay: inner.core.relay_address().map(|address| address.to_string()),
            connected: !inner.peers.relay.1.links.is_empty(),
            listens: options.relay.as_ref().map(|relay| relay.address()),
            followers: options
                .relay
                .as_ref()
                .map(|relay| relay.followers(&self.shared.model))
                .unwrap_or_default(),
            relayed_bytes: self.shared.accounts.relayed.load(Ordering::Relaxed),
            replaced_blocks: inner.core.replaced_relay(),
        })
    }

    /// The model's shards, in the order of the block map's owners.
    pub fn shards(&self) -> Vec<ShardView> {
        let inner = self.shared.inner.lock();
        if self.shared.shards.local().is_some() {
            let here = |&shard| ShardView {
                shard,
                address: None,
                transport: TransportKind::InProcess,
                checksum: None,
                coding: None,
                full_because: inner.controls().wire.map(|_| FullBecause::InProcess),
                blocks: self.layout().blocks(),
                no_memory: None,
                no_rdma: None,
                lost: None,
                connected: true,
                away: None,
            };
            return inner.core.shards().iter().map(here).collect();
        }
        let view = |(partition, (place, peer)): (usize, (&ShardRoute, &Peer))| {
            let now = self.shared.now();
            let gone = inner.peers.gone_since(partition, now).map(|since| now.saturating_sub(since));
            // A required path has no substitute.
            let must = self.shared.options.transport;
            let no = |fast: FastPath| {
                let barred = place.barred.clone().filter(|_| must == fast.alone());
                barred.or_else(|| peer.fallbacks.why(fast).map(str::to_owned))
            };
            let (no_memory, no_rdma) = (no(FastPath::SharedMemory), no(FastPath::Rdma));
            let transport = match place.fast {
                Some(FastPath::SharedMemory) if no_memory.is_none() || must != TransportChoice::Auto => {
                    TransportKind::SharedMemory
                }
                Some(FastPath::Rdma) if no_rdma.is_none() || must != TransportChoice::Auto => {
                    TransportKind::Rdma
                }
                _ => TransportKind::Tcp,
            };
            let coding = inner.controls().wire;
            let full_because = coding.and_then(|_| self.shared.full_because(&inner, transport));
            ShardView {
                coding: coding.filter(|_| full_because.is_none()),
                full_because,
                shard: place.record.shard,
                address: Some(place.record.address.clone()),
                transport,
                checksum: (transport == TransportKind::Tcp).then_some(self.shared.options.checksum),
                blocks: place.blocks,
                no_memory,
                no_rdma,
                lost: peer.lost.clone(),
                connected: !peer.links.is_empty(),
                away: gone.filter(|gone| *gone >= AWAY),
            }
        };
        inner.peers.routes.partitions.iter().zip(&inner.peers.partitions).enumerate().map(view).collect()
    }
}
