//! The version that the client shows, and what the buffer behind it holds.

use crate::vocabulary::ids::Version;

/// What the two buffers hold.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// The version that the client shows. None before the first one.
    shown: Option<Version>,
    /// A version is whole in the back buffer, and not shown yet.
    is_whole: bool,
    /// The version in the back buffer was not pulled.
    is_own: bool,
    /// The version that has come with the state which announces it.
    brought: Option<Version>,
    /// The number of blocks that connections are receiving into the back buffer.
    reserved: u32,
    /// There are none: versions are only known.
    are_none: bool,
}

impl Buffers {
    pub(super) fn shown(&self) -> Option<Version> {
        self.shown
    }

    pub(super) fn hold_nothing(&mut self) {
        self.are_none = true;
    }

    pub(super) fn are_none(&self) -> bool {
        self.are_none
    }

    /// Whether the back buffer can be filled with any version.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_whole && !self.is_received()
    }

    /// Whether connections are receiving into the back buffer.
    pub(super) fn is_received(&self) -> bool {
        self.reserved > 0
    }

    /// A connection receives a block.
    pub(super) fn reserve(&mut self) {
        self.reserved += 1;
    }

    /// A connection receives a block no more.
    pub(super) fn end_reservation(&mut self) {
        self.reserved = self.reserved.saturating_sub(1);
    }

    /// The back buffer holds a whole version.
    pub(super) fn fill(&mut self) {
        self.is_whole = true;
    }

    /// The back buffer is memory of this client's own, which is a whole version.
    pub(super) fn fill_with_own(&mut self) {
        (self.is_whole, self.is_own) = (true, true);
    }

    /// This version, or none, has come with the state that follows.
    pub(super) fn set_brought(&mut self, version: Option<Version>) {
        self.brought = version;
    }

    /// Whether this version has come with the state.
    pub(super) fn has_brought(&self, version: Version) -> bool {
        self.brought == Some(version)
    }

    /// The client shows the version that was in the back buffer. Returns whether it was pulled.
    pub(super) fn show(&mut self, version: Version) -> bool {
        self.shown = self.shown.max(Some(version));
        self.is_whole = false;
        !std::mem::take(&mut self.is_own)
    }
}
