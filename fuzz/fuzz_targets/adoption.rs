//! Any bytes as what a shard is told that is to take blocks: what is taken can be said again, and both maps fit the model.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::wire::Adoption;

fuzz_target!(|bytes: &[u8]| {
    let Ok(adoption) = Adoption::decode(bytes) else { return };
    let again = adoption.encode().expect("it was decoded");
    assert_eq!(Adoption::decode(&again).expect("it was encoded"), adoption);
    let (before, after) = (adoption.map_in_force(), adoption.record.block_map());
    let (before, after) = (before.expect("it was checked"), after.expect("it was checked"));
    assert_eq!((before.blocks(), before.epoch().0 + 1), (after.blocks(), after.epoch().0));
    let known = |owner| adoption.shards.iter().any(|shard| shard.shard == owner);
    assert!(before.shares().into_keys().chain(after.shares().into_keys()).all(known));
});
