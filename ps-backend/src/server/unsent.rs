//! What a peer may have asked a shard for without taking the answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::transport::stream::Piece;
use libmodelio::wire::{Message, Refusal};

/// What a request for administration is answered with.
pub(super) type AdminAnswer = Result<(Message, Option<Vec<u8>>), Refusal>;

/// Requests of one connection that take time, or memory for their answer, and whose answers are not with the kernel yet.
const MAX_UNSENT: usize = 128;
/// Bytes that came with them.
const MAX_UNSENT_BYTES: usize = 64 << 20;

/// Of one connection.
#[derive(Default)]
pub(super) struct UnsentAll {
    requests: AtomicUsize,
    bytes: AtomicUsize,
}

/// Counts as long as the answer is not with the kernel.
pub(super) struct Unsent {
    of: Arc<UnsentAll>,
    bytes: usize,
}

impl Unsent {
    /// Until it is dropped there is one more.
    ///
    /// # Errors
    /// There are too many.
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
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.of.requests.fetch_sub(1, Ordering::Relaxed);
        self.of.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Says what came of a request.
pub(super) fn answer(link: &Link, request: u64, answer: AdminAnswer) {
    answer_counted(link, request, answer, None);
}

/// The same; `unsent` counts until that is with the kernel.
pub(super) fn answer_counted(link: &Link, request: u64, answer: AdminAnswer, unsent: Option<Unsent>) {
    let (message, payload) = match answer {
        Ok((message, payload)) => (message, payload),
        Err(refusal) => (Message::Refused(refusal), None),
    };
    let payload = payload.filter(|bytes| !bytes.is_empty());
    link.send(Outgoing {
        payload: payload.map(|bytes| Piece::owned_with(bytes, unsent)),
        ..Outgoing::new(request, message)
    });
}
