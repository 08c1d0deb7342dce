//! The thread that may talk to the kernel on its own accord: it has names dropped that a new version moves, wakes who
//! polls, and looks now and then at what is to be done. Another one ends waits: those that have lasted too long, and
//! those of threads that a signal is to end.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use libmodelio::vocabulary::members::LeaveReason;

use super::calls::{Calls, Chore, Started, Wake};
use super::closing::settle;
use super::waits::CHECK_INTERVAL;
use crate::fs::moved_names::Kernel;
use crate::fs::node::{File, Node};
use crate::session::own_thread::on_own_thread;
use crate::session::wait_log::WaitLog;

impl Started {
    /// Starts the thread; it tells `kernel` what has changed.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run_chores(self, kernel: Arc<dyn Kernel>) -> io::Result<()> {
        let Started { calls, inbox } = self;
        let calls = Arc::downgrade(&calls);
        let others = calls.clone();
        // A request of the other thread to the kernel may wait for a call, and that call for the other thread. So
        // whatever ends a wait at its deadline is done here.
        std::thread::Builder::new().name("gradfs-late".into()).spawn(move || {
            while let Some(calls) = others.upgrade() {
                let now = Instant::now();
                calls.fs.trees().iter().for_each(|tree| tree.tensors_name.give_up(now));
                calls.waits.release_signalled();
                calls.pending_exits.tick(now);
                drop(calls);
                std::thread::sleep(CHECK_INTERVAL);
            }
        })?;
        std::thread::Builder::new().name("gradfs-chores".into()).spawn(move || {
            let mut checked = Instant::now();
            let mut wait_log = WaitLog::default();
            loop {
                let chore = inbox.recv_timeout(CHECK_INTERVAL.saturating_sub(checked.elapsed()));
                let Some(calls) = calls.upgrade() else { return };
                match chore {
                    Ok(chore) => calls.do_chore(chore, &kernel),
                    Err(mpsc::RecvTimeoutError::Timeout) => {}
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                }
                // Also where versions come all the time.
                if checked.elapsed() >= CHECK_INTERVAL {
                    checked = Instant::now();
                    calls.fs.drop_leftovers(&*kernel);
                    for tree in calls.fs.trees() {
                        tree.model.times.sample(&tree.model.job);
                        tree.model.learners().iter().for_each(|learner| learner.report_progress());
                    }
                    wait_log.check(calls.fs.shown().iter().map(|tree| &*tree.model));
                }
            }
        })?;
        Ok(())
    }
}

impl Calls {
    fn do_chore(&self, chore: Chore, kernel: &Arc<dyn Kernel>) {
        match chore {
            Chore::Published(index) => self.published(index, &**kernel),
            Chore::Left(index, learner, reason) => {
                let Ok(tree) = self.fs.tree(index) else { return };
                let left = tree.model.left(learner, reason);
                let dropped = left.as_ref().filter(|_| reason != LeaveReason::Asked);
                if let Some(dropped) = dropped {
                    // First, so that its programs find it or the reason at any time.
                    tree.model.keep_dropped(dropped, reason);
                }
                if !self.watches.left(&tree.model, learner, dropped.is_some()) {
                    tree.model.forget_dropped(|id, _| id == learner);
                }
                if let Some(learner) = left {
                    // A mkdir or rmdir in `learners/` has the kernel lock it until the job has answered. Other chores
                    // do not wait for that.
                    let (kernel, learners) = (Arc::clone(kernel), Node::Model(index, File::Learners).ino());
                    on_own_thread("gradfs-forgets", move || kernel.forget_name(learners, &learner.name));
                }
            }
            Chore::Settle(open, settling) => settle(open, settling),
        }
    }

    fn published(&self, index: u8, kernel: &dyn Kernel) {
        let Ok(tree) = self.fs.tree(index) else { return };
        tree.drop_tensors_name(kernel);
        let ready: Vec<Wake> = {
            let mut pollers = self.pollers.lock();
            pollers.extract_if(|_, (of, _)| *of == index).map(|(_, (_, wake))| wake).collect()
        };
        for wake in ready {
            wake();
        }
        self.fs.drop_moved_names(&tree, kernel, true);
    }
}
