//! A small model of mixed types behind the real shard, and a scalar reference to compare with.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use libmodelio::bytes::kernels::Wire;
use libmodelio::bytes::region::Region;
use libmodelio::client::{self, wait_for};
use libmodelio::contributor::{ContributeError, Contributor, Share, Wrote};
use libmodelio::observe::trace::{MOST_EVENTS, What};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::{BlockId, Incarnation, LearnerId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::members::{Attached, LeaveReason};
use libmodelio::vocabulary::reducer::{Aggregation, Hyper, Reducer};
use libmodelio::vocabulary::shard_error::ShardError;
use ps_backend::partition::executor::{Executor, Pool};
use ps_backend::server::local;

use test_devices::fp8;

pub const LONG: Duration = Duration::from_secs(600);
pub const BLOCK: u32 = 64 << 10;

thread_local! {
    /// The executor of the jobs that this thread makes, if it is not to be a CPU.
    static EXECUTOR: RefCell<Option<Arc<dyn Executor>>> = const { RefCell::new(None) };
}

/// Calls `test`, whose jobs have this executor.
pub fn on(executor: Arc<dyn Executor>, test: fn()) {
    EXECUTOR.set(Some(executor));
    test();
    EXECUTOR.set(None);
}

/// A job, and the objects to write to it.
pub struct Job {
    pub shard: Arc<client::Job>,
    pub layout: Arc<ModelLayout>,
}

/// One learner.
pub struct Learner {
    pub id: LearnerId,
    pub incarnation: Incarnation,
    pub writes: Arc<Contributor>,
}

impl Job {
    /// The mixed model, loaded with [`initial_weights`].
    pub fn new(settings: &[(&str, &str)]) -> Job {
        Job::with(mixed_layout(), settings)
    }

    /// The mixed model, with this executor.
    pub fn on(executor: Arc<dyn Executor>, settings: &[(&str, &str)]) -> Job {
        EXECUTOR.set(Some(executor));
        let job = Job::new(settings);
        EXECUTOR.set(None);
        job
    }

    pub fn with(layout: ModelLayout, settings: &[(&str, &str)]) -> Job {
        let layout = Arc::new(layout);
        let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
        let executor = EXECUTOR.with_borrow(Option::clone).unwrap_or_else(|| Pool::start(2, None).unwrap());
        let shard = local::start("m", &layout, &controls, &executor, |memory| {
            // SAFETY: nobody else knows the shard yet.
            unsafe { memory.write(0, &initial_weights(&layout)) };
            Ok(())
        });
        Job { shard: Arc::new(shard.unwrap()), layout }
    }

    pub fn join(&self, name: &str) -> Learner {
        let (id, incarnation) = wait_for(LONG, |done| self.shard.join(name.into(), LONG, done)).unwrap();
        self.shard.touch(id, Some(Attached::Yes));
        let shard = Arc::clone(&self.shard);
        let writes = Contributor::new(shard, (id, incarnation), Arc::default()).unwrap();
        Learner { id, incarnation, writes: Arc::new(writes) }
    }

    pub fn size(&self) -> usize {
        self.layout.size() as usize
    }

    pub fn weights(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.size()];
        self.shard.read(0, &mut bytes).unwrap();
        bytes
    }

    pub fn weights_of(&self, version: Version) -> Vec<u8> {
        self.shard.get(version).unwrap().bytes(0..self.layout.size()).to_vec()
    }

    /// The newest version, pinned.
    pub fn pin_newest(&self) -> Version {
        loop {
            let version = self.shard.version();
            if self.shard.pin(version) {
                return version;
            }
        }
    }

    pub fn set(&self, name: &str, value: &str) {
        let (sender, receiver) = mpsc::channel();
        self.shard.set_control(name, value, LONG, Box::new(move |result| sender.send(result).unwrap()));
        receiver.recv_timeout(LONG).expect("an answer").unwrap();
    }

    pub fn leave(&self, learner: &Learner, reason: LeaveReason) {
        wait_for(LONG, |done| self.shard.leave(learner.id, reason, LONG, done)).unwrap();
    }

    /// Publishes a buffer.
    pub fn assign(&self, buffer: Region, written: &[std::ops::Range<u64>]) -> Result<(), ShardError> {
        wait_for(LONG, |done| self.shard.assign(buffer, written, LONG, done))
    }

    /// Waits until so many different blocks are reduced, from staging or as they come, of what `writes` writes.
    #[track_caller]
    pub fn wait_for_sent(&self, blocks: usize, writes: impl FnOnce()) {
        let (trace, deadline) = (self.shard.trace(), Instant::now() + LONG);
        trace.begin(Instant::now(), MOST_EVENTS);
        writes();
        loop {
            let events = trace.so_far();
            let sent: BTreeSet<BlockId> = { events.iter() }
                .filter_map(|event| if let What::Sent(_, block, _) = event.what { Some(block) } else { None })
                .collect();
            if sent.len() >= blocks {
                break;
            }
            assert!(Instant::now() < deadline, "{} of {blocks} blocks were reduced", sent.len());
            std::thread::sleep(Duration::from_millis(5));
        }
        trace.end();
    }

    /// Waits until the learner's last commit is part of a version.
    pub fn wait(&self, learner: &Learner) -> Version {
        wait_for(LONG, |done| self.shard.await_step(learner.id, LONG, done)).unwrap()
    }
}

impl Learner {
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), ContributeError> {
        while self.writes.write(&mut Share::None, offset as u64, data, LONG)? == Wrote::Asks {
            let (sender, receiver) = mpsc::channel();
            self.writes.ask_step(LONG, move |outcome| sender.send(outcome).unwrap());
            receiver.recv_timeout(2 * LONG).expect("an answer")?;
        }
        Ok(())
    }

    pub fn commit(&self) -> Result<(), ContributeError> {
        self.commit_within(LONG)
    }

    pub fn commit_within(&self, timeout: Duration) -> Result<(), ContributeError> {
        let (sender, receiver) = mpsc::channel();
        self.writes.commit(Share::None, timeout, move |result| sender.send(result).unwrap());
        receiver.recv_timeout(LONG).expect("an answer")
    }

    /// Stores `data` through the mapping and ships it.
    pub fn commit_mapped(&self, data: &[u8]) -> Result<(), ContributeError> {
        // SAFETY: the shard reads the mapping only while a commit of it is under way.
        unsafe { self.writes.mapped().memory().write(0, data) };
        let (sender, receiver) = mpsc::channel();
        self.writes.commit_mapped(LONG, move |result| sender.send(result).unwrap());
        receiver.recv_timeout(LONG).expect("an answer")
    }

    /// One whole contribution through write(2).
    pub fn contribute(&self, data: &[u8]) -> Result<(), ContributeError> {
        self.write(0, data)?;
        self.commit()
    }

    /// Writes `data` in unaligned pieces from several threads.
    pub fn write_in_pieces(&self, data: &[u8], piece: usize) {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    for (i, part) in data.chunks(piece).enumerate().filter(|(i, _)| i % 3 == thread) {
                        self.write(i * piece, part).unwrap();
                    }
                });
            }
        });
    }
}

/// Every kind of tensor, several blocks, odd sizes, types that change within a block.
pub fn mixed_layout() -> ModelLayout {
    use safetensors_dtype::i64;
    let tensors = vec![
        ("ids".to_owned(), i64(), vec![101]),
        ("w".to_owned(), DType::F32, vec![40_003]),
        ("b".to_owned(), DType::BF16, vec![30_001]),
        ("h".to_owned(), DType::F16, vec![17_011]),
        ("e".to_owned(), DType::E4M3, vec![23_003]),
        ("f".to_owned(), DType::E5M2, vec![9_007]),
    ];
    ModelLayout::new(tensors, BLOCK).unwrap()
}

mod safetensors_dtype {
    pub fn i64() -> libmodelio::vocabulary::layout::DType {
        libmodelio::vocabulary::layout::DType::parse("I64").unwrap()
    }
}

/// A model of one F32 tensor.
pub fn floats_layout(elements: usize) -> ModelLayout {
    ModelLayout::blank(elements as u64 * 4, DType::F32, BLOCK).unwrap()
}

/// The bytes of a model whose element `i` (over all reducible tensors) is `value(i)`; other bytes are `fill`.
pub fn encode(layout: &ModelLayout, fill: u8, value: impl Fn(usize) -> f32) -> Vec<u8> {
    (0..layout.blocks()).flat_map(|block| encode_block(layout, BlockId(block), fill, &value)).collect()
}

/// The bytes of one block of them.
pub fn encode_block(layout: &ModelLayout, block: BlockId, fill: u8, value: impl Fn(usize) -> f32) -> Vec<u8> {
    let range = layout.block_bytes(block);
    let mut bytes = vec![fill; (range.end - range.start) as usize];
    for (at, i, dtype) in elements_of(layout, block) {
        let at = at - range.start as usize;
        match dtype {
            DType::F32 => bytes[at..at + 4].copy_from_slice(&value(i).to_le_bytes()),
            DType::BF16 => bytes[at..at + 2].copy_from_slice(&bf16::from_f32(value(i)).to_le_bytes()),
            DType::E4M3 => bytes[at] = fp8::code(Wire::E4M3, value(i).into()),
            DType::E5M2 => bytes[at] = fp8::code(Wire::E5M2, value(i).into()),
            _ => bytes[at..at + 2].copy_from_slice(&f16::from_f32(value(i)).to_le_bytes()),
        }
    }
    bytes
}

pub fn decode(layout: &ModelLayout, bytes: &[u8]) -> Vec<f32> {
    elements(layout)
        .map(|(at, _, dtype)| match dtype {
            DType::F32 => f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()),
            DType::BF16 => bf16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
            DType::E4M3 => fp8::value(Wire::E4M3, bytes[at]) as f32,
            DType::E5M2 => fp8::value(Wire::E5M2, bytes[at]) as f32,
            _ => f16::from_le_bytes(bytes[at..at + 2].try_into().unwrap()).to_f32(),
        })
        .collect()
}

/// Offset, number and type of every reducible element.
pub fn elements(layout: &ModelLayout) -> impl Iterator<Item = (usize, usize, DType)> {
    (0..layout.blocks()).flat_map(|block| elements_of(layout, BlockId(block)))
}

fn elements_of(layout: &ModelLayout, block: BlockId) -> impl Iterator<Item = (usize, usize, DType)> {
    layout.segments(block).iter().filter(|segment| segment.dtype.is_reducible()).flat_map(|segment| {
        let size = segment.dtype.size_bytes().unwrap();
        let count = (segment.bytes.end - segment.bytes.start) as usize / size;
        (0..count).map(move |i| {
            (segment.bytes.start as usize + i * size, segment.element as usize + i, segment.dtype)
        })
    })
}

/// Some number of few bits for element `i`: exact in every type but those of 8 bits.
pub fn noise(seed: usize, i: usize) -> f32 {
    let mixed = (i.wrapping_mul(2_654_435_761) ^ seed.wrapping_mul(40_503)) >> 5;
    (mixed % 64) as f32 / 16.0 - 2.0
}

pub fn initial_weights(layout: &ModelLayout) -> Vec<u8> {
    encode(layout, 0x5a, |i| noise(1, i))
}

pub fn gradient(layout: &ModelLayout, seed: usize) -> Vec<u8> {
    encode(layout, seed as u8, |i| noise(seed, i))
}

/// What the model should be, in doubles.
pub struct Reference {
    pub weights: Vec<f64>,
    slots: [Vec<f64>; 2],
    /// Steps of each element.
    t: Vec<i32>,
}

impl Reference {
    pub fn new(layout: &ModelLayout) -> Reference {
        let weights: Vec<f64> = decode(layout, &initial_weights(layout)).into_iter().map(f64::from).collect();
        let zeros = || vec![0.0; weights.len()];
        Reference { slots: [zeros(), zeros()], t: vec![0; weights.len()], weights }
    }

    /// One version from contributions decoded from what the learners wrote, of which each holds something of every
    /// tensor.
    pub fn step(&mut self, reducer: Reducer, h: &Hyper, contributions: &[Vec<f32>]) {
        self.step_of(reducer, h, contributions, |_| true);
    }

    /// The same where nobody has written the tensors of the other elements.
    pub fn step_of(
        &mut self,
        reducer: Reducer,
        h: &Hyper,
        contributions: &[Vec<f32>],
        is_written: impl Fn(usize) -> bool,
    ) {
        let rate = f64::from(h.learning_rate);
        let [momentum, dampening, decay] = [h.momentum, h.dampening, h.weight_decay].map(f64::from);
        let [beta1, beta2, alpha, epsilon] = [h.beta1, h.beta2, h.alpha, h.epsilon].map(f64::from);
        for i in (0..self.weights.len()).filter(|&i| is_written(i)) {
            self.t[i] += 1;
            let t = self.t[i];
            let sum: f64 = contributions.iter().map(|contribution| f64::from(contribution[i])).sum();
            let w = self.weights[i];
            let mean = match h.aggregation {
                Aggregation::Mean => sum / contributions.len() as f64,
                Aggregation::Sum => sum,
            };
            let decoupled = matches!(reducer, Reducer::AdamW | Reducer::Lamb | Reducer::Lion);
            let g = if decoupled { mean } else { mean + decay * w };
            let [m, v] = [0, 1].map(|slot| self.slots[slot][i]);
            self.weights[i] = match reducer {
                Reducer::Sum => f64::from(h.carry) * w + sum,
                Reducer::Sgd => w - rate * g,
                // Layer-wise steps have the factor 1 here.
                Reducer::Momentum | Reducer::Nesterov | Reducer::Lars => {
                    let m = if t == 1 { g } else { momentum * m + (1.0 - dampening) * g };
                    self.slots[0][i] = m;
                    w - rate * if reducer == Reducer::Nesterov { g + momentum * m } else { m }
                }
                Reducer::Adam | Reducer::AdamW | Reducer::Lamb => {
                    let m = beta1 * m + (1.0 - beta1) * g;
                    let v = beta2 * v + (1.0 - beta2) * g * g;
                    (self.slots[0][i], self.slots[1][i]) = (m, v);
                    let keep = if decoupled { 1.0 - rate * decay } else { 1.0 };
                    let (m, v) = (m / (1.0 - beta1.powi(t)), v / (1.0 - beta2.powi(t)));
                    keep * w - rate * m / (v.sqrt() + epsilon)
                }
                Reducer::RmsProp => {
                    let square = alpha * self.slots[0][i] + (1.0 - alpha) * g * g;
                    self.slots[0][i] = square;
                    w - rate * g / (square.sqrt() + epsilon)
                }
                Reducer::AdaGrad => {
                    let sum = self.slots[0][i] + g * g;
                    self.slots[0][i] = sum;
                    w - rate * g / (sum.sqrt() + epsilon)
                }
                Reducer::Lion => {
                    let update = beta1 * m + (1.0 - beta1) * g;
                    self.slots[0][i] = beta2 * m + (1.0 - beta2) * g;
                    let sign = if update == 0.0 { 0.0 } else { update.signum() };
                    w * (1.0 - rate * decay) - rate * sign
                }
                // What is sent of models and replicas.
                Reducer::Average => w + sum / contributions.len() as f64,
                Reducer::Easgd => w + sum,
                Reducer::Sma => {
                    self.slots[0][i] = if t == 1 { sum } else { momentum * m + sum };
                    w + self.slots[0][i]
                }
                Reducer::Diloco => {
                    let g = -sum / contributions.len() as f64;
                    let m = if t == 1 { g } else { momentum * m + g };
                    self.slots[0][i] = m;
                    w - rate * (g + momentum * m)
                }
                Reducer::Assign => contributions.last().map_or(w, |last| f64::from(last[i])),
            };
        }
    }

    /// Forget the optimizer's state.
    pub fn reset_state(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.fill(0.0));
        self.t.fill(0);
    }

    /// Within what rounding allows.
    pub fn check(&self, layout: &ModelLayout, bytes: &[u8], what: &str) {
        for ((at, i, dtype), got) in elements(layout).zip(decode(layout, bytes)) {
            let relative = match dtype {
                DType::F32 => 2e-5,
                DType::BF16 => 1.0 / 250.0,
                DType::E4M3 => 1.0 / 15.0,
                DType::E5M2 => 1.0 / 7.0,
                _ => 1.0 / 2_000.0,
            };
            let want = self.weights[i];
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= relative * want.abs().max(0.25),
                "{what}: element {i} at byte {at} ({dtype}) is {got}, not {want}"
            );
        }
    }
}
