//! A model in this process whose state is read while a version is to be made.

use std::sync::mpsc::channel;

use libmodelio::client::wait_for;
use libmodelio::contributor::{Contributor, Share};
use libmodelio::vocabulary::layout::DType;

use super::*;
use crate::partition::executor::Pool;

const LONG: Duration = Duration::from_secs(600);
const BLOCK: u32 = 64 << 10;
const BLOCKS: u32 = 3;
/// A version would be made in far less.
const A_WHILE: Duration = Duration::from_millis(100);

#[test]
fn a_version_that_waits_for_readers_of_the_state_is_shown_once_it_is_made() {
    let bytes = u64::from(BLOCK * BLOCKS);
    let layout = Arc::new(ModelLayout::blank(bytes, DType::F32, BLOCK).unwrap());
    let controls = Controls::default().with_all([("reducer", "momentum")]).unwrap();
    let executor: Arc<dyn Executor> = Pool::start(2, None).unwrap();
    let beginning = Beginning::Weights(Box::new(|_: &Mapping| Ok(())));
    let copies = (&executor, StateCopies::Single);
    let (job, shard) = start_from("m", &layout, &controls, copies, beginning).unwrap();
    let job = Arc::new(job);
    let store = shard.upgrade().unwrap().partition.store().clone();
    let who = wait_for(LONG, |done| job.join("l".into(), LONG, done)).unwrap();
    let learner = Arc::new(Contributor::new(Arc::clone(&job), who, Arc::default()).unwrap());
    for version in 1..=3 {
        let kept = store.keep().unwrap();
        let gradients = 1f32.to_le_bytes().repeat(bytes as usize / 4);
        learner.write(&mut Share::None, 0, &gradients, LONG).unwrap();
        let (sender, committed) = channel();
        learner.commit(Share::None, LONG, move |result| drop(sender.send(result)));
        assert!(committed.recv_timeout(A_WHILE).is_err(), "the state is being read");
        assert_eq!(job.version(), Version(version - 1));
        drop(kept);
        committed.recv_timeout(LONG).unwrap().unwrap();
        let mine = wait_for(LONG, |done| job.await_step(learner.learner(), LONG, done)).unwrap();
        assert_eq!((mine, store.newest().unwrap().version()), (Version(version), Version(version)));
    }
    job.shut_down();
}
