//! The tree over a job with a slow coordinator: a listener keeps the thread that delivers messages until the test lets
//! it go on.

use std::ffi::OsStr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use libmodelio::client::{Event, Job, wait_for};
use libmodelio::vocabulary::controls::{Controls, SETTINGS};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::layout::{DType, ModelLayout};
use ps_backend::partition::executor::Pool;
use ps_backend::server::local;

use super::*;
use crate::fs::Way;
use crate::fs::node::{File, FileKind, MapsTo, Node};
use crate::fs::text;
use crate::fs::{Attributes, Keep};
use crate::fuse::calls::Opened;
use crate::session::contribution::{Contribution, Ending};
use crate::session::model::Snapshots;

const PATIENCE: Duration = Duration::from_secs(600);

/// A version more.
fn publish(job: &Job) {
    let buffer = job.allocate().unwrap();
    let all = std::iter::once(0..job.layout().size()).collect::<Vec<_>>();
    wait_for(PATIENCE, |done| job.assign(buffer, &all, PATIENCE, done)).unwrap();
}

/// What a call is to do with its outcome, and where that comes.
fn done<T: Send + 'static>() -> (Box<dyn FnOnce(T) + Send>, Receiver<T>) {
    let (sender, outcome) = channel();
    (Box::new(move |it| sender.send(it).unwrap()), outcome)
}

fn control(name: &str) -> File {
    File::Control(SETTINGS.iter().position(|(known, _)| *known == name).unwrap() as u32)
}

/// A listener says here that it has been called, and waits for the answer.
type Keeper = (Sender<()>, Receiver<()>);

struct Mounted {
    fs: Arc<Fs>,
    calls: Arc<Calls>,
    /// For the next event that a learner has left.
    keeper: Arc<Mutex<Option<Keeper>>>,
    _inbox: mpsc::Receiver<Chore>,
}

impl Mounted {
    fn new() -> Mounted {
        Mounted::of(ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap(), &[])
    }

    fn of(layout: ModelLayout, settings: &[(&str, &str)]) -> Mounted {
        let (layout, executor) = (Arc::new(layout), Pool::start(1, None).unwrap());
        let controls = Controls::default().with_all(settings.iter().copied()).unwrap();
        let job = local::start("m", &layout, &controls, &executor, |_| Ok(())).unwrap();
        let model = Model::new(
            "m".into(),
            job,
            Default::default(),
            "host1".into(),
            Snapshots::Here(Default::default()),
        );
        let access = Access { owner: (0, 0), umask: None };
        let Started { calls, inbox } = Calls::start(vec![Arc::new(model)], true, access).unwrap();
        let keeper = Arc::<Mutex<Option<Keeper>>>::default();
        let mounted =
            Mounted { fs: Arc::clone(&calls.fs), calls, keeper: Arc::clone(&keeper), _inbox: inbox };
        mounted.job().subscribe(Box::new(move |event| {
            let Event::Left(..) = event else { return };
            let Some((called, go_on)) = keeper.lock().take() else { return };
            called.send(()).unwrap();
            let _ = go_on.recv_timeout(PATIENCE);
        }));
        mounted
    }

    fn job(&self) -> Arc<Job> {
        Arc::clone(&self.model().job)
    }

    fn model(&self) -> Arc<Model> {
        Arc::clone(&self.fs.trees()[0].model)
    }

    /// Makes the coordinator slow: it gets no request until the returned sender is used.
    fn slow_down(&self) -> Sender<()> {
        let job = Arc::clone(&self.model().job);
        let (slow, _) = wait_for(PATIENCE, |done| job.join("slow".into(), PATIENCE, done)).unwrap();
        let (called, is_called) = channel();
        let (answer, go_on) = channel();
        *self.keeper.lock() = Some((called, go_on));
        std::thread::spawn(move || {
            job.leave(slow, LeaveReason::Asked, PATIENCE, Box::new(|_| {}));
        });
        is_called.recv_timeout(PATIENCE).unwrap();
        answer
    }

    fn open(&self, file: File, flags: i32) -> Receiver<CallResult<Opened>> {
        let (done, opened) = done();
        self.calls.open(Node::Model(0, file).ino(), flags, 0, done);
        opened
    }

    /// Writes a setting, and closes it; the answer.
    fn set(&self, name: &str, value: &str) -> Receiver<CallResult<()>> {
        let opened = self.open(control(name), libc::O_WRONLY).try_recv().unwrap().unwrap();
        let ((done, written), by) = (done(), Holder { tid: 0, lock: 1 });
        let calls = Arc::clone(&self.calls);
        self.calls.write(opened.fh, 0, value.as_bytes(), false, by, move |outcome| match outcome {
            Ok(()) => calls.flush(opened.fh, by, done),
            Err(error) => done(Err(error)),
        });
        written
    }
}

#[test]
fn a_setting_is_answered_when_the_job_has_answered() {
    let mounted = Mounted::new();
    let answer = mounted.slow_down();
    let written = mounted.set("learning_rate", "0.5\n");
    assert!(written.try_recv().is_err(), "answered before the job");
    assert_eq!(mounted.job().controls().hyper.learning_rate, 0.001);
    answer.send(()).unwrap();
    assert_eq!(written.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(mounted.job().controls().hyper.learning_rate, 0.5);

    // A value that is wrong by itself is refused without asking the coordinator.
    let refused = mounted.set("learning_rate", "fast");
    let error = refused.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert_eq!((error.errno, error.message.contains("control/learning_rate")), (libc::EINVAL, true));
}

#[test]
fn a_contradiction_is_judged_by_the_settings_of_the_job() {
    let mounted = Mounted::new();
    let write = |value: &str| {
        let opened = mounted.open(control("min_learners"), libc::O_WRONLY).try_recv().unwrap().unwrap();
        let (answer, wrote) = channel();
        let by = Holder { tid: 0, lock: 1 };
        let done = move |outcome: CallResult<()>| answer.send(outcome.map_err(|error| error.errno)).unwrap();
        mounted.calls.write(opened.fh, 0, value.as_bytes(), false, by, done);
        wrote
    };
    assert_eq!(write("7\n").recv_timeout(PATIENCE).unwrap(), Err(libc::EINVAL), "above learners");
    let answer = mounted.slow_down();
    // As another mount may, before this one hears of it.
    mounted.job().set_control("learners", "8", PATIENCE, Box::new(|_| {}));
    let wrote = write("7\n");
    assert!(wrote.try_recv().is_err(), "this mount knows of one learner");
    answer.send(()).unwrap();
    assert_eq!(wrote.recv_timeout(PATIENCE).unwrap(), Ok(()));
}

#[test]
fn a_setting_that_nobody_answers_for_is_no_success() {
    let layout = ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap();
    let mounted = Mounted::of(layout, &[("timeout", "0.001")]);
    let _answer = mounted.slow_down();
    let late = mounted.set("learning_rate", "0.5");
    assert_eq!(late.recv_timeout(PATIENCE).unwrap().unwrap_err().errno, libc::ETIMEDOUT);
    let lost = mounted.set("learning_rate", "0.5");
    mounted.job().shut_down();
    assert_eq!(lost.recv_timeout(PATIENCE).unwrap().unwrap_err().errno, libc::EIO);
}

#[test]
fn a_setting_that_nobody_takes_is_refused_at_its_write() {
    let layout = ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap();
    let mounted = Mounted::of(layout, &[("timeout", "0.001")]);
    let _answer = mounted.slow_down();
    let opened = mounted.open(control("learning_rate"), libc::O_WRONLY).try_recv().unwrap().unwrap();
    let ((done_writing, wrote), by) = (done(), Holder { tid: 0, lock: 1 });
    mounted.calls.write(opened.fh, 0, b"0.5\n", false, by, done_writing);
    let error = wrote.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert_eq!((error.errno, error.message.contains("control/learning_rate")), (libc::ETIMEDOUT, true));
    let (done, closed) = done();
    mounted.calls.flush(opened.fh, by, done);
    assert_eq!(closed.recv_timeout(PATIENCE).unwrap(), Err(error), "the next close says it, too");
}

#[test]
fn a_version_that_goes_while_its_name_is_looked_up_gives_way_to_the_next_one() {
    let layout = ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap();
    let mounted = Mounted::of(layout, &[("reducer", "assign"), ("retain", "0")]);
    let (fs, job) = (&mounted.fs, &mounted.job());
    // A lookup of this version is too late: there is another one.
    let goes = |version| {
        move |node| {
            if matches!(node, Node::Model(_, file) if file.names() == Some(version))
                && job.version() == version
            {
                publish(job);
            }
            fs.note(node)
        }
    };
    let dir = Node::Model(0, File::Dir).ino();
    let found = fs.lookup_by(dir, OsStr::new("weights"), goes(Version(0))).unwrap();
    assert_eq!(job.version(), Version(1));
    assert_eq!(Node::from_ino(found.ino), Some(Node::Model(0, File::Weights(Version(1)))));
    fs.forget(found.ino, 1);
    // Names of one version end with it.
    let versions = Node::Model(0, File::Versions).ino();
    let gone = fs.lookup_by(versions, OsStr::new("1"), goes(Version(1))).unwrap_err();
    assert_eq!((gone.errno, job.version()), (libc::ENOENT, Version(2)));
}

#[test]
fn directories_of_tensors_are_part_of_their_version() {
    let elements = 1 << 13;
    let tensors = ["a/b/w", "a/v"].map(|name| (name.to_owned(), DType::F32, vec![elements]));
    let layout = ModelLayout::new(tensors.into(), 64 << 10).unwrap();
    let mounted = Mounted::of(layout, &[("reducer", "assign"), ("retain", "0")]);
    let (fs, job) = (&mounted.fs, mounted.job());
    let mut seen = std::collections::HashSet::new();
    for (way, top) in
        [("versions", File::RetainedTensors(Version(0), 0)), ("newest", File::Tensors(Version(0), 0))]
    {
        let top = Node::Model(0, top).ino();
        let a = fs.lookup(top, OsStr::new("a")).unwrap();
        let b = fs.lookup(a.ino, OsStr::new("b")).unwrap();
        let w = fs.lookup(b.ino, OsStr::new("w.npy")).unwrap();
        assert!([top, a.ino, b.ino, w.ino].into_iter().all(|ino| seen.insert(ino)), "{way}");
        for (parent, dir, links) in [(top, a, 3), (a.ino, b, 2)] {
            assert!((dir.kind == FileKind::Dir) && fs.is_fixed(parent, dir.ino), "{way}");
            assert_eq!((dir.links, dir.mode, dir.keep), (links, 0o755, Keep::Forever), "{way}");
            let mut entries = Vec::new();
            fs.list(dir.ino, 0, |entry| {
                entries.push((entry.name, entry.ino));
                true
            })
            .unwrap();
            assert_eq!(entries[..2], [(".".to_owned(), dir.ino), ("..".to_owned(), parent)], "{way}");
        }
        assert!((w.kind == FileKind::File) && fs.is_fixed(b.ino, w.ino));
        // The kernel's interest in any of the directories keeps the version.
        fs.forget(w.ino, 1);
        fs.forget(a.ino, 1);
    }
    publish(&job);
    let held = [File::RetainedTensors(Version(0), 2), File::Tensors(Version(0), 2)];
    for file in held {
        assert!(job.versions().contains(&Version(0)), "{file:?}");
        fs.forget(Node::Model(0, file).ino(), 1);
    }
    publish(&job);
    assert!(!job.versions().contains(&Version(0)), "{:?}", job.versions());
    // A path may lead through `tensors` to another version; one with a version's number leads nowhere now.
    for (file, errno) in held.into_iter().zip([libc::ENOENT, libc::ESTALE]) {
        let gone = fs.lookup(Node::Model(0, file).ino(), OsStr::new("w.npy")).unwrap_err();
        assert_eq!(gone.errno, errno, "{file:?}");
    }
}

#[test]
fn learners_join_and_leave_beside_other_requests() {
    let mounted = Mounted::new();
    let learners = Node::Model(0, File::Learners).ino();
    let answer = mounted.slow_down();
    let (made_it, made) = done::<CallResult<Attributes>>();
    mounted.fs.make_dir(learners, OsStr::new("a"), (1000, 100), made_it);
    // This thread is free for others, though nobody has answered.
    assert!(made.try_recv().is_err());
    assert_eq!(mounted.fs.lookup(learners, OsStr::new("a")).unwrap_err().errno, libc::ENOENT);
    answer.send(()).unwrap();
    let dir = made.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!((dir.kind == FileKind::Dir, dir.uid, dir.gid), (true, 1000, 100));
    assert!(mounted.fs.lookup(learners, OsStr::new("a")).is_ok());

    let answer = mounted.slow_down();
    let (removed_it, removed) = done();
    mounted.fs.remove_dir(learners, OsStr::new("a"), removed_it);
    assert!(removed.try_recv().is_err());
    answer.send(()).unwrap();
    assert_eq!(removed.recv_timeout(PATIENCE).unwrap(), Ok(()));
    assert_eq!(mounted.fs.lookup(learners, OsStr::new("a")).unwrap_err().errno, libc::ENOENT);
}

#[test]
fn the_own_learner_joins_beside_other_requests_under_its_name() {
    let mounted = Mounted::new();
    for (file, flags) in [(File::Gradients(MapsTo::PageCache), libc::O_WRONLY), (File::Device, libc::O_RDWR)]
    {
        let answer = mounted.slow_down();
        let opened = mounted.open(file, flags);
        assert!(opened.try_recv().is_err(), "{file:?}");
        answer.send(()).unwrap();
        let opened = opened.recv_timeout(PATIENCE).unwrap().unwrap();
        let own = mounted.model().own_learner().unwrap();
        assert_eq!(own.name, "host1");
        // In the job, it need not be asked again.
        let again = mounted.open(file, flags).try_recv().expect("at once").unwrap();
        mounted.calls.release(again.fh);
        mounted.calls.release(opened.fh);
        mounted.model().send_leave(own.id, LeaveReason::Died);
    }
}

#[test]
fn a_file_that_its_process_has_closed_is_none_of_it_before_the_kernel_releases_it() {
    let mounted = Mounted::new();
    let learner = mounted.model().join("a", None).unwrap();
    let (ino, pid) =
        (Node::Model(0, File::LearnerGradients(learner.id, MapsTo::PageCache)).ino(), std::process::id());
    let open = |flags| {
        let (done, opened) = done::<CallResult<Opened>>();
        mounted.calls.open(ino, flags, pid, done);
        opened.recv_timeout(PATIENCE).unwrap().unwrap().fh
    };
    let [one, other, last] = [(); 3].map(|()| open(libc::O_WRONLY));
    assert_eq!(mounted.calls.files.others(last, ino, &[pid]), 2);
    assert_eq!(mounted.calls.files.others(last, ino, &[1]), 0, "of another process");
    for (fh, writes, left) in [(other, false, 1), (one, true, 0)] {
        let by = Holder { tid: pid, lock: 1 };
        let (sender, ended) = channel();
        let of_write = sender.clone();
        if writes {
            let wrote = move |outcome| of_write.send(outcome).unwrap();
            mounted.calls.write(fh, 0, &[0; 1 << 16], false, by, wrote);
            assert_eq!(ended.recv_timeout(PATIENCE).unwrap(), Ok(()));
        }
        mounted.calls.flush(fh, by, Box::new(move |outcome| sender.send(outcome).unwrap()));
        assert_eq!(ended.recv_timeout(PATIENCE).unwrap(), Ok(()));
        assert_eq!(mounted.calls.files.others(last, ino, &[pid]), left);
    }
}

#[test]
fn o_direct_maps_the_memory_itself() {
    const DIRECT: i32 = libc::O_RDWR | libc::O_DIRECT;
    let mounted = Mounted::new();
    let learner = mounted.model().join("a", None).unwrap();
    let of = |maps| Node::Model(0, File::LearnerGradients(learner.id, maps)).ino();
    let (cached, memory) = (of(MapsTo::PageCache), of(MapsTo::Memory));
    let dir = Node::Model(0, File::Learner(learner.id)).ino();
    let lookup = |tid| mounted.calls.lookup(dir, OsStr::new("gradients"), tid).unwrap().ino;
    let open = |ino, flags, tid| {
        let (done, opened) = done::<CallResult<Opened>>();
        mounted.calls.open(ino, flags, tid, done);
        opened.recv_timeout(PATIENCE).unwrap().map(|opened| opened.way).map_err(|error| error.errno)
    };
    assert!(matches!(open(cached, DIRECT, 7), Err(libc::ESTALE)));
    assert_eq!([lookup(7), lookup(7), lookup(8)], [memory, memory, cached], "the kernel may look twice");
    assert!(matches!(open(memory, DIRECT, 7), Ok(Way::MapBypass(_))));
    assert_eq!(lookup(7), cached);
    for flags in [libc::O_RDWR, libc::O_WRONLY, libc::O_WRONLY | libc::O_DIRECT] {
        assert!(matches!(open(cached, flags, 7), Ok(Way::Direct)), "{flags:o}");
    }
    assert!(matches!(open(memory, libc::O_RDWR, 7), Err(libc::ESTALE)), "its msync would say nothing");
    assert_eq!(lookup(7), cached);
    assert!(matches!(open(memory, libc::O_WRONLY, 7), Ok(Way::MapBypass(_))), "it cannot be mapped");
    assert!(matches!(open(cached, DIRECT, 0), Ok(Way::Direct)), "a thread of another namespace");
}

#[test]
fn an_ended_process_is_noticed_while_another_learner_joins() {
    let mounted = Mounted::new();
    let model = mounted.model();
    let learner = model.join("a", None).unwrap();
    let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
    let (done, opened) = done::<CallResult<Opened>>();
    let gradients = Node::Model(0, File::LearnerGradients(learner.id, MapsTo::PageCache)).ino();
    mounted.calls.open(gradients, libc::O_WRONLY, child.id(), done);
    opened.try_recv().unwrap().unwrap();
    assert!(mounted.calls.watches.is_user(&learner, child.id()));
    let answer = mounted.slow_down();
    let joins = mounted.open(File::Gradients(MapsTo::PageCache), libc::O_WRONLY);
    child.kill().unwrap();
    while mounted.calls.watches.is_user(&learner, child.id()) {
        std::thread::yield_now();
    }
    assert!(joins.try_recv().is_err(), "the coordinator has not answered");
    answer.send(()).unwrap();
    assert!(joins.recv_timeout(PATIENCE).unwrap().is_ok());
    child.wait().unwrap();
}

#[test]
fn a_first_write_that_fails_after_its_close_leaves_nothing_to_the_next_program() {
    let layout = ModelLayout::blank(1 << 16, DType::F32, 64 << 10).unwrap();
    let mounted = Mounted::of(layout, &[("reducer", "sum"), ("learners", "2"), ("timeout", "0.001")]);
    let model = mounted.model();
    let [learner, _other] = ["a", "b"].map(|name| model.join(name, None).unwrap());
    let begin = || Arc::new(Contribution::open(&model, Arc::clone(&learner), false, None));
    let values = [0; 1 << 16];
    // What the last commit has come to, and so the next step, is the coordinator's to say.
    loop {
        let first = begin();
        match first.write(0, &values).unwrap() {
            Wrote::Asks => break,
            Wrote::Taken => {
                let (done, ended) = done();
                first.commit(Ending::Close, done);
                let _ = ended.recv_timeout(PATIENCE).unwrap();
            }
        }
    }
    for closes_first in [true, false] {
        let answer = mounted.slow_down();
        let (asks, (done, failed)) = (begin(), done::<CallResult<()>>());
        asks.write_later(0, values.to_vec(), |named| named, done);
        if closes_first {
            asks.closed();
        }
        failed.recv_timeout(PATIENCE).unwrap().unwrap_err();
        if !closes_first {
            asks.closed();
        }
        assert_eq!(begin().write(0, &values), Ok(Wrote::Asks), "it asks anew");
        answer.send(()).unwrap();
    }
}

#[test]
fn the_status_tells_transport_and_shards() {
    let mounted = Mounted::new();
    let mount = MountStatus { passthrough: false, open_files: 0, watched_processes: 0 };
    let status = text::status(&mounted.fs.trees()[0], &mount);
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["transport"], "in-process");
    let only = serde_json::json!([
        { "id": 0, "address": null, "transport": "in-process", "blocks": 1, "wire": "full", "connected": true }
    ]);
    assert_eq!(status["shards"], only);
}
