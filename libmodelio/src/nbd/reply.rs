//! The heads of replies.

use smallvec::SmallVec;

use super::Context;
use super::numbers::{self, Errno, chunk};

/// The head of a reply. Most are short, and take no memory of their own.
pub type Head = SmallVec<[u8; 32]>;

/// The most bytes of a message to people, in a reply.
const MAX_MESSAGE: usize = 4096;

/// Makes replies as the client has asked for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replies {
    /// The client takes structured replies.
    pub structured: bool,
}

impl Replies {
    /// Everything went well, and there is nothing to tell.
    pub fn ok(self, cookie: u64) -> Head {
        match self.structured {
            true => head(chunk::DONE, chunk::NONE, cookie, 0),
            false => simple(cookie, 0),
        }
    }

    /// Before the `len` bytes at `offset`, which are all that was to be read.
    pub fn read(self, cookie: u64, offset: u64, len: u32) -> Head {
        if !self.structured {
            return simple(cookie, 0);
        }
        let mut head = head(chunk::DONE, chunk::OFFSET_DATA, cookie, len + 8);
        head.extend_from_slice(&offset.to_be_bytes());
        head
    }

    /// The request has failed. The message reaches clients that take structured replies.
    pub fn error(self, cookie: u64, errno: Errno, message: &str) -> Head {
        if !self.structured {
            return simple(cookie, errno as u32);
        }
        let mut end = message.len().min(MAX_MESSAGE);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let mut head = head(chunk::DONE, chunk::ERROR, cookie, 6 + end as u32);
        head.extend_from_slice(&(errno as u32).to_be_bytes());
        head.extend_from_slice(&(end as u16).to_be_bytes());
        head.extend_from_slice(&message.as_bytes()[..end]);
        head
    }

    /// The status of `len` bytes in each context, which is the same for all of them.
    pub fn status(self, cookie: u64, len: u32, contexts: &[(Context, u32)]) -> Head {
        let mut reply = Head::new();
        for (index, (context, status)) in contexts.iter().enumerate() {
            let done = if index + 1 == contexts.len() { chunk::DONE } else { 0 };
            reply.extend(head(done, chunk::BLOCK_STATUS, cookie, 12));
            for number in [*context as u32, len, *status] {
                reply.extend_from_slice(&number.to_be_bytes());
            }
        }
        reply
    }
}

fn simple(cookie: u64, error: u32) -> Head {
    let mut bytes = Head::new();
    bytes.extend_from_slice(&numbers::SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&error.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes
}

/// The head of a chunk.
fn head(flags: u16, kind: u16, cookie: u64, len: u32) -> Head {
    let mut bytes = Head::new();
    bytes.extend_from_slice(&numbers::STRUCTURED_REPLY_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&flags.to_be_bytes());
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&cookie.to_be_bytes());
    bytes.extend_from_slice(&len.to_be_bytes());
    bytes
}
