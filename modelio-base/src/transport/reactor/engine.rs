//! The loop of a serving thread. It takes requests of other threads, runs timers, sleeps until something happens, and
//! passes on the outcome. This file and [`Serving`] hold the part that all backends share.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::driver::Driver;
use super::endings::{panic_message, refuse};
use super::inbox::{Inbox, ThreadState};
use super::serving::Serving;
use crate::transport::stream::Close;

/// The longest sleep without a timer.
const NAP: Duration = Duration::from_secs(60);

/// One serving thread.
pub struct Engine<D> {
    serving: Serving<D>,
    thread: Arc<ThreadState>,
    stop_at: Option<Instant>,
}

impl<D: Driver> Engine<D> {
    /// An engine of `thread`, whose bytes `driver` moves.
    pub fn new(driver: D, thread: Arc<ThreadState>) -> Engine<D> {
        Engine { serving: Serving::new(driver), thread, stop_at: None }
    }

    /// Runs until it is shut down.
    ///
    /// # Errors
    /// When a system call fails that the loop cannot do without.
    pub fn run(mut self) -> Result<(), Errno> {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.turn_until_done()));
        for late in self.thread.end().arrivals {
            refuse(late);
        }
        if self.serving.table.len() > 0 {
            // The kernel may still write to memory that these connections have named, so that memory is never freed.
            tracing::error!(connections = self.serving.table.len(), "given up with operations outstanding");
            std::mem::forget(self);
        }
        match outcome {
            Ok(result) => result,
            Err(panic) => {
                tracing::error!(panic = panic_message(panic.as_ref()), "the thread of a reactor panicked");
                Err(Errno::ENOTRECOVERABLE)
            }
        }
    }

    fn turn_until_done(&mut self) -> Result<(), Errno> {
        let mut inbox = Inbox::default();
        let mut done = Vec::with_capacity(256);
        loop {
            self.serving.now = Instant::now();
            self.thread.take(&mut inbox);
            self.take_requests(&mut inbox);
            self.serving.run_timers();
            if let Some(deadline) = self.stop_at
                && (self.serving.table.len() == 0 || self.serving.now >= deadline)
            {
                return Ok(());
            }
            let sleepy = !self.serving.driver.ready() && self.thread.fall_asleep();
            let timeout = if sleepy { self.time_to_sleep() } else { Duration::ZERO };
            self.serving.driver.wait(&mut self.serving.table, &mut done, timeout)?;
            self.thread.wake_up();
            self.serving.now = Instant::now();
            for completion in done.drain(..) {
                self.serving.complete(completion);
            }
        }
    }

    fn time_to_sleep(&self) -> Duration {
        let until = self.serving.timers.next().into_iter().chain(self.stop_at).min();
        until.map_or(NAP, |at| at.saturating_duration_since(Instant::now()).min(NAP))
    }

    /// Takes the requests of other threads.
    fn take_requests(&mut self, inbox: &mut Inbox) {
        for arrival in inbox.arrivals.drain(..) {
            if self.stop_at.is_some() { refuse(arrival) } else { self.serving.take(arrival) }
        }
        for state in inbox.woken.drain(..) {
            self.serving.wake(&state);
        }
        if let Some(deadline) = inbox.shut_down.take() {
            self.stop_at = Some(deadline);
            for token in self.serving.table.tokens() {
                self.serving.close(token, Close::ShutDown);
            }
        }
    }
}
