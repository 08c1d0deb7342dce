//! The formula.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use libmodelio::bytes::available::promise;
use libmodelio::bytes::mmap::Mapping;

use super::*;
use crate::state_copies::StateCopies::{Double, Single};

fn layout(dtype: DType) -> ModelLayout {
    ModelLayout::blank(1 << 20, dtype, 256 << 10).unwrap()
}

fn with(settings: &[(&str, &str)]) -> Controls {
    Controls::default().with_all(settings.iter().copied()).unwrap()
}

#[test]
fn models_leave_a_reserve_of_a_shards_memory() {
    assert_eq!(less_reserve(1600), 1500);
    assert_eq!(less_reserve(100 << 30), 99 << 30);
    assert_eq!(less_reserve(0), 0);
}

#[test]
fn models_that_are_made_at_once_take_no_memory_twice() {
    let left = AtomicU64::new(3);
    let make = || {
        let look = || Some(left.load(Relaxed));
        let take_one = || {
            let before = left.load(Relaxed);
            thread::yield_now();
            left.store(before - 1, Relaxed);
        };
        take(1, look, take_one).is_ok()
    };
    let made = thread::scope(|scope| {
        let makers: Vec<_> = (0..64).map(|_| scope.spawn(make)).collect();
        makers.into_iter().map(|maker| maker.join().unwrap()).filter(|made| *made).count()
    });
    assert_eq!((made, left.into_inner()), (3, 0));
    assert_eq!(take(2, || Some(1), || unreachable!("too little")), Err::<(), _>(1));
    assert!(take(u64::MAX, || None, || ()).is_ok(), "nobody knows");
}

#[test]
fn memory_that_is_promised_to_others_is_not_for_models() {
    let Some(before) = for_models() else { return };
    // Only promised, so nothing of it is taken.
    let most = Arc::new(Mapping::anonymous(before as usize / 4 * 3).unwrap());
    promise(&most).unwrap();
    assert!(for_models().unwrap() < before / 2, "a quarter is left, give or take what others do here");
}

#[test]
fn one_formula_counts_versions_masters_state_sums_and_staging() {
    let mib = |use_: MemoryUse| use_.items().map(|(_, bytes)| bytes >> 20);
    let process =
        |dtype, controls: &Controls, copies| mib(MemoryUse::of_one_process(&layout(dtype), controls, copies));
    let plain = Controls::default();
    let adam = with(&[("reducer", "adam"), ("learners", "2"), ("retain", "3")]);
    assert_eq!(process(DType::F32, &plain, Some(Single)), [2, 0, 0, 0, 1]);
    assert_eq!(process(DType::F32, &adam, Some(Double)), [5, 0, 4, 1, 2]);
    assert_eq!(
        process(DType::F32, &adam, Some(Single)),
        [5, 0, 2, 0, 2],
        "sums lie where the version will be"
    );
    let clips = with(&[("clip_norm", "1")]);
    assert_eq!(process(DType::F32, &clips, Some(Single)), [2, 0, 0, 1, 1]);
    // Half as many bytes an element: masters, moments and sums weigh double.
    assert_eq!(process(DType::BF16, &adam, Some(Double)), [5, 4, 8, 2, 2]);
    assert_eq!(process(DType::BF16, &adam, Some(Single)), [5, 2, 4, 2, 2]);
    // Masters change in place, so contributions are added up before that, of one learner, too.
    assert_eq!(process(DType::BF16, &plain, Some(Single)), [2, 2, 0, 2, 1]);
    assert_eq!(process(DType::BF16, &plain, Some(Double)), [2, 4, 0, 0, 1]);
    let assigns = with(&[("reducer", "assign")]);
    assert_eq!(process(DType::BF16, &assigns, Some(Single)), [2, 0, 0, 0, 1], "nothing is added to masters");
    assert_eq!(process(DType::E4M3, &plain, Some(Single)), [2, 4, 0, 4, 1]);
    let shard = |controls, copies| mib(MemoryUse::of_partition(&layout(DType::F32), controls, copies));
    assert_eq!(shard(&adam, Some(Double)), [2, 0, 4, 1, 0]);
    assert_eq!(shard(&adam, Some(Single)), [2, 0, 2, 0, 0]);
    let asynchronous = with(&[("reducer", "adam"), ("consistency", "async")]);
    assert_eq!(
        shard(&asynchronous, Some(Single)),
        [2, 0, 2, 1, 0],
        "sums wait for the version after the next"
    );
    // A device has masters and moments, and sums lie in versions also if there is no state.
    assert_eq!(process(DType::F32, &adam, None), [5, 0, 0, 0, 2]);
    assert_eq!(process(DType::F32, &plain, None), [2, 0, 0, 0, 1]);
    assert_eq!(process(DType::BF16, &plain, None), [2, 0, 0, 2, 1]);
    assert_eq!(shard(&adam, None), [2, 0, 0, 0, 0]);
    assert_eq!(MemoryUse::on_device(&layout(DType::F32), &adam) >> 20, 3);
    assert_eq!(MemoryUse::on_device(&layout(DType::BF16), &plain) >> 20, 2);
    assert_eq!(mib(MemoryUse::of_mount(1 << 20)), [2, 0, 0, 0, 1]);
    assert_eq!(MemoryUse::of_mount(1 << 20).total(), 3 << 20);
    let whole = MemoryUse::of_one_process(&layout(DType::F32), &adam, Some(Single));
    assert!(MemoryUse::at_least(1 << 20, &adam).total() <= whole.total());
    assert_eq!(MemoryUse::at_least(u64::MAX, &adam).total(), u64::MAX, "no overflow");
}

#[test]
fn the_memory_of_a_model_has_a_name_for_each_use() {
    let text = MemoryUse { versions: 3 << 30, staging: 1 << 29, ..MemoryUse::default() }.to_string();
    assert_eq!(text, "versions 3.0 + staging 0.5 GiB");
}
