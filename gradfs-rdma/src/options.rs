//! The options of RDMA. The defaults suit a host with one device.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How a thread learns of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// The thread polls without pause, and takes a core.
    Busy,
    /// The thread sleeps until the device interrupts.
    Event,
    /// The thread polls without pause for this long after a completion, and then sleeps.
    Adaptive(Duration),
}

/// The memory that a shard fetches payload into (the buffer models of PS-RDMA §3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Buffers {
    /// Slots that all queue pairs share. Any free slot is used. Memory does not grow with the learners.
    #[default]
    Shared,
    /// Shared slots that are used in turn, one after the other.
    Looped,
    /// Slots of each queue pair's own.
    Own,
}

/// How a peer notifies this end of written data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Notice {
    /// Immediate data if the device supports it, else a flag.
    #[default]
    Auto,
    /// Immediate data.
    Immediate,
    /// A word in this end's memory, which it polls.
    Flag,
}

/// How a block is pushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Static placement for short blocks, dynamic placement for long ones.
    #[default]
    Auto,
    /// The client writes the block into a slot that the shard has granted (RPCH §3.2).
    Static,
    /// The client names the block, and the shard fetches it when it has room (RPCH §3.3).
    Dynamic,
}

/// Text that is none of the choices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{got:?} is none of {choices}")]
pub struct NoChoice {
    got: String,
    choices: &'static str,
}

macro_rules! choices {
    ($of:ty, $all:literal, $($text:literal => $value:expr),+) => {
        impl FromStr for $of {
            type Err = NoChoice;

            fn from_str(text: &str) -> Result<$of, NoChoice> {
                match text {
                    $($text => Ok($value),)+
                    _ => Err(NoChoice { got: text.to_owned(), choices: $all }),
                }
            }
        }

        impl fmt::Display for $of {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(value if *value == $value => $text,)+
                    _ => "adaptive",
                })
            }
        }
    };
}

choices!(Polling, "busy, event, adaptive", "busy" => Polling::Busy, "event" => Polling::Event, "adaptive" => ADAPTIVE);
choices!(Buffers, "shared, looped, own", "shared" => Buffers::Shared, "looped" => Buffers::Looped, "own" => Buffers::Own);
choices!(Notice, "auto, immediate, flag", "auto" => Notice::Auto, "immediate" => Notice::Immediate, "flag" => Notice::Flag);
choices!(Placement, "auto, static, dynamic", "auto" => Placement::Auto, "static" => Placement::Static, "dynamic" => Placement::Dynamic);

/// Long enough for an answer over a fast network, and short enough to cost little.
const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

/// The most bytes of payload in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(u8);

impl Mtu {
    /// The MTU of this many bytes: 256, 512, 1024, 2048 or 4096.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        (1..=5).map(Mtu).find(|mtu| mtu.bytes() == bytes)
    }

    /// The MTU with this code, which is 1 to 5 as in verbs.
    pub fn from_code(code: u8) -> Option<Mtu> {
        (1..=5).contains(&code).then_some(Mtu(code))
    }

    /// The code on the wire.
    pub fn code(self) -> u8 {
        self.0
    }

    /// The number of bytes.
    pub fn bytes(self) -> u32 {
        128 << self.0
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// The RDMA settings of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// The device. `None` for the first one with an active port.
    pub device: Option<String>,
    /// Its port. `None` for the first active one.
    pub port: Option<u8>,
    /// The index of the GID that packets come from. `None` for the one that leads to the peer.
    pub gid_index: Option<u32>,
    /// The traffic class of packets (RoCE: DSCP and ECN).
    pub traffic_class: Option<u8>,
    /// The largest MTU. `None` for as much as the path allows. iWARP does not have this.
    pub mtu: Option<Mtu>,
    /// The most bytes that go inside the work request.
    pub inline: u32,
    /// The most work requests outstanding on a queue pair.
    pub depth: u32,
    /// One in so many work requests is reported.
    pub report_every: u32,
    /// The number of completion queues. Each has a thread.
    pub queues: usize,
    /// How these threads wait for completions.
    pub polling: Polling,
    /// The number of receives that the queue pairs of a completion queue share.
    pub shared_receives: u32,
    /// How peers notify this end of written data.
    pub notice: Notice,
    /// Memory that payload is fetched into.
    pub buffers: Buffers,
    /// How blocks are pushed.
    pub placement: Placement,
    /// The number of slots for payload: in all, or of each queue pair.
    pub slots: usize,
    /// Bytes of registered memory for rings and slots.
    pub arena: usize,
    /// The most READs outstanding on a queue pair.
    pub reads: u8,
    /// How often a packet is repeated.
    pub retries: u8,
}

impl Default for RdmaOptions {
    fn default() -> RdmaOptions {
        RdmaOptions {
            device: None,
            port: None,
            gid_index: None,
            traffic_class: None,
            mtu: None,
            inline: 128,
            depth: 128,
            report_every: 16,
            queues: 2,
            polling: ADAPTIVE,
            shared_receives: 1024,
            notice: Notice::Auto,
            buffers: Buffers::Shared,
            placement: Placement::Auto,
            slots: 16,
            arena: 64 << 20,
            reads: 16,
            retries: 7,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_text() {
        assert_eq!("looped".parse(), Ok(Buffers::Looped));
        assert_eq!("flag".parse(), Ok(Notice::Flag));
        assert_eq!("static".parse(), Ok(Placement::Static));
        assert_eq!("adaptive".parse(), Ok(ADAPTIVE));
        assert_eq!(Polling::Adaptive(Duration::from_millis(1)).to_string(), "adaptive");
        let error = "fast".parse::<Placement>().unwrap_err();
        assert_eq!(error.to_string(), "\"fast\" is none of auto, static, dynamic");
    }

    #[test]
    fn five_lengths_of_packets() {
        for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            let mtu = Mtu::from_code(code).unwrap();
            assert_eq!((mtu.bytes(), Mtu::from_bytes(bytes)), (bytes, Some(mtu)));
            assert_eq!(mtu.to_string(), bytes.to_string());
        }
        for bytes in [0, 1, 255, 1500, 8192, 9000] {
            assert_eq!(Mtu::from_bytes(bytes), None);
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
    }
}
