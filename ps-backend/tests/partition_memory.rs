//! What the process takes from the system does not depend on how many send. Alone in its process, so that nothing
//! else is counted.

use std::fs;

use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use libmodelio::vocabulary::reducer::{Hyper, Reducer, Step};
use libmodelio::vocabulary::tensor_steps::TensorSteps;
use libmodelio::wire::Work;
use ps_backend::partition::store::{Home, Limits, PartitionStore, Payload};
use test_devices::one_by_one::OneByOne;

const BLOCK: u32 = 256 << 10;
const SIZE: u64 = 64 << 20;

/// Resident bytes, of every kind.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// One version from so many plans of so many sources each.
fn version(store: &PartitionStore, base: u64, plans: usize, sources: usize) {
    let payload = vec![0x3c; BLOCK as usize];
    let blocks = || (0..(SIZE / u64::from(BLOCK)) as u32).map(BlockId);
    for _ in 1..plans {
        let work = Work::Add { combine: Reducer::Sgd.combine() };
        let job = store.begin(Version(base), work, true).unwrap();
        for block in (0..sources).flat_map(|_| blocks()) {
            assert!(job.add(block, Payload::Plain(&payload)).unwrap());
        }
        drop(store.conclude(&job).unwrap());
    }
    let contributions = (plans * sources) as u32;
    let step = Step {
        reducer: Reducer::Sgd,
        hyper: Hyper::default(),
        contributions,
        t: base + 1,
        ..Step::default()
    };
    let tensors = TensorSteps::uniform(1, step.t);
    let work = Work::Reduce {
        step,
        tensors,
        groups: Groups::default(),
        factors: Default::default(),
        fresh_state: base == 0,
    };
    let job = store.begin(Version(base), work, true).unwrap();
    for block in (1..sources).flat_map(|_| blocks()) {
        assert!(job.add(block, Payload::Plain(&payload)).unwrap());
    }
    assert!(blocks().all(|block| job.finish(block, Some(Payload::Plain(&payload))).unwrap()));
    assert!(store.conclude(&job).unwrap().is_none());
}

#[test]
fn memory_does_not_depend_on_the_number_of_sources() {
    let model = ModelLayout::blank(SIZE, DType::F32, BLOCK).unwrap();
    let all: Vec<_> = (0..model.blocks()).map(BlockId).collect();
    let store =
        PartitionStore::new(model.partition(&all).unwrap(), Reducer::Sgd, Limits::default(), Home::default())
            .unwrap();
    for &block in &all {
        store.load(block, &vec![0; BLOCK as usize]).unwrap();
    }
    store.finish_loading().unwrap();
    let slack = SIZE / 8;
    let empty = resident();
    version(&store, 0, 1, 1);
    assert!(resident() < empty + slack, "one source: {} MiB more", (resident() - empty) >> 20);
    version(&store, 1, 1, 2);
    let two = resident();
    assert!(two < empty + SIZE + slack, "two sources: {} MiB more", (two - empty) >> 20);
    version(&store, 2, 1, 16);
    assert!(resident() < two + slack, "16 sources: {} MiB more", (resident() - two) >> 20);
    version(&store, 3, 3, 16);
    let most = resident();
    assert!(most < empty + 2 * SIZE + slack, "three plans of 16: {} MiB more", (most - empty) >> 20);
    version(&store, 4, 6, 32);
    assert!(resident() < most + slack, "six plans of 32: {} MiB more", (resident() - most) >> 20);
    assert_eq!(store.bytes().total(), 4 * SIZE, "two versions and two sums");
}
