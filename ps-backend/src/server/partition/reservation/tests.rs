//! Payloads that a connection fetches straight into a sum: one connection has a block until it is complete, a block can
//! come again after its fetch has failed, and a dropped plan waits for fetches.

use std::sync::{LazyLock, Weak};
use std::time::Duration;

use libmodelio::transport::local::{Mail, Mailbox, MailboxEnd, Recipient};
use libmodelio::vocabulary::coding::Form;
use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::ids::{Epoch, Generation, ShardId};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::Combine;
use libmodelio::wire::{self, ModelRecord, PlanSource, Work};

use super::*;
use crate::partition::executor::Pool;
use crate::server::partition::{PartitionOptions, ToCoordinator};

const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 3;
const CLIENTS: [ClientId; 2] = [ClientId(1), ClientId(2)];

/// A coordinator whose orders are never refused.
struct Coordinates;

impl Recipient for Coordinates {
    fn receive(self: Arc<Coordinates>, _: MailboxEnd, mail: Mail) {
        assert!(!matches!(mail, Mail::Message(_, Message::Refused(_))), "{mail:?}");
    }
}

static REFUSES_NOTHING: LazyLock<Arc<Coordinates>> = LazyLock::new(|| Arc::new(Coordinates));

/// A partition of fp32 zeros, on which a plan has begun that adds up what both clients send.
fn begun() -> Arc<Partition> {
    let layout = ModelLayout::blank(u64::from(BLOCK * BLOCKS), DType::F32, BLOCK).unwrap();
    let record = ModelRecord {
        name: "m".into(),
        generation: Generation(1),
        tensors: layout
            .tensors()
            .iter()
            .map(|tensor| {
                (tensor.name.to_string(), "F32".to_owned(), tensor.shape.iter().map(|&n| n as u64).collect())
            })
            .collect(),
        metadata: Default::default(),
        block_size: BLOCK,
        epoch: Epoch(1),
        owners: vec![(ShardId(1), BLOCKS)],
        coordinator: ShardId(1),
        controls: Controls::default().with_all([("reducer", "sum"), ("learners", "2")]).unwrap(),
        ready: true,
        lineage: Default::default(),
    };
    let cpu = Pool::start(1, None).unwrap();
    let partition = Partition::new(&record, ShardId(1), &cpu, PartitionOptions::default()).unwrap();
    for block in 0..BLOCKS {
        partition.load((BlockId(block), wire::DataKind::Weights), &[0; BLOCK as usize]).unwrap();
    }
    partition.store().finish_loading().unwrap();
    let own = Arc::downgrade(&partition) as Weak<dyn Recipient>;
    let mailbox = Mailbox::new(Arc::downgrade(&REFUSES_NOTHING) as Weak<dyn Recipient>, own);
    partition.coordinated_by(ToCoordinator::Here(Arc::new(mailbox)), PlanId(0));
    let source = |client| PlanSource {
        client,
        blocks: std::iter::once(0..BLOCKS).collect(),
        check: true,
        partly: Default::default(),
        provisional: false,
    };
    partition.from_coordinator(
        1,
        Message::Start(Box::new(wire::Plan {
            plan: PlanId(1),
            work: Work::Add { combine: Combine::Sum },
            base: Version(0),
            ordered: false,
            changes: 1,
            sources: CLIENTS.map(source).to_vec(),
            parts: None,
        })),
        None,
    );
    let deadline = Instant::now() + Duration::from_secs(600);
    while partition.missing(CLIENTS[0], PlanId(1)).is_none() {
        assert!(Instant::now() < deadline, "the plan does not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    partition
}

fn push(partition: &Partition, block: u32) -> Push {
    partition.push_of(PlanId(1), BlockId(block), Form::Plain, false).unwrap()
}

fn is_due(partition: &Partition, client: ClientId, block: u32) -> bool {
    partition.is_due(&Sender::over(&Link::default(), client), &push(partition, block))
}

/// What a device does.
fn fill(mut target: Target, with: f32) {
    let from = [with; BLOCK as usize / 4];
    // SAFETY: it is as long, and elsewhere.
    unsafe { target.copy_from(from.as_ptr().cast(), BLOCK as usize).unwrap() };
}

fn fetch_if(
    partition: &Arc<Partition>,
    client: ClientId,
    block: u32,
    registered: bool,
) -> Option<(Target, Arc<Reservation>)> {
    let mut sender = Sender::over(&Link::default(), client);
    let mut suits = |_, _| registered;
    match partition.reserve(&mut sender, push(partition, block), Room::Sum(&mut suits)).unwrap() {
        Reserved::Ready(reservation) => {
            let (target, reservation) = reservation.fetch();
            Some((target.expect("memory"), reservation))
        }
        Reserved::Kept | Reserved::Later => panic!("there is another way for it"),
        Reserved::Skip => None,
    }
}

fn fetch(partition: &Arc<Partition>, client: ClientId, block: u32) -> Option<(Target, Arc<Reservation>)> {
    fetch_if(partition, client, block, true)
}

fn left(partition: &Partition) -> u64 {
    partition.progress().1.expect("a plan").1
}

#[test]
fn a_block_that_is_fetched_direct_is_nobody_elses_until_it_is_there() {
    let partition = begun();
    let (target, fetching) = fetch(&partition, CLIENTS[0], 0).expect("room");
    assert!(fetch(&partition, CLIENTS[0], 0).is_none());
    assert!(fetch(&partition, CLIENTS[1], 0).is_none());
    assert!(!is_due(&partition, CLIENTS[1], 0) && is_due(&partition, CLIENTS[1], 1));
    fill(target, 2.5);
    fetching.complete_fetched().unwrap();
    assert_eq!((left(&partition), partition.store().tally().read().push_stored_bytes), (5, u64::from(BLOCK)));
    // The second is added to it, and is no first one.
    assert!(fetch(&partition, CLIENTS[1], 0).is_none());
    assert!(is_due(&partition, CLIENTS[1], 0) && !is_due(&partition, CLIENTS[0], 0));
}

#[test]
fn a_block_that_is_not_fetched_can_come_again() {
    let partition = begun();
    let (target, fetching) = fetch(&partition, CLIENTS[0], 1).expect("room");
    fill(target, f32::NAN);
    drop(fetching);
    assert_eq!(left(&partition), 6);
    let (target, fetching) = fetch(&partition, CLIENTS[1], 1).expect("room");
    fill(target, 1.0);
    fetching.complete_fetched().unwrap();
    assert_eq!(left(&partition), 5);
}

#[test]
fn a_payload_that_is_still_being_fetched_does_not_count() {
    let partition = begun();
    let (target, fetching) = fetch(&partition, CLIENTS[0], 2).expect("room");
    let refusal = fetching.complete_fetched().unwrap_err();
    assert!(refusal.to_string().contains("still being fetched"), "{refusal}");
    assert_eq!(left(&partition), 6);
    // Whoever fetches it has its memory as long as that lasts.
    assert!(fetch(&partition, CLIENTS[1], 2).is_none());
    drop(target);
    assert!(fetch(&partition, CLIENTS[1], 2).is_some());
}

#[test]
fn a_plan_that_is_dropped_waits_for_what_is_being_fetched() {
    let partition = begun();
    let (target, fetching) = fetch(&partition, CLIENTS[0], 0).expect("room");
    assert!(!fetching.is_abandoned());
    partition.from_coordinator(2, Message::Drop { plan: PlanId(1) }, None);
    assert!(partition.progress().1.is_some());
    assert!(fetching.is_abandoned());
    assert!(fetch(&partition, CLIENTS[0], 1).is_none());
    drop(target);
    fetching.complete_fetched().unwrap();
    assert!(partition.progress().1.is_none());
}

#[test]
fn memory_that_is_not_registered_is_left_alone() {
    let partition = begun();
    assert!(fetch_if(&partition, CLIENTS[0], 0, false).is_none());
    assert!(is_due(&partition, CLIENTS[0], 0) && is_due(&partition, CLIENTS[1], 0));
    assert!(fetch(&partition, CLIENTS[0], 0).is_some());
}

#[test]
fn nan_that_is_fetched_direct_voids_the_plan() {
    let partition = begun();
    let (target, fetching) = fetch(&partition, CLIENTS[0], 0).expect("room");
    fill(target, f32::NAN);
    fetching.complete_fetched().unwrap();
    assert_eq!(left(&partition), 6);
    assert!(fetch(&partition, CLIENTS[1], 0).is_none(), "nothing more is wanted");
}
