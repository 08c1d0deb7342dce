//! The random settings of a run, which are drawn before it begins.

use std::ops::Range;

use fastrand::Rng;
use libmodelio::vocabulary::controls::{Consistency, ControlError, Controls};
use libmodelio::vocabulary::groups::{Groups, TensorReducers};
use libmodelio::vocabulary::layout::{DType, ModelLayout};

use crate::network::Weather;
use crate::parts::InParts;
use crate::world::Now;

/// The consistency modes of runs. Modes that the controls do not know are left out.
const CONSISTENCY: &[&str] =
    &["sync", "sync", "async", "quorum(1)", "quorum(2)", "quorum(3)", "ssp(0)", "ssp(1)", "ssp(2)"];

/// Rules of single tensors, for reducers that add up.
const RULES: &[&str] = &[
    "t0 reducer=momentum",
    "t0 reducer=adam weight_decay=0",
    "t0 reducer=adam\n* reducer=momentum",
    "t0 reducer=sgd\n* reducer=lamb",
    "t0 learning_rate_scale=0.5",
];

/// The constants of a run.
#[derive(Clone, Debug)]
pub struct Settings {
    pub blocks: u32,
    pub partitions: u16,
    /// The first partition is in the coordinator's process.
    pub colocated: bool,
    /// Learners on each client at the beginning.
    pub clients: Vec<usize>,
    pub controls: Controls,
    pub weather: Weather,
    /// How long the coordinator waits for the others of a step.
    pub patience: Now,
    /// Versions that a shard keeps.
    pub keep: usize,
    pub lease: Now,
    /// About what a program waits at most.
    pub timeout: Now,
    /// Its wait beyond the timeout that the coordinator knows.
    pub grace: Now,
    /// About what a program takes for a step.
    pub compute: Now,
    /// Longest time that a block takes to arrive, in microseconds.
    pub arrival: u64,
    /// Programs are known to live.
    pub attached: bool,
    /// Share of transfers that break in the middle.
    pub broken: f64,
    /// Shares of contributions that are dropped, interrupted, or hold NaN; of turns in which a learner leaves.
    pub aborts: f64,
    pub interrupts: f64,
    pub bad: f64,
    pub leaves: f64,
    /// Share of contributions that write some tensors, and so blocks in part.
    pub in_part: f64,
    /// Share of contributions that lie in memory which their programs have back when they are answered.
    pub mapped: f64,
    /// Shards read blocks in their clients' memory, and clients copy versions out of shards' memory.
    pub shared: bool,
    /// Share of blocks in whose copying a client is stopped, for longer than shards wait for a sign of life.
    pub freezes: f64,
    pub silence: Now,
    /// There are programs that change settings and write weights.
    pub operators: bool,
    /// Programs that change settings read, too, and versions wait for them.
    pub readers: bool,
    /// Clients pull versions from each other.
    pub relays: bool,
    /// The changed settings.
    pub changes: Vec<(&'static str, &'static str)>,
    /// How long things go wrong, and how often.
    pub chaos: Now,
    pub faults: usize,
    /// How often a stranger sends messages.
    pub strangers: usize,
    /// How often the model's blocks go elsewhere.
    pub moves: usize,
    /// Moves compete: another one is asked for while one is under way.
    pub competes: bool,
    /// How much faster or slower than others a clock may be, in millionths, and how often one jumps.
    pub drift: u64,
    pub jumps: usize,
    /// Processes of shards end.
    pub kills: bool,
    /// Every report says that a program has exited, so learners that others wait for leave soon.
    pub exits: bool,
    /// A client withholds what it was granted, from some time on.
    pub withholds: bool,
    /// Plans begin while their last contribution is written.
    pub provisional: bool,
    /// How likely it is that a program writes on when it could commit.
    pub slow: f64,
    /// There are ranks that publish new weights in parts.
    pub parts: Option<InParts>,
}

/// Tensors are one and a half blocks long, so that many blocks have two of them.
pub fn tensors_of(block: u32) -> Range<usize> {
    (2 * block / 3) as usize..((2 * block + 1) / 3 + 1) as usize
}

/// The tensor that the block begins with.
pub fn first_tensor(block: u32) -> usize {
    tensors_of(block).start
}

pub fn one_of<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(0..of.len())]
}

impl Settings {
    /// The model: see [`tensors_of`].
    pub fn layout(&self) -> ModelLayout {
        const HALF: usize = 32 << 10;
        let halves = 2 * self.blocks as usize;
        let tensor = |i| (format!("t{i}"), DType::F32, vec![HALF / 4 * 3.min(halves - 3 * i)]);
        ModelLayout::new((0..halves.div_ceil(3)).map(tensor).collect(), 2 * HALF as u32).expect("a layout")
    }

    pub fn draw(rng: &mut Rng) -> Settings {
        let millis = Now::from_millis;
        // Few learners are often alone in the job, and nobody's commit is missing but one's.
        let is_small = rng.u8(0..3) == 0;
        let most = if is_small { (2, 1) } else { (4, 3) };
        let clients: Vec<usize> = (0..rng.usize(1..=most.0)).map(|_| rng.usize(0..=most.1)).collect();
        let learners = clients.iter().sum::<usize>().max(1) as u32;
        let mut controls = Controls::default();
        let expected = rng.u32(1..=learners);
        let lease = millis(one_of(rng, &[1000, 2000, 5000, 12_000]));
        for (name, value) in [
            ("consistency", one_of(rng, CONSISTENCY).to_owned()),
            ("reducer", one_of(rng, &["sgd", "sgd", "sgd", "sum", "adam", "assign"]).to_owned()),
            ("clip_norm", one_of(rng, &["0", "0", "0", "0", "0", "1"]).to_owned()),
            ("learners", expected.to_string()),
            ("min_learners", rng.u32(1..=expected.min(2)).to_string()),
            ("lease", lease.as_secs_f64().to_string()),
            ("patience", lease.as_secs_f64().to_string()),
        ] {
            if let Ok(new) = controls.with(name, &value) {
                controls = new;
            }
        }
        let mut changes = vec![("learning_rate", "0.5"), ("learning_rate", "0.25"), ("momentum", "0.5")];
        if rng.bool() {
            let other = one_of(rng, &["async", "async", "quorum(2)", "grace(1, 1)", "ssp(0)", "ssp(2)"]);
            changes.extend(["sync", "sync", other].map(|consistency| ("consistency", consistency)));
            changes.extend(["1", "2"].map(|learners| ("learners", learners)));
            changes.extend(["assign", "sgd", "lars", "momentum"].map(|reducer| ("reducer", reducer)));
            changes.push(("min_learners", "1"));
            changes.extend([("clip_norm", "1"), ("clip_norm", "0")]);
        }
        // These settings have a generator of their own: another value of them changes no other choice of a seed.
        let mut of_pulls = rng.clone();
        for (name, values) in [
            ("pull", &["auto", "eager", "adaptive", "on-demand"][..]),
            ("read_own_step", &["auto", "auto", "true", "false"]),
        ] {
            controls = controls.with(name, one_of(&mut of_pulls, values)).expect("a setting");
        }
        // It is refused without `sync`.
        if of_pulls.u8(0..6) == 0
            && let Ok(new) = controls.with("deterministic", "true")
        {
            controls = new;
        }
        if of_pulls.bool() {
            changes.extend([("pull", "adaptive"), ("pull", "on-demand"), ("read_own_step", "false")]);
        }
        if of_pulls.u8(0..3) == 0 {
            controls = controls.with("schedule", "linear(20)").expect("a setting");
            changes.extend([("schedule", "cosine(9)"), ("schedule", "constant"), ("warmup", "3")]);
        }
        if of_pulls.u8(0..8) == 0
            && let Ok(new) = controls
                .with("consistency", one_of(&mut of_pulls, &["grace(1, 0.5)", "grace(2, 1)", "grace(2, 10)"]))
        {
            controls = new;
        }
        if of_pulls.u8(0..8) == 0 {
            controls = controls.with("nonfinite", "accept").expect("a setting");
        }
        if of_pulls.u8(0..8) == 0 {
            let reducer = one_of(&mut of_pulls, &["momentum", "momentum", "lamb"]);
            controls = controls.with("reducer", reducer).expect("a setting");
        }
        if of_pulls.u8(0..4) == 0 {
            // They are refused for reducers that do not add up.
            if let Ok(new) = controls.with("tensors", one_of(&mut of_pulls, RULES)) {
                controls = new;
            }
            changes.extend(RULES.iter().chain(&[""]).map(|&rules| ("tensors", rules)));
        }
        // It is refused where versions wait for several contributions.
        if of_pulls.u8(0..3) == 0
            && let Ok(new) = controls.with("staleness_aware", "true")
        {
            controls = new;
        }
        let readers = of_pulls.u8(0..4) == 0;
        if readers {
            controls = controls.with("hold_for_readers", "1").expect("a setting");
            changes.extend(["0", "1", "2"].map(|ahead| ("hold_for_readers", ahead)));
        }
        let rough = rng.u32(0..4);
        let mut settings = Settings {
            blocks: rng.u32(1..=12),
            partitions: rng.u16(1..=3),
            colocated: rng.bool(),
            clients,
            controls,
            weather: Weather {
                streams: rng.bool(),
                delay: Now::from_micros(one_of(rng, &[50, 500, 5000])),
                jitter: Now::from_micros(one_of(rng, &[100, 2000, 50_000, 700_000])),
                orders: millis(one_of(rng, &[0, 0, 20])),
                loss: one_of(rng, &[0.0, 0.01, 0.05, 0.2]),
                twice: one_of(rng, &[0.0, 0.05, 0.3]),
            },
            patience: millis(one_of(rng, &[0, 20, 200])),
            keep: rng.usize(2..=4),
            lease,
            timeout: millis(one_of(rng, &[300, 2000, 10_000])),
            grace: millis(one_of(rng, &[0, 0, 500])),
            compute: millis(one_of(rng, &[20, 100, 400])),
            arrival: one_of(rng, &[100, 2000, 30_000]),
            attached: rng.bool(),
            broken: one_of(rng, &[0.0, 0.02, 0.2]),
            aborts: one_of(rng, &[0.0, 0.05]),
            interrupts: one_of(rng, &[0.0, 0.1]),
            bad: one_of(rng, &[0.0, 0.0, 0.05]),
            leaves: one_of(rng, &[0.0, 0.01, 0.1]),
            in_part: one_of(rng, &[0.0, 0.5, 1.0]),
            mapped: one_of(rng, &[0.0, 0.5, 1.0, 1.0]),
            shared: rng.bool(),
            freezes: one_of(rng, &[0.0, 0.0, 0.015]),
            silence: millis(one_of(rng, &[50, 300, 3000])),
            operators: rng.bool(),
            readers,
            relays: false,
            changes,
            chaos: millis(rng.u64(3000..15_000)),
            faults: [0, 3, 8, 20][rough as usize],
            strangers: one_of(rng, &[0, 0, 3, 10, 40]),
            moves: one_of(rng, &[0, 0, 1, 2, 4]),
            competes: rng.bool(),
            drift: one_of(rng, &[0, 0, 10_000, 50_000]),
            jumps: one_of(rng, &[0, 0, 0, 2, 6]),
            kills: rng.u8(0..4) == 0,
            exits: rng.u8(0..4) == 0,
            withholds: rng.u8(0..4) == 0,
            provisional: rng.u8(0..4) > 0,
            slow: one_of(rng, &[0.5, 0.9]),
            parts: None,
        };
        // Where memory is shared, it is copied from where it lies.
        settings.relays = !settings.shared && of_pulls.u8(0..3) == 0;
        // New weights are refused with other reducers.
        let rare = if settings.controls.reducer.takes_weights() { 2 } else { 10 };
        if of_pulls.u8(0..rare) == 0
            && let Ok(new) = settings.controls.with("reducer", "assign")
        {
            settings.controls = new;
            settings.changes.retain(|(name, value)| *name != "reducer" || *value == "assign");
            settings.parts = Some(InParts::draw(&mut of_pulls));
        }
        // A small model has no tensor for some rules.
        if settings.groups(&settings.controls).is_err() {
            settings.controls = settings.controls.with("tensors", "").expect("a setting");
        }
        if settings.exits {
            settings.controls.linger = settings.lease / 10;
        }
        settings
    }

    /// The consistency of the whole run, if it is one throughout.
    pub fn consistency_throughout(&self) -> Option<Consistency> {
        let changes = self.operators && self.changes.iter().any(|(name, _)| *name == "consistency");
        (!changes).then_some(self.controls.consistency)
    }

    fn groups(&self, controls: &Controls) -> Result<Groups, ControlError> {
        let layout = self.layout();
        let tensors = layout.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.dtype));
        controls.of_tensors(tensors).map(|(_, groups)| groups)
    }

    /// The reducer of each tensor with these settings.
    pub fn reducers(&self, controls: &Controls) -> TensorReducers {
        let groups = self.groups(controls).expect("settings of this model");
        TensorReducers::new(tensors_of(self.blocks - 1).end, controls.reducer, &groups)
    }
}
