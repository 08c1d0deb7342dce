//! Records there and back, and bytes that are no record.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::vocabulary::controls::Controls;
use crate::vocabulary::ids::Epoch;
use crate::vocabulary::layout::MIN_BLOCK_SIZE;

fn layout() -> ModelLayout {
    let tensor = |name: &str, dtype: &str, shape: &[usize]| {
        (name.to_owned(), DType::from_name(dtype).unwrap(), shape.to_vec())
    };
    let tensors = vec![
        tensor("ids", "I64", &[7]),
        tensor("embedding", "F32", &[100, 1000]),
        tensor("scale", "BF16", &[]),
        tensor("mask", "BOOL", &[3]),
    ];
    ModelLayout::new(tensors, MIN_BLOCK_SIZE).unwrap()
}

fn record() -> ModelRecord {
    let layout = layout();
    let map = BlockMap::striped(layout.blocks(), &[ShardId(4), ShardId(9)]).unwrap();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let controls = Controls::default().with("reducer", "adam").unwrap();
    ModelRecord::new("gpt", Generation(3), &layout, metadata, &map, ShardId(4), controls).unwrap()
}

#[test]
fn records_are_layouts_and_maps() {
    let record = record();
    assert_eq!(ModelRecord::decode(&record.encode().unwrap()).unwrap(), record);
    record.check().unwrap();
    assert_eq!(record.layout().unwrap().tensors(), layout().tensors());
    let map = record.block_map().unwrap();
    assert_eq!((map.epoch(), map.blocks(), map.owners()[3]), (Epoch(1), layout().blocks(), ShardId(9)));
    assert!(!record.ready);
}

#[test]
fn a_single_owner_is_one_run() {
    let layout = layout();
    let map = BlockMap::striped(layout.blocks(), &[ShardId(1)]).unwrap();
    let record =
        ModelRecord::new("m", Generation(1), &layout, BTreeMap::new(), &map, ShardId(1), Controls::default())
            .unwrap();
    assert_eq!(record.owners, [(ShardId(1), layout.blocks())]);
}

#[test]
fn what_does_not_fit_is_named() {
    let changed = |change: fn(&mut ModelRecord)| {
        let mut record = record();
        change(&mut record);
        record.check().expect_err("it does not fit").to_string()
    };
    let blocks = layout().blocks();
    assert_eq!(
        changed(|record| record.owners[0].1 += 1),
        format!("the block map has owners for {} blocks, the model has {blocks}", blocks + 1)
    );
    assert!(changed(|record| record.owners.push((ShardId(1), 0))).starts_with("the block map has owners"));
    assert_eq!(
        changed(|record| record.coordinator = ShardId(5)),
        "the coordinator, shard 5, owns no block of the model"
    );
    assert_eq!(
        changed(|record| record.tensors[1].1 = "F99".to_owned()),
        r#"tensor "embedding" is of unknown element type "F99""#
    );
    assert_eq!(
        changed(|record| record.tensors.reverse()),
        r#"tensor "mask" stands where the layout has "ids""#
    );
    assert_eq!(
        changed(|record| record.name = "a/b".to_owned()),
        r#"model name "a/b" contains '/', so it cannot be a directory's"#
    );
    assert_eq!(changed(|record| record.generation = Generation(0)), "generation 0 is no life of a model");
    assert!(changed(|record| record.block_size = 0).contains("block size 0"));
    assert!(changed(|record| record.tensors[1].2[0] = u64::MAX).contains("embedding"));
    assert!(changed(|record| record.tensors[1].2[0] = 1 << 40).contains("blocks, the limit is"));
}

#[test]
fn other_bytes_are_no_record() {
    let mut bytes = record().encode().unwrap();
    bytes.push(0);
    assert!(matches!(ModelRecord::decode(&bytes), Err(RecordError::Trailing(1))));
    let long = ModelRecord::decode(&vec![0; MAX_PAYLOAD as usize + 1]);
    assert!(matches!(long, Err(RecordError::TooLong { .. })));
    let mut record = record();
    record.controls.learners = 0;
    assert!(matches!(record.encode(), Err(RecordError::Controls(_))));
    let bytes = postcard::to_stdvec(&record).unwrap();
    assert!(matches!(ModelRecord::decode(&bytes), Err(RecordError::Controls(_))));
}

proptest! {
    #[test]
    fn every_truncation_is_refused(keep in any::<proptest::sample::Index>()) {
        let bytes = record().encode().unwrap();
        let cut = ModelRecord::decode(&bytes[..keep.index(bytes.len())]);
        prop_assert!(matches!(cut, Err(RecordError::Encoding(_))));
    }

    #[test]
    fn damage_is_refused_or_another_record(damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = record().encode().unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Ok(record) = ModelRecord::decode(&bytes) {
            let sound = record.check().is_ok();
            prop_assert_eq!(sound, record.layout().is_ok() && record.block_map().is_ok());
            prop_assert_eq!(ModelRecord::decode(&record.encode().unwrap()).unwrap(), record);
        }
    }
}
