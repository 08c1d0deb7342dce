//! The private data of rdma_cm with which both ends begin a connection: 24 bytes, documented in
//! `docs/internals/protocol.md`. A shard that takes no connection sends its reason the same way.

use super::options::Mtu;
use super::queue_pair::QueuePair;
use super::verbs::{Notify, RemoteMemory};

/// The first bytes of the data that an end sends.
const MAGIC: [u8; 4] = *b"GFRD";
/// The length of the data.
const OFFER: usize = 24;

/// The data that each end sends when a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The end's protocol.
    pub protocol: u16,
    /// How the peer must notify this end of written data.
    pub notify: Notify,
    /// The largest payload of a packet that the end wants. In an answer, the size that both ends use. `None` for as
    /// much as the path allows.
    pub mtu: Option<Mtu>,
    /// The end's ring.
    pub ring: RemoteMemory,
}

/// Why an offer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Strange {
    /// The data is something else.
    #[error("something else than gradfs is there")]
    Magic,
    /// The peer speaks another protocol.
    #[error("it speaks protocol {got}, expected {expected}")]
    Protocol {
        /// This end's.
        expected: u16,
        /// The peer's.
        got: u16,
    },
    /// The peer expects another notification than this end.
    #[error(
        "it is notified of written data by {got:?}, this end by {expected:?}: set the same --rdma-notice for both"
    )]
    Notify {
        /// This end's.
        expected: Notify,
        /// The peer's.
        got: Notify,
    },
    /// The MTU does not exist.
    #[error("it wants the MTU numbered {0}, expected 0 to 5")]
    Mtu(u8),
}

/// Why a shard refuses a connection whose offer it understands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Shortage {
    /// The shard has no memory for rings.
    #[error("its registered memory is full: raise its --rdma-arena, or lower its --rdma-slots")]
    Rings,
    /// The shard has no room for completions.
    #[error("its completion queues are full: raise its --rdma-queues, or lower its --rdma-depth")]
    Completions,
    /// The connection comes by another device or port than the shard's.
    #[error("it uses another device, or another port, than the way leads to (--rdma-device names it)")]
    Device,
    /// Another reason.
    #[error("its log says why")]
    Other,
}

impl Shortage {
    /// The code on the wire: u32 little-endian in byte 12 of a refusing shard's data.
    pub fn code(self) -> u32 {
        match self {
            Shortage::Other => 0,
            Shortage::Rings => 1,
            Shortage::Completions => 2,
            Shortage::Device => 3,
        }
    }

    /// Decodes the peer's code. An unknown code is `Other`.
    pub fn decode(bytes: &[u8]) -> Shortage {
        let code =
            bytes.get(12..).and_then(|bytes| bytes.first_chunk()).map(|&code| u32::from_le_bytes(code));
        let all = [Shortage::Rings, Shortage::Completions, Shortage::Device];
        all.into_iter().find(|shortage| Some(shortage.code()) == code).unwrap_or(Shortage::Other)
    }
}

impl Offer {
    pub(super) fn of(queue_pair: &QueuePair, mtu: Option<Mtu>, protocol: u16) -> Offer {
        Offer { protocol, notify: queue_pair.device().notify(), mtu, ring: queue_pair.invitation() }
    }

    /// The encoding: magic, protocol u16, notice u8, MTU u8, key u32, address u64 from byte 16,
    /// little-endian.
    pub fn encode(&self) -> [u8; OFFER] {
        let mut bytes = [0; OFFER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.protocol.to_le_bytes());
        bytes[6] = u8::from(self.notify == Notify::Flag);
        bytes[7] = self.mtu.map_or(0, Mtu::code);
        bytes[8..12].copy_from_slice(&self.ring.key.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.ring.address.to_le_bytes());
        bytes
    }

    /// Decodes the peer's data, if this end can use it. The peer must speak the protocol `expected`, and notify this end
    /// by `notify`.
    ///
    /// # Errors
    /// [`Strange`].
    pub fn decode(bytes: &[u8], expected: u16, notify: Notify) -> Result<Offer, Strange> {
        let Some(bytes) = bytes.first_chunk::<OFFER>().filter(|bytes| bytes[..4] == MAGIC) else {
            return Err(Strange::Magic);
        };
        let got = u16::from_le_bytes([bytes[4], bytes[5]]);
        if got != expected {
            return Err(Strange::Protocol { expected, got });
        }
        let got_notify = if bytes[6] == 0 { Notify::Immediate } else { Notify::Flag };
        if got_notify != notify {
            return Err(Strange::Notify { expected: notify, got: got_notify });
        }
        let mtu = match bytes[7] {
            0 => None,
            code => Some(Mtu::from_code(code).ok_or(Strange::Mtu(code))?),
        };
        let mut key = [0; 4];
        key.copy_from_slice(&bytes[8..12]);
        let mut address = [0; 8];
        address.copy_from_slice(&bytes[16..24]);
        let ring = RemoteMemory { address: u64::from_le_bytes(address), key: u32::from_le_bytes(key) };
        Ok(Offer { protocol: got, notify, mtu, ring })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROTOCOL: u16 = 12;

    #[test]
    fn offers_are_understood_or_refused() {
        let ring = RemoteMemory { address: 0x1234_5678_9abc, key: 77 };
        let offer = Offer { protocol: PROTOCOL, notify: Notify::Immediate, mtu: Mtu::from_bytes(1024), ring };
        let mut sent = offer.encode().to_vec();
        sent.resize(56, 0);
        assert_eq!(Offer::decode(&sent, PROTOCOL, Notify::Immediate), Ok(offer));
        assert!(matches!(Offer::decode(&sent, PROTOCOL, Notify::Flag), Err(Strange::Notify { .. })));
        assert_eq!(Shortage::decode(&sent), Shortage::Other);
        for shortage in [Shortage::Rings, Shortage::Completions, Shortage::Device] {
            sent[12] = shortage.code() as u8;
            assert_eq!(
                (Shortage::decode(&sent), Offer::decode(&sent, PROTOCOL, Notify::Immediate)),
                (shortage, Ok(offer))
            );
        }
        assert_eq!(Shortage::decode(&sent[..14]), Shortage::Other);
        sent[7] = 6;
        assert_eq!(Offer::decode(&sent, PROTOCOL, Notify::Immediate), Err(Strange::Mtu(6)));
        sent[4] = 99;
        let got = Offer::decode(&sent, PROTOCOL, Notify::Immediate);
        assert_eq!(got, Err(Strange::Protocol { expected: offer.protocol, got: 99 }));
        for bytes in [&b""[..], b"GFRD", b"GET / HTTP/1.1\r\nHost: example"] {
            assert_eq!(Offer::decode(bytes, PROTOCOL, Notify::Immediate), Err(Strange::Magic));
        }
    }
}
