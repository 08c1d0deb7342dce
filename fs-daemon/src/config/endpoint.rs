//! The address where a process of a cluster listens, or can be reached: `host:port`.
//!
//! Names are not looked up here: that is done when they are used, for it may take long and change.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::error::Error;

/// The port where none is given.
pub const DEFAULT_PORT: u16 = 7070;

/// The port of metrics, which exporters for Prometheus use by custom.
pub const METRICS_PORT: u16 = 9464;

/// The port of mounts that other mounts pull from.
pub const RELAY_PORT: u16 = 7071;

/// The port of NBD.
pub const NBD_PORT: u16 = 10809;

/// A host and a port of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// An IPv4 or IPv6 address (without brackets), or a name.
    pub host: String,
    /// Its TCP port. 0, where one may listen on it, is any free one.
    pub port: u16,
}

impl Endpoint {
    /// The endpoint that `text` names, on `default_port` where it names none.
    ///
    /// # Errors
    /// With what is wrong with it.
    pub fn parse(text: &str, default_port: u16) -> Result<Endpoint, Error> {
        let wrong = |why: &str, hint: &str| {
            let hint =
                if hint.is_empty() { "write host:port, as in node1:7070 or 10.0.0.1:7070" } else { hint };
            Error::usage(format!("{text:?} is not host:port: {why}")).hint(hint)
        };
        if let Some((scheme, rest)) = text.split_once("://") {
            return Err(wrong(&format!("it begins with {scheme}://"), &format!("leave that out: {rest}")));
        }
        let (host, port) = if let Some(inner) = text.strip_prefix('[') {
            let (host, rest) = inner.split_once(']').ok_or_else(|| wrong("the bracket is not closed", ""))?;
            if host.parse::<Ipv6Addr>().is_err() {
                return Err(wrong("what is in brackets is no IPv6 address", ""));
            }
            match (rest, rest.strip_prefix(':')) {
                ("", _) => (host, None),
                (_, Some(port)) => (host, Some(port)),
                _ => return Err(wrong("a colon belongs behind the bracket", "")),
            }
        } else if text.parse::<Ipv6Addr>().is_ok() {
            return Err(wrong(
                "an IPv6 address needs brackets",
                &format!("write [{text}] or [{text}]:{default_port}"),
            ));
        } else {
            match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            }
        };
        let port = match port {
            None => default_port,
            // "+7070" is no port, though `parse` would take it as a number.
            Some(port) => port
                .parse()
                .ok()
                .filter(|_| !port.starts_with('+'))
                .ok_or_else(|| wrong("its port is not a number up to 65535", ""))?,
        };
        if let Some(fault) = host_fault(host) {
            return Err(wrong(fault, ""));
        }
        Ok(Endpoint { host: host.to_owned(), port })
    }

    /// The endpoint of a registry or shard that `text` names.
    pub fn to_connect_to(text: &str) -> Result<Endpoint, Error> {
        Endpoint::reached(text, DEFAULT_PORT, true)
    }

    /// The endpoint that `text` names, refused if one can listen on it, but not connect to it. `needs_port`: 0 is no
    /// port.
    pub fn reached(text: &str, default_port: u16, needs_port: bool) -> Result<Endpoint, Error> {
        let endpoint = Endpoint::parse(text, default_port)?;
        if endpoint.is_unspecified() {
            let message = format!("{} stands for all addresses: nobody can connect to it", endpoint.host);
            return Err(Error::usage(message).hint("name the host, or one of its addresses"));
        }
        if needs_port && endpoint.port == 0 {
            return Err(Error::usage("nobody can connect to port 0")
                .hint(format!("name its port, or leave it out for {default_port}")));
        }
        Ok(endpoint)
    }

    /// Whether the host stands for all addresses: a process can listen on it, and nobody can connect to it.
    pub fn is_unspecified(&self) -> bool {
        self.host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified())
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Why `host` is neither an address nor a name, if so.
fn host_fault(host: &str) -> Option<&'static str> {
    if host.parse::<IpAddr>().is_ok() {
        return None;
    }
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    // A dot at the end marks a complete name.
    let labels = host.strip_suffix('.').unwrap_or(host);
    match host {
        "" => Some("it names no host"),
        _ if host.contains(':') => Some("it has several colons"),
        _ if host.len() > 253 => Some("its host is longer than 253 bytes"),
        _ if !labels.split('.').all(is_label) => {
            Some("its host is no name: letters, digits and hyphens between dots")
        }
        _ if labels.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit())) => {
            Some("its host is no IPv4 address")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports() {
        for (text, host, port) in [
            ("node1:7071", "node1", 7071),
            ("node1", "node1", DEFAULT_PORT),
            ("node-1.rack_2.example.com.", "node-1.rack_2.example.com.", DEFAULT_PORT),
            ("10.0.0.1:1", "10.0.0.1", 1),
            ("0.0.0.0:65535", "0.0.0.0", 65535),
            ("[::1]:7071", "::1", 7071),
            ("[fe80::1]", "fe80::1", DEFAULT_PORT),
            ("localhost:0", "localhost", 0),
        ] {
            let endpoint = Endpoint::parse(text, DEFAULT_PORT).unwrap();
            assert_eq!((endpoint.host.as_str(), endpoint.port), (host, port), "{text}");
            assert_eq!(Endpoint::parse(&endpoint.to_string(), 1).unwrap(), endpoint, "{text}");
        }
    }

    #[test]
    fn text_that_is_no_endpoint_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "no host"),
            (":7070", "no host"),
            ("node1:", "port"),
            ("node1:http", "port"),
            ("node1:65536", "port"),
            ("node1:-1", "port"),
            ("node1:+1", "port"),
            ("node1: 7070", "port"),
            ("tcp://node1:7070", "tcp://"),
            ("::1", "brackets"),
            ("fe80::1:7070", "brackets"),
            ("a:b:7070", "several colons"),
            ("[::1", "not closed"),
            ("[node1]:7070", "no IPv6 address"),
            ("[::1]7070", "colon"),
            ("10.0.0.256:7070", "no IPv4 address"),
            ("10.0.0:7070", "no IPv4 address"),
            ("7070", "no IPv4 address"),
            ("-node:7070", "no name"),
            ("node 1:7070", "no name"),
            ("node..1:7070", "no name"),
            ("nöde:7070", "no name"),
        ] {
            let error = Endpoint::parse(text, DEFAULT_PORT).unwrap_err();
            assert!(error.message.starts_with(&format!("{text:?} is not host:port")), "{text}");
            assert!(error.message.contains(why), "{text}: {}", error.message);
            assert!(error.hint.is_some(), "{text}");
            assert_eq!(error.exit_code(), 2, "{text}");
        }
        let long = format!("{}:7070", "a.".repeat(127));
        assert!(Endpoint::parse(&long, 1).unwrap_err().message.contains("253 bytes"));
    }

    #[test]
    fn all_addresses_are_none() {
        let is_unspecified = |text| Endpoint::parse(text, 1).unwrap().is_unspecified();
        assert!(is_unspecified("0.0.0.0") && is_unspecified("[::]"));
        assert!(!is_unspecified("127.0.0.1") && !is_unspecified("node1"));
    }
}
