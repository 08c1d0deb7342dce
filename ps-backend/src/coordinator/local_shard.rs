//! The only shard, if it is in this process with the only client.

/// Whether there is such a shard, and what it has yet to say.
#[derive(Debug, Default)]
pub(super) struct LocalShard {
    is_there: bool,
    /// It has yet to say whether the next version has a buffer.
    awaits_buffer: bool,
}

impl LocalShard {
    pub(super) fn new() -> LocalShard {
        LocalShard { is_there: true, awaits_buffer: false }
    }

    pub(super) fn is_there(&self) -> bool {
        self.is_there
    }

    /// A version is made. Returns whether the next one is known to have a buffer.
    pub(super) fn version_is_made(&mut self) -> bool {
        self.awaits_buffer = self.is_there;
        !self.is_there
    }

    /// It has said whether the next version has a buffer.
    pub(super) fn has_said(&mut self) {
        self.awaits_buffer = false;
    }

    /// Whether it has yet to say that.
    pub(super) fn awaits_buffer(&self) -> bool {
        self.awaits_buffer
    }
}
