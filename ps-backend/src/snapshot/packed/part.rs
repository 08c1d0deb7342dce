//! What one process writes of a snapshot: the pieces that it has, but for those that are as they were.

use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rayon::prelude::*;

use super::PACK_BYTES;
use super::places::{Pack, PieceHash, Place, Places, hash_of};
use crate::snapshot::{Piece, SnapshotError};
use crate::stores::{Existing, Objects};

/// Packs that are written at once: disks and networks take several requests together.
const WRITERS: usize = 3;

/// How fast packs are written, at most.
#[derive(Debug, Default)]
pub struct Pace {
    /// Bytes a second, if they are limited.
    rate: Option<u64>,
    /// When what was taken is written at that rate.
    busy_until: Mutex<Option<Instant>>,
}

impl Pace {
    /// So many bytes a second, or as fast as it goes.
    pub fn new(rate: Option<u64>) -> Pace {
        Pace { rate, busy_until: Mutex::default() }
    }

    /// When so many bytes may be written.
    fn takes(&self, bytes: u64, now: Instant) -> Instant {
        let Some(rate) = self.rate else { return now };
        let mut busy_until = self.busy_until.lock();
        let begin = busy_until.map_or(now, |until| until.max(now));
        *busy_until = Some(begin + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64));
        begin
    }
}

/// What was written.
#[derive(Debug)]
pub struct Part {
    /// Where its pieces lie, also those of before.
    pub places: Places,
    /// Bytes of new packs.
    pub written: u64,
}

/// A pack that is to be written.
struct Filled<'a> {
    number: u32,
    pieces: Vec<(Piece, &'a [u8], PieceHash)>,
}

/// Whether the job makes steps now. Hashing beside them takes little of the time.
pub type Stepping<'a> = &'a (dyn Fn() -> bool + Sync);

/// Beside steps, computing takes one of so many parts of the time.
const BESIDE_STEPS: u32 = 10;
/// How often it is looked whether there are steps.
const LOOK: Duration = Duration::from_millis(5);

/// Leaves the cores to steps, after hashing has taken them for so long.
fn make_room(took: Duration, is_stepping: Stepping<'_>) {
    let until = Instant::now() + took * (BESIDE_STEPS - 1);
    while is_stepping() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// Writes pieces, which come in the order in which they are to lie. Packs are called `name` and a number. A piece that is as
/// `before` has it is named and not written, and the others at this pace. Calls `done` with the number of bytes that are
/// dealt with; it can return an interruption.
///
/// # Errors
/// [`SnapshotError`]; the packs that are there belong to no snapshot then.
pub fn write_part<'a>(
    store: &dyn Objects,
    name: &str,
    before: &Places,
    (pace, is_stepping): (&Pace, Stepping<'_>),
    pieces: impl Iterator<Item = (Piece, &'a [u8])>,
    done: &(dyn Fn(u64) -> Result<(), SnapshotError> + Sync),
) -> Result<Part, SnapshotError> {
    let (filled, packs) = sync_channel::<Filled<'a>>(1);
    let (packs, written) =
        (Mutex::new(Some(packs)), Mutex::new(Part { places: Places::default(), written: 0 }));
    let (packs, written_here) = (&packs, &written);
    std::thread::scope(|scope| {
        let write = move || -> Result<(), SnapshotError> {
            loop {
                let next = packs.lock().as_ref().and_then(|packs| packs.recv().ok());
                let Some(pack) = next else { return Ok(()) };
                let name = format!("{name}-{:05}", pack.number);
                let bytes: Vec<&[u8]> = pack.pieces.iter().map(|(_, bytes, _)| *bytes).collect();
                let len = bytes.iter().map(|bytes| bytes.len() as u64).sum();
                let now = Instant::now();
                std::thread::sleep(pace.takes(len, now) - now);
                // No other pack has its name, so it may travel in parts, which takes no condition.
                store.put(&name, &bytes, Existing::Replaced)?;
                written_here.lock().add(&Pack { name, bytes: len }, &pack.pieces);
                done(len)?;
            }
        };
        // With the end of the channel, nobody writes in vain, or waits for a writer that has gone.
        let write = move || write().inspect_err(|_| drop(packs.lock().take()));
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(write)).collect();
        let mut number = 0;
        let mut next = Vec::new();
        let mut pieces = pieces.peekable();
        let mut sorted = Ok(());
        while pieces.peek().is_some() && sorted.is_ok() {
            let some = take_bytes(&mut pieces, PACK_BYTES);
            let begun = Instant::now();
            let hashes: Vec<PieceHash> = some.par_iter().map(|(_, bytes)| hash_of(bytes)).collect();
            make_room(begun.elapsed(), is_stepping);
            for ((piece, bytes), hash) in some.into_iter().zip(hashes) {
                match before.of(piece) {
                    Some((place, pack)) if (place.hash, place.bytes as usize) == (hash, bytes.len()) => {
                        let mut written = written.lock();
                        let pack = written.places.pack(pack);
                        written.places.add(piece, Place { pack, ..*place });
                        drop(written);
                        sorted = sorted.and_then(|()| done(bytes.len() as u64));
                    }
                    _ => next.push((piece, bytes, hash)),
                }
            }
            let len: usize = next.iter().map(|(_, bytes, _)| bytes.len()).sum();
            if len >= PACK_BYTES || pieces.peek().is_none() && len > 0 {
                let pack = Filled { number, pieces: std::mem::take(&mut next) };
                number += 1;
                // Otherwise a writer has failed.
                if filled.send(pack).is_err() {
                    break;
                }
            }
        }
        drop(filled);
        let panicked = || SnapshotError::Invalid("a thread that wrote packs has panicked".into());
        let ended = writers.into_iter().map(|writer| writer.join().unwrap_or_else(|_| Err(panicked())));
        ended.fold(sorted, |before, ended| before.and(ended))
    })?;
    Ok(written.into_inner())
}

/// The next pieces, of about so many bytes.
fn take_bytes<'a>(
    pieces: &mut impl Iterator<Item = (Piece, &'a [u8])>,
    bytes: usize,
) -> Vec<(Piece, &'a [u8])> {
    let mut left = bytes;
    let mut taken = Vec::new();
    while left > 0
        && let Some((piece, bytes)) = pieces.next()
    {
        left = left.saturating_sub(bytes.len());
        taken.push((piece, bytes));
    }
    taken
}

impl Part {
    fn add(&mut self, pack: &Pack, pieces: &[(Piece, &[u8], PieceHash)]) {
        let (number, mut offset) = (self.places.pack(pack), 0);
        for &(piece, bytes, hash) in pieces {
            self.places.add(piece, Place { pack: number, offset, bytes: bytes.len() as u32, hash });
            offset += bytes.len() as u64;
        }
        self.written += offset;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn hashing_leaves_the_cores_to_steps_as_long_as_there_are_any() {
        let (begin, took) = (Instant::now(), Duration::from_millis(10));
        make_room(took, &|| true);
        assert!(begin.elapsed() >= took * (BESIDE_STEPS - 1));
        let looks = AtomicU32::new(0);
        // Without an end of the steps, it would take hours.
        make_room(Duration::from_secs(3600), &|| looks.fetch_add(1, Ordering::Relaxed) < 3);
        assert_eq!(looks.into_inner(), 4);
    }

    #[test]
    fn packs_are_written_no_faster_than_they_may() {
        let (pace, now) = (Pace::new(Some(1000)), Instant::now());
        let after = |bytes, seconds| pace.takes(bytes, now + Duration::from_secs(seconds)) - now;
        assert_eq!(after(2000, 0), Duration::ZERO, "the first one at once");
        assert_eq!(after(500, 0), Duration::from_secs(2));
        assert_eq!(after(500, 1), Duration::from_millis(2500));
        assert_eq!(after(500, 9), Duration::from_secs(9), "a pause is not made up for");
        assert_eq!(Pace::default().takes(1 << 40, now), now);
    }
}
