//! `gradfs run`: starts the processes of learners for a model that is mounted, and looks after them until all have
//! ended.
//!
//! The decisions are in [`supervisor`] and [`tuner`], which have no process and no clock. This is the edge: one thread
//! takes signals, one reads the job's status, and this one has the processes and does what is decided.

pub mod args;
mod job;
mod output;
pub mod process;
mod progress;
mod supervisor;
mod tuner;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Pid;

use self::args::{Count, RunArgs};
use self::job::{Job, Status};
use self::output::Output;
use self::process::Program;
use self::progress::Lines;
use self::supervisor::{Act, End, Supervisor};
use self::tuner::{Step, Tuner};
use crate::error::{self, Error};
use crate::logging;
use crate::proc::mask_in_status;
use crate::sys;

/// The status that shells have for a command that is not there.
const NOT_FOUND: u8 = 127;
/// The processes are looked at so often even if no signal tells of an end.
const PROCESS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long the last learners may take to leave.
const LAST_LEAVES: Duration = Duration::from_secs(5);

enum Event {
    Signal(Signal),
    Status(Status),
}

/// Runs the plan to its end, and returns the exit status of the processes.
///
/// # Errors
/// Nothing could be started. No learner of it is in the job then.
pub fn run(plan: &RunArgs) -> Result<ExitCode, Error> {
    let count = plan.count()?;
    let (first, most) = match count {
        Count::Fixed(count) => (count, count),
        Count::Auto { most, .. } => (1, most),
    };
    // Before there are threads.
    let output = (!plan.no_prefix && most > 1).then(Output::start).transpose();
    let output = output.map_err(|error| Error::new("nobody can pass lines on").caused_by(error))?;
    let job = Job::find(&plan.model)?;
    if !process::is_there(&plan.command[0]) {
        let command = plan.command[0].display();
        let error = Error::new(format!("there is no command {command}"))
            .hint("name a program in PATH, or give its path: gradfs run -n 4 MODEL -- ./train.sh");
        logging::report_failure(&error);
        return Ok(NOT_FOUND.into());
    }
    match job.status() {
        Ok(status) => {
            let shown = plan.model.display().to_string();
            if let Some(warning) = status.waits_for_more_than(first, &shown) {
                say(&format!("warning: {warning}"));
            }
        }
        Err(error) => return Err(Error::new("the status of the job cannot be read").caused_by(error)),
    }
    let program = Program::new(&plan.command)
        .map_err(|error| Error::new("the command cannot be started").caused_by(error))?;
    // Before there are threads: they inherit the signals that are blocked.
    let (sender, events) = channel();
    take_signals(sender.clone())?;
    let leaves = Leaves::start(job.clone())?;
    let mut edge = Edge {
        plan,
        job,
        program,
        most,
        supervisor: Supervisor::new(plan.on_failure, plan.restarts, plan.grace),
        processes: HashMap::new(),
        output,
        leaves,
        rendezvous: rendezvous()?,
    };
    let progress = plan.progress.unwrap_or_else(|| std::io::stderr().is_terminal());
    let mut watch = Watch::new(count, progress);
    if let Some(period) = watch.period() {
        watch_job(edge.job.clone(), period, sender)?;
    }
    edge.join(first)?;
    for _ in 0..first {
        let acts = edge.supervisor.add();
        edge.act(acts);
    }
    let status = edge.attend(&events, &mut watch);
    edge.leaves.finish(LAST_LEAVES);
    if let Some(output) = edge.output {
        output.finish();
    }
    Ok(status.into())
}

/// The address at which the processes would meet for a process group of their own: programs that see `RANK` and
/// `WORLD_SIZE` expect one, as torchrun gives it. The port is free now. An address from outside stays.
fn rendezvous() -> Result<Vec<(&'static str, OsString)>, Error> {
    let names = ["MASTER_ADDR", "MASTER_PORT"];
    if names.iter().all(|name| std::env::var_os(name).is_some()) {
        return Ok(Vec::new());
    }
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| Error::new("there is no free port for MASTER_PORT").caused_by(error))?;
    Ok(vec![(names[0], port.ip().to_string().into()), (names[1], port.port().to_string().into())])
}

/// The processes, and what belongs to them.
struct Edge<'a> {
    plan: &'a RunArgs,
    job: Job,
    program: Program,
    /// The most processes there may be.
    most: u32,
    supervisor: Supervisor,
    processes: HashMap<u32, Pid>,
    output: Option<Output>,
    leaves: Leaves,
    /// Where the processes meet.
    rendezvous: Vec<(&'static str, OsString)>,
}

impl Edge<'_> {
    fn name(&self, rank: u32) -> String {
        format!("{}-{rank}", self.plan.name)
    }

    /// The first learners join, before any process starts: either all of them or none.
    fn join(&self, count: u32) -> Result<(), Error> {
        for rank in 0..count {
            if let Err(error) = self.job.join(&self.name(rank)) {
                (0..rank).for_each(|rank| leave(&self.job, &self.name(rank)));
                return Err(error);
            }
        }
        Ok(())
    }

    fn leave(&self, rank: u32) {
        self.leaves.leave(self.name(rank));
    }

    /// Waits for events and does what they lead to, until nobody lives any more.
    fn attend(&mut self, events: &Receiver<Event>, watch: &mut Watch) -> u8 {
        loop {
            self.reap(watch);
            let acts = self.supervisor.tick(Instant::now());
            self.act(acts);
            if let Some(status) = self.supervisor.status() {
                return status;
            }
            let until = self.supervisor.next_tick().map(|at| at.saturating_duration_since(Instant::now()));
            let Ok(event) =
                events.recv_timeout(until.unwrap_or(PROCESS_CHECK_INTERVAL).min(PROCESS_CHECK_INTERVAL))
            else {
                continue;
            };
            match event {
                // Looked at above.
                Event::Signal(Signal::SIGCHLD) => {}
                Event::Signal(signal) => {
                    watch.settle();
                    let acts = self.supervisor.signal(signal, Instant::now());
                    self.act(acts);
                }
                Event::Status(status) => self.look(&status, watch),
            }
        }
    }

    fn reap(&mut self, watch: &mut Watch) {
        let ended =
            self.processes.iter().filter_map(|(rank, process)| Some((*rank, process::end_of(*process)?)));
        let mut ended: Vec<(u32, End)> = ended.collect();
        ended.sort_by_key(|(rank, _)| *rank);
        // Their numbers may be other processes' by now, so nothing is sent to them.
        for (rank, _) in &ended {
            self.processes.remove(rank);
        }
        for (rank, end) in ended {
            // Whoever has come to its end shows that the job does: more learners make it no faster.
            watch.settle();
            let acts = self.supervisor.ended(rank, end, Instant::now());
            self.act(acts);
        }
    }

    fn look(&mut self, status: &Status, watch: &mut Watch) {
        let living: Vec<String> = self.supervisor.living().map(|rank| self.name(rank)).collect();
        let Some(step) = watch.next(status, &living) else { return };
        let (count, rate) = (living.len(), step.rate());
        match step {
            Step::Add(_) => {
                let rank = self.supervisor.next_rank();
                say(&format!("{rate:.1} contributions/s with {count}: one more learner is tried"));
                match self.job.join(&self.name(rank)) {
                    Ok(()) => {
                        let acts = self.supervisor.add();
                        self.act(acts);
                        if !self.supervisor.living().any(|living| living == rank) {
                            watch.settle();
                        }
                    }
                    Err(error) => {
                        say(&error::chain(&error));
                        watch.settle();
                    }
                }
            }
            Step::Remove(_) => {
                say(&format!("{rate:.1} contributions/s with {count}: it stays at {}", count - 1));
                let acts = self.supervisor.remove_last(Instant::now());
                self.act(acts);
            }
            Step::Stay(_) => say(&format!("{rate:.1} contributions/s with {count}: these are the most")),
        }
    }

    fn act(&mut self, acts: Vec<Act>) {
        for act in acts {
            match act {
                Act::Say(text) => say(&text),
                Act::Leave(rank) => self.leave(rank),
                Act::Start(rank) => self.start(rank),
                Act::Restart(rank) => match self.job.rejoin(&self.name(rank)) {
                    Ok(()) => self.start(rank),
                    Err(error) => self.not_started(rank, &error),
                },
                Act::Send(rank, signal) => {
                    let Some(process) = self.processes.get(&rank) else { continue };
                    if let Err(error) = process::send(*process, signal) {
                        say(&format!("{signal} cannot be sent to rank {rank}: {error}"));
                    }
                }
            }
        }
    }

    fn start(&mut self, rank: u32) {
        let variables = [
            ("GRADFS_LEARNER", self.job.learner(&self.name(rank)).into()),
            ("RANK", rank.to_string().into()),
            ("LOCAL_RANK", rank.to_string().into()),
            ("WORLD_SIZE", self.most.to_string().into()),
            ("LOCAL_WORLD_SIZE", self.most.to_string().into()),
        ];
        let variables: Vec<_> = variables.into_iter().chain(self.rendezvous.clone()).collect();
        let streams = self.output.as_ref().map(|output| output.streams(rank)).transpose();
        let started = streams.and_then(|streams| {
            let streams = streams.as_ref().map(|(out, err)| (out.as_fd(), err.as_fd()));
            self.program.start(&variables, streams)
        });
        match started {
            Ok(process) => drop(self.processes.insert(rank, process)),
            Err(error) => {
                let command = self.plan.command[0].display();
                let many = error.raw_os_error() == Some(libc::EMFILE);
                let what = if many { " (raise ulimit -n, or use --no-prefix)" } else { "" };
                let error = Error::new(format!("{command} cannot be started{what}")).caused_by(error);
                self.not_started(rank, &error);
            }
        }
    }

    fn not_started(&mut self, rank: u32, error: &Error) {
        say(&error::chain(error));
        let acts = self.supervisor.ended(rank, End::NotStarted, Instant::now());
        self.act(acts);
    }
}

/// Makes lines of progress, and the number of learners, of the job's status.
struct Watch {
    began: Instant,
    /// When the last line was printed.
    lines: Option<(Lines, Duration)>,
    tuner: Option<(Tuner, Duration)>,
    /// The step of each learner when it was first seen.
    first_steps: HashMap<(String, u64), u64>,
}

impl Watch {
    fn new(count: Count, progress: bool) -> Watch {
        let tuner = match count {
            Count::Fixed(_) => None,
            Count::Auto { most, gain, window } => Some((Tuner::new(gain, window, most), window)),
        };
        Watch {
            began: Instant::now(),
            lines: progress.then(|| (Lines::default(), Duration::ZERO)),
            tuner,
            first_steps: HashMap::new(),
        }
    }

    /// How often the status is wanted.
    fn period(&self) -> Option<Duration> {
        let second = Duration::from_secs(1);
        match &self.tuner {
            Some((_, window)) => Some((*window / 50).clamp(Duration::from_millis(20), second / 5)),
            None => self.lines.as_ref().map(|_| second),
        }
    }

    fn settle(&mut self) {
        if let Some((tuner, _)) = &mut self.tuner {
            tuner.settle();
        }
    }

    fn next(&mut self, status: &Status, living: &[String]) -> Option<Step> {
        let now = self.began.elapsed();
        if let Some((lines, last)) = &mut self.lines
            && now.saturating_sub(*last) >= Duration::from_millis(950)
        {
            *last = now;
            say(&lines.next(now, status, living, living.len()));
        }
        let (tuner, _) = self.tuner.as_mut()?;
        let mut at_work = living.len();
        for learner in status.learners.iter().filter(|learner| living.contains(&learner.id)) {
            let key = (learner.id.clone(), learner.incarnation);
            let first = *self.first_steps.entry(key).or_insert(learner.step);
            at_work -= usize::from(learner.step > first);
        }
        tuner.sample(self.began + now, status.contributions, at_work == 0)
    }
}

/// Learners leave on a thread of their own: a mount that hangs must not keep signals from the processes.
struct Leaves {
    names: Sender<String>,
    ended: Receiver<()>,
}

impl Leaves {
    fn start(job: Job) -> Result<Leaves, Error> {
        let ((names, to_leave), (ends, ended)) = (channel::<String>(), channel());
        let leaves = move || {
            to_leave.iter().for_each(|name| leave(&job, &name));
            drop(ends);
        };
        let started = thread::Builder::new().name("gradfs-leaves".into()).spawn(leaves);
        started
            .map_err(|error| Error::new("cannot start a thread for learners that leave").caused_by(error))?;
        Ok(Leaves { names, ended })
    }

    fn leave(&self, name: String) {
        // The thread lives for as long as this.
        let _ = self.names.send(name);
    }

    /// Waits until all have left, at most for `patience`.
    fn finish(self, patience: Duration) {
        drop(self.names);
        // Nothing is ever sent: it ends with the thread.
        if self.ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            say("the mount does not answer: some learners may still be in the job");
        }
    }
}

fn leave(job: &Job, name: &str) {
    if let Err(error) = job.leave(name) {
        say(&error::chain(&error));
    }
}

/// Takes over the signals that are forwarded, and the one that tells of a process's end.
fn take_signals(events: Sender<Event>) -> Result<(), Error> {
    let failed = |error| Error::new("cannot take over signals").caused_by(error);
    // Whoever ignores it is told of no end, and gets no status.
    sys::signals::default_action(Signal::SIGCHLD).map_err(failed)?;
    let ignored = mask_in_status(&std::fs::read_to_string("/proc/self/status").unwrap_or_default(), "SigIgn");
    let forwarded =
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGCHLD];
    // One that is ignored from the start stays so, here and in the processes, as nohup expects.
    let signals: SigSet =
        forwarded.into_iter().filter(|signal| ignored & (1 << (*signal as i32 - 1)) == 0).collect();
    signals.thread_block().map_err(|error| failed(std::io::Error::from(error)))?;
    let listens = move || {
        while let Ok(signal) = signals.wait() {
            if events.send(Event::Signal(signal)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("gradfs-signals".into()).spawn(listens).map_err(failed)?;
    Ok(())
}

/// Reads the job's status so often. It has a thread of its own: a mount that hangs must not keep signals from the
/// processes.
fn watch_job(job: Job, period: Duration, events: Sender<Event>) -> Result<(), Error> {
    let watches = move || {
        loop {
            // A mount that has ended is noticed by the processes.
            if let Ok(status) = job.status()
                && events.send(Event::Status(status)).is_err()
            {
                return;
            }
            thread::sleep(period);
        }
    };
    let started = thread::Builder::new().name("gradfs-status".into()).spawn(watches);
    started.map(drop).map_err(|error| Error::new("cannot start a thread for the status").caused_by(error))
}

/// Tells the user; it is no error if nobody listens any more.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "gradfs: run: {text}");
}
