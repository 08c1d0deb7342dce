//! Checksums of blocks, also while somebody follows by patches: from then on, a block's checksum is made with the block.

use libmodelio::bytes::block;
use libmodelio::bytes::changes::Changed;
use libmodelio::vocabulary::ids::{BlockId, Version};
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use libmodelio::wire::Work;
use ps_backend::partition::store::{Limits, Payload};
use test_devices::one_by_one::OneByOne;

use crate::driver::{Source, Twin, Way, bytes_of, conclude, model, partition_of};

/// Makes the newest version from one that is so many versions older. Returns whether a patch was enough for some block.
fn follow(twin: &Twin, behind: u64, old: &[Vec<u8>]) -> bool {
    let base = Version(twin.version.0 - behind);
    let Some(since) = twin.store.since(base, twin.version) else { return false };
    let newest = twin.store.newest().unwrap();
    let patched = twin.blocks().filter(|&block| {
        let Some((patch, crc)) = since.patch(&twin.layout, block, &newest) else { return false };
        let mut bytes = old[base.0 as usize][bytes_of(&twin.layout, block)].to_vec();
        Changed::apply(&patch, &mut bytes).unwrap();
        assert!(bytes == newest.block(block), "block {block} of version {}", twin.version);
        crc.is_some()
    });
    patched.count() > 0
}

#[test]
fn a_block_has_the_checksum_of_its_bytes_while_others_follow_by_patches() {
    for reducer in [Reducer::Sgd, Reducer::Adam, Reducer::Assign] {
        let (partition, hyper) =
            (partition_of(&model(), |_| true), Hyper { learning_rate: 1e-4, ..Hyper::default() });
        let mut twin = Twin::new(partition, reducer, hyper, Limits { retain: 2, buffers: 8 });
        twin.store.keep_changes(3);
        let (mut versions, mut patched) = (vec![twin.check("the first")], 0);
        for round in 0..12 {
            let blocks = twin.blocks().filter(|block| (block.index() + round) % 3 > 0).collect();
            twin.reduce(&[Source { seed: round, way: Way::Plain, blocks }]);
            // Nobody follows at first, then for some versions, and then nobody does again.
            if (3..9).contains(&round) {
                patched += usize::from(follow(&twin, 1 + round as u64 % 3, &versions));
            }
            versions.push(twin.check(&format!("{reducer:?} {round}")));
        }
        assert!(patched > 3, "{reducer:?}: {patched} versions were patched");
    }
}

#[test]
fn blocks_that_were_compared_ahead_have_the_checksums_of_their_bytes() {
    let limits = Limits { retain: 2, buffers: 8 };
    let mut twin = Twin::new(partition_of(&model(), |_| true), Reducer::Assign, Hyper::default(), limits);
    twin.store.keep_changes(3);
    let mut versions = vec![twin.check("the first")];
    for round in 0..8 {
        let source = Source { seed: round, way: Way::Plain, blocks: twin.blocks().collect() };
        let buffer = twin.store.take_buffer().unwrap();
        let (memory, key) = (buffer.memory().clone(), buffer.key());
        let write = |of: BlockId| {
            assert!(block::place(&twin.layout, of, &source.plain(&twin.layout, of), &memory, true));
        };
        twin.blocks().for_each(write);
        let blocks: Vec<BlockId> = twin.blocks().filter(|block| block.index() % 4 > 0).collect();
        twin.store.compare_ahead(key, &blocks).unwrap().run();
        if round == 5 {
            // A program writes them again, with the same values.
            twin.store.forget_ahead(key);
            twin.store.compare_ahead(key, &blocks[2..]).unwrap().run();
        }
        let job = twin.store.begin(twin.version, Work::Assign { token: key.0 }, true).unwrap();
        for of in twin.blocks() {
            let bytes = block::pinned_bytes(&memory, twin.layout.block_bytes(of));
            assert!(job.finish(of, Some(Payload::Plain(bytes))).unwrap());
        }
        drop((memory, buffer));
        conclude(&twin.store, &job).unwrap();
        drop(job);
        twin.published(&[source]);
        assert!(round < 2 || follow(&twin, 1 + round as u64 % 2, &versions));
        versions.push(twin.check(&format!("round {round}")));
    }
}
