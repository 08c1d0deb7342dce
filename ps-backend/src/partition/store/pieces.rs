//! Pieces of a version, packed: one behind the other; and what has changed in them.

use libmodelio::bytes::changes::{Changed, Union};
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::PartitionLayout;
use libmodelio::vocabulary::shard_error::ShardError;
use libmodelio::vocabulary::strided::Strided;
use libmodelio::wire::Refusal;

use super::changes::Since;
use super::pinned::PinnedVersion;

/// The most that the search for changes may cost. Pieces that go to and fro between many blocks cost more than they save.
const MOST_WORK: usize = 4 << 20;
/// So many bytes of a block that is looked at cost as much as a unit that has changed there.
const BYTES_A_UNIT: usize = 64;

/// These pieces of a version of a model of `size` bytes, packed. The caller bounds them.
///
/// # Errors
/// If they do not lie in the partition, or are no pieces.
pub(crate) fn packed(version: &PinnedVersion, size: u64, parts: &[Strided]) -> Result<Vec<u8>, Refusal> {
    let partition = &version.shared.partition;
    let block_size = u64::from(partition.layout().block_size());
    let bytes = Strided::total(parts, size).ok_or(ShardError::OutOfRange)?;
    let mut packed = Vec::with_capacity(bytes as usize);
    let mut around = (0..0, [].as_slice());
    for piece in parts.iter().flat_map(Strided::pieces) {
        let mut at = piece.start;
        while at < piece.end {
            if !around.0.contains(&at) {
                let block = BlockId((at / block_size) as u32);
                let local = partition.local(block).ok_or(Refusal::NotMine { block })?;
                let (start, bytes) = (u64::from(block.0) * block_size, version.block(local));
                around = (start..start + bytes.len() as u64, bytes);
            }
            let end = piece.end.min(around.0.end);
            let start = around.0.start;
            packed.extend_from_slice(&around.1[(at - start) as usize..(end - start) as usize]);
            at = end;
        }
    }
    Ok(packed)
}

/// The patch that makes packed pieces from those of an older version. None if that is no shorter than they are, or
/// takes too long to find out.
pub(crate) fn patch_packed(
    since: &Since,
    partition: &PartitionLayout,
    parts: &[Strided],
    packed: &[u8],
) -> Option<Vec<u8>> {
    let layout = partition.layout();
    let size = u64::from(layout.block_size());
    let local = |at: u64| partition.local(BlockId((at / size) as u32));
    let unit = parts.iter().filter_map(|part| Some(layout.unit(local(part.start)?))).min()?;
    let (mut union, mut place, mut work) = (Union::new(packed.len(), unit), 0, 0);
    // What has changed in the block that begins here: the numbers of units of so many bytes. None is all of it.
    let (mut around, mut units, mut width) = (None, Some(Vec::new()), 1);
    for piece in parts.iter().flat_map(Strided::pieces) {
        let mut at = piece.start;
        while at < piece.end {
            let start = at - at % size;
            if around.replace(start) != Some(start) {
                let numbers = units.get_or_insert_default();
                numbers.clear();
                match since.changed(layout, local(at)?) {
                    Changed::Nothing => {}
                    Changed::Some(changed) => {
                        changed.numbers(numbers);
                        width = changed.unit() as u64;
                    }
                    Changed::Whole => units = None,
                }
                work += size as usize / BYTES_A_UNIT + units.as_ref().map_or(0, Vec::len);
                if work > MOST_WORK {
                    return None;
                }
            }
            let end = piece.end.min(start + size);
            let mut add = |from: u64, to: u64| {
                union.add_bytes(place + (from - at) as usize..place + (to - at) as usize);
            };
            match &units {
                None => add(at, end),
                Some(units) => {
                    let unit_at = |unit: &u32| start + u64::from(*unit) * width;
                    let first = units.partition_point(|unit| unit_at(unit) + width <= at);
                    for from in units[first..].iter().map(unit_at).take_while(|from| *from < end) {
                        add(from.max(at), (from + width).min(end));
                    }
                }
            }
            place += (end - at) as usize;
            at = end;
        }
    }
    let mut patch = Vec::new();
    union.all().patch(packed, &mut patch).then_some(patch)
}

#[cfg(test)]
mod tests {
    use fastrand::Rng;
    use libmodelio::bytes::block::span;
    use libmodelio::vocabulary::ids::Version;
    use libmodelio::vocabulary::layout::{DType, MIN_BLOCK_SIZE, ModelLayout};

    use super::super::changes::{ChangeLog, VersionChanges};
    use super::*;

    const TYPES: [DType; 4] = [DType::BF16, DType::F32, DType::F64, DType::E4M3];

    /// Random pieces in some blocks of a model, which a patch makes from those of an older version, over all densities.
    #[test]
    fn what_has_changed_makes_the_pieces_that_are_there() {
        let (mut rng, mut shorter) = (Rng::with_seed(17), 0);
        for round in 0..150 {
            let elements = |rng: &mut Rng| vec![rng.usize(20_000..60_000)];
            let tensors =
                (0..4).map(|at| (format!("{at}"), *rng.choice(&TYPES).unwrap(), elements(&mut rng)));
            let model = ModelLayout::new(tensors.collect(), MIN_BLOCK_SIZE).unwrap();
            let blocks: Vec<BlockId> = (0..model.blocks()).filter(|at| at % 3 != 1).map(BlockId).collect();
            let partition = model.partition(&blocks).unwrap();
            let layout = partition.layout();
            // Some versions, of which the log knows what each has changed.
            let mut versions: Vec<Vec<u8>> = vec![(0..model.size()).map(|_| rng.u8(..)).collect()];
            let mut log = ChangeLog::new(u64::MAX, 9);
            for version in 1..=rng.u64(1..4) {
                let (old, density) =
                    (versions.last().unwrap(), [0.0, 0.0003, 0.02, 0.4, 1.0][rng.usize(..5)]);
                let mut new = old.clone();
                let only = rng.usize(..3);
                for (at, byte) in new.iter_mut().enumerate() {
                    if (only == 0 || at / 9000 % 3 == only) && rng.f64() < density {
                        *byte ^= 1 << (at % 8);
                    }
                }
                let changes = VersionChanges::new(layout.blocks(), false);
                for (local, block) in (0..).map(BlockId).zip(&blocks) {
                    let bytes = span(&model.block_bytes(*block));
                    changes
                        .set(local, Changed::between(&old[bytes.clone()], &new[bytes], layout.unit(local)));
                }
                log.publish(Version(version), Some(changes));
                versions.push(new);
            }
            let parts: Vec<Strided> =
                (0..rng.usize(1..6)).map(|_| pieces(&mut rng, &model, &blocks)).collect();
            let of = |version: &[u8]| {
                let pieces = parts.iter().flat_map(Strided::pieces);
                pieces.flat_map(|piece| version[span(&piece)].to_vec()).collect::<Vec<u8>>()
            };
            let newest = versions.len() - 1;
            let base = rng.usize(..newest);
            let since = log.since(Version(base as u64), Version(newest as u64)).unwrap();
            let (mut made, packed) = (of(&versions[base]), of(&versions[newest]));
            if let Some(patch) = patch_packed(&since, &partition, &parts, &packed) {
                assert!(patch.len() < packed.len(), "round {round}");
                Changed::apply(&patch, &mut made).unwrap();
                assert!(made == packed, "round {round}: {parts:?}");
                shorter += 1;
            }
        }
        assert!((50..150).contains(&shorter), "{shorter} of the patches are shorter");
    }

    /// Pieces within a few of the blocks that are here, one behind the other in the model.
    fn pieces(rng: &mut Rng, model: &ModelLayout, blocks: &[BlockId]) -> Strided {
        let at = rng.usize(..blocks.len());
        let next = blocks.get(at + 1).filter(|next| next.0 == blocks[at].0 + 1).unwrap_or(&blocks[at]);
        let (from, to) = (model.block_bytes(blocks[at]).start, model.block_bytes(*next).end);
        let (longest, widest) = ([1, 4, 700, to - from][rng.usize(..4)], [1, 3, 64, 5000][rng.usize(..4)]);
        let run = rng.u64(1..=longest.min(to - from));
        let stride = run + rng.u64(0..widest);
        let start = from + rng.u64(0..=to - from - run);
        Strided { start, run, stride, count: rng.u64(1..=(to - start - run) / stride + 1) }
    }

    #[test]
    fn pieces_that_take_too_long_to_compare_have_no_patch() {
        let model = ModelLayout::blank(8 * u64::from(MIN_BLOCK_SIZE), DType::F32, MIN_BLOCK_SIZE).unwrap();
        let blocks: Vec<BlockId> = (0..model.blocks()).map(BlockId).collect();
        let partition = model.partition(&blocks).unwrap();
        let mut log = ChangeLog::new(u64::MAX, 1);
        let changes = VersionChanges::new(model.blocks(), false);
        blocks.iter().for_each(|block| changes.set(*block, Changed::Nothing));
        log.publish(Version(1), Some(changes));
        let since = log.since(Version(0), Version(1)).unwrap();
        let one = Strided { start: 0, run: 4, stride: u64::from(MIN_BLOCK_SIZE), count: 8 };
        let patch = |times: usize| patch_packed(&since, &partition, &vec![one; times], &vec![0; 32 * times]);
        assert_eq!(patch(10).map(|patch| patch.len()), Some(Changed::NOTHING_BYTES));
        assert_eq!(patch(4096), None);
    }
}
