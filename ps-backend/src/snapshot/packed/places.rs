//! Where the pieces of a snapshot lie, and their hashes.

use std::collections::BTreeMap;

use libmodelio::vocabulary::ids::BlockId;
use libmodelio::wire::DataKind;
use serde::{Deserialize, Serialize};

use crate::snapshot::{Piece, SnapshotError};

/// BLAKE3 of a piece, cut off. Two pieces with one hash are one: nobody finds two such, not even on purpose.
pub type PieceHash = [u8; 16];

/// The hash of a piece.
pub(super) fn hash_of(bytes: &[u8]) -> PieceHash {
    let mut cut = PieceHash::default();
    cut.copy_from_slice(&blake3::hash(bytes).as_bytes()[..16]);
    cut
}

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The pack, by its number in [`Places`].
    pub pack: u32,
    /// Its offset in the pack, in bytes.
    pub offset: u64,
    /// Its length, in bytes.
    pub bytes: u32,
    /// Its hash.
    pub hash: PieceHash,
}

impl Place {
    /// The error of a piece here that does not have its hash.
    pub(super) fn damaged(&self, (block, kind): Piece, pack: &str) -> SnapshotError {
        let why =
            format!("the {kind:?} of block {block} (from byte {} on) are not what was written", self.offset);
        SnapshotError::damaged(pack.as_ref(), why)
    }
}

/// An object with pieces.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Pack {
    /// Its name in the store.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

/// Where pieces lie. Each pack is named once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Encoded", into = "Encoded")]
pub struct Places {
    packs: Vec<Pack>,
    /// The packs' numbers by their names.
    numbers: BTreeMap<String, u32>,
    of: BTreeMap<Piece, Place>,
}

impl Places {
    /// The packs.
    pub fn packs(&self) -> &[Pack] {
        &self.packs
    }

    /// The place of a piece, and its pack.
    pub fn of(&self, piece: Piece) -> Option<(&Place, &Pack)> {
        let place = self.of.get(&piece)?;
        Some((place, &self.packs[place.pack as usize]))
    }

    /// All pieces, by block and kind.
    pub fn pieces(&self) -> impl Iterator<Item = (Piece, &Place)> {
        self.of.iter().map(|(piece, place)| (*piece, place))
    }

    /// The number of a pack, which is added if it is not there.
    pub fn pack(&mut self, pack: &Pack) -> u32 {
        if let Some(number) = self.numbers.get(&pack.name) {
            return *number;
        }
        let number = self.packs.len() as u32;
        self.packs.push(pack.clone());
        self.numbers.insert(pack.name.clone(), number);
        number
    }

    /// Adds a piece. Its pack is known.
    pub fn add(&mut self, piece: Piece, place: Place) {
        self.of.insert(piece, place);
    }

    /// Adds all of others. False if both have a piece.
    pub fn add_all(&mut self, others: &Places) -> bool {
        let numbers: Vec<u32> = others.packs.iter().map(|pack| self.pack(pack)).collect();
        let place = |place: &Place| Place { pack: numbers[place.pack as usize], ..*place };
        let mut added = others.of.iter().map(|(piece, of)| self.of.insert(*piece, place(of)));
        added.all(|before| before.is_none())
    }
}

/// Places as JSON has them.
#[derive(Serialize, Deserialize)]
struct Encoded {
    packs: Vec<Pack>,
    runs: Vec<Run>,
    /// The hashes of the pieces in the order of the runs: 32 hexadecimal digits each, one behind the other.
    hashes: String,
}

/// Pieces of equal length that lie one behind the other. Their blocks rise by `step`.
#[derive(Serialize, Deserialize)]
struct Run {
    kind: String,
    first: u32,
    step: u32,
    count: u32,
    pack: u32,
    offset: u64,
    bytes: u32,
}

impl Run {
    /// Whether the piece can be the next one; the step follows from the second one.
    fn takes(&mut self, kind: &str, block: u32, place: &Place) -> bool {
        let is_behind = self.kind == kind
            && (self.pack, self.bytes) == (place.pack, place.bytes)
            && self.offset + u64::from(self.count) * u64::from(self.bytes) == place.offset;
        let step = match self.count {
            1 => block.checked_sub(self.first).filter(|step| *step > 0),
            _ => Some(self.step),
        };
        match step {
            Some(step) if is_behind && self.first + self.count * step == block => {
                (self.step, self.count) = (step, self.count + 1);
                true
            }
            _ => false,
        }
    }
}

fn name_of(kind: DataKind) -> String {
    match kind {
        DataKind::Weights => "weights".to_owned(),
        DataKind::Masters => "masters".to_owned(),
        DataKind::Slot(slot) => format!("state{slot}"),
    }
}

fn kind_of(name: &str) -> Option<DataKind> {
    match name {
        "weights" => Some(DataKind::Weights),
        "masters" => Some(DataKind::Masters),
        name => Some(DataKind::Slot(name.strip_prefix("state")?.parse().ok()?)),
    }
}

impl From<Places> for Encoded {
    fn from(places: Places) -> Encoded {
        let mut pieces: Vec<(Piece, Place)> = places.of.into_iter().collect();
        pieces.sort_unstable_by_key(|((block, kind), place)| (*kind, place.pack, place.offset, *block));
        let (mut runs, mut hashes): (Vec<Run>, _) = (Vec::new(), String::with_capacity(32 * pieces.len()));
        for ((block, kind), place) in pieces {
            let kind = name_of(kind);
            for byte in place.hash {
                hashes.push_str(&format!("{byte:02x}"));
            }
            if !runs.last_mut().is_some_and(|run| run.takes(&kind, block.0, &place)) {
                let Place { pack, offset, bytes, .. } = place;
                runs.push(Run { kind, first: block.0, step: 1, count: 1, pack, offset, bytes });
            }
        }
        Encoded { packs: places.packs, runs, hashes }
    }
}

impl TryFrom<Encoded> for Places {
    type Error = String;

    fn try_from(encoded: Encoded) -> Result<Places, String> {
        let Encoded { packs, runs, hashes } = encoded;
        let mut hashes = hashes.as_bytes().chunks(32);
        let mut next_hash = || {
            let digits = str::from_utf8(hashes.next()?).ok()?;
            let mut hash = PieceHash::default();
            for (at, byte) in hash.iter_mut().enumerate() {
                *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
            }
            Some(hash)
        };
        let mut of = BTreeMap::new();
        for run in runs {
            let kind = kind_of(&run.kind).ok_or_else(|| format!("{:?} is no kind of data", run.kind))?;
            let len = packs.get(run.pack as usize).map_or(0, |pack| pack.bytes);
            let end = u64::from(run.count)
                .checked_mul(run.bytes.into())
                .and_then(|all| all.checked_add(run.offset));
            if end.is_none_or(|end| end > len) {
                return Err(format!("a run of {} ends behind its pack", run.kind));
            }
            for at in 0..run.count {
                let block = run.step.checked_mul(at).and_then(|step| run.first.checked_add(step));
                let block = BlockId(block.ok_or("a run of blocks ends behind the last one")?);
                let hash = next_hash().ok_or("there are too few hashes")?;
                let offset = run.offset + u64::from(at) * u64::from(run.bytes);
                let place = Place { pack: run.pack, offset, bytes: run.bytes, hash };
                if of.insert((block, kind), place).is_some() {
                    return Err(format!("block {block} has two places of {}", run.kind));
                }
            }
        }
        match next_hash() {
            None => {
                let numbers = (0..).zip(&packs).map(|(number, pack)| (pack.name.clone(), number)).collect();
                Ok(Places { packs, numbers, of })
            }
            Some(_) => Err("there are too many hashes".to_owned()),
        }
    }
}
