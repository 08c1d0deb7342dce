//! A coordinator whose other shard cannot be found.

use std::collections::BTreeMap;

use libmodelio::transport::reactor::{Reactor, ReactorOptions};
use libmodelio::vocabulary::block_map::BlockMap;
use libmodelio::vocabulary::layout::{DType, ModelLayout};

use super::*;
use crate::partition::executor::Pool;
use crate::server::partition::PartitionOptions;

#[test]
fn a_missing_shard_is_sought_after_growing_pauses() {
    const BLOCK: u32 = 64 << 10;
    let (here, lost) = (ShardId(1), ShardId(2));
    let layout = ModelLayout::blank(8 * u64::from(BLOCK), DType::F32, BLOCK).unwrap();
    let map = BlockMap::striped(layout.blocks(), &[here, lost]).unwrap();
    let record =
        ModelRecord::new("m", Generation(7), &layout, BTreeMap::new(), &map, here, Default::default())
            .unwrap();
    let partition =
        Partition::new(&record, here, &Pool::start(1, None).unwrap(), PartitionOptions::default()).unwrap();
    let reactor = Reactor::start(&ReactorOptions { threads: 1, ..ReactorOptions::default() }).unwrap();
    let (tell, asked) = std::sync::mpsc::channel();
    let resolve: Resolve = Arc::new(move |shard| {
        let _ = tell.send(Instant::now());
        Err(format!("nobody knows where shard {shard} is"))
    });
    let network = Some(Network { net: reactor.handle(), resolve });
    let coordinator = Coordinator::new(&record, &partition, here, network, Begins::Anew, &[]).unwrap();
    let mut before: Option<Instant> = None;
    for pause in [0, 50, 100, 200, 400] {
        let now = asked.recv_timeout(Duration::from_secs(600)).expect("it is asked for again");
        if let Some(before) = before {
            let gap = now - before;
            assert!(gap >= Duration::from_millis(pause), "{gap:?} instead of {pause} ms");
        }
        before = Some(now);
    }
    let unreachable = coordinator.status().unreachable;
    assert_eq!(unreachable.len(), 1);
    assert_eq!((unreachable[0].0, unreachable[0].2.as_str()), (lost, "nobody knows where shard 2 is"));
    coordinator.stop(&Refusal::other("it was a test"));
    reactor.shut_down(Duration::from_secs(2)).unwrap();
}
