//! The bytes of a view: parts are read piece by piece, each small enough for the caches, changed and stored.

use std::ops::Range;

use super::part::Part;
use super::plan::{Move, ViewPlan};
use crate::formats::named::{Convert, conversion};
use crate::vocabulary::layout::Tensor;
use crate::vocabulary::strided::Strided;

/// Bytes of the model that are read at once at most.
const PIECE: usize = 256 << 10;

/// Where the bytes of a version come from.
pub trait Source {
    /// Why they do not come.
    type Error;

    /// Fills `out` with these pieces of the version, packed: one behind the other.
    ///
    /// # Errors
    /// The view is not made.
    fn read(&mut self, pieces: &[Strided], out: &mut [u8]) -> Result<(), Self::Error>;
}

/// A version in memory.
pub struct Flat<'a>(pub &'a [u8]);

impl Source for Flat<'_> {
    type Error = std::convert::Infallible;

    fn read(&mut self, pieces: &[Strided], mut out: &mut [u8]) -> Result<(), Self::Error> {
        for piece in pieces.iter().flat_map(Strided::pieces) {
            let from = &self.0[piece.start as usize..piece.end as usize];
            let (now, later) = std::mem::take(&mut out).split_at_mut(from.len());
            now.copy_from_slice(from);
            out = later;
        }
        Ok(())
    }
}

/// Makes the view of a version. `out` has the size of the view.
///
/// # Errors
/// Those of `source`.
///
/// # Panics
/// If `out` is shorter.
pub fn fill<S: Source>(plan: &ViewPlan, source: &mut S, out: &mut [u8]) -> Result<(), S::Error> {
    let mut room = Room::default();
    plan.moves.iter().try_for_each(|of| carry(plan, of, source, out, &mut room))
}

/// What [`fill`] reads, tile by tile, in its order. A source that takes its time can read ahead.
pub fn reads(plan: &ViewPlan) -> impl Iterator<Item = Tile> + '_ {
    plan.moves.iter().flat_map(move |of| {
        let Move { part, target, convert, .. } = of;
        let (from, to) = (&plan.source.tensors()[part.tensor], &plan.target.tensors()[*target]);
        let sizes = from.dtype.size_bytes().zip(to.dtype.size_bytes());
        let whole = whole(from).filter(|_| sizes.is_none());
        let whole = whole.into_iter().flat_map(move |all| {
            let cuts = (0..all.run).step_by(PIECE).map(move |at| at..all.run.min(at + PIECE as u64));
            cuts.map(move |cut| {
                let at = |base: u64| vec![Strided::contiguous(base + cut.start..base + cut.end)];
                Tile { pieces: at(all.start), places: at(to.bytes.start), kept: Some(Kept::default()) }
            })
        });
        let tiled = sizes.into_iter().flat_map(move |(size, width)| {
            // Wider elements hold all that narrower ones say.
            let back = conversion(to.dtype, from.dtype).filter(|_| width > size);
            tiles(&shape(part), size, part.transpose).map(move |tile| {
                let turned = part.transpose.then(|| (tile[1].len(), size));
                let kept = (convert.is_none() || back.is_some()).then_some(Kept { back, turned });
                Tile { pieces: sources(part, from, size, &tile), places: targets(of, to, width, &tile), kept }
            })
        });
        whole.chain(tiled)
    })
}

/// The pieces of the model that a view of this plan holds, tile by tile, and the pieces of the view that hold the same bytes
/// in the same order. The plan must have an inverse ([`ViewPlan::check_inverse`]).
pub fn inverse(plan: &ViewPlan) -> impl Iterator<Item = (Vec<Strided>, Vec<Strided>)> + '_ {
    reads(plan).map(|Tile { pieces, places, .. }| (pieces, places))
}

/// A tile of a part.
pub struct Tile {
    /// The pieces of the model that it is read from.
    pub pieces: Vec<Strided>,
    /// The pieces of the view that it becomes.
    places: Vec<Strided>,
    /// None if the view has less than their bytes say.
    kept: Option<Kept>,
}

/// What makes the bytes of a tile again.
#[derive(Default)]
struct Kept {
    /// Changes the type of elements.
    back: Option<Convert>,
    /// The rows of the view, which are columns there, and the bytes of an element.
    turned: Option<(usize, usize)>,
}

impl Tile {
    /// The bytes of the model that it is read from.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.run * piece.count).sum()
    }

    /// Whether a view holds all that these bytes say.
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Appends the bytes of the model that this tile of `view` was made of, if [`Self::is_kept`]. Where types were changed,
    /// a NaN may come back with other bits.
    ///
    /// # Panics
    /// If the view is shorter than its plan says.
    pub fn recover(&self, view: &[u8], out: &mut Vec<u8>) {
        let Some(Kept { back, turned }) = &self.kept else { return };
        let pieces = self.places.iter().flat_map(Strided::pieces);
        let bytes = pieces.map(|piece| &view[piece.start as usize..piece.end as usize]);
        if back.is_none() && turned.is_none() {
            return bytes.for_each(|bytes| out.extend_from_slice(bytes));
        }
        let (mut packed, mut changed) = (bytes.collect::<Vec<_>>().concat(), Vec::new());
        if let Some(back) = back {
            back(&packed, &mut changed);
            std::mem::swap(&mut packed, &mut changed);
        }
        if let Some((rows, size)) = *turned {
            transpose(&packed, rows, size, &mut changed);
            std::mem::swap(&mut packed, &mut changed);
        }
        out.extend_from_slice(&packed);
    }
}

fn carry<S: Source>(
    plan: &ViewPlan,
    of: &Move,
    source: &mut S,
    out: &mut [u8],
    Room { packed, turned, converted }: &mut Room,
) -> Result<(), S::Error> {
    let Move { part, target, convert, .. } = of;
    let (from, to) = (&plan.source.tensors()[part.tensor], &plan.target.tensors()[*target]);
    let (Some(size), Some(width)) = (from.dtype.size_bytes(), to.dtype.size_bytes()) else {
        // Elements of less than a byte are carried whole.
        return whole(from).map_or(Ok(()), |all| {
            source.read(&[all], &mut out[to.bytes.start as usize..to.bytes.end as usize])
        });
    };
    for tile in tiles(&shape(part), size, part.transpose) {
        let sources = sources(part, from, size, &tile);
        let targets = targets(of, to, width, &tile);
        if let ([Strided { start, run, count: 1, .. }], None, false) = (&targets[..], convert, part.transpose)
        {
            source.read(&sources, &mut out[*start as usize..(start + run) as usize])?;
            continue;
        }
        packed.resize(tile.iter().map(Range::len).product::<usize>() * size, 0);
        source.read(&sources, packed)?;
        if part.transpose {
            transpose(packed, tile[0].len(), size, turned);
            std::mem::swap(packed, turned);
        }
        if let Some(convert) = convert {
            converted.clear();
            convert(packed, converted);
            std::mem::swap(packed, converted);
        }
        let mut rest = &packed[..];
        for piece in targets.iter().flat_map(Strided::pieces) {
            let (now, later) = rest.split_at((piece.end - piece.start) as usize);
            out[piece.start as usize..piece.end as usize].copy_from_slice(now);
            rest = later;
        }
    }
    Ok(())
}

/// A tensor that is carried whole, if it has bytes.
fn whole(from: &Tensor) -> Option<Strided> {
    Some(Strided::contiguous(from.bytes.clone())).filter(|all| all.run > 0)
}

/// How much of each dimension a part takes.
fn shape(part: &Part) -> Vec<usize> {
    part.ranges.iter().map(Range::len).collect()
}

/// The pieces of the model that a tile of a part is made of.
fn sources(part: &Part, from: &Tensor, size: usize, tile: &[Range<usize>]) -> Vec<Strided> {
    let placed = part.ranges.iter().zip(tile).map(|(all, of)| all.start + of.start..all.start + of.end);
    pieces(from.bytes.start, size as u64, &from.shape, &placed.collect::<Vec<_>>())
}

/// The pieces of the view that a tile of a part becomes.
fn targets(of: &Move, to: &Tensor, width: usize, tile: &[Range<usize>]) -> Vec<Strided> {
    let mut there = tile.to_vec();
    if of.part.transpose {
        there.reverse();
    }
    if let Some(range) = there.get_mut(of.dim) {
        *range = range.start + of.at..range.end + of.at;
    }
    pieces(to.bytes.start, width as u64, &to.shape, &there)
}

/// Memory for pieces that are changed.
#[derive(Default)]
struct Room {
    packed: Vec<u8>,
    turned: Vec<u8>,
    converted: Vec<u8>,
}

/// The pieces of these ranges of a tensor's dimensions, which hold some elements. The tensor begins at `base`.
fn pieces(base: u64, size: u64, shape: &[usize], ranges: &[Range<usize>]) -> Vec<Strided> {
    let (mut start, mut run, mut unit) = (base, size, size);
    // How often it goes on, and after how many bytes, from within to without.
    let mut levels: Vec<(u64, u64)> = Vec::new();
    for (&len, range) in shape.iter().zip(ranges).rev() {
        let count = range.len() as u64;
        start += range.start as u64 * unit;
        match levels.last_mut() {
            None if run == unit => run = count * unit,
            Some((before, stride)) if *before * *stride == unit => *before *= count,
            _ if count > 1 => levels.push((count, unit)),
            _ => {}
        }
        unit *= len as u64;
    }
    let (&(count, stride), outer) = levels.split_first().unwrap_or((&(1, run), &[]));
    let mut all = vec![Strided { start, run, stride, count }];
    for &(count, stride) in outer {
        let again = |at: u64| all.iter().map(move |of| Strided { start: of.start + at * stride, ..*of });
        all = (0..count).flat_map(again).collect();
    }
    all
}

/// Cuts a tensor of this shape into tiles of so few bytes. Those that are transposed are about square.
fn tiles(shape: &[usize], size: usize, square: bool) -> impl Iterator<Item = Vec<Range<usize>>> + use<> {
    let mut room = (PIECE / size).max(1);
    let side = room.isqrt();
    let mut steps: Vec<usize> = shape.to_vec();
    for step in steps.iter_mut().rev() {
        *step = (*step).min(if square { side } else { room }).max(1);
        room = (room / *step).max(1);
    }
    let shape = shape.to_vec();
    let counts: Vec<usize> = shape.iter().zip(&steps).map(|(len, step)| len.div_ceil(*step)).collect();
    (0..counts.iter().product()).map(move |mut number: usize| {
        let mut tile: Vec<Range<usize>> = Vec::with_capacity(shape.len());
        for ((&len, &step), &count) in shape.iter().zip(&steps).zip(&counts).rev() {
            let start = number % count * step;
            tile.push(start..len.min(start + step));
            number /= count;
        }
        tile.reverse();
        tile
    })
}

/// The elements of so many rows, column by column.
fn transpose(packed: &[u8], rows: usize, size: usize, turned: &mut Vec<u8>) {
    turned.clear();
    let row = packed.len() / rows;
    for column in (0..row).step_by(size) {
        for at in (0..rows).map(|of| of * row + column) {
            turned.extend_from_slice(&packed[at..at + size]);
        }
    }
}
