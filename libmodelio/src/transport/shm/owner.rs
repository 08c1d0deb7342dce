//! The owner of a socket in the abstract namespace. Any process of the host can bind a free name, so such a socket
//! need not be the shard's.
//!
//! A socket counts as the shard's if it belongs to this process's own user, to root, or to the user that listens on
//! the shard's TCP port. These users could pretend to be the shard anyway.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// The user that has bound the socket at the other end. `None` if that user may be the shard of `address`.
pub(super) fn stranger(socket: &OwnedFd, address: &str) -> Result<Option<u32>, Errno> {
    let owner = getsockopt(socket, PeerCredentials)?.uid();
    if owner == 0 || owner == nix::unistd::geteuid().as_raw() {
        return Ok(None);
    }
    let at: Vec<SocketAddr> = address.to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    // A table that cannot be read counts as absent.
    let tables =
        ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let mut users: Vec<u32> = tables.iter().flat_map(|table| listening(table, &at)).collect();
    users.dedup();
    Ok((users != [owner]).then_some(owner))
}

/// The users that listen on one of these addresses, by one of the kernel's tables.
fn listening<'a>(table: &'a str, at: &'a [SocketAddr]) -> impl Iterator<Item = u32> + 'a {
    table.lines().skip(1).filter_map(move |line| {
        const LISTENS: &str = "0A";
        let mut fields = line.split_whitespace();
        let (local, state) = (fields.nth(1)?, fields.nth(1)?);
        let user = fields.nth(3)?.parse().ok()?;
        let (ip, port) = local.split_once(':')?;
        let (ip, port) = (parse_ip(ip)?, u16::from_str_radix(port, 16).ok()?);
        let fits = |at: &SocketAddr| at.port() == port && (ip.is_unspecified() || ip == at.ip());
        (state == LISTENS && at.iter().any(fits)).then_some(user)
    })
}

/// Parses an address. The kernel prints its words as numbers in its own byte order.
fn parse_ip(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| Some(u32::from_str_radix(hex.get(8 * at..8 * at + 8)?, 16).ok()?.to_ne_bytes());
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            let bytes: [u8; 16] = words.concat().try_into().ok()?;
            Some(IpAddr::from(Ipv6Addr::from(bytes)).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn only_listening_users_are_found() {
        let own = nix::unistd::geteuid().as_raw();
        for (address, path) in [("127.0.0.1:0", "/proc/net/tcp"), ("[::1]:0", "/proc/net/tcp6")] {
            let Ok(listener) = TcpListener::bind(address) else {
                eprintln!("not tested: {address} is not there");
                continue;
            };
            let at = listener.local_addr().unwrap();
            let find = |at| listening(&std::fs::read_to_string(path).unwrap(), &[at]).collect::<Vec<_>>();
            assert_eq!(find(at), [own]);
            // A connection from the address is not a listener.
            let near = std::net::TcpStream::connect(at).unwrap();
            assert_eq!(find(near.local_addr().unwrap()), [0u32; 0]);
            drop(listener);
            assert_eq!(find(at), [0u32; 0]);
        }
    }

    #[test]
    fn a_table_is_read_as_the_kernel_writes_it() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1001        0 31 1 0 100 0 0 10 0\n   1: 00000000:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1002        0 32 1 0 100 0 0 10 0\n   2: 0100007F:1F92 0200007F:0050 01 00000000:00000000 00:00000000 00000000  1003        0 33 1 0 100 0 0 10 0\n short\n";
        if cfg!(target_endian = "little") {
            let users = |at: &str| listening(table, &[at.parse().unwrap()]).collect::<Vec<_>>();
            assert_eq!(users("127.0.0.1:8080"), [1001]);
            assert_eq!(users("127.0.0.2:8080"), [0u32; 0], "another address");
            assert_eq!(users("10.1.2.3:8081"), [1002], "all addresses");
            assert_eq!(users("127.0.0.1:8082"), [0u32; 0], "it is connected");
        }
    }
}
