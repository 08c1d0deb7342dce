//! Any bytes as a copy of a directory of versions, and copies of a true one that are damaged or put together from two
//! moments: what is found is an entry that lies there whole, and what is still there afterwards is published.

#![no_main]

use std::collections::BTreeMap;
use std::os::fd::AsFd;

use libfuzzer_sys::fuzz_target;
use libmodelio::transport::rdma::published::{DIRECTORY, Directory, ENTRIES, ENTRY, Seen, find};
use libmodelio::vocabulary::ids::Version;

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    Publish {
        version: u8,
        address: u64,
        key: u32,
        bytes: u64,
    },
    Retire {
        version: u8,
    },
    /// Words of the copy come from now on, others are older.
    Copy {
        words: Vec<u16>,
    },
    Damage {
        at: u16,
        by: u8,
    },
    Look,
}

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    steps: Vec<Step>,
    bytes: Vec<u8>,
    version: u64,
}

fn image(directory: &Directory) -> Vec<u8> {
    let mut bytes = vec![0; DIRECTORY];
    let memory = directory.memory().fd().expect("a memfd");
    assert_eq!(nix::sys::uio::pread(memory.as_fd(), &mut bytes, 0), Ok(DIRECTORY));
    bytes
}

fn check(bytes: &[u8], version: Version) -> Option<Seen> {
    match find(bytes, version) {
        Ok(seen) => {
            assert!(seen.slot < ENTRIES && seen.version == version);
            assert!(seen.still_there(&bytes[seen.offset()..seen.offset() + ENTRY]));
            assert!(seen.sequence.is_multiple_of(2));
            assert!(seen.place(0, seen.bytes).is_none_or(|first| first == seen.address));
            Some(seen)
        }
        Err(absent) => {
            assert!(absent.newest.is_none_or(|newest| newest != version && find(bytes, newest).is_ok()));
            None
        }
    }
}

fuzz_target!(|input: Input| {
    check(&input.bytes, Version(input.version));
    let mut directory = Directory::new().expect("memory");
    let mut model = BTreeMap::new();
    let mut copy = image(&directory);
    let mut whole = true;
    for step in input.steps.into_iter().take(300) {
        match step {
            Step::Publish { version, address, key, bytes } => {
                directory.publish(Version(version.into()), address, key, bytes);
                model.insert(version, (address, key, bytes));
                if model.len() > ENTRIES {
                    model.pop_first();
                }
                whole = false;
            }
            Step::Retire { version } => {
                directory.retire(Version(version.into()));
                model.remove(&version);
                whole = false;
            }
            Step::Copy { words } => {
                let now = image(&directory);
                for word in words {
                    let at = usize::from(word) * 8 % DIRECTORY;
                    copy[at..at + 8].copy_from_slice(&now[at..at + 8]);
                }
                whole = copy == now;
            }
            Step::Damage { at, by } => {
                copy[usize::from(at) % DIRECTORY] ^= by;
                whole = false;
            }
            Step::Look => {
                let now = image(&directory);
                for version in 0..=u8::MAX {
                    let is = model.get(&version);
                    let published = |seen: &Seen| is == Some(&(seen.address, seen.key, seen.bytes));
                    let found = check(&now, Version(version.into()));
                    assert!(found.as_ref().map_or(is.is_none(), published), "{version}: {found:?}, {is:?}");
                    let Some(seen) = check(&copy, Version(version.into())) else {
                        assert!(!whole || is.is_none());
                        continue;
                    };
                    let there = seen.still_there(&now[seen.offset()..seen.offset() + ENTRY]);
                    assert!(!there || published(&seen), "{seen:?} is there, and is not");
                }
            }
        }
    }
});
