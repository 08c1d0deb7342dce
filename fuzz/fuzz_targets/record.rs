//! Any bytes as a model's record: what is sound has a layout and a map that make the same record.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::wire::ModelRecord;

/// A sound record may claim terabytes; tables for so many blocks say nothing more, and take long.
const BLOCKS: u32 = 1 << 12;

fuzz_target!(|bytes: &[u8]| {
    let Ok(record) = ModelRecord::decode(bytes) else { return };
    let again = record.encode().expect("it was decoded");
    assert_eq!(ModelRecord::decode(&again).expect("it was encoded"), record);
    let owned: u64 = record.owners.iter().map(|&(_, run)| u64::from(run)).sum();
    if owned > u64::from(BLOCKS) {
        return;
    }
    let Ok(map) = record.block_map() else { return };
    let Ok(layout) = record.layout() else { return };
    assert_eq!(map.blocks(), layout.blocks());
    let made = ModelRecord::new(
        &record.name,
        record.generation,
        &layout,
        record.metadata.clone(),
        &map,
        record.coordinator,
        record.controls.clone(),
    )
    .expect("it is sound");
    assert_eq!(made.block_map().expect("it is sound"), map);
    assert_eq!(made.tensors, record.tensors);
});
