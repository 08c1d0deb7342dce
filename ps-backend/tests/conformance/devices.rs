//! Which way the bytes go, memory that is registered, and several who contribute as one learner.

use std::collections::BTreeSet;
use std::sync::Arc;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::contributor::ContributeError;
use libmodelio::vocabulary::block_slot::Placement;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCKS, Way, begin_commit, done, outcome, store, write};

pub fn each_path_reports_its_kind(way: &Way) {
    let (site, end) = way.striped_job(&[]).one_end();
    assert_eq!(end.job.kind(), site.kind);
    let shards = end.job.status().shards;
    assert!(shards.iter().all(|shard| shard.transport == site.kind && shard.connected), "{shards:?}");
    assert_eq!(shards.iter().map(|shard| shard.blocks).sum::<u32>(), BLOCKS);
    let numbers: BTreeSet<_> = shards.iter().map(|shard| shard.shard).collect();
    assert_eq!(numbers.len(), shards.len());
}

pub fn memory_that_is_registered_is_the_same_at_both_ends(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum")]).one_end();
    let size = end.job.layout().size() as usize;
    let memories: Vec<_> = (0..4).map(|_| Arc::new(Mapping::memfd("registered", size).unwrap())).collect();
    let regions: Vec<_> = memories.iter().map(|memory| end.job.register(Arc::clone(memory))).collect();
    let keys: BTreeSet<u64> = regions.iter().map(|region| region.key().0).collect();
    assert_eq!(keys.len(), regions.len(), "a key names one region");
    assert!(regions.iter().zip(&memories).all(|(region, memory)| Arc::ptr_eq(region.memory(), memory)));
    // The other end reads bytes that were stored after the registration, from whichever region is named.
    let learner = end.join("a");
    let mut sum = 0.0;
    for (region, value) in regions.iter().rev().zip([1.0, 2.0, 4.0, 8.0]) {
        let mut contribution = learner.open();
        contribution.notice.staging = region.clone();
        (0..BLOCKS).for_each(|block| contribution.stage_all_of(block, value));
        done(contribution.commit());
        let version = learner.pull();
        sum += value;
        end.shows(version, sum);
        // It is the learner's again.
        store(region, 0, &vec![0xff; size]);
        end.shows(version, sum);
    }
}

pub fn several_contribute_as_one_learner(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum")]).one_end();
    let learner = end.join("a");
    let other = Arc::clone(&end.job);
    assert_eq!(end.try_join("a").unwrap_err(), ShardError::NameTaken("a".into()));
    // A contribution may be made by several.
    let mut contribution = learner.all_of(1.0);
    let again = contribution.filled(0, 2.0);
    let slot = learner.slot(contribution.step, 0);
    assert_eq!(other.write(&again, slot, Some(&contribution.notice.staging)), Ok(Placement::Duplicate));
    assert_eq!(contribution.offer(1, &contribution.filled(1, 2.0)), Ok(Placement::Duplicate));
    done(contribution.commit());
    assert_eq!(learner.pull(), 1);
    let mut first = [0; 4];
    assert_eq!(other.read(0, &mut first), end.job.read(0, &mut [0; 4]));
    assert_eq!(f32::from_le_bytes(first), 1.0);
}

/// In this process.
pub fn a_device_that_fails_is_named_to_the_learner(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "adam")]).one();
    learner.push(1.0);
    assert_eq!(learner.pull(), 1);
    let before = end.bytes();
    way.device().fail_after(2);
    let contributor = learner.contributor();
    let contribute = || {
        let bytes = 2f32.to_le_bytes().repeat(before.1.len() / 4);
        write(&contributor, 0, &bytes)?;
        outcome(&begin_commit(&contributor))
    };
    // The contribution counts before the version is made of it, so its commit may be answered well.
    let _ = contribute();
    let failed = contribute().unwrap_err();
    let is_named = |why: &str| why.contains("a device in software has failed");
    assert!(matches!(&failed, ContributeError::Shard(ShardError::Lost(why)) if is_named(why)), "{failed}");
    assert!(end.bytes() == before, "the last version stays");
}
