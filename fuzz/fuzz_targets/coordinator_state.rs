//! Any bytes as the state of a model's coordinator: what is taken goes on, for a while and for long, and can be handed
//! over again.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use libmodelio::vocabulary::layout::{DType, MIN_BLOCK_SIZE as BLOCK, ModelLayout};
use ps_backend::coordinator::CoordinatorCore;

fuzz_target!(|input: (u8, u8, u32, &[u8])| {
    let (blocks, partitions, now, bytes) = input;
    let (blocks, partitions) = (usize::from(blocks) + 1, usize::from(partitions) + 1);
    let tensor = |i| (format!("t{i}"), DType::F32, vec![BLOCK as usize / 4]);
    let layout = ModelLayout::new((0..blocks).map(tensor).collect(), BLOCK).expect("a layout");
    let now = Duration::from_millis(now.into());
    let Ok(mut coordinator) = CoordinatorCore::taken_over(bytes, &layout, partitions, now) else { return };
    let mut actions = Vec::new();
    coordinator.go_on(now, &mut actions);
    for after in [0, 1, 1000, 1_000_000] {
        coordinator.tick(now + Duration::from_millis(after), &mut actions);
    }
    coordinator.hold(now, &mut actions);
    if coordinator.is_held() {
        let again = coordinator.hand_over().expect("it is held");
        CoordinatorCore::taken_over(&again, &layout, partitions, now).expect("it was handed over");
    }
});
