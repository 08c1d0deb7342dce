//! One queue pair at work: its stream's operations, and whether the stream has finished.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use nix::errno::Errno;

use super::queue_pair::QueuePair;
use modelio_base::transport::reactor::{Completion, Op, Phase, Port};
use modelio_base::transport::stream::Token;

/// One queue pair at work.
pub(super) struct Served {
    pub queue_pair: Arc<QueuePair>,
    pub token: Token,
    pub receiving: bool,
    pub sending: bool,
    /// The peer had gone when the queue was last polled. Everything that it had sent before was read then.
    pub gone: bool,
    /// The other end of the descriptor that stands for its socket. It closes when everything is sent.
    pub said: UnixStream,
    finished: Finished,
}

/// Whether a stream has finished, and its peer knows that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finished {
    Not,
    /// There was no room to notify the peer.
    Unreported,
    Reported,
}

impl Served {
    pub(crate) fn new(queue_pair: Arc<QueuePair>, token: Token, said: UnixStream) -> Served {
        let [receiving, sending, gone] = [false; 3];
        Served { queue_pair, token, receiving, sending, gone, said, finished: Finished::Not }
    }

    /// The stream has sent everything. False if that is known already.
    pub(crate) fn ends(&mut self) -> bool {
        let is_news = self.finished == Finished::Not;
        if is_news {
            self.finish();
        }
        is_news
    }

    /// Tells the peer that everything is sent.
    fn finish(&mut self) {
        self.finished = match self.queue_pair.finish() {
            Ok(true) => Finished::Reported,
            Ok(false) => Finished::Unreported,
            Err(error) => {
                tracing::debug!(%error, "an RDMA connection ended before the peer knew that everything was sent");
                Finished::Reported
            }
        };
    }

    /// Moves bytes, and reports finished operations.
    pub(crate) fn progress(&mut self, port: &mut Port, done: &mut Vec<Completion>) {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(%error, "an RDMA connection is over");
            Errno::ECONNRESET
        };
        if self.queue_pair.owes()
            && let Err(error) = self.queue_pair.acknowledge()
        {
            tracing::debug!(%error, "an RDMA connection is over");
        }
        if self.finished == Finished::Unreported {
            self.finish();
        }
        if self.receiving {
            let received = self.queue_pair.receive(&port.receive, self.gone).transpose();
            if let Some(received) = received {
                let result = received.map_err(|error| failed(&error));
                self.receiving = false;
                port.receiving = Phase::Over;
                done.push(Completion { token: self.token, op: Op::Receive, result });
            }
        }
        if self.sending {
            let sent = self.queue_pair.send(&port.send, self.receiving, self.gone).transpose();
            if let Some(sent) = sent {
                let result = sent.map_err(|error| failed(&error));
                self.sending = false;
                port.sending = Phase::Over;
                done.push(Completion { token: self.token, op: Op::Send, result });
            }
        }
    }

    /// Whether bytes can be moved.
    pub(crate) fn is_possible(&self) -> bool {
        self.queue_pair.possible(self.receiving, self.sending, self.gone)
    }
}
