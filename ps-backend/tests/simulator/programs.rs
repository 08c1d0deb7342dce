//! What runs on the clients: learners that train as programs do, with their mishaps, and an operator.

use std::collections::BTreeSet;

use libmodelio::client::core::Token;
use libmodelio::vocabulary::ids::{BlockId, LearnerId, Step};
use libmodelio::vocabulary::members::LeaveReason;
use libmodelio::vocabulary::partly::PartlyWritten;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{Message, ReaderDoes, Refusal};

use crate::client::{Client, ClientEvent, Payload};
use crate::history::{Uid, meta_of};
use crate::settings::tensors_of;
use crate::world::{Event, Node, Now, World};

/// Memory that is lent counts only if the version is made before its program needs it back, and so does any contribution
/// to a deterministic job. Learners that wait for less than a version takes may keep each other from it for ever, also
/// while the network is well. Then they wait for this much longer.
pub const ENOUGH: Now = Now::from_secs(20);

/// What a request was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Join,
    Open,
    /// As mounts do: the step is known here, and the coordinator gets a message.
    OpenBeside(Step),
    AbortBeside(Option<Uid>),
    Commit(Uid),
    Await(Uid),
    Abort(Option<Uid>),
    Withdraw,
    Leave,
    Control,
    Assign(Uid),
    Part(Uid),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// It joins, or opens its next contribution, when it goes on.
    Idle,
    Writing,
    /// The outcome of its commit is not known.
    Unsure,
    Waiting,
    /// It has left for good.
    Ended,
}

/// A program on a client.
#[derive(Debug)]
pub struct Program {
    name: String,
    /// It changes settings and writes weights; it contributes nothing.
    operator: bool,
    pub learner: Option<LearnerId>,
    doing: Doing,
    /// Its next turn; another one is void.
    turn: u64,
    step: Step,
    slot: u32,
    uid: Option<Uid>,
    /// Its contribution lies in memory that is its own again at the answer.
    mapped: bool,
    /// It waits for a version with its own step in it.
    reads_own: bool,
    /// Steps acknowledged since the network is well.
    pub since: u32,
    /// The coordinator may have carried out a join of which it does not know.
    join_unsure: bool,
    /// New weights that it is writing, and their blocks.
    writes: Option<(Uid, Vec<u32>)>,
}

impl Program {
    pub fn learner(name: String) -> Program {
        Program {
            name,
            operator: false,
            learner: None,
            doing: Doing::Idle,
            turn: 0,
            step: Step(0),
            slot: 0,
            uid: None,
            mapped: false,
            reads_own: false,
            since: 0,
            join_unsure: false,
            writes: None,
        }
    }

    pub fn operator(name: String) -> Program {
        Program { operator: true, ..Program::learner(name) }
    }

    /// Whether it has done `steps` since the network is well, or never does any.
    pub fn has_done(&self, steps: u32) -> bool {
        self.operator || self.doing == Doing::Ended || self.since >= steps
    }

    pub fn is_operator(&self) -> bool {
        self.operator
    }

    pub fn has_ended(&self) -> bool {
        self.doing == Doing::Ended
    }
}

impl World {
    /// The program goes on after about so long.
    pub fn program_pauses(&mut self, index: usize, program: usize, about: Now) {
        let after = about / 2 + self.some_time(about.as_micros() as u64);
        let program_of = &mut self.clients[index].programs[program];
        program_of.turn += 1;
        let turn = program_of.turn;
        self.after(after, Event::Client(index, ClientEvent::Program(program, turn)));
    }

    fn ask(
        &mut self,
        index: usize,
        program: usize,
        asked: Asked,
        message: impl FnOnce(u32) -> Message,
    ) -> Token {
        let client = &mut self.clients[index];
        let token = client.next_token;
        client.next_token += 1;
        let mut timeout =
            self.settings.timeout / 4 + self.some_time(self.settings.timeout.as_micros() as u64);
        let can_end = self.clients[index].programs[program].mapped || self.settings.controls.deterministic;
        if self.healed && can_end && matches!(asked, Asked::Commit(_)) {
            timeout += ENOUGH;
        }
        // The coordinator's answer may take a while: it says more than silence does.
        let deadline = self.clock(Node::Client(index)) + timeout + self.settings.grace;
        self.clients[index].tokens.insert(token, (program, asked, deadline));
        let message = message(timeout.as_millis() as u32 + 1);
        self.on_client(index, |core, now, actions| core.request(token, message, deadline, now, actions));
        token
    }

    pub fn program_goes_on(&mut self, index: usize, at: usize, turn: u64) {
        let program = &self.clients[index].programs[at];
        if program.turn != turn {
            return;
        }
        if program.operator {
            return self.operate(index, at);
        }
        let Some(learner) = program.learner else {
            if self.ending {
                self.clients[index].programs[at].doing = Doing::Ended;
                return;
            }
            let name = program.name.clone();
            self.clients[index].programs[at].doing = Doing::Waiting;
            self.ask(index, at, Asked::Join, |_| Message::Join { name });
            return;
        };
        let doing = program.doing;
        match doing {
            Doing::Idle if self.ending || self.chance(self.settings.leaves) => self.leave(index, at),
            Doing::Idle => {
                let known = self.clients[index].core.next_step(learner).filter(|_| self.rng.bool());
                if let Some((step, lent)) = known {
                    self.ask(index, at, Asked::OpenBeside(step), |_| Message::Open { learner });
                    return self.opened(index, at, step, lent);
                }
                self.clients[index].programs[at].doing = Doing::Waiting;
                self.ask(index, at, Asked::Open, |_| Message::Open { learner });
            }
            Doing::Writing if self.rng.f64() < self.settings.slow && self.writes_more(index, at) => {
                self.program_pauses(index, at, self.settings.compute);
            }
            Doing::Writing if self.chance(self.settings.aborts) => self.abort(index, at),
            Doing::Writing if self.chance(self.settings.leaves) => self.leave(index, at),
            Doing::Writing => self.commit(index, at),
            Doing::Unsure => match self.rng.u32(0..10) {
                0..6 => self.commit(index, at),
                6..8 => self.abort(index, at),
                8 => self.leave(index, at),
                _ => {
                    let program = &mut self.clients[index].programs[at];
                    program.doing = Doing::Waiting;
                    self.ask(index, at, Asked::Open, |_| Message::Open { learner });
                }
            },
            Doing::Waiting | Doing::Ended => {}
        }
    }

    fn abort(&mut self, index: usize, at: usize) {
        let program = &mut self.clients[index].programs[at];
        program.doing = Doing::Waiting;
        let Some(learner) = program.learner else {
            return self.program_pauses(index, at, Now::from_millis(10));
        };
        let is_its = |uid: &Uid| self.history.records[uid].of.is_some_and(|(of, _)| of == learner);
        let uid = self.clients[index].programs[at].uid.filter(is_its);
        if self.rng.bool() {
            self.ask(index, at, Asked::AbortBeside(uid), |_| Message::Abort { learner });
            self.clients[index].programs[at].doing = Doing::Idle;
            return self.program_pauses(index, at, Now::from_millis(1));
        }
        self.ask(index, at, Asked::Abort(uid), |_| Message::Abort { learner });
    }

    fn leave(&mut self, index: usize, at: usize) {
        let program = &mut self.clients[index].programs[at];
        program.doing = Doing::Waiting;
        let Some(learner) = program.learner else {
            return self.program_pauses(index, at, Now::from_millis(10));
        };
        let reason = LeaveReason::Asked;
        self.ask(index, at, Asked::Leave, |_| Message::Leave { learner, reason });
    }

    fn commit(&mut self, index: usize, at: usize) {
        let program = &mut self.clients[index].programs[at];
        let (Some(learner), Some(uid)) = (program.learner, program.uid) else {
            program.doing = Doing::Idle;
            return self.program_pauses(index, at, Now::from_millis(10));
        };
        program.doing = Doing::Waiting;
        let (step, slot, lent) = (program.step, program.slot, program.mapped);
        self.history.offered(uid);
        let mut blocks: Vec<std::ops::Range<u32>> = Vec::new();
        for &block in &self.history.records[&uid].blocks {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        let payload = Payload { uid, slot, lent, overwritten: false };
        self.clients[index].payloads.insert((learner, step), payload);
        let mut tensors: Vec<std::ops::Range<u32>> = Vec::new();
        for tensor in self.history.records[&uid].tensors.iter().map(|&tensor| tensor as u32) {
            match tensors.last_mut() {
                Some(last) if last.end == tensor => last.end += 1,
                _ => tensors.push(tensor..tensor + 1),
            }
        }
        // It stays open what is written of a block that is not whole, as if there were too many pieces.
        let record = &self.history.records[&uid];
        let is_whole = record.blocks.iter().all(|&block| record.is_whole(block));
        let partly = is_whole.then(PartlyWritten::default);
        let base = Some(self.clients[index].core.version());
        let commit = |timeout_ms| Message::Commit {
            learner,
            step,
            blocks,
            tensors,
            partly,
            contents: Default::default(),
            weight: Default::default(),
            timeout_ms,
            lent,
            given_up: None,
            base,
        };
        let token = self.ask(index, at, Asked::Commit(uid), commit);
        if self.chance(self.settings.interrupts) {
            let after = self.some_time(500_000);
            self.after(after, Event::Client(index, ClientEvent::Interrupt(at, token)));
        }
    }

    /// A signal ends the wait for a commit.
    pub fn interrupt(&mut self, index: usize, at: usize, token: Token) {
        let waits = self.clients[index].tokens.contains_key(&token);
        if let Some(learner) = self.clients[index].programs[at].learner.filter(|_| waits) {
            self.ask(index, at, Asked::Withdraw, |_| Message::Withdraw { learner });
        }
    }

    /// The coordinator has said that a learner is gone.
    pub fn program_left(&mut self, index: usize, learner: LearnerId) {
        if let Some(program) = self.clients[index].programs.iter_mut().find(|p| p.learner == Some(learner)) {
            program.learner = None;
        }
    }

    pub fn awaited(
        &mut self,
        index: usize,
        at: usize,
        result: Result<libmodelio::vocabulary::ids::Version, String>,
    ) {
        let now = self.clock(Node::Client(index));
        let Client { core, programs, .. } = &mut self.clients[index];
        let program = &mut programs[at];
        program.doing = Doing::Idle;
        let reads_own = program.reads_own && core.state().controls.reads_own_step();
        if let Ok(version) = result {
            core.version_opened(program.learner, now);
            if let Some(uid) = program.uid.filter(|_| reads_own) {
                self.history.holds(version, uid);
            }
        }
        let about = self.settings.compute;
        self.program_pauses(index, at, about);
    }

    pub fn answered(&mut self, index: usize, at: usize, asked: Asked, result: Result<Message, Refusal>) {
        if let Asked::Part(uid) = asked {
            return self.part_answered(index, uid, result);
        }
        self.trace(|| format!("client {index}, program {at}: {asked:?} is answered with {result:?}"));
        let compute = self.settings.compute;
        let timed_out = matches!(&result, Err(Refusal::Shard(ShardError::TimedOut(_))));
        let interrupted = matches!(&result, Err(Refusal::Shard(ShardError::Interrupted)));
        let unknown = matches!(&result, Err(Refusal::Shard(ShardError::UnknownLearner(_))));
        let mapped = matches!(asked, Asked::Commit(_)) && self.clients[index].programs[at].mapped;
        if let (Asked::Commit(uid), true) = (asked, mapped) {
            // It stores into its memory from now on, so later reads find other bytes.
            let lent = self.clients[index].payloads.values().find(|payload| payload.uid == uid);
            assert!(lent.is_none(), "client {index}: {uid} is answered, and may be asked for still");
        }
        match (asked, result) {
            (Asked::Join, Ok(Message::Joined { learner, .. })) => {
                let program = &mut self.clients[index].programs[at];
                program.learner = Some(learner);
                program.slot = 0;
                program.uid = None;
            }
            (Asked::Join, Err(_)) if timed_out => self.clients[index].programs[at].join_unsure = true,
            // Nobody else has its name, and whatever it joined before it has left.
            (Asked::Join, Err(Refusal::Shard(ShardError::NameTaken(name)))) => {
                let unsure = self.clients[index].programs[at].join_unsure;
                assert!(unsure, "client {index}: a join of {name} was carried out twice");
            }
            (Asked::Open, Ok(Message::Opened { step, staging_lent })) => {
                return self.opened(index, at, step, staging_lent);
            }
            (Asked::Commit(uid), Ok(_)) => {
                self.history.acknowledged(uid);
                let healed = self.healed;
                let program = &mut self.clients[index].programs[at];
                program.since += u32::from(healed);
                if let Some(learner) = program.learner.filter(|_| self.rng.bool()) {
                    return self.await_own_step(index, at, learner, uid);
                }
            }
            (Asked::Commit(uid), Err(why)) if timed_out && mapped => {
                self.loans.timed_out += 1;
                let text = why.to_string();
                // The coordinator's word is that it never counts. Silence says nothing.
                if text.contains("does not answer") || text.contains("silent past the lease") {
                    self.history.record(uid).unsure = true;
                } else {
                    self.history.refused(uid, &why);
                }
                return self.abort(index, at);
            }
            (Asked::Commit(uid), Err(_)) if timed_out => {
                self.history.record(uid).unsure = true;
                self.clients[index].programs[at].doing = Doing::Unsure;
                return self.program_pauses(index, at, Now::from_millis(50));
            }
            // A signal ends the wait also where the coordinator does not answer.
            (Asked::Commit(uid), Err(_)) if interrupted => {
                self.history.record(uid).unsure = true;
                return self.abort(index, at);
            }
            // Its commit may have been taken before its learner was given up.
            (Asked::Commit(_), Err(_)) if unknown => self.clients[index].programs[at].learner = None,
            // In a failed job, the outcome of an earlier try stays unknown.
            (Asked::Commit(uid), Err(Refusal::Shard(ShardError::Lost(_))))
                if self.history.records[&uid].unsure =>
            {
                return self.abort(index, at);
            }
            (Asked::Commit(uid), Err(why)) => {
                self.history.refused(uid, &why);
                return self.abort(index, at);
            }
            (Asked::Leave, Ok(_)) => self.clients[index].programs[at].learner = None,
            (Asked::OpenBeside(expected), Ok(Message::Opened { step, .. })) => {
                assert_eq!(step, expected, "client {index}, program {at}: opened by itself");
                return;
            }
            (Asked::AbortBeside(uid), Ok(_)) => return self.took_back(index, uid),
            (Asked::Abort(uid), Ok(_)) => self.took_back(index, uid),
            (Asked::Withdraw | Asked::OpenBeside(_) | Asked::AbortBeside(_), _) => return,
            (Asked::Assign(uid), Ok(_)) => self.history.acknowledged(uid),
            (Asked::Assign(_), Err(_)) if timed_out || interrupted => {}
            (Asked::Assign(uid), Err(why)) => self.history.refused(uid, &why),
            (_, Err(_)) if unknown => self.clients[index].programs[at].learner = None,
            _ => {}
        }
        self.clients[index].programs[at].doing = Doing::Idle;
        self.program_pauses(index, at, compute);
    }

    /// The coordinator has answered that this contribution is taken back. It counts then as the client knows by now, or
    /// never: on a stream, the state comes before the answer.
    fn took_back(&mut self, index: usize, uid: Option<Uid>) {
        let Some(uid) = uid.filter(|_| self.settings.weather.streams) else { return };
        let Some((learner, step)) = self.history.records[&uid].of else { return };
        if self.clients[index].core.taken_step(learner).is_some_and(|taken| taken < step) {
            self.history.refused(uid, &"it was taken back");
        }
    }

    fn await_own_step(&mut self, index: usize, at: usize, learner: LearnerId, uid: Uid) {
        let deadline = self.clock(Node::Client(index)) + self.settings.timeout;
        let client = &mut self.clients[index];
        let token = client.next_token;
        client.next_token += 1;
        client.programs[at].doing = Doing::Waiting;
        client.tokens.insert(token, (at, Asked::Await(uid), deadline));
        let reads_own = client.core.state().controls.reads_own_step();
        client.programs[at].reads_own = reads_own;
        self.on_client(index, |core, now, actions| {
            core.await_fresh(token, Some(learner), deadline, now, actions);
        });
    }

    /// The first write of a contribution: from here on its staging region is written over.
    fn opened(&mut self, index: usize, at: usize, step: Step, lent: bool) {
        let maps = self.rng.f64() < self.settings.mapped;
        let client = &mut self.clients[index];
        let program = &mut client.programs[at];
        let Some(learner) = program.learner else {
            program.doing = Doing::Idle;
            return self.program_pauses(index, at, Now::from_millis(10));
        };
        // The region that is lent is the one of the step before, whatever was staged and dropped since.
        let before = client.payloads.get(&(learner, Step(step.0 - 1)));
        if client.core.take_strays(learner) {
            program.slot = (program.slot | 1) + 1;
        } else if let Some(payload) = before.filter(|_| lent) {
            program.slot = payload.slot ^ 1;
        }
        program.doing = Doing::Writing;
        program.step = step;
        program.mapped = maps;
        let slot = program.slot;
        let of_learner = client.payloads.iter_mut().filter(|((l, _), _)| *l == learner);
        of_learner
            .filter(|(_, payload)| payload.slot == slot && !payload.lent && !maps)
            .for_each(|(_, payload)| payload.overwritten = true);
        let uid = self.history.begins(Some((learner, step)));
        client.programs[at].uid = Some(uid);
        let mut blocks = self.some_blocks();
        // Contributions of values are refused if it is open what is written of them.
        let are_values = self.clients[index].core.state().controls.reducer.combine().replaces();
        let mut tensors: BTreeSet<usize> = blocks.iter().flat_map(|&block| tensors_of(block)).collect();
        if self.chance(self.settings.in_part) && !are_values {
            // Whole tensors are written, so blocks at their ends are written in part.
            let all = tensors_of(self.settings.blocks - 1).end;
            tensors = (0..all).filter(|_| self.rng.bool()).collect();
            tensors.insert(self.rng.usize(0..all));
            blocks = (0..self.settings.blocks).collect();
            blocks.retain(|&block| tensors_of(block).any(|tensor| tensors.contains(&tensor)));
        }
        let record = self.history.record(uid);
        record.blocks.extend(&blocks);
        record.tensors = tensors;
        if self.chance(self.settings.bad) {
            self.history.record(uid).bad = blocks.first().copied();
        }
        let compute = self.settings.compute;
        self.program_pauses(index, at, compute);
    }

    /// Some of what the program contributes is written, or declared final in its mapping. False if that was not possible, or not wanted.
    fn writes_more(&mut self, index: usize, at: usize) -> bool {
        let program = &self.clients[index].programs[at];
        let (Some(learner), Some(uid), step) = (program.learner, program.uid, program.step) else {
            return false;
        };
        if !self.settings.provisional {
            return false;
        }
        let (slot, lent) = (program.slot, program.mapped);
        let record = &self.history.records[&uid];
        // NaN is found when a block is staged. In a mapping it is found when a block is read.
        let can_go = |&block: &u32| record.is_whole(block) && (lent || record.bad != Some(block));
        let blocks: Vec<u32> = record.blocks.iter().copied().filter(can_go).collect();
        let mut any = false;
        for block in blocks {
            if self.rng.bool() {
                continue;
            }
            let block = BlockId(block);
            if self
                .on_client(index, |core, now, actions| core.offered(learner, step, block, now, actions))
                .is_some()
            {
                let payload = Payload { uid, slot, lent, overwritten: false };
                self.clients[index].payloads.insert((learner, step), payload);
                any = true;
            }
        }
        any
    }

    fn some_blocks(&mut self) -> Vec<u32> {
        if self.chance(0.5) {
            return (0..self.settings.blocks).collect();
        }
        let mut blocks: Vec<u32> = (0..self.settings.blocks).filter(|_| self.rng.bool()).collect();
        if blocks.is_empty() {
            blocks.push(self.rng.u32(0..self.settings.blocks));
        }
        blocks
    }

    /// The operator does something.
    fn operate(&mut self, index: usize, at: usize) {
        if self.healed {
            let program = &mut self.clients[index].programs[at];
            program.doing = Doing::Ended;
            if let Some((uid, _)) = program.writes.take() {
                self.on_client(index, |core, _, actions| core.rewrites_weights(u64::from(uid), actions));
            }
            return;
        }
        if self.settings.readers && self.chance(0.4) {
            let version = self.clients[index].core.version();
            let does = match self.rng.u8(0..8) {
                0..2 => ReaderDoes::Begins { host: "host".into(), staged: version },
                2..7 => ReaderDoes::Applies(version),
                _ => ReaderDoes::Ends,
            };
            let name = self.clients[index].programs[at].name.clone();
            self.ask(index, at, Asked::Control, |_| Message::Reader { name, does });
            return;
        }
        if self.chance(0.5) {
            let settings = self.settings.changes.clone();
            if let Some(&(name, value)) = settings.get(self.rng.usize(0..settings.len().max(1))) {
                let (name, value) = (name.to_owned(), value.to_owned());
                self.ask(index, at, Asked::Control, |_| Message::SetControl { name, value });
                return;
            }
        }
        let (uid, blocks) = match self.clients[index].programs[at].writes.take() {
            Some(writes) => writes,
            None => (self.history.begins(None), self.some_blocks()),
        };
        let token = u64::from(uid);
        if self.chance(0.4) {
            return self.writes_weights(index, at, uid, blocks);
        }
        if self.chance(0.2) {
            self.on_client(index, |core, _, actions| core.rewrites_weights(token, actions));
        }
        self.history.offered(uid);
        self.history.record(uid).blocks.extend(&blocks);
        self.clients[index].weights.insert(token, uid);
        if self.chance(0.7) {
            self.clients[index].core.can_show(token);
        }
        let blocks = blocks.into_iter().map(|block| block..block + 1).collect();
        let ahead = None;
        self.ask(index, at, Asked::Assign(uid), |timeout_ms| Message::Assign {
            token,
            blocks,
            timeout_ms,
            ahead,
            meta: meta_of(uid),
        });
    }

    /// The operator writes some blocks of new weights, or gives them up.
    fn writes_weights(&mut self, index: usize, at: usize, uid: Uid, blocks: Vec<u32>) {
        let token = u64::from(uid);
        if self.chance(0.1) {
            self.on_client(index, |core, _, actions| core.rewrites_weights(token, actions));
        } else {
            if !self.clients[index].weights.contains_key(&token) {
                let begins = Message::BeginWeights { token };
                self.on_client(index, |core, _, actions| core.notify(begins, actions));
            }
            for &block in &blocks {
                if self.chance(0.5) {
                    self.clients[index].weights.insert(token, uid);
                    self.on_client(index, |core, now, actions| {
                        core.wrote_weights(token, BlockId(block), now, actions);
                    });
                }
            }
            self.clients[index].programs[at].writes = Some((uid, blocks));
        }
        self.program_pauses(index, at, self.settings.compute);
    }
}
