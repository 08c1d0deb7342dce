//! Pieces of versions, for whoever holds no more of them.

use std::time::Instant;

use libmodelio::client::PartsError;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::strided::Strided;

use crate::site::{BLOCK, LONG, SHORT, Way, done};

const WIDE: u64 = BLOCK as u64;

pub fn pieces_of_a_version_are_read_wherever_it_is(way: &Way) {
    let (site, end, learner) = way.striped_job(&[("reducer", "assign")]).one();
    let size = end.job.layout().size();
    let bytes: Vec<u8> = (0..size as u32 / 4).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut contribution = learner.open();
    for (block, bytes) in (0..).zip(bytes.chunks(BLOCK)) {
        contribution.offer(block, bytes).unwrap();
    }
    done(contribution.commit());
    assert_eq!(learner.pull(), 1);
    let onlooker = site.onlooker();
    onlooker.sees(1);
    let columns = Strided { start: 20, run: 12, stride: 1000, count: 270 };
    let across = Strided { start: WIDE - 6, run: 12, stride: WIDE, count: 4 };
    let long = Strided { start: 5, run: WIDE + 100, stride: WIDE + 101, count: 3 };
    let single = Strided { start: 1, run: 1, stride: 2, count: size / 2 };
    for parts in [
        vec![],
        vec![Strided::contiguous(0..size)],
        vec![columns],
        vec![across],
        vec![long, columns, across],
        vec![single, Strided::contiguous(size - 1..size), Strided::contiguous(0..1)],
    ] {
        let wanted: Vec<u8> = parts
            .iter()
            .flat_map(Strided::pieces)
            .flat_map(|piece| bytes[piece.start as usize..piece.end as usize].iter().copied())
            .collect();
        for end in [&end, &onlooker] {
            let mut read = vec![0xee; wanted.len()];
            end.job.read_parts(Version(1), &parts, &mut read, Instant::now() + LONG).unwrap();
            assert!(read == wanted, "{parts:?}");
        }
    }
}

pub fn pieces_that_are_none_are_refused(way: &Way) {
    let (site, end) = way.striped_job(&[("reducer", "sum")]).one_end();
    let size = end.job.layout().size();
    let sound = Strided { start: 0, run: 4, stride: 8, count: 2 };
    for end in [end, site.onlooker()] {
        let read = |part, room: usize| {
            let mut read = vec![0xee; room];
            let outcome = end.job.read_parts(Version(0), &[sound, part], &mut read, Instant::now() + LONG);
            assert!(outcome.is_ok() || read.iter().all(|&byte| byte == 0xee), "nothing is read");
            outcome
        };
        read(sound, 16).unwrap();
        for part in [
            Strided { run: 0, ..sound },
            Strided { count: 0, ..sound },
            Strided { stride: 3, ..sound },
            Strided { start: size - 11, ..sound },
            Strided { start: u64::MAX - 2, ..sound },
            Strided { count: u64::MAX, ..sound },
            Strided { run: u64::MAX, stride: u64::MAX, ..sound },
        ] {
            let outcome = read(part, 16);
            assert!(matches!(outcome, Err(PartsError::Outside)), "{part:?}: {outcome:?}");
        }
        for room in [15, 17] {
            assert!(matches!(read(sound, room), Err(PartsError::Room { bytes: 16, .. })));
        }
    }
}

pub fn pieces_of_versions_that_are_not_there_are_not_read(way: &Way) {
    let (site, end, learner) = way.striped_job(&[("reducer", "sum")]).one();
    let onlooker = site.onlooker();
    for step in 1..=4 {
        learner.makes(1.0, step, step as f32);
    }
    onlooker.sees(4);
    for end in [end, onlooker] {
        let read = |version, patience| {
            let mut read = [0; 4];
            let parts = [Strided::contiguous(0..4)];
            end.job.read_parts(Version(version), &parts, &mut read, Instant::now() + patience).map(|()| read)
        };
        assert_eq!(read(4, LONG).unwrap(), 4f32.to_le_bytes());
        let gone = read(1, LONG);
        assert!(matches!(gone, Err(PartsError::Gone(Version(1)))), "{gone:?}");
        let to_come = read(5, SHORT);
        assert!(matches!(to_come, Err(PartsError::NotYet(Version(5)))), "{to_come:?}");
    }
}
