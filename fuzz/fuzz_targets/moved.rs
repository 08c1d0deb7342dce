//! Any bytes as word of where a model is: what is taken can be said again, and leads somewhere.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::wire::Moved;

fuzz_target!(|bytes: &[u8]| {
    let Ok(moved) = Moved::decode(bytes) else { return };
    let again = moved.encode().expect("it was decoded");
    assert_eq!(Moved::decode(&again).expect("it was encoded"), moved);
    let known = |owner| moved.shards.iter().any(|shard| shard.shard == owner);
    assert!(moved.record.owners.iter().all(|&(owner, _)| known(owner)));
    assert!(moved.record.owners.iter().any(|&(owner, _)| owner == moved.record.coordinator));
});
