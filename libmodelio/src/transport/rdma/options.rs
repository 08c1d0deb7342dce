//! How RDMA is to be used. Defaults are for a host with one device.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// How a thread learns of completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// It asks without pause, and takes a core.
    Busy,
    /// It sleeps until the device interrupts.
    Event,
    /// It asks without pause for this long after something has happened, and then sleeps.
    Adaptive(Duration),
}

/// The memory that a shard fetches payload into (the buffer models of PS-RDMA §3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Buffers {
    /// Slots that all queue pairs have in common; any free one will do. Memory does not grow with the learners.
    #[default]
    Shared,
    /// Slots in common that are used in turn, one after the other.
    Looped,
    /// Each queue pair has its own.
    Own,
}

/// How the peer learns of written data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Notice {
    /// Immediate data where the device has it, else a flag.
    #[default]
    Auto,
    /// Immediate data.
    Immediate,
    /// A word in its memory, which it polls.
    Flag,
}

/// How a block is pushed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Short ones by static, long ones by dynamic placement.
    #[default]
    Auto,
    /// Written into a slot that the shard has granted (RPCH §3.2).
    Static,
    /// Named, and fetched by the shard when it has room (RPCH §3.3).
    Dynamic,
}

/// Text that names none of the choices there are.
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

/// Long enough for an answer over a fast network, short enough to cost little.
const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

/// Bytes of payload that a packet carries at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(u8);

impl Mtu {
    /// From the power of two that it is: 256, 512, 1024, 2048, 4096.
    pub fn from_bytes(bytes: u32) -> Option<Mtu> {
        (1..=5).map(Mtu).find(|mtu| mtu.bytes() == bytes)
    }

    /// The MTU of a code on the wire, which is also that of verbs: 1 to 5.
    pub fn from_code(code: u8) -> Option<Mtu> {
        (1..=5).contains(&code).then_some(Mtu(code))
    }

    /// The code on the wire.
    pub fn code(self) -> u8 {
        self.0
    }

    /// In bytes.
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
    /// The device; `None` for the first one that has an active port.
    pub device: Option<String>,
    /// Its port; `None` for the first active one.
    pub port: Option<u8>,
    /// The GID that packets come from; `None` for the one that leads to the peer.
    pub gid_index: Option<u32>,
    /// The traffic class of packets (RoCE: DSCP and ECN).
    pub traffic_class: Option<u8>,
    /// The largest MTU of packets; `None` for what the path allows. iWARP does not have this.
    pub mtu: Option<Mtu>,
    /// Bytes that go with the work itself.
    pub inline: u32,
    /// Pieces of work outstanding on a queue pair.
    pub depth: u32,
    /// Every how many pieces one is reported.
    pub report_every: u32,
    /// Completion queues, with a thread each.
    pub queues: usize,
    /// How those threads learn of news.
    pub polling: Polling,
    /// Messages of peers that are waited for; the queue pairs of a completion queue have them in common.
    pub shared_receives: u32,
    /// How peers learn of written data.
    pub notice: Notice,
    /// Memory that payload is fetched into.
    pub buffers: Buffers,
    /// How blocks are pushed.
    pub placement: Placement,
    /// Slots for payload: of all queue pairs, or of each.
    pub slots: usize,
    /// Bytes of registered memory for rings and slots.
    pub arena: usize,
    /// Reads that a queue pair has outstanding.
    pub reads: u8,
    /// How often a packet is sent again.
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
