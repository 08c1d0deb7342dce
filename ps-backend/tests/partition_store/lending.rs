//! Memory of versions that a program outside has borrowed.

use std::collections::HashSet;

use libmodelio::bytes::loan::Loan;
use libmodelio::vocabulary::reducer::{Hyper, Reducer};
use ps_backend::partition::store::Limits;

use crate::driver::{Source, Twin, Way, model, partition_of};

#[test]
fn memory_of_a_version_that_was_not_given_back_is_never_used_again() {
    let limits = Limits { retain: 0, buffers: 4 };
    for gives_back in [true, false] {
        let mut twin = Twin::new(partition_of(&model(), |_| true), Reducer::Sgd, Hyper::default(), limits);
        let mut seed = 0;
        let mut step = |twin: &mut Twin| {
            seed += 1;
            let source = Source { seed, way: Way::Plain, blocks: twin.blocks().collect() };
            twin.reduce(&[source]);
            twin.check("a step");
        };
        step(&mut twin);
        let pinned = twin.store.newest().unwrap();
        let (loan, file) = Loan::of(pinned.region().0.memory()).unwrap();
        let size = twin.layout.size() as usize;
        let bytes = |file| {
            let mut bytes = vec![0; size];
            nix::sys::uio::pread(file, &mut bytes, 0).map(|_| bytes).unwrap()
        };
        let before = bytes(&file);
        let inode = nix::sys::stat::fstat(&file).unwrap().st_ino;
        step(&mut twin);
        if gives_back {
            loan.give_back();
        } else {
            drop(loan);
        }
        drop(pinned);
        let mut inodes = HashSet::new();
        for _ in 0..10 {
            step(&mut twin);
            let newest = twin.store.newest().unwrap();
            inodes.insert(nix::sys::stat::fstat(newest.region().0.memory().fd().unwrap()).unwrap().st_ino);
        }
        assert_eq!(inodes.contains(&inode), gives_back);
        assert_eq!(bytes(&file) == before, !gives_back);
        assert!(twin.store.buffer_counts().0 <= 3);
    }
}
