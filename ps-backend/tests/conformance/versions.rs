//! Versions: complete, immutable, in order; read in any range by any number of threads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use libmodelio::client::{Event, Job};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::shard_error::ShardError;

use crate::site::{BLOCK, End, LONG, Way, done, floats};

fn shown(job: &Job, version: Version) -> Vec<f32> {
    let view = job.get(version).expect("a pinned version");
    let size = job.layout().size();
    assert_eq!(view.region.memory().len() as u64, size);
    floats(view.bytes(0..size))
}

pub fn a_pinned_version_stays_as_it_is(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("retain", "1")]).one_end();
    let job = &*end.job;
    let learner = end.join("a");
    assert!(job.pin(Version(0)));
    let mut kept = vec![Version(0)];
    for step in 1..=6 {
        learner.push(1.0);
        let version = Version(learner.pull());
        assert_eq!(job.retained(), [version, Version(step - 1)], "the newest and one more");
        if step % 3 == 0 {
            assert!(job.pin(version) && job.pin(version));
            kept.push(version);
        }
        for &version in &kept {
            assert!(shown(job, version).iter().all(|&weight| weight == version.0 as f32), "{version}");
            assert!(job.versions().contains(&version));
        }
    }
    assert!(!job.pin(Version(7)) && job.get(Version(7)).is_none(), "it is not there yet");
    assert!(!job.pin(Version(1)) && job.get(Version(1)).is_none(), "it is gone");
    // Two pins are taken back in two calls or one.
    job.unpin(Version(3), 1);
    job.unpin(Version(0), 1);
    learner.push(1.0);
    learner.pull();
    assert!(shown(job, Version(3)).iter().all(|&weight| weight == 3.0));
    job.unpin(Version(3), 1);
    job.unpin(Version(6), 2);
    for _ in 0..3 {
        learner.push(1.0);
        learner.pull();
    }
    assert_eq!(job.versions(), [Version(9), Version(10)]);
    // Memory is used again.
    let (buffers, _) = job.status().buffers;
    assert!(buffers <= 7, "{buffers} buffers");
}

pub fn a_version_that_is_only_known_by_name_stops_no_training(way: &Way) {
    let (_site, end) = way.job(&[("reducer", "sum"), ("max_versions", "3")]).one_end();
    let job = &*end.job;
    let learner = end.join("a");
    let mut newest = Version(0);
    for step in 1..=20 {
        assert!(job.look_up(newest), "{newest}");
        learner.push(1.0);
        newest = Version(learner.pull());
        assert_eq!(newest, Version(step));
    }
    assert!(!job.open_version(Version(0)), "its buffer was needed");
    let (buffers, _) = job.status().buffers;
    assert!(buffers <= 6, "{buffers} buffers");
    // New weights take such a buffer, too.
    let buffers: Vec<_> = std::iter::from_fn(|| job.allocate().ok()).collect();
    assert!(buffers.len() >= 3, "{}", buffers.len());
    (0..20).map(Version).for_each(|version| job.forget(version, 1));
}

/// Reads versions until it must stop: each is whole, and none is older than the one before. Returns their number.
fn read_on(end: &End, stop: &AtomicBool, pins: bool) -> usize {
    let (mut newest, mut seen) = (Version(0), 0);
    loop {
        let last = stop.load(Ordering::Relaxed);
        let (version, weights) = if pins {
            let version = end.job.version();
            if !end.job.pin(version) {
                continue;
            }
            let weights = shown(&end.job, version);
            end.job.unpin(version, 1);
            (version, weights)
        } else {
            end.weights()
        };
        assert!(version >= newest, "{version} after {newest}");
        assert!(weights.iter().all(|&weight| weight == version.0 as f32), "version {version} is torn");
        seen += usize::from(version > newest);
        newest = version;
        if last {
            return seen;
        }
    }
}

pub fn no_read_is_torn(way: &Way) {
    const STEPS: u64 = 12;
    let (_site, [a, b]) = way.striped_job(&[("reducer", "sum"), ("retain", "0")]).two_ends();
    let learner = a.join("a");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (stop, ends) = (&stop, [&a, &b]);
        let readers: Vec<_> = ends
            .into_iter()
            .flat_map(|end| [true, false].map(|pins| scope.spawn(move || read_on(end, stop, pins))))
            .collect();
        for step in 1..=STEPS {
            learner.push(1.0);
            assert_eq!(learner.pull(), step);
        }
        b.sees(STEPS);
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 0, "it has seen no version");
        }
    });
    a.shows(STEPS, STEPS as f32);
    b.shows(STEPS, STEPS as f32);
}

pub fn versions_are_opened_by_their_number_while_they_are_kept(way: &Way) {
    let (_site, end, learner) = way.job(&[("reducer", "sum"), ("retain", "2")]).one();
    for version in 1..=5 {
        learner.makes(1.0, version, version as f32);
    }
    for version in 0..=6 {
        let expected =
            (3..=5).contains(&version).then(|| vec![version as f32; end.job.layout().size() as usize / 4]);
        assert!(end.opens(Version(version)) == expected, "version {version}");
    }
}

pub fn any_range_can_be_read(way: &Way) {
    let (_site, end, learner) = way.striped_job(&[("reducer", "assign")]).one();
    let size = end.job.layout().size();
    let bytes: Vec<u8> = (0..size as u32 / 4).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut contribution = learner.open();
    for (block, bytes) in (0..).zip(bytes.chunks(BLOCK)) {
        contribution.offer(block, bytes).unwrap();
    }
    done(contribution.commit());
    assert_eq!(learner.pull(), 1);
    let block = BLOCK as u64;
    for (offset, len) in [
        (0, 0),
        (0, 1),
        (0, size),
        (1, 2),
        (block - 1, 2),
        (block, block),
        (block + 3, 3 * block),
        (size - 1, 1),
        (size, 0),
    ] {
        let mut local = vec![0xee; len as usize];
        assert_eq!(end.job.read(offset, &mut local), Ok(Version(1)));
        assert!(local == bytes[offset as usize..][..len as usize], "{len} bytes at {offset}");
    }
    for (offset, len) in
        [(size, 1), (size - 1, 2), (0, size + 1), (u64::MAX, 1), (u64::MAX, 0), (size + 1, 0)]
    {
        let mut local = vec![0xee; len as usize];
        assert_eq!(end.job.read(offset, &mut local), Err(ShardError::OutOfRange), "{len} at {offset}");
        assert!(local.iter().all(|&byte| byte == 0xee), "nothing is read");
    }
}

pub fn listeners_hear_of_every_version(way: &Way) {
    const STEPS: u64 = 5;
    let (_site, [a, b]) = way.job(&[("reducer", "sum")]).two_ends();
    let learner = a.join("a");
    let (sender, events) = channel();
    let sender = Mutex::new(sender);
    let job = Arc::downgrade(&b.job);
    b.job.subscribe(Box::new(move |event| {
        let version = job.upgrade().map(|job| job.version());
        // Nobody listens in the end.
        let _ = sender.lock().unwrap().send((event, version));
    }));
    for _ in 0..STEPS {
        learner.push(1.0);
    }
    assert_eq!(learner.pull(), STEPS);
    b.sees(STEPS);
    // They may come in another order, and some versions need not be shown here at all.
    let mut seen = BTreeSet::new();
    while !seen.contains(&Version(STEPS)) {
        let (event, shown) = events.recv_timeout(LONG).expect("word of a version");
        let Event::Published(version) = event else { panic!("{event:?}") };
        assert!(shown >= Some(version), "{version} is reported, {shown:?} is shown");
        assert!(version <= Version(STEPS) && seen.insert(version), "{version} is reported again");
    }
}
