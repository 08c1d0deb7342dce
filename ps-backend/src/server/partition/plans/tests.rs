//! Plans of a partition whose executor does nothing until it is told to.

use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};

use libmodelio::transport::local::{Mailbox, Pushed, SharedBlock, SharedPayload};
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::ids::{ClientId, Epoch, Generation, ShardId};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::{DataKind, ModelRecord, PlanSource};
use parking_lot::Mutex;

use super::*;
use crate::partition::executor::{Executor, Pool};
use crate::server::partition::PartitionOptions;

const BLOCK: u32 = 128 << 10;
const BLOCKS: u32 = 3;
const CLIENT: ClientId = ClientId(1);
const LONG: Duration = Duration::from_secs(600);

/// Holds batches, as a device would that has not come to them yet.
struct Holds {
    batches: Mutex<Vec<Batch>>,
    cpu: Arc<dyn Executor>,
}

impl Executor for Holds {
    fn execute(&self, batch: Batch) {
        self.batches.lock().push(batch);
    }
    fn make(&self, making: &Making, blocks: &[BlockId]) -> Result<(), (BlockId, PartitionError)> {
        self.cpu.make(making, blocks)
    }

    fn spawn(&self, work: Box<dyn FnOnce() + Send>) {
        self.cpu.spawn(work);
    }
    fn for_each(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        self.cpu.for_each(count, work);
    }
    fn threads(&self) -> usize {
        self.cpu.threads()
    }
}

/// Notes what the partition says.
struct Notes(Mutex<Sender<Message>>);

impl Recipient for Notes {
    fn receive(self: Arc<Notes>, _: MailboxEnd, mail: Mail) {
        if let Mail::Message(_, message) = mail {
            self.0.lock().send(message).unwrap();
        }
    }
}

struct Bench {
    partition: Arc<Partition>,
    executor: Arc<Holds>,
    said: Receiver<Message>,
    _notes: Arc<Notes>,
    plans: u64,
}

impl Bench {
    /// A partition of fp32 ones.
    fn new() -> Bench {
        Bench::of("sum")
    }

    fn of(reducer: &str) -> Bench {
        Bench::with_blocks(BLOCK, reducer)
    }

    /// With blocks of another size.
    fn with_blocks(block: u32, reducer: &str) -> Bench {
        let layout = ModelLayout::blank(u64::from(block * BLOCKS), DType::F32, block).unwrap();
        let tensors = layout.tensors().iter().map(|tensor| {
            let shape = tensor.shape.iter().map(|&n| n as u64).collect();
            (tensor.name.to_string(), "F32".to_owned(), shape)
        });
        let record = ModelRecord {
            name: "m".into(),
            generation: Generation(1),
            tensors: tensors.collect(),
            metadata: Default::default(),
            block_size: block,
            epoch: Epoch(1),
            owners: vec![(ShardId(1), BLOCKS)],
            coordinator: ShardId(1),
            controls: Controls::default().with_all([("reducer", reducer)]).unwrap(),
            ready: true,
            lineage: Default::default(),
        };
        let executor = Arc::new(Holds { batches: Mutex::default(), cpu: Pool::start(1, None).unwrap() });
        let of_partition: Arc<dyn Executor> = Arc::clone(&executor) as _;
        let partition =
            Partition::new(&record, ShardId(1), &of_partition, PartitionOptions::default()).unwrap();
        for at in (0..BLOCKS).map(BlockId) {
            partition.load((at, DataKind::Weights), &1f32.to_le_bytes().repeat(block as usize / 4)).unwrap();
        }
        partition.store().finish_loading().unwrap();
        let (sender, said) = channel();
        let notes = Arc::new(Notes(Mutex::new(sender)));
        let own = Arc::downgrade(&partition) as Weak<dyn Recipient>;
        let mailbox = Mailbox::new(Arc::downgrade(&notes) as Weak<dyn Recipient>, own);
        partition.coordinated_by(ToCoordinator::Here(Arc::new(mailbox)), PlanId(0));
        Bench { partition, executor, said, _notes: notes, plans: 0 }
    }

    /// Begins a plan for which the client sends the first `sent` blocks, and sends them.
    fn run(&mut self, work: Work, sent: u32) -> PlanId {
        self.plans += 1;
        let plan = PlanId(self.plans);
        let blocks = std::iter::once(0..sent).collect();
        let partly = Default::default();
        let sources = vec![PlanSource { client: CLIENT, blocks, check: true, partly, provisional: false }];
        let base = self.partition.progress().0;
        let started = wire::Plan { plan, work, base, ordered: false, sources, changes: 1, parts: None };
        self.partition.from_coordinator(plan.0, Message::Start(Box::new(started)), None);
        for block in (0..sent).map(BlockId) {
            while self.push(plan, block) == Pushed::Later {
                std::thread::sleep(BEGIN_PAUSE);
            }
        }
        plan
    }

    fn push(&self, plan: PlanId, block: BlockId) -> Pushed {
        let bytes = &2f32.to_le_bytes().repeat(BLOCK as usize / 4)[..];
        let payloads = &[SharedPayload { bytes, written: None, check: true }];
        let shared = SharedBlock { client: CLIENT, plan, block, payloads, ahead: false, is_weights: false };
        self.partition.push_here(shared, &|| true)
    }

    fn conclude(&self, plan: PlanId) {
        self.partition.from_coordinator(plan.0, Message::Conclude { plan }, None);
        assert_eq!(self.said.recv_timeout(LONG).unwrap(), Message::Done);
    }

    /// The batch that the executor has been handed, which is the only one.
    fn batch(&self) -> Batch {
        let deadline = Instant::now() + LONG;
        loop {
            let mut batches = self.executor.batches.lock();
            assert!(batches.len() < 2 && Instant::now() < deadline, "{} batches", batches.len());
            if let Some(batch) = batches.pop() {
                return batch;
            }
            drop(batches);
            std::thread::sleep(BEGIN_PAUSE);
        }
    }

    fn first_weight(&self, block: u32) -> f32 {
        let newest = self.partition.store().newest().unwrap();
        f32::from_le_bytes(newest.block(BlockId(block))[..4].try_into().unwrap())
    }
}

/// The weights decay to half, and contributions are added.
fn reduce() -> Work {
    let hyper = Hyper { carry: 0.5, ..Default::default() };
    let step = Step { reducer: Reducer::Sum, hyper, contributions: 1, t: 1, ..Step::default() };
    Work::Reduce {
        step,
        tensors: TensorSteps::uniform(1, 1),
        groups: Groups::default(),
        factors: Default::default(),
        fresh_state: true,
    }
}

#[test]
fn the_first_sum_of_a_new_model_is_promised_to_it() {
    let bench = Bench::with_blocks(BLOCK, "sgd");
    let [first, second] = bench.partition.store().sum_memory();
    assert!(first.is_promised() && !second.is_promised());
}

#[test]
fn blocks_that_nobody_sends_are_one_batch_and_the_plan_waits_for_it() {
    let mut bench = Bench::new();
    let plan = bench.run(reduce(), 1);
    let batch = bench.batch();
    let Pass::Compute(_, blocks) = &batch.pass else { panic!("no pass that computes") };
    assert_eq!(*blocks, [BlockId(1), BlockId(2)]);
    // All that is sent has come, and is computed. No thread but the executor's computes the rest.
    assert_eq!(bench.push(plan, BlockId(0)), Pushed::Unwanted);
    assert_eq!(bench.partition.progress().1, Some((plan, 2)));
    assert!(bench.said.try_recv().is_err(), "nothing is ready yet");
    bench.executor.cpu.execute(batch);
    assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Ready { plan });
    bench.conclude(plan);
    assert_eq!([0, 1, 2].map(|block| bench.first_weight(block)), [2.5, 0.5, 0.5]);
}

#[test]
fn sums_of_two_plans_are_one_batch_and_the_next_plan_waits_for_it() {
    let mut bench = Bench::new();
    for _ in 0..2 {
        let plan = bench.run(Work::Add { combine: Combine::Sum }, BLOCKS);
        assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Ready { plan });
        bench.conclude(plan);
    }
    let batch = bench.batch();
    assert!(matches!(&batch.pass, Pass::Merge(merge) if merge.len() == BLOCKS as usize));
    let plan = bench.run(reduce(), 0);
    std::thread::sleep(10 * BEGIN_PAUSE);
    assert!(bench.executor.batches.lock().is_empty(), "it has not begun");
    bench.executor.cpu.execute(batch);
    bench.executor.cpu.execute(bench.batch());
    assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Ready { plan });
    bench.conclude(plan);
    assert_eq!([0, 1, 2].map(|block| bench.first_weight(block)), [4.5; 3]);
}

fn momentum() -> Work {
    let step = Step { reducer: Reducer::Momentum, contributions: 1, t: 1, ..Step::default() };
    Work::Reduce {
        step,
        tensors: TensorSteps::uniform(1, 1),
        groups: Groups::default(),
        factors: Default::default(),
        fresh_state: true,
    }
}

#[test]
fn a_small_model_is_computed_before_its_version_counts() {
    let in_place =
        |block| Bench::with_blocks(block, "momentum").partition.store().changes_in_place(&momentum());
    assert!(!in_place(64 << 10), "the version goes with the message that it counts");
    assert!(in_place(128 << 10));
}

#[test]
fn state_that_is_read_is_not_changed_in_place_meanwhile() {
    let mut bench = Bench::of("momentum");
    let plan = bench.run(momentum(), BLOCKS);
    assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Ready { plan });
    let kept = bench.partition.store().keep().unwrap();
    bench.partition.from_coordinator(plan.0, Message::Conclude { plan }, None);
    std::thread::sleep(10 * BEGIN_PAUSE);
    assert!(bench.executor.batches.lock().is_empty() && bench.said.try_recv().is_err());
    assert_eq!(bench.partition.progress(), (Version(0), Some((plan, u64::from(BLOCKS)))));
    drop(kept);
    let batch = bench.batch();
    assert!(matches!(&batch.pass, Pass::Make(_, blocks) if blocks.len() == BLOCKS as usize));
    // A repeated order is answered when the version is there.
    bench.partition.from_coordinator(plan.0, Message::Conclude { plan }, None);
    assert!(bench.said.try_recv().is_err());
    bench.executor.cpu.execute(batch);
    assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Done);
    assert_eq!(bench.partition.progress(), (Version(1), None));
    let expected = 1.0 - 2.0 * Hyper::default().learning_rate;
    assert_eq!([0, 1, 2].map(|block| bench.first_weight(block)), [expected; 3]);
}

#[test]
fn what_has_changed_is_said_piece_by_piece() {
    let mut bench = Bench::of("assign");
    let plan = bench.run(Work::Assign { token: 1 }, BLOCKS);
    assert_eq!(bench.said.recv_timeout(LONG).unwrap(), Message::Ready { plan });
    bench.conclude(plan);
    assert_eq!(bench.partition.progress().0, Version(1));
    let say = |version, first, room| {
        bench.partition.changed_since((Version(0), Version(version)), BlockId(first), room)
    };
    let (all, next) = say(1, 0, usize::MAX).unwrap();
    assert_eq!((all.is_empty(), next), (false, None));
    let (mut pieces, mut first) = (Vec::new(), Some(BlockId(0)));
    for block in 0..BLOCKS {
        assert_eq!(first, Some(BlockId(block)));
        let (piece, next) = say(1, block, 1).unwrap();
        pieces.extend(piece);
        first = next;
    }
    assert_eq!((pieces, first), (all, None));
    assert_eq!(say(1, BLOCKS, 1), Ok((Vec::new(), None)));
    let unknown = Err(Refusal::NoVersion { wanted: Version(0), newest: Version(1) });
    assert_eq!([say(2, 0, 1), say(0, 0, 1)], [unknown.clone(), unknown]);
}
