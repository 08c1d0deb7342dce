//! Readers, contributions and publications on a shard in this process, with nobody who calls them but the test.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use libmodelio::vocabulary::controls::Controls;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use ps_backend::partition::executor::Pool;
use ps_backend::server::local;

use super::contribution::{Contribution, Ending};
use super::error::{CallError, CallResult, Done};
use super::learner::{Learner, LearnerUse};
use super::model::{Model, Snapshots};
use super::publication::Publication;
use libmodelio::publisher::Publisher;
use libmodelio::reader::Reader;
use libmodelio::tracker::WriteRefused;
use libmodelio::vocabulary::shard_error::ShardError;

const PATIENCE: Duration = Duration::from_secs(600);
const SIZE: u64 = 1 << 16;

/// A model of zeros with these settings.
fn model(settings: &[(&str, &str)]) -> Arc<Model> {
    let layout = Arc::new(ModelLayout::blank(SIZE, DType::F32, 64 << 10).unwrap());
    let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
    let job = local::start("m", &layout, &controls, &Pool::start(1, None).unwrap(), |_| Ok(())).unwrap();
    Arc::new(Model::new(
        "m".into(),
        job,
        Default::default(),
        "own".into(),
        Snapshots::Here(Default::default()),
    ))
}

fn contribution(model: &Arc<Model>, learner: &Arc<Learner>) -> Arc<Contribution> {
    Arc::new(Contribution::open(model, Arc::clone(learner), false, None))
}

fn done<T: Send + 'static>() -> (Done<T>, Receiver<CallResult<T>>) {
    let (sender, receiver) = channel();
    (Box::new(move |outcome| sender.send(outcome).unwrap()), receiver)
}

/// What a call says at last.
fn outcome<T: Send + 'static>(call: impl FnOnce(Done<T>)) -> CallResult<T> {
    let (done, outcome) = done();
    call(done);
    outcome.recv_timeout(PATIENCE).expect("an answer")
}

/// The outcome of a commit, its error as an errno.
fn commit(contribution: &Arc<Contribution>, ending: Ending) -> Result<(), i32> {
    outcome(|done| contribution.commit(ending, done)).map_err(|error| error.errno)
}

fn take_back(contribution: &Arc<Contribution>) -> Result<(), i32> {
    outcome(|done| contribution.take_back(done)).map_err(|error| error.errno)
}

fn publish(publication: &Arc<Publication>) -> CallResult<()> {
    outcome(|done| publication.commit(Ending::Close, done))
}

fn await_step(model: &Arc<Model>, learner: &Learner) -> Result<Version, i32> {
    outcome(|done| model.await_fresh(Some(learner.id), done)).map_err(|error| error.errno)
}

/// A model that adds up what its only learner brings.
fn one() -> (Arc<Model>, Arc<Learner>) {
    let model = model(&[("reducer", "sum")]);
    let learner = model.join("a", None).unwrap();
    (model, learner)
}

/// A model of two learners with what each contributes.
fn two(setting: (&str, &str)) -> (Arc<Model>, [Arc<Learner>; 2], [Arc<Contribution>; 2]) {
    let model = model(&[("reducer", "sum"), ("learners", "2"), setting]);
    let learners = ["a", "b"].map(|name| model.join(name, None).unwrap());
    let contributions = learners.each_ref().map(|learner| contribution(&model, learner));
    (model, learners, contributions)
}

/// The bytes of a model that is `value` throughout.
fn all(value: f32) -> Vec<u8> {
    value.to_le_bytes().repeat(SIZE as usize / 4)
}

fn shows(reader: &Reader, value: f32) -> bool {
    reader.bytes(0..SIZE) == all(value)
}

#[test]
fn a_step_is_in_the_version_that_it_waits_for_and_readers_keep_theirs() {
    let (model, learner) = one();
    let (before, steps) = (Reader::newest(&model.job).unwrap(), contribution(&model, &learner));
    assert_eq!(commit(&steps, Ending::Step), Ok(()), "without anything written");
    for (step, sum) in [(1, 1.5), (2, 3.0)] {
        let (bytes, middle) = (all(1.5), 1001);
        steps.write(middle, &bytes[middle as usize..]).unwrap();
        steps.write(0, &bytes[..middle as usize]).unwrap();
        assert!(steps.wrote() && learner.is_open());
        assert_eq!(commit(&steps, Ending::Step), Ok(()));
        assert!(!steps.wrote() && !learner.is_open());
        assert_eq!(await_step(&model, &learner), Ok(Version(step)));
        assert!(shows(&Reader::newest(&model.job).unwrap(), sum));
    }
    assert!(shows(&before, 0.0));
    assert!(Reader::open(&model.job, Version(7)).is_none());
    drop(before);
    assert!(!model.job.versions().contains(&Version(0)) || model.job.retained().contains(&Version(0)));
}

#[test]
fn an_aborted_contribution_counts_nowhere_and_its_reason_is_kept_until_a_success() {
    let (model, learner) = one();
    let (one, other) = (contribution(&model, &learner), contribution(&model, &learner));
    one.write(0, &all(1.0)[..8]).unwrap();
    other.write(8, &all(1.0)[8..16]).unwrap();
    let why = CallError::new(libc::EIO, "the writer died");
    assert!(one.abort(&why));
    assert!(!one.abort(&why), "nothing is open");
    assert_eq!(learner.refusal.text().as_deref(), Some("the writer died"));
    assert_eq!(other.write(16, &[0; 4]).unwrap_err().errno, libc::EIO, "it shared what was dropped");
    assert_eq!(commit(&other, Ending::Close), Err(libc::EIO));
    one.write(0, &all(2.0)).unwrap_err();
    assert_eq!(commit(&one, Ending::Step), Err(libc::EIO), "said where it ends, too");
    one.write(0, &all(2.0)).unwrap();
    assert_eq!(commit(&one, Ending::Step), Ok(()));
    assert_eq!(learner.refusal.text(), None);
    assert!(shows(&Reader::newest(&model.job).unwrap(), 2.0));
}

#[test]
fn all_who_write_as_a_learner_make_one_contribution() {
    let (model, learner) = one();
    let (one, other) = (contribution(&model, &learner), contribution(&model, &learner));
    let (bytes, half) = (all(1.0), SIZE / 2);
    one.write(0, &bytes[..half as usize]).unwrap();
    other.write(half, &bytes[half as usize..]).unwrap();
    assert_eq!(commit(&other, Ending::Close), Ok(()));
    assert_eq!(commit(&one, Ending::Close), Ok(()), "the same outcome, once");
    assert_eq!(model.job.version(), Version(1));
    assert!(shows(&Reader::newest(&model.job).unwrap(), 1.0));
}

#[test]
fn a_commit_that_waits_in_vain_can_be_tried_again_but_for_a_close() {
    let (model, [learner, _], [ahead, behind]) = two(("timeout", "3"));
    ahead.write(0, &all(1.0)).unwrap();
    assert_eq!(commit(&ahead, Ending::Step), Ok(()));
    behind.write(0, &all(1.0)[..4]).unwrap();
    assert_eq!(await_step(&model, &learner), Err(libc::ETIMEDOUT));
    ahead.write(0, &all(1.0)[..4]).unwrap();
    for _ in 0..2 {
        assert_eq!(commit(&ahead, Ending::Step), Err(libc::ETIMEDOUT));
        assert!(ahead.wrote(), "still there");
    }
    assert!(learner.refusal.text().unwrap().contains("\"b\""), "{:?}", learner.refusal.text());
    let start = Instant::now();
    assert_eq!(commit(&ahead, Ending::Close), Err(libc::ETIMEDOUT));
    assert!(start.elapsed() < Duration::from_secs(3), "it has waited before");
    assert!(!ahead.wrote());
    // The answer may come a moment before the contribution is gone. A write would wait for that.
    while learner.is_open() && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    assert!(!learner.is_open());
}

#[test]
fn what_is_being_committed_cannot_be_taken_back() {
    let (model, [learner, _], [ahead, behind]) = two(("timeout", "600"));
    ahead.write(0, &all(1.0)).unwrap();
    assert_eq!(commit(&ahead, Ending::Step), Ok(()), "taken, for a version that needs another one");
    ahead.write(0, &all(2.0)).unwrap();
    let (done, committed) = done();
    ahead.commit(Ending::Step, done);
    assert_eq!(take_back(&ahead), Err(libc::EBUSY));
    for _ in 0..2 {
        behind.write(0, &all(1.0)).unwrap();
        assert_eq!(commit(&behind, Ending::Step), Ok(()));
    }
    assert_eq!(committed.recv_timeout(PATIENCE).expect("an answer"), Ok(()));
    assert_eq!(take_back(&ahead), Ok(()), "nothing is written");
    assert_eq!(await_step(&model, &learner), Ok(Version(2)));
    assert!(shows(&Reader::newest(&model.job).unwrap(), 5.0));
}

#[test]
fn both_faces_show_the_newest_version_after_each_step() {
    let model = model(&[("reducer", "sum")]);
    let own = model.join_own().unwrap();
    assert!(Arc::ptr_eq(&own, &model.join_own().unwrap()), "it is in the job");
    let device = Arc::new(Contribution::open(&model, own, false, Reader::newest(&model.job)));
    assert!(device.store_mapped(0, &[0]).is_err_and(|error| error.errno == libc::EIO));
    let before = device.reader().unwrap();
    device.write(0, &all(0.5)).unwrap();
    assert!(shows(&device.reader().unwrap(), 0.0), "a step has not ended");
    assert_eq!(commit(&device, Ending::Step), Ok(()));
    assert!(shows(&device.reader().unwrap(), 0.5) && shows(&before, 0.0));
}

#[test]
fn a_step_ships_the_mapping_where_nothing_was_written() {
    let (model, learner) = one();
    let mapped = Arc::new(Contribution::open(&model, learner, true, None));
    mapped.store_mapped(0, &all(1.0)).unwrap();
    assert_eq!(commit(&mapped, Ending::Close), Ok(()));
    assert_eq!(model.job.version(), Version(0), "a close ships nothing");
    assert_eq!(commit(&mapped, Ending::Step), Ok(()));
    assert!(shows(&Reader::newest(&model.job).unwrap(), 1.0));
    let mut kept = vec![0; SIZE as usize];
    mapped.load_mapped(0, &mut kept);
    assert_eq!(kept, all(1.0));
}

#[test]
fn new_weights_are_a_version_all_at_once_or_not_at_all() {
    let model = model(&[("reducer", "assign")]);
    let publication = Arc::new(Publication::open(&model).unwrap());
    publication.must_be_whole();
    publication.write(0, &all(1.0)[..8]).unwrap();
    assert_eq!(publish(&publication).unwrap_err().errno, libc::EINVAL, "not whole");
    assert!(model.own_refusal.text().is_some());
    publication.write(2, &[1; 4]).unwrap();
    assert_eq!(publish(&publication).unwrap_err().errno, libc::EINVAL, "half an element");
    publication.write(0, &f32::NAN.to_le_bytes()).unwrap();
    assert_eq!(publish(&publication).unwrap_err().errno, libc::EINVAL, "not finite");
    assert_eq!(publication.write(SIZE, &[0]).unwrap_err().errno, libc::EFBIG);
    assert_eq!(publication.write(0, b"\x93NUMPY\x01\0v\0{'descr'").unwrap_err().errno, libc::EINVAL);
    assert_eq!((publication.is_open(), model.job.version()), (false, Version(0)));
    assert_eq!(
        publish(&publication).unwrap_err().errno,
        libc::EFBIG,
        "the first refusal is said where it ends, too"
    );
    for value in [1.0, 2.0] {
        publication.write(0, &all(value)).unwrap();
        assert!(publication.is_open());
        publish(&publication).unwrap();
        assert!(shows(&Reader::newest(&model.job).unwrap(), value));
    }
    assert_eq!(publish(&publication), Ok(()), "without anything written");
    assert_eq!(model.job.version(), Version(2));
}

#[test]
fn weights_are_not_written_under_another_reducer_once_there_is_a_version() {
    let model = model(&[("reducer", "sum")]);
    let steps = contribution(&model, &model.join("a", None).unwrap());
    steps.write(0, &all(1.0)).unwrap();
    assert_eq!(commit(&steps, Ending::Step), Ok(()));
    assert!(Publication::open(&model).is_err_and(|error| error.errno == libc::EACCES));
}

#[test]
fn a_learner_whose_users_have_ended_is_not_waited_for_beyond_linger() {
    let (model, [stays, goes], [steps, left]) = two(("linger", "0"));
    goes.note(LearnerUse::Comes);
    left.closed();
    goes.note(LearnerUse::Ends);
    steps.write(0, &all(1.0)).unwrap();
    assert_eq!(commit(&steps, Ending::Step), Ok(()));
    assert_eq!(await_step(&model, &stays), Ok(Version(1)));
    assert!(!model.job.has_learner(goes.id));
}

#[test]
fn a_mapping_is_published_by_steps_and_stays_its_programs() {
    let model = model(&[("reducer", "assign")]);
    let publication = Arc::new(Publication::open_mapped(&model).unwrap());
    let ends = |ending| outcome(|done| publication.commit(ending, done)).map_err(|error| error.errno);
    let memory = publication.mapped().unwrap();
    assert_eq!(
        memory.store(SIZE, &[0]).unwrap_err(),
        WriteRefused::PastEnd { offset: SIZE, end: SIZE + 1, size: SIZE }
    );
    assert_eq!(
        (ends(Ending::Close), model.job.version()),
        (Ok(()), Version(0)),
        "closing publishes no mapping"
    );
    memory.store(0, &all(2.0)).unwrap();
    publication.must_be_whole();
    assert_eq!(ends(Ending::Step), Ok(()));
    let first = Reader::newest(&model.job).unwrap();
    memory.store(0, &f32::INFINITY.to_le_bytes()).unwrap();
    assert_eq!(ends(Ending::Step), Err(libc::EINVAL));
    memory.store(0, &all(3.0)).unwrap();
    assert!(shows(&first, 2.0));
    publication.write(4, &1f32.to_le_bytes()).unwrap();
    assert_eq!(ends(Ending::Step), Ok(()), "what was written");
    assert_eq!(
        Reader::newest(&model.job).unwrap().bytes(0..8),
        [2f32.to_le_bytes(), 1f32.to_le_bytes()].concat()
    );
    assert_eq!(ends(Ending::Step), Ok(()));
    assert!(shows(&Reader::newest(&model.job).unwrap(), 3.0) && model.job.version() == Version(3));
    let other = Arc::new(ModelLayout::blank(2 * SIZE, DType::F32, 64 << 10).unwrap());
    let other =
        local::start("o", &other, &Controls::default(), &Pool::start(1, None).unwrap(), |_| Ok(())).unwrap();
    let publisher = Publisher::new(Arc::new(other)).unwrap();
    assert_eq!(publisher.write_all(memory), Err(ShardError::OutOfRange));
}

#[test]
fn holes_of_new_weights_are_written_beside_other_requests() {
    let model = model(&[("reducer", "assign")]);
    let publication = Arc::new(Publication::open(&model).unwrap());
    publication.must_be_whole();
    publication.write(0, &all(1.0)[..8]).unwrap();
    publication.extended();
    let (sender, receiver) = channel();
    let done = Box::new(move |outcome: CallResult<()>| {
        sender.send((outcome, std::thread::current().id())).unwrap();
    });
    publication.commit(Ending::Close, done);
    let (outcome, thread) = receiver.recv_timeout(PATIENCE).expect("an answer");
    assert!(outcome == Ok(()) && thread != std::thread::current().id());
    let newest = Reader::newest(&model.job).unwrap();
    assert_eq!(newest.bytes(0..SIZE), [&all(1.0)[..8], &all(0.0)[8..]].concat());
}
