//! The directory against a map; copies that are torn or anything at all; buffers that are used again while they are
//! read.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;

type Entry = (u64, u32, u64);

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish(u64, Entry),
    Retire(u64),
}

/// Few versions, so that they meet, or enough to fill the directory.
fn step(versions: u64) -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..versions, any::<Entry>()).prop_map(|(version, entry)| Step::Publish(version, entry)),
        1 => (0..versions).prop_map(Step::Retire),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop_oneof![vec(step(6), 1..60), vec(step(300), 100..400)]
}

/// A directory and what should be in it.
struct Twin {
    directory: Directory,
    model: BTreeMap<u64, Entry>,
}

impl Twin {
    fn new() -> Twin {
        Twin { directory: Directory::new().unwrap(), model: BTreeMap::new() }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Publish(version, entry) => {
                self.directory.publish(Version(version), entry.0, entry.1, entry.2);
                self.model.insert(version, entry);
                if self.model.len() > ENTRIES {
                    self.model.pop_first();
                }
            }
            Step::Retire(version) => {
                self.directory.retire(Version(version));
                self.model.remove(&version);
            }
        }
    }

    fn image(&self) -> Vec<u8> {
        let words = words(self.directory.memory()).iter();
        words.flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect()
    }

    fn is_in(&self, version: u64, seen: &Seen) -> bool {
        self.model.get(&version) == Some(&(seen.address, seen.key, seen.bytes))
    }
}

fn entry_of<'a>(image: &'a [u8], seen: &Seen) -> &'a [u8] {
    &image[seen.offset()..seen.offset() + ENTRY]
}

proptest! {
    #[test]
    fn a_published_version_is_found_until_it_is_retired(steps in steps()) {
        let mut twin = Twin::new();
        let mut seen: BTreeMap<u64, Seen> = BTreeMap::new();
        let last = steps.len() - 1;
        for (i, step) in steps.into_iter().enumerate() {
            twin.take(step);
            let image = twin.image();
            prop_assert_eq!(image.len(), DIRECTORY);
            // An entry that was seen before is still there, or gone for good.
            let (Step::Publish(touched, _) | Step::Retire(touched)) = step;
            for (version, seen) in &seen {
                let stays = *version != touched && twin.model.contains_key(version);
                prop_assert_eq!(seen.still_there(entry_of(&image, seen)), stays, "{:?}", seen);
            }
            let newest = twin.model.last_key_value().map(|(&version, _)| Version(version));
            let looked_for = if i == last { 0..300 } else { touched.saturating_sub(3)..touched + 4 };
            for version in looked_for {
                match find(&image, Version(version)) {
                    Ok(found) => {
                        prop_assert!(found.version == Version(version) && twin.is_in(version, &found));
                        prop_assert!(found.still_there(entry_of(&image, &found)));
                        seen.insert(version, found);
                    }
                    Err(absent) => {
                        prop_assert!(!twin.model.contains_key(&version), "{}", absent);
                        prop_assert_eq!(absent, Absent { wanted: Version(version), newest });
                        seen.remove(&version);
                    }
                }
            }
        }
        // Readers that have the memory find it empty afterwards.
        let memory = Arc::clone(twin.directory.memory());
        drop(twin);
        let bytes: Vec<u8> = words(&memory).iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        prop_assert!((0..300).all(|version| find(&bytes, Version(version)).is_err()));
        prop_assert!(seen.values().all(|seen| !seen.still_there(entry_of(&bytes, seen))));
    }

    #[test]
    fn torn_copies_lead_to_nothing_that_is_not_there(
        steps in steps(),
        early in any::<Index>(),
        late in any::<Index>(),
        torn in vec(any::<bool>(), DIRECTORY / 8),
    ) {
        let mut twin = Twin::new();
        let (early, late) = (early.index(steps.len()), late.index(steps.len()));
        let (early, late) = (early.min(late), early.max(late));
        let mut images = Vec::new();
        // All that ever was.
        let mut history = Vec::new();
        for (i, step) in steps.iter().enumerate() {
            twin.take(*step);
            history.extend(match *step {
                Step::Publish(version, entry) => Some((version, entry)),
                Step::Retire(_) => None,
            });
            if i == early || i == late {
                images.push(twin.image());
            }
        }
        let words = |image: usize| images[image.min(images.len() - 1)].chunks(8);
        let mixed: Vec<u8> =
            words(0).zip(words(1)).zip(&torn).flat_map(|((a, b), &torn)| if torn { a } else { b }).copied().collect();
        let now = twin.image();
        for version in 0..300 {
            if let Ok(seen) = find(&mixed, Version(version)) {
                let entry = (seen.address, seen.key, seen.bytes);
                prop_assert!(history.contains(&(version, entry)), "{:?} never was", seen);
                if seen.still_there(entry_of(&now, &seen)) {
                    prop_assert!(twin.is_in(version, &seen), "{:?} is there, and is not", seen);
                }
            }
        }
    }

    #[test]
    fn garbage_is_no_directory(bytes in vec(any::<u8>(), 0..2 * DIRECTORY), version: u64, seen: (u64, u64, u64)) {
        prop_assert_eq!(find(&bytes, Version(version)), Err(Absent { wanted: Version(version), newest: None }));
        let (sequence, address, len) = seen;
        let seen = Seen { slot: 3, sequence, version: Version(version), address, key: 1, bytes: len };
        prop_assert!(!seen.still_there(&bytes) && !seen.still_there(&bytes[..bytes.len().min(ENTRY)]));
    }

    #[test]
    fn a_damaged_entry_is_none(
        version: u64,
        entry: Entry,
        damage in 1..=u8::MAX,
        at in 0..ENTRY,
        cut in 0..ENTRY,
    ) {
        let mut twin = Twin::new();
        twin.take(Step::Publish(version, entry));
        let image = twin.image();
        let seen = find(&image, Version(version)).unwrap();
        let mut damaged = entry_of(&image, &seen).to_vec();
        damaged[at] ^= damage;
        prop_assert!(!seen.still_there(&damaged));
        prop_assert_eq!(find(&damaged, Version(version)), Err(Absent { wanted: Version(version), newest: None }));
        prop_assert!(!seen.still_there(&image[..cut]));
        prop_assert!(find(&image[..cut], Version(version)).is_err());
        prop_assert!(find(&image[..ENTRY], Version(version)).is_ok());
        prop_assert!(!seen.still_there(&image[..ENTRY + 1]));
    }

    #[test]
    fn places_are_within_the_version(address: u64, bytes: u64, offset: u64, len: u64) {
        let seen = Seen { slot: 0, sequence: 2, version: Version(1), address, key: 1, bytes };
        let (first, end) = (u128::from(address) + u128::from(offset), u128::from(offset) + u128::from(len));
        let within = end <= bytes.into() && first + u128::from(len) <= u64::MAX.into();
        prop_assert_eq!(seen.place(offset, len).map(u128::from), within.then_some(first));
    }
}

#[test]
fn an_entry_lies_as_the_protocol_says() {
    let mut directory = Directory::new().unwrap();
    directory.publish(Version(7), 0x1122_3344_5566_7788, 0x99aa_bbcc, 0x0102);
    let image: Vec<u8> = words(directory.memory())
        .iter()
        .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
        .collect();
    let mut expected = [2u64, 7, 0x1122_3344_5566_7788, 0x0102].map(u64::to_le_bytes).concat();
    expected.extend(0x99aa_bbcc_u32.to_le_bytes());
    expected.resize(CHECKED, 0);
    expected.extend(crc32c(&expected).to_le_bytes());
    assert_eq!(image[..ENTRY], expected);
    // Unused entries look like entries that are being changed.
    assert_eq!(image[ENTRY..2 * ENTRY], [&[1u8][..], &[0; ENTRY - 1]].concat());
}

#[test]
fn the_oldest_make_way() {
    let mut twin = Twin::new();
    let entries = ENTRIES as u64;
    for version in 0..entries + 3 {
        twin.take(Step::Publish(version, (version, 0, 0)));
    }
    let image = twin.image();
    let found = |version| find(&image, Version(version)).is_ok();
    assert!((0..3).all(|version| !found(version)) && (3..entries + 3).all(found));
    // A version older than all of them drives none out, nor does it come back when there is room.
    twin.take(Step::Publish(1, (1, 0, 0)));
    twin.take(Step::Retire(20));
    assert!(find(&twin.image(), Version(1)).is_err() && find(&twin.image(), Version(3)).is_ok());
}

const BUFFERS: usize = 4;
const BUFFER_WORDS: usize = 2048;

/// Stores `value` everywhere: every other time past the caches, as versions are made.
fn fill(buffer: &Mapping, value: u64) {
    #[cfg(target_arch = "x86_64")]
    if value.is_multiple_of(2) {
        use std::arch::x86_64::{_mm_sfence, _mm_stream_si64};
        for word in words(buffer) {
            // SAFETY: an aligned word that is never accessed but whole.
            unsafe { _mm_stream_si64(word.as_ptr().cast(), value as i64) };
        }
        // SAFETY: sse2 is part of x86_64.
        unsafe { _mm_sfence() };
        return;
    }
    words(buffer).iter().for_each(|word| word.store(value, Ordering::Relaxed));
}

/// A copy as a NIC might make it: words one by one, from any start, in one direction or the other.
fn copy(from: &[AtomicU64], random: u64) -> Vec<u64> {
    let (len, start) = (from.len(), (random >> 8) as usize % from.len());
    let mut copy = vec![0; len];
    for i in 0..len {
        let at = (start + i) % len;
        let at = if random & 1 == 0 { at } else { len - 1 - at };
        copy[at] = from[at].load(Ordering::Relaxed);
    }
    copy
}

fn bytes(words: Vec<u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

#[derive(Debug, Default)]
struct Counts {
    accepted: u64,
    /// Rejected, and other bytes had indeed come.
    overwritten: u64,
    /// Rejected, though all bytes were the version's.
    late: u64,
    absent: u64,
}

fn read(
    memory: &Mapping,
    buffers: &[Mapping],
    enough: impl Fn(&Counts) -> bool,
    seed: u64,
    deadline: Instant,
) -> Counts {
    let mut counts = Counts::default();
    let mut random = seed;
    while !enough(&counts) && Instant::now() < deadline {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let directory = bytes(copy(words(memory), random));
        let Err(Absent { newest: Some(newest), .. }) = find(&directory, Version(u64::MAX)) else {
            counts.absent += 1;
            continue;
        };
        let Ok(seen) = find(&directory, Version(newest.0.saturating_sub(random >> 32 & 3))) else {
            counts.absent += 1;
            continue;
        };
        let buffer = &buffers[seen.key as usize];
        assert_eq!((seen.address, seen.bytes), (buffer.start().addr().get() as u64, buffer.len() as u64));
        fence(Ordering::Acquire);
        let copied = copy(words(buffer), random >> 16);
        fence(Ordering::Acquire);
        let entry = bytes(copy(&words(memory)[seen.slot * WORDS..][..WORDS], random >> 24));
        let is_right = copied.iter().all(|&word| word == seen.version.0);
        match (seen.still_there(&entry), is_right) {
            (true, true) => counts.accepted += 1,
            (true, false) => panic!("{seen:?} was accepted with bytes of another version"),
            (false, true) => counts.late += 1,
            (false, false) => counts.overwritten += 1,
        }
    }
    counts
}

#[test]
fn a_version_may_be_there_and_not_readable() {
    let mut directory = Directory::new().unwrap();
    directory.publish_unreadable(Version(3));
    let copied = bytes(copy(words(directory.memory()), 0));
    let seen = find(&copied, Version(3)).unwrap();
    assert!(!seen.is_readable() && seen.place(0, 1).is_none());
    // It can be read later, after all.
    directory.publish(Version(3), 4096, 7, 100);
    let copied = bytes(copy(words(directory.memory()), 0));
    let again = find(&copied, Version(3)).unwrap();
    assert!(again.is_readable() && again != seen);
    directory.retire(Version(3));
    assert!(find(&bytes(copy(words(directory.memory()), 0)), Version(3)).is_err());
}

#[test]
fn a_copy_of_a_buffer_that_was_used_again_is_never_accepted() {
    let buffers: Vec<_> = (0..BUFFERS).map(|_| Mapping::memfd("test", 8 * BUFFER_WORDS).unwrap()).collect();
    let mut directory = Directory::new().unwrap();
    let memory = Arc::clone(directory.memory());
    let deadline = Instant::now() + Duration::from_secs(600);
    let enough = |counts: &Counts| counts.accepted >= 2_000 && counts.overwritten >= 200;
    let counts = std::thread::scope(|scope| {
        let readers = [0x9e37_79b9_7f4a_7c15, 0xbf58_476d_1ce4_e5b9].map(|seed| {
            let (memory, buffers) = (&memory, &buffers);
            scope.spawn(move || read(memory, buffers, enough, seed, deadline))
        });
        // Version 0 is in no buffer: they are all zero.
        let mut version = 1;
        while readers.iter().any(|reader| !reader.is_finished()) {
            let number = version as usize % BUFFERS;
            let buffer = &buffers[number];
            if version > BUFFERS as u64 {
                directory.retire(Version(version - BUFFERS as u64));
            }
            fill(buffer, version);
            let address = buffer.start().addr().get() as u64;
            directory.publish(Version(version), address, number as u32, buffer.len() as u64);
            version += 1;
        }
        readers.map(|reader| reader.join().unwrap())
    });
    assert!(counts.iter().all(enough), "{counts:?}");
}
