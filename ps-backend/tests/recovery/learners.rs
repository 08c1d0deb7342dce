//! Learners, which ask again for what is not answered, and join each life that they hear of. After a restoration they go
//! on with what the weights do not have.

use libmodelio::vocabulary::ids::{Generation, LearnerId, Step};
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::wire::{ModelRecord, RegistryRequest};

use super::job::{Answers, Commit};
use super::world::{MODEL, World};

/// An answer is waited for so long.
const PATIENCE: u64 = 1200;

/// A learner's place in a life.
struct Place {
    generation: Generation,
    /// Its coordinator.
    shard: usize,
    id: LearnerId,
    /// The step that comes.
    step: Step,
}

#[derive(Default)]
pub(super) struct Learner {
    place: Option<Place>,
    /// The number of the contribution that comes.
    next: u32,
    /// The request that is not answered, and until when it is waited for.
    asks: Option<(u64, u64)>,
    /// The highest number that it has sent.
    sent: u32,
    pub(super) acknowledged: u64,
}

impl World {
    /// A learner does something, perhaps.
    pub(super) fn learn(&mut self, at: usize) {
        if self.random.u8(0..4) > 0 {
            return;
        }
        let learner = &self.learners[at];
        match (&learner.place, learner.asks) {
            (None, _) if self.random.u8(0..4) == 0 => self.join(at),
            (None, _) => {}
            (Some(_), None) => self.send(at),
            (Some(_), Some((_, until))) if until > self.now => {}
            // It asks again, or hears that another life counts.
            (Some(_), Some(_)) if self.random.bool() => self.send(at),
            (Some(place), Some(_)) => {
                let generation = place.generation;
                if self.counting().is_some_and(|record| record.generation != generation) {
                    self.leave(at);
                }
            }
        }
    }

    /// The record of the model, as a client is told.
    fn counting(&mut self) -> Option<ModelRecord> {
        let (_, payload) = self.tell(false, &RegistryRequest::Model { name: MODEL.to_owned() }, &[]).ok()?;
        Some(ModelRecord::decode(&payload).unwrap()).filter(|record| record.ready)
    }

    /// A learner hears that its life is over.
    fn leave(&mut self, at: usize) {
        let learner = &mut self.learners[at];
        learner.place = None;
        self.counts.in_flight += u64::from(learner.asks.take().is_some());
    }

    fn join(&mut self, at: usize) {
        let Some(record) = self.counting() else { return };
        let (now, generation) = (self.time(), record.generation);
        let there = (0..self.shards.len()).find(|of| self.shards[*of].number == record.coordinator);
        let Some(shard) = there.filter(|shard| self.runs(*shard)) else { return };
        let job = self.shards[shard].job.as_mut().filter(|job| job.generation == generation);
        let Some(job) = job else { return };
        job.is_known = true;
        // It opens the weights, and takes the next step from there.
        let next = job.content.last_of(at as u8) + 1;
        let id = job.join(at as u8, next, now);
        self.promises.begins(generation, &job.content);
        if self.is_lost() {
            return;
        }
        let learner = &mut self.learners[at];
        learner.place = Some(Place { generation, shard, id, step: Step(1) });
        learner.next = next;
        self.counts.undone += u64::from(learner.sent + 1 - next);
        self.say(format_args!("learner {at} goes on with {next} in life {generation}"));
    }

    /// A learner commits, for the first time or again.
    fn send(&mut self, at: usize) {
        self.counts.sent += 1;
        let (request, until) = (self.counts.sent, self.now + PATIENCE);
        let learner = &mut self.learners[at];
        let Some(Place { generation, shard, id, step }) = learner.place else { return };
        learner.asks = Some((request, until));
        learner.sent = learner.sent.max(learner.next);
        let of = (at as u8, learner.next);
        let commit = Commit { of, generation, shard, id, step, request };
        // The network may repeat it, much later.
        let times = if self.is_lost() { 0 } else { 1 + usize::from(self.is_lost()) };
        for _ in 0..times {
            let late = if self.random.u8(0..8) == 0 { 5000 } else { 300 };
            let arrives = self.now + self.random.u64(0..late);
            self.flying.push((arrives, commit.clone()));
        }
    }

    /// Requests come to their shards.
    pub(super) fn deliver(&mut self) {
        let now = self.now;
        for (_, commit) in self.flying.extract_if(.., |(arrives, _)| *arrives <= now).collect::<Vec<_>>() {
            self.take(&commit);
        }
    }

    fn take(&mut self, commit: &Commit) {
        let (now, &Commit { of: (learner, _), generation, shard, .. }) = (self.time(), commit);
        if !self.runs(shard) {
            return;
        }
        let owners = self.shards[shard].job.as_ref().filter(|job| job.generation == generation);
        let Some(owners) = owners.map(|job| job.owners.clone()) else {
            // Nothing of a life counts that is over here.
            let place = &self.learners[usize::from(learner)].place;
            let is_of_it = place.as_ref().is_some_and(|place| place.generation == generation);
            if is_of_it && !self.is_lost() {
                self.counts.refused += 1;
                self.leave(learner.into());
            }
            return;
        };
        // Its blocks would wait for a shard.
        if !owners.iter().all(|of| self.runs(*of) && self.shards[*of].held.contains(&generation)) {
            return;
        }
        let Some(job) = &mut self.shards[shard].job else { return };
        self.counts.repeats += u64::from(job.step_of(commit.id) == Some(commit.step));
        self.counts.arrived += 1;
        let answers = job.commit(self.counts.arrived, commit, now);
        self.answer(shard, answers);
    }

    /// The coordinator of a life answers learners.
    pub(super) fn answer(&mut self, shard: usize, answers: Answers) {
        for (ticket, outcome) in answers {
            let Some(job) = &mut self.shards[shard].job else { return };
            let generation = job.generation;
            let ((learner, number), request) = job.answered(ticket, outcome.is_ok());
            self.counts.of_zombies += u64::from(outcome.is_ok() && self.promises.counts > generation);
            if self.is_lost() {
                continue;
            }
            let of = &mut self.learners[usize::from(learner)];
            let Some(place) = of.place.as_mut().filter(|place| place.generation == generation) else {
                continue;
            };
            match outcome {
                _ if of.asks.is_none_or(|(asked, _)| asked != request) => continue,
                Ok(()) => {}
                // The network has repeated it.
                Err(ShardError::NotAllowed(why)) if why == "the same commit was sent again" => continue,
                Err(error) => panic!("contribution {number} of learner {learner} is refused: {error}"),
            }
            (of.asks, of.next, place.step) = (None, number + 1, place.step.next());
            of.acknowledged += 1;
        }
    }
}
