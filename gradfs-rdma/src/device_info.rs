//! What people and programs are told of the devices of a host.

/// A port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// In a word: active, down.
    pub state: String,
    /// Whether the port carries traffic.
    pub active: bool,
    /// `Ethernet` or `InfiniBand`.
    pub link: &'static str,
    /// Bytes of the largest packet.
    pub mtu: u32,
    /// Its GIDs.
    pub gids: Vec<GidInfo>,
}

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidInfo {
    /// Its index.
    pub index: u32,
    /// The GID as an IPv6 address, or as an IPv4 address if it stands for one.
    pub address: String,
    /// The kernel's name for its kind, such as `RoCE v2`; empty if it has none.
    pub kind: String,
}

impl GidInfo {
    /// Whether the address is valid on one link only, without saying on which.
    pub fn is_link_local(&self) -> bool {
        self.address.parse::<std::net::Ipv6Addr>().is_ok_and(|address| address.is_unicast_link_local())
    }
}

/// A device, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// `InfiniBand` (RoCE is of that kind, too) or `iWARP`.
    pub transport: &'static str,
    /// Its firmware.
    pub firmware: String,
    /// Queue pairs, and work of each, at most.
    pub max_pairs: u32,
    /// Work that one queue pair takes at most.
    pub max_work: u32,
    /// Memory that can be registered at once, in bytes.
    pub max_registration: u64,
    /// Its ports.
    pub ports: Vec<PortInfo>,
}
