//! Attributes and errors, from ours to `fuser`'s and back.

use std::time::Duration;

use fuser::{Errno, FileAttr, FileType, INodeNo, ReplyEmpty, ReplyXattr};

use super::refusals::Caller;
use crate::fs::attr::{Attributes, Keep};
use crate::session::error::{CallError, Done};

/// How long the kernel may keep a name or attributes that do not change.
pub(super) const FOREVER: Duration = Duration::from_secs(86_400);
/// Long enough for a thousand paths through a directory, and too short for a person to see.
const BRIEFLY: Duration = Duration::from_millis(10);

/// The attributes of a file in the kernel's form.
pub(super) fn attr(a: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.size.div_ceil(512),
        atime: a.modified,
        mtime: a.modified,
        ctime: a.modified,
        crtime: a.modified,
        kind: if a.is_dir { FileType::Directory } else { FileType::RegularFile },
        perm: a.mode,
        nlink: a.links,
        uid: a.uid,
        gid: a.gid,
        rdev: 0,
        blksize: a.block_size,
        flags: 0,
    }
}

/// How long it may believe that.
pub(super) fn attr_ttl(a: &Attributes) -> Duration {
    match a.keep {
        Keep::No => Duration::ZERO,
        Keep::Briefly => BRIEFLY,
        Keep::Forever => FOREVER,
    }
}

impl Caller {
    /// The errno of the refused call, whose sentence goes into the log.
    pub(super) fn refused(&self, error: &CallError) -> Errno {
        self.log(error);
        Errno::from_i32(error.errno)
    }
}

/// Answers a call that has no result but its end.
pub(super) fn answer(caller: Caller, reply: ReplyEmpty) -> Done<()> {
    Box::new(move |outcome| match outcome {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(caller.refused(&error)),
    })
}

/// A value or a list of names; its length where only that is asked for.
pub(super) fn send_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    if size == 0 {
        reply.size(value.len() as u32);
    } else if value.len() <= size as usize {
        reply.data(value);
    } else {
        reply.error(Errno::ERANGE);
    }
}
