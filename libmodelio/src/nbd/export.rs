//! The exports that clients can open, and the contexts of their ranges.

/// A kind of status that a client can ask for, range by range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Context {
    /// Whether a range is allocated: all of it is.
    Allocation = 1,
    /// The version that a range is read from, modulo 2^32.
    Version = 2,
}

impl Context {
    /// All contexts, in the order of their numbers.
    pub const ALL: [Context; 2] = [Context::Allocation, Context::Version];

    /// The name, with its namespace.
    pub fn name(self) -> &'static str {
        match self {
            Context::Allocation => "base:allocation",
            Context::Version => "gradfs:version",
        }
    }

    /// Whether a client that lists contexts by this query wants this one. A namespace alone is all contexts of it.
    pub fn is_listed_by(self, query: &str) -> bool {
        query == self.name() || query.ends_with(':') && self.name().starts_with(query)
    }
}

/// One export, as clients hear of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The name that opens it.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// In bytes.
    pub size: u64,
    /// The commands that it takes, and its other properties ([`transmission`](super::numbers::transmission)).
    pub flags: u16,
    /// The length of a request that suits the server: a power of two, at least 512.
    pub preferred: u32,
}

/// The exports of a server.
pub trait Exports {
    /// All exports that clients may list.
    fn list(&self) -> Vec<Export>;

    /// The export of this name, which need not be listed.
    fn find(&self, name: &str) -> Option<Export>;
}
