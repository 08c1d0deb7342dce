//! Ranks of a trainer, which publish new weights in parts: each brings its part to the shards, then tells the
//! coordinator. They die in the middle, take their parts back, come twice or not at all, and begin the next step before
//! others.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use libmodelio::client::core::OUT_OF_REACH;
use libmodelio::vocabulary::ids::{BlockId, ClientId, Version};
use libmodelio::vocabulary::shard_error::{SET_LACKS, ShardError};
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::{Message, PartOf, Refusal};

use crate::chaos::Fault;
use crate::client::ClientEvent;
use crate::history::Uid;
use crate::history::sets::{CELLS, PartRecord};
use crate::laying::{Bringing, CELL, NAN, NotKept};
use crate::programs::{Asked, ENOUGH};
use crate::settings::one_of;
use crate::shard::ShardEvent;
use crate::world::{Event, Node, Now, World};

/// Of reasons that are not the coordinator's.
const SILENCE: [&str; 4] = ["does not answer", "silent past the lease", "is still being made", OUT_OF_REACH];

/// Tokens of ranks belong to no program.
const NO_PROGRAM: usize = usize::MAX;

/// How a run publishes in parts.
#[derive(Clone, Copy, Debug)]
pub struct InParts {
    /// Parts of a set.
    pub of: u32,
    /// The parts must have each element.
    pub all: bool,
    /// Shares of parts that lack some of what they should have, that are of the next step, and that hold NaN.
    pub holes: f64,
    pub early: f64,
    pub bad: f64,
    /// Shares of ranks that die when the shards have their parts, and while others are waited for.
    pub deaths: f64,
    pub withdrawals: f64,
}

/// Of all ranks.
#[derive(Debug, Default)]
pub struct Parts {
    ranks: Vec<Rank>,
    /// The trainer's step, which is the name of its set.
    step: u64,
    /// The requests of ranks that have come to a coordinator.
    asked: BTreeMap<(ClientId, u64), Uid>,
    /// Ranks that have ended when the shards had their part, and before the coordinator heard of it.
    pub died: u64,
    /// Their clients with them.
    pub crashed: u64,
    /// Parts that were taken back.
    pub withdrawn: u64,
    /// Parts that were answered: their sets are versions.
    pub acknowledged: u64,
    /// Parts that have waited in vain for others.
    pub lacking: u64,
    /// Parts that came while another set gathered.
    pub other_set: u64,
    /// Parts that had come already.
    pub twice: u64,
    /// Answers to parts of sets of which a part was not on its shards any more.
    pub gone: u64,
    /// Answers to parts of sets that lacked some of the model.
    pub uncovered: u64,
    /// Sets that were refused for NaN.
    pub bad: u64,
    /// Versions that ranks have waited for, because their parts were answered.
    pub seen: u64,
    /// Parts whose outcome nobody knows.
    pub unsure: u64,
}

#[derive(Debug)]
struct Rank {
    client: usize,
    number: u32,
    /// Its next turn; another one is void.
    turn: u64,
    doing: Doing,
    /// The shards that have heard of its newest part.
    told: BTreeSet<usize>,
    /// Sets with it that are versions, since the network is well.
    since: u32,
}

#[derive(Debug)]
enum Doing {
    Idle,
    Sending {
        uid: Uid,
        deadline: Now,
        batches: Vec<Vec<(usize, Bringing)>>,
        unanswered: usize,
    },
    Waiting {
        uid: Uid,
        is_withdrawn: bool,
    },
    /// It waits until its client shows the version.
    Looking,
    Ended,
}

/// Something that happens to a rank.
#[derive(Clone, Debug)]
pub enum PartEvent {
    /// It goes on.
    Turn(usize, u64),
    /// A shard has answered.
    Taken(Uid, Result<(), NotKept>),
    /// A connection to a shard is lost.
    Lost(Uid),
    /// Nothing has come to its end.
    Late(Uid),
    /// It dies while it waits, or a signal ends its wait.
    Dies(Uid),
}

impl InParts {
    pub fn draw(rng: &mut Rng) -> InParts {
        InParts {
            of: rng.u32(2..=3),
            all: rng.u8(0..3) == 0,
            holes: one_of(rng, &[0.0, 0.2, 0.7]),
            early: one_of(rng, &[0.0, 0.05, 0.3]),
            bad: one_of(rng, &[0.0, 0.0, 0.1]),
            deaths: one_of(rng, &[0.0, 0.05, 0.2]),
            withdrawals: one_of(rng, &[0.0, 0.05, 0.2]),
        }
    }
}

/// Cells one behind the other, or at equal distances.
fn strided(cells: &[u32]) -> Vec<Strided> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for at in cells.iter().map(|cell| u64::from(*cell) * CELL) {
        match runs.last_mut() {
            Some((start, run)) if *start + *run == at => *run += CELL,
            _ => runs.push((at, CELL)),
        }
    }
    let mut pieces: Vec<Strided> = Vec::new();
    for (start, run) in runs {
        match pieces.last_mut() {
            Some(last) if last.run == run && last.count == 1 => {
                (last.stride, last.count) = (start - last.start, 2);
            }
            Some(last) if last.run == run && last.start + last.count * last.stride == start => {
                last.count += 1
            }
            _ => pieces.push(Strided { start, run, stride: run, count: 1 }),
        }
    }
    pieces
}

impl World {
    /// A client has a rank, of a part that nobody has, or of another one.
    pub fn add_rank(&mut self, client: usize) {
        let Some(InParts { of, .. }) = self.settings.parts else { return };
        let missing = self.missing_ranks();
        match missing[..] {
            // Two of one part.
            _ if self.chance(0.1) => {
                let number = self.rng.u32(0..of);
                self.begin_rank(client, number);
            }
            [first, ..] => self.begin_rank(client, first),
            [] => {}
        }
    }

    /// Somebody has each part.
    pub fn complete_ranks(&mut self, client: usize) {
        self.missing_ranks().into_iter().for_each(|number| self.begin_rank(client, number));
    }

    fn begin_rank(&mut self, client: usize, number: u32) {
        let rank = self.parts.ranks.len();
        let told = BTreeSet::new();
        self.parts.ranks.push(Rank { client, number, turn: 0, doing: Doing::Idle, told, since: 0 });
        self.rank_pauses(rank);
    }

    fn missing_ranks(&self) -> Vec<u32> {
        let of = self.settings.parts.map_or(0, |parts| parts.of);
        let has = |rank: &Rank| {
            let client = &self.clients[rank.client];
            client.alive && !client.withholds && !matches!(rank.doing, Doing::Ended)
        };
        (0..of)
            .filter(|number| !self.parts.ranks.iter().any(|rank| rank.number == *number && has(rank)))
            .collect()
    }

    /// Whether a set was published since the network is well, if it can be.
    pub fn ranks_have_done(&self) -> bool {
        let ranks = &self.parts.ranks;
        ranks.iter().any(|rank| rank.since > 0) || self.ranks_have_ended()
    }

    pub fn ranks_have_ended(&self) -> bool {
        let mut ranks = self.parts.ranks.iter().filter(|rank| self.clients[rank.client].alive);
        ranks.all(|rank| matches!(rank.doing, Doing::Ended))
    }

    fn rank_pauses(&mut self, rank: usize) {
        // A trainer steps on for long once the network is well, and others train.
        let about = self.settings.compute * if self.healed { 4 } else { 1 };
        let after = about / 2 + self.some_time(about.as_micros() as u64);
        let of = &mut self.parts.ranks[rank];
        of.turn += 1;
        let (client, turn) = (of.client, of.turn);
        self.after(after, Event::Client(client, ClientEvent::Part(PartEvent::Turn(rank, turn))));
    }

    /// The rank that is at this part.
    fn rank_at(&self, uid: Uid) -> Option<usize> {
        let is_at = |rank: &Rank| match &rank.doing {
            Doing::Sending { uid: at, .. } | Doing::Waiting { uid: at, .. } => *at == uid,
            _ => false,
        };
        self.parts.ranks.iter().position(is_at)
    }

    pub fn part_event(&mut self, client: usize, event: PartEvent) {
        match event {
            PartEvent::Turn(rank, turn) if self.parts.ranks[rank].turn == turn => self.rank_goes_on(rank),
            PartEvent::Turn(..) => {}
            PartEvent::Taken(uid, taken) => {
                let Some(rank) = self.rank_at(uid) else { return };
                let Doing::Sending { unanswered, .. } = &mut self.parts.ranks[rank].doing else { return };
                *unanswered -= 1;
                match taken {
                    Ok(()) if *unanswered == 0 => self.brings_more(rank),
                    Ok(()) => {}
                    Err(NotKept) => self.part_ends(rank, uid),
                }
            }
            PartEvent::Lost(uid) | PartEvent::Dies(uid) => {
                let Some(rank) = self.rank_at(uid) else { return };
                match &mut self.parts.ranks[rank].doing {
                    Doing::Waiting { is_withdrawn, .. } if !*is_withdrawn => {
                        *is_withdrawn = true;
                        self.parts.withdrawn += 1;
                        let message = Message::WithdrawAssign { token: uid.into() };
                        self.ask_for_rank(client, Asked::Withdraw, self.settings.timeout, |_| message);
                    }
                    Doing::Waiting { .. } => {}
                    _ => self.part_ends(rank, uid),
                }
            }
            PartEvent::Late(uid) => {
                let Some(rank) = self.rank_at(uid) else { return };
                if matches!(self.parts.ranks[rank].doing, Doing::Sending { .. }) {
                    self.part_ends(rank, uid);
                }
            }
        }
    }

    fn rank_goes_on(&mut self, rank: usize) {
        let client = self.parts.ranks[rank].client;
        if self.ending {
            self.parts.ranks[rank].doing = Doing::Ended;
            return;
        }
        let state = self.clients[client].core.state();
        let may = state.controls.reducer.takes_weights() || state.version == Version(0);
        if !may && self.healed {
            self.parts.ranks[rank].doing = Doing::Ended;
            return;
        }
        if !may && self.rng.u8(0..4) > 0 {
            return self.rank_pauses(rank);
        }
        self.begins_part(rank);
    }

    /// The cells of a rank's part: a run of them, or some of each block.
    fn cells_of(&mut self, number: u32, step: u64, of: InParts) -> BTreeSet<u32> {
        let cells = self.settings.blocks * CELLS;
        let is_other = self.chance(0.1);
        // A set that must have all is complete once the network is well.
        let lacks = self.rng.f64() < of.holes && !(of.all && self.healed);
        if step.is_multiple_of(3) != is_other {
            let mut all: BTreeSet<u32> = (number..cells).step_by(of.of as usize).collect();
            if all.len() > 1 && lacks {
                all.pop_last();
            }
            return all;
        }
        let (begin, end) = (cells * number / of.of, cells * (number + 1) / of.of);
        let (before, behind) = (self.rng.u32(0..=CELLS), self.rng.u32(0..=CELLS));
        let hole = u32::from(lacks && end > begin + 1);
        // Often it has something of others' besides.
        let (before, behind) = if self.rng.bool() { (before, behind) } else { (0, 0) };
        let begin = if hole > 0 { begin + hole } else { begin.saturating_sub(before) };
        (begin..(end + behind).min(cells)).collect()
    }

    fn begins_part(&mut self, rank: usize) {
        let parts = self.settings.parts.expect("there are ranks");
        let Rank { client, number, .. } = self.parts.ranks[rank];
        let step = self.parts.step + u64::from(self.chance(parts.early));
        let cells = self.cells_of(number, step, parts);
        let bad = self.chance(parts.bad).then(|| cells.iter().nth(self.rng.usize(0..cells.len())).copied());
        let bad = bad.flatten();
        let of = PartOf { set: format!("step-{step}"), number, of: parts.of, all: parts.all };
        let says = self.rng.bool();
        let of_client = self.clients[client].id;
        let uid = self.history.begins_part(PartRecord::new(of_client, of, (cells.clone(), bad), says));
        let batches = self.batches(client, uid, &cells, bad);
        let mut timeout =
            self.settings.timeout / 4 + self.some_time(self.settings.timeout.as_micros() as u64);
        if self.healed {
            timeout += ENOUGH;
        }
        let deadline = self.clock(Node::Client(client)) + timeout;
        self.parts.ranks[rank].told.clear();
        self.parts.ranks[rank].doing = Doing::Sending { uid, deadline, batches, unanswered: 0 };
        self.after(timeout, Event::Client(client, ClientEvent::Part(PartEvent::Late(uid))));
        self.brings_more(rank);
    }

    /// What a part's client sends to the shards that it knows, a request to each at a time.
    fn batches(
        &mut self,
        client: usize,
        uid: Uid,
        cells: &BTreeSet<u32>,
        bad: Option<u32>,
    ) -> Vec<Vec<(usize, Bringing)>> {
        let cells: Vec<u32> = cells.iter().copied().collect();
        let at_once = cells.len().div_ceil(self.rng.usize(1..=3));
        let partitions = &self.courses[self.clients[client].course].partitions;
        let of = |cells: &[u32], partition: usize| {
            let mine = self.shards[partition].mine();
            let is_there = |cell: &&u32| mine.binary_search(&BlockId(**cell / CELLS)).is_ok();
            let cells: Vec<u32> = cells.iter().filter(is_there).copied().collect();
            let value = |cell| if bad == Some(cell) { uid | NAN } else { uid };
            let packed = cells.iter().flat_map(|cell| value(*cell).to_le_bytes()).collect();
            let pieces = strided(&cells);
            (!cells.is_empty()).then_some((partition, Bringing::Pieces { client, part: uid, pieces, packed }))
        };
        let batches = cells.chunks(at_once);
        let batches =
            batches.map(|cells| partitions.iter().filter_map(|&partition| of(cells, partition)).collect());
        batches.rev().collect()
    }

    /// Sends the next of a part, or tells the coordinator that all of it is there.
    fn brings_more(&mut self, rank: usize) {
        let Rank { client, doing, told, .. } = &mut self.parts.ranks[rank];
        let client = *client;
        let Doing::Sending { uid, deadline, batches, unanswered } = doing else { return };
        if let Some(batch) = batches.pop() {
            *unanswered = batch.len();
            told.extend(batch.iter().map(|(partition, _)| *partition));
            for (partition, pieces) in batch {
                let after = self.part_delay(client, partition);
                self.after(after, Event::Shard(partition, ShardEvent::Part(pieces)));
            }
            return;
        }
        let (uid, deadline) = (*uid, *deadline);
        let parts = self.settings.parts.expect("there are ranks");
        if self.chance(parts.deaths) {
            self.parts.died += 1;
            if self.rng.u8(0..4) == 0 {
                self.parts.crashed += 1;
                self.crash(client);
                return self.after(self.settings.compute, Event::Fault(Fault::Starts(1)));
            }
            return self.part_ends(rank, uid);
        }
        self.history.offered(uid);
        self.parts.ranks[rank].doing = Doing::Waiting { uid, is_withdrawn: false };
        let part = self.history.records[&uid].part.clone().expect("a part");
        let blocks = part.blocks().into_iter().map(|block| block..block + 1);
        let blocks = blocks.fold(Vec::<std::ops::Range<u32>>::new(), |mut runs, block| {
            match runs.last_mut() {
                Some(last) if last.end == block.start => last.end = block.end,
                _ => runs.push(block),
            }
            runs
        });
        let (token, meta, part) = (uid.into(), part.meta(uid), part.of);
        let left = deadline.saturating_sub(self.clock(Node::Client(client)));
        let message = |timeout_ms| Message::AssignPart { token, part, blocks, timeout_ms, meta };
        self.ask_for_rank(client, Asked::Part(uid), left, message);
        if self.chance(parts.withdrawals) {
            let after = self.some_time(500_000);
            self.after(after, Event::Client(client, ClientEvent::Part(PartEvent::Dies(uid))));
        }
    }

    fn ask_for_rank(
        &mut self,
        client: usize,
        asked: Asked,
        timeout: Now,
        message: impl FnOnce(u32) -> Message,
    ) {
        let deadline = self.clock(Node::Client(client)) + timeout + self.settings.grace + Now::from_millis(1);
        let of = &mut self.clients[client];
        let token = of.next_token;
        of.next_token += 1;
        of.tokens.insert(token, (NO_PROGRAM, asked, deadline));
        let message = message(timeout.as_millis() as u32 + 1);
        self.on_client(client, |core, now, actions| core.request(token, message, deadline, now, actions));
    }

    /// Nobody waits for this part any more: its connections end.
    fn part_ends(&mut self, rank: usize, part: Uid) {
        let Rank { client, told, doing, .. } = &mut self.parts.ranks[rank];
        let (client, told) = (*client, std::mem::take(told));
        *doing = Doing::Idle;
        for partition in told {
            let after = self.part_delay(client, partition);
            self.after(after, Event::Shard(partition, ShardEvent::Part(Bringing::Ends { client, part })));
        }
        self.rank_pauses(rank);
    }

    /// The coordinator has answered, or nobody waits for it any more.
    pub fn part_answered(&mut self, client: usize, uid: Uid, result: Result<Message, Refusal>) {
        self.trace(|| format!("client {client}: part {uid} is answered with {result:?}"));
        let rank = self.rank_at(uid).expect("it waits");
        let is_made = result.is_ok();
        match result {
            Ok(_) => {
                self.history.acknowledged(uid);
                self.parts.acknowledged += 1;
                let name = self.history.records[&uid].part.as_ref().expect("a part").of.set.clone();
                let step = name.strip_prefix("step-").and_then(|step| step.parse().ok());
                self.parts.step = self.parts.step.max(step.map_or(0, |step: u64| step + 1));
                let healed = self.healed;
                self.parts.ranks[rank].since += u32::from(healed);
            }
            Err(Refusal::Shard(why)) => self.part_refused(uid, &why),
            Err(why) => self.history.part_refused(uid, why.to_string()),
        }
        self.part_ends(rank, uid);
        // On a stream, the state comes before the answer.
        if is_made && self.settings.weather.streams {
            let deadline = self.clock(Node::Client(client)) + self.settings.timeout;
            let of = &mut self.clients[client];
            let token = of.next_token;
            of.next_token += 1;
            of.tokens.insert(token, (NO_PROGRAM, Asked::Part(uid), deadline));
            let of = &mut self.parts.ranks[rank];
            (of.doing, of.turn) = (Doing::Looking, of.turn + 1);
            self.on_client(client, |core, now, actions| core.await_newest(token, deadline, now, actions));
        }
    }

    /// A request comes to the coordinator.
    pub fn part_is_asked(&mut self, client: ClientId, request: u64, message: &Message) {
        if let Message::AssignPart { token, .. } = message {
            self.parts.asked.insert((client, request), *token as Uid);
        }
    }

    /// The coordinator answers a request, perhaps one for a part. Its refusal is its word, also if nobody hears it.
    pub fn part_is_answered(&mut self, client: ClientId, request: u64, answer: &Message) {
        let Some(&uid) = self.parts.asked.get(&(client, request)) else { return };
        let Message::Refused(Refusal::Shard(why)) = answer else { return };
        let why = why.to_string();
        if !SILENCE.iter().any(|silence| why.contains(silence)) {
            self.history.part_refused(uid, why);
        }
    }

    fn part_refused(&mut self, uid: Uid, why: &ShardError) {
        match why {
            ShardError::TimedOut(text) if text.starts_with(SET_LACKS) => self.parts.lacking += 1,
            // Whoever hears nothing knows nothing.
            ShardError::TimedOut(text) if SILENCE.iter().any(|silence| text.contains(silence)) => {
                self.parts.unsure += 1;
                return;
            }
            // Nobody has answered whether it was taken back, unless the coordinator has.
            ShardError::Interrupted => {
                self.parts.unsure += 1;
                return;
            }
            ShardError::Busy(text) if text.starts_with("another set") => self.parts.other_set += 1,
            ShardError::Busy(_) => self.parts.twice += 1,
            ShardError::PartGone(_) => self.parts.gone += 1,
            ShardError::Uncovered(_) => self.parts.uncovered += 1,
            ShardError::NonFinite(_) => self.parts.bad += 1,
            _ => {}
        }
        self.history.part_refused(uid, why.to_string());
    }

    /// The client shows the version that a part has made, or that took too long.
    pub fn part_awaited(&mut self, uid: Uid, shown: Result<Version, String>) {
        if let Ok(version) = shown {
            self.history.holds(version, uid);
            self.parts.seen += 1;
        }
        let client = self.history.records[&uid].part.as_ref().expect("a part").client;
        let looks =
            |rank: &Rank| matches!(rank.doing, Doing::Looking) && self.clients[rank.client].id == client;
        let Some(rank) = self.parts.ranks.iter().position(looks) else { return };
        self.parts.ranks[rank].doing = Doing::Idle;
        self.rank_pauses(rank);
    }
}
