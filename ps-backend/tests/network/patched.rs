//! What a client does with patches: none is shown that does not make the shard's block.

use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::client::{ClientOptions, Job, TransportChoice};
use libmodelio::vocabulary::ids::{Epoch, ShardId, Version};

use crate::scripted_shard::{ScriptedShard, record};
use crate::world::{Client, until};

const BLOCK: usize = 64 << 10;
/// The last one is shorter.
const BLOCKS: usize = 5;

/// Whether all bytes of the version that is shown are its number.
fn is_whole(client: &Job) -> bool {
    let version = client.version();
    let view = client.get(version).unwrap();
    view.bytes(0..client.layout().size()).iter().all(|byte| *byte == version.0 as u8)
}

#[test]
fn a_patched_block_with_another_checksum_is_pulled_whole() {
    let shard = ScriptedShard::start(ShardId(1), Epoch(1));
    let options = ClientOptions { transport: TransportChoice::Tcp, ..ClientOptions::default() };
    let connected = Job::connect(&record(ShardId(1), Epoch(1)), std::slice::from_ref(&shard.record), options);
    let client = Client::of(connected.unwrap());
    let mut patch = Vec::new();
    let (old, mut new) = (vec![0; BLOCK], vec![0; BLOCK]);
    new[1000] = 1;
    assert!(Changed::between(&old, &new, 4).patch(&new, &mut patch));
    let broken = vec![9; 20];
    let lies = [
        (patch.clone(), Some(crc32c(&new) ^ 1)),
        (patch.clone(), None),
        (broken, Some(crc32c(&new))),
        (patch[..patch.len() - 1].to_vec(), Some(crc32c(&new))),
    ];
    for (number, lie) in (1..).zip(lies) {
        let before = shard.with(|script| {
            (script.newest, script.patch) = (Version(number), Some(lie));
            script.sent
        });
        until("the version is shown", || client.version() == Version(number));
        assert!(is_whole(&client));
        let (patched, whole) = shard.with(|script| script.sent);
        assert!(patched > before.0 && whole == before.1 + BLOCKS, "lie {number}: {patched}, {whole}");
    }
    drop(client);
    shard.stop();
}
