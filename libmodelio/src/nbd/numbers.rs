//! The numbers of the specification, under its names.

#![allow(missing_docs, reason = "the specification says what its names mean")]

/// The first bytes of a server.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// What an option begins with, and what follows [`MAGIC`].
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// What the answer to an option begins with.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// What a request begins with.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// What a simple reply begins with.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// What a chunk of a structured reply begins with.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Handshake flag, of both sides: the fixed newstyle negotiation.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1;
/// Handshake flag, of both sides: 124 zeros are left out.
pub const FLAG_NO_ZEROES: u16 = 2;

/// The client's options.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// The server's answers to options.
pub mod answer {
    const ERROR: u32 = 1 << 31;

    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const UNSUPPORTED: u32 = ERROR | 1;
    pub const POLICY: u32 = ERROR | 2;
    pub const INVALID: u32 = ERROR | 3;
    pub const UNKNOWN: u32 = ERROR | 6;
    pub const TOO_BIG: u32 = ERROR | 9;
}

/// What [`answer::INFO`] tells of an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// What a client may do with an export.
pub mod transmission {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
}

/// Commands of requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod flag {
    /// Of a write: it is stable when it is answered.
    pub const FUA: u16 = 1;
    /// Of zeros: the range must stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Of a read: one chunk must hold all of it.
    pub const DONT_FRAGMENT: u16 = 1 << 2;
    /// Of a block status: one extent of each context will do.
    pub const REQUEST_ONE: u16 = 1 << 3;
}

/// Types of chunks.
pub mod chunk {
    /// The flag of the last chunk of a reply.
    pub const DONE: u16 = 1;

    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = 0x8001;
}

/// The errors that the specification has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// The export is read-only.
    NotPermitted = 1,
    /// An error of the server's.
    Io = 5,
    /// No memory.
    NoMemory = 12,
    /// The request makes no sense.
    Invalid = 22,
    /// A write past the end.
    NoSpace = 28,
    /// The server does not do this.
    NotSupported = 95,
    /// The server is about to end.
    ShuttingDown = 108,
}
