//! A limit on answers that a peer has asked for and not taken.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::stream::LentPayload;
use libmodelio::wire::{Message, Refusal};

/// The answer to a request for administration.
pub(super) type AdminAnswer = Result<(Message, Option<Vec<u8>>), Refusal>;

/// The most requests of one connection whose answers the kernel does not have yet.
const MAX_UNSENT: usize = 128;
/// The most bytes that came with these requests.
const MAX_UNSENT_BYTES: usize = 64 << 20;

/// The unsent answers of one connection.
#[derive(Default)]
pub(super) struct UnsentAll {
    requests: AtomicUsize,
    bytes: AtomicUsize,
    over: AtomicBool,
}

impl UnsentAll {
    /// The connection is over: nobody gets the answers.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

/// Counts a request until the kernel has its answer.
pub(super) struct Unsent {
    of: Arc<UnsentAll>,
    bytes: usize,
}

impl Unsent {
    /// Counts one more request until the result is dropped.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn one_more(of: &Arc<UnsentAll>, bytes: usize) -> Result<Unsent, Refusal> {
        let unsent = Unsent { of: Arc::clone(of), bytes };
        let requests = of.requests.fetch_add(1, Ordering::Relaxed);
        let before = of.bytes.fetch_add(bytes, Ordering::Relaxed);
        if requests >= MAX_UNSENT || requests > 0 && before + bytes > MAX_UNSENT_BYTES {
            let most = MAX_UNSENT_BYTES >> 20;
            let why = format!("more than {MAX_UNSENT} requests at once, or {most} MiB with them");
            return Err(Refusal::other(why));
        }
        Ok(unsent)
    }

    /// The bytes that came with the request.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nobody waits for the answer any more.
    pub(super) fn is_in_vain(&self) -> bool {
        self.of.over.load(Ordering::Relaxed)
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.of.requests.fetch_sub(1, Ordering::Relaxed);
        self.of.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Answers a request.
pub(super) fn answer(link: &Link, request: u64, answer: AdminAnswer) {
    answer_counted(link, request, answer, None);
}

/// Answers a request. `unsent` counts until the kernel has the answer.
pub(super) fn answer_counted(link: &Link, request: u64, answer: AdminAnswer, unsent: Option<Unsent>) {
    let (message, payload) = match answer {
        Ok((message, payload)) => (message, payload),
        Err(refusal) => (Message::Refused(refusal), None),
    };
    let payload = payload.filter(|bytes| !bytes.is_empty());
    link.send(Outgoing {
        payload: payload.map(|bytes| LentPayload::owned_with(bytes, unsent)),
        ..Outgoing::new(request, message)
    });
}
