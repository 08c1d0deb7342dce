//! A job of many learners in virtual time: the real core of a job, and learners that only take their time. No byte is
//! computed or sent. A run is a function of its settings, the seed among them.
//!
//! A contribution is made of many steps, as with DiLoCo, and each step's time is log-normal. Some learners are slow
//! throughout. Learners die, are noticed to be dead after a while, and come back under their names.
//!
//! *Goodput* is the computing time behind the contributions that versions have, as a share of the time that learners
//! were in the job. What a learner computes before it dies, waits for others, and is not noticed to be dead is lost.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use fastrand::Rng;
use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, Step};
use ps_backend::core::{Action, Contribution, JobCore, Source, Ticket, Work};

/// Time since the beginning.
pub type Now = Duration;

/// The mean time of one of a contribution's steps, in seconds, and the deviation of its logarithm.
const STEP: (f64, f64) = (1.0, 0.5);
/// The steps of a contribution.
const STEPS: u32 = 50;
/// The share of learners that are slow, and how much slower they are: at least, at most.
const SLOW: (f64, [f64; 2]) = (0.05, [2.0, 4.0]);
/// The time after which a dead learner is noticed.
const NOTICED: Now = Now::from_secs(60);
/// The mean time until it comes back, in contributions.
const AWAY: f64 = 5.0;
/// The time in which a version is computed.
const REDUCE: Now = Now::from_secs(1);

/// What a run is of.
#[derive(Clone, Debug)]
pub struct Settings {
    pub seed: u64,
    pub learners: usize,
    pub consistency: String,
    /// How long it takes, in the mean times of a contribution.
    pub contributions: u32,
    /// The learners that die while a contribution is computed, on average.
    pub deaths: f64,
    /// A learner begins its next contribution when the last one is taken. Otherwise it waits for the version.
    pub overlaps: bool,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// See the top of the file.
    pub goodput: f64,
    /// The versions, and the contributions that they have.
    pub versions: u64,
    pub contributions: u64,
    pub deaths: u64,
    /// The virtual time.
    pub took: Now,
}

#[derive(Debug, Default)]
struct Learner {
    /// How much slower it is.
    slowness: f64,
    /// Its number, and since when it is in the job.
    member: Option<(LearnerId, Now)>,
    /// Events of earlier lives do not count.
    life: u32,
    is_dead: bool,
    /// Its last contribution is taken.
    is_taken: bool,
    /// It is part of a version.
    is_published: bool,
    /// When the present one was begun, and its number.
    began: Now,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A contribution is computed.
    Computed(usize, u32),
    Dies(usize, u32),
    Noticed(usize),
    Returns(usize),
    /// The running plan is done.
    Reduced,
}

struct World {
    settings: Settings,
    rng: Rng,
    core: JobCore,
    now: Now,
    events: BinaryHeap<Reverse<(Now, u64, Event)>>,
    event: u64,
    learners: Vec<Learner>,
    /// The learner of a ticket.
    tickets: BTreeMap<Ticket, usize>,
    ticket: Ticket,
    /// The owner of each contribution, in which of its lives, and the computing time.
    computed: Vec<(usize, u32, Now)>,
    /// The contributions in the running plan.
    running: Vec<usize>,
    useful: Now,
    present: Now,
    outcome: Outcome,
}

/// The mean time of a contribution of a learner that is not slow.
fn contribution() -> f64 {
    f64::from(STEPS) * STEP.0
}

/// Runs a job.
///
/// # Panics
/// If the consistency is none, or the core does what it must not.
pub fn run(settings: Settings) -> Outcome {
    let learners = settings.learners.to_string();
    let set = [("consistency", &settings.consistency[..]), ("learners", &learners), ("lease", "0")];
    let controls = Controls::default().with_all(set.into_iter().chain([("timeout", "86400")]));
    let mut world = World {
        rng: Rng::with_seed(settings.seed),
        core: JobCore::new(1, 1, controls.expect("settings of a job")),
        now: Now::ZERO,
        events: BinaryHeap::new(),
        event: 0,
        learners: Vec::new(),
        tickets: BTreeMap::new(),
        ticket: 0,
        computed: Vec::new(),
        running: Vec::new(),
        useful: Now::ZERO,
        present: Now::ZERO,
        outcome: Outcome { goodput: 0.0, versions: 0, contributions: 0, deaths: 0, took: Now::ZERO },
        settings,
    };
    world.run();
    world.outcome
}

impl World {
    fn run(&mut self) {
        let (share, [least, most]) = SLOW;
        for _ in 0..self.settings.learners {
            let slowness = match self.rng.f64() < share {
                true => least + (most - least) * self.rng.f64(),
                false => 1.0,
            };
            self.learners.push(Learner { slowness, ..Learner::default() });
        }
        (0..self.settings.learners).for_each(|at| self.joins(at));
        let end = Now::from_secs_f64(contribution() * f64::from(self.settings.contributions));
        loop {
            let event = self.events.peek().map_or(end, |Reverse((at, ..))| *at);
            let deadline = self.core.next_deadline().unwrap_or(Now::MAX);
            self.now = self.now.max(event.min(deadline));
            if self.now >= end {
                break;
            }
            if deadline < event {
                self.call(|core, now, actions| core.tick(now, actions));
            } else if let Some(Reverse((.., event))) = self.events.pop() {
                self.happens(event);
            }
        }
        for at in 0..self.learners.len() {
            self.leaves(at);
        }
        self.outcome.took = self.now;
        self.outcome.goodput = self.useful.as_secs_f64() / self.present.as_secs_f64();
    }

    fn after(&mut self, wait: Now, event: Event) {
        self.event += 1;
        self.events.push(Reverse((self.now + wait, self.event, event)));
    }

    /// An exponential time of this mean, in seconds.
    fn some_time(&mut self, mean: f64) -> Now {
        Now::from_secs_f64(-mean * (1.0 - self.rng.f64()).ln())
    }

    /// The time of one contribution at full speed.
    fn work(&mut self) -> Now {
        let (mean, deviation) = STEP;
        let mut seconds = 0.0;
        for _ in 0..STEPS.div_ceil(2) {
            // Two normal numbers of two uniform ones (Box and Muller).
            let (radius, angle) = ((-2.0 * (1.0 - self.rng.f64()).ln()).sqrt(), self.rng.f64());
            for normal in [(std::f64::consts::TAU * angle).cos(), (std::f64::consts::TAU * angle).sin()] {
                seconds += mean * (deviation * radius * normal - deviation * deviation / 2.0).exp();
            }
        }
        Now::from_secs_f64(seconds)
    }

    fn joins(&mut self, at: usize) {
        let name = format!("l{at}");
        let joined = self.call(|core, now, actions| core.join(&name, now, actions));
        let (member, _) = joined.expect("the name is free");
        let now = self.now;
        let learner = &mut self.learners[at];
        learner.life += 1;
        *learner = Learner {
            member: Some((member, now)),
            life: learner.life,
            slowness: learner.slowness,
            ..Learner::default()
        };
        let life = learner.life;
        if self.settings.deaths > 0.0 {
            let mean = contribution() * self.settings.learners as f64 / self.settings.deaths;
            let lives = self.some_time(mean);
            self.after(lives, Event::Dies(at, life));
        }
        self.begins(at);
    }

    /// A learner begins its next contribution.
    fn begins(&mut self, at: usize) {
        let work = self.work();
        let learner = &mut self.learners[at];
        (learner.is_taken, learner.is_published) = (false, false);
        learner.began = self.now;
        learner.step = learner.step.next();
        let (life, takes) = (learner.life, work.mul_f64(learner.slowness));
        self.after(takes, Event::Computed(at, life));
    }

    fn leaves(&mut self, at: usize) {
        if let Some((_, since)) = self.learners[at].member.take() {
            self.present += self.now - since;
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Computed(at, life) if self.learners[at].life == life && !self.learners[at].is_dead => {
                self.commits(at);
            }
            Event::Dies(at, life) if self.learners[at].life == life => {
                self.learners[at].is_dead = true;
                self.outcome.deaths += 1;
                self.after(NOTICED, Event::Noticed(at));
            }
            Event::Noticed(at) => {
                if let Some((member, _)) = self.learners[at].member {
                    self.call(|core, now, actions| core.lost(&[member], now, actions));
                    self.leaves(at);
                }
                let away = self.some_time(AWAY * contribution());
                self.after(away, Event::Returns(at));
            }
            Event::Returns(at) => self.joins(at),
            Event::Reduced => {
                let of = std::mem::take(&mut self.running);
                self.outcome.versions += 1;
                self.outcome.contributions += of.len() as u64;
                for uid in of {
                    let (at, life, took) = self.computed[uid];
                    self.useful += took;
                    if self.learners[at].life == life {
                        self.learners[at].is_published = true;
                        self.goes_on(at);
                    }
                }
                self.call(|core, now, actions| core.reduced(true, now, actions));
            }
            Event::Computed(..) | Event::Dies(..) => {}
        }
    }

    fn commits(&mut self, at: usize) {
        let Some((member, _)) = self.learners[at].member else { return };
        self.ticket += 1;
        let (ticket, step) = (self.ticket, self.learners[at].step);
        self.tickets.insert(ticket, at);
        let uid = self.computed.len();
        let learner = &self.learners[at];
        self.computed.push((at, learner.life, self.now - learner.began));
        let mut all = FixedBitSet::with_capacity(1);
        all.insert(0);
        let contribution = Contribution {
            learner: member,
            sent: all.clone(),
            tensors: all,
            partly: Some(Default::default()),
            contents: Default::default(),
            weight: Default::default(),
            base: None,
            source: Source::of_contribution(ClientId(0), Step(uid as u64)),
            steady: true,
            lent: false,
        };
        let deadline = self.now + Now::from_secs(86_400);
        self.call(|core, now, actions| {
            core.open(member, now).expect("the learner is in the job");
            core.commit(ticket, step, contribution, deadline, now, actions);
        });
    }

    /// A learner begins its next contribution if it need not wait for anything.
    fn goes_on(&mut self, at: usize) {
        let learner = &self.learners[at];
        let waits = !learner.is_taken || !self.settings.overlaps && !learner.is_published;
        if learner.member.is_some() && !learner.is_dead && !waits {
            self.begins(at);
        }
    }

    fn call<R>(&mut self, what: impl FnOnce(&mut JobCore, Now, &mut Vec<Action>) -> R) -> R {
        let mut actions = Vec::new();
        let result = what(&mut self.core, self.now, &mut actions);
        for action in actions {
            match action {
                Action::Reply(ticket, result) => {
                    let at = self.tickets.remove(&ticket).expect("it was asked");
                    // The commit of a learner that died is refused.
                    if result.is_ok() {
                        self.learners[at].is_taken = true;
                        self.goes_on(at);
                    }
                }
                Action::Begin(plan) => {
                    assert!(plan.provisional.is_none(), "nothing begins early");
                    assert!(
                        matches!(plan.work, Work::Reduce { .. }),
                        "nothing is accumulated, nobody writes weights"
                    );
                    self.running = plan.inputs.iter().map(|input| input.source.name as usize).collect();
                    self.after(REDUCE, Event::Reduced);
                }
                Action::Published(_) | Action::Left { .. } => {}
                other => panic!("nothing begins early: {other:?}"),
            }
        }
        result
    }
}
