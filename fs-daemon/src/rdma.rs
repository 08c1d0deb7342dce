//! `gradfs rdma devices`: the RDMA devices of this host, their addresses, and whether connections over them
//! are possible.

use std::fmt::Write as _;

use gradfs_rdma::{DeviceInfo, PortInfo, VerbsError};
use serde_json::{Value, json};

use crate::error::Error;

const NONE: &str = "\
no RDMA devices
For a device in software, with the module rdma_rxe (as root): rdma link add rxe0 type rxe netdev eth0
";

/// Prints the devices. No device is also an answer.
///
/// # Errors
/// In a build without RDMA, or when libibverbs cannot tell.
pub fn devices(as_json: bool) -> Result<(), Error> {
    let failed = |error| Error::new("RDMA devices cannot be listed").caused_by(error);
    let found = gradfs_rdma::devices().map_err(failed)?;
    let hindrance = match gradfs_rdma::usable() {
        Ok(usable) => hindrance(&found, &usable),
        // A host without devices has no obstacle.
        Err(VerbsError::NoDevice) if found.is_empty() => None,
        Err(error) => Some(error.to_string()),
    };
    if as_json {
        println!("{:#}", for_programs(&found, hindrance.as_deref()));
    } else {
        print!("{}", for_people(&found, hindrance.as_deref()));
    }
    Ok(())
}

/// Why connections cannot come about over all of `found`, if librdmacm knows `usable` ones.
fn hindrance(found: &[DeviceInfo], usable: &[String]) -> Option<String> {
    let names = found.iter().map(|device| device.name.as_str());
    let others: Vec<&str> = names.filter(|name| !usable.iter().any(|usable| usable == name)).collect();
    (!others.is_empty()).then(|| format!("librdmacm does not connect over {}", others.join(", ")))
}

fn for_programs(found: &[DeviceInfo], hindrance: Option<&str>) -> Value {
    let port = |port: &PortInfo| {
        let gids: Vec<Value> = port
            .gids
            .iter()
            .map(|gid| json!({ "index": gid.index, "address": gid.address, "kind": gid.kind }))
            .collect();
        json!({
            "number": port.number,
            "state": port.state,
            "active": port.active,
            "link": port.link,
            "mtu": port.mtu,
            "gids": gids,
        })
    };
    let device = |device: &DeviceInfo| {
        json!({
            "name": device.name,
            "transport": device.transport,
            "firmware": device.firmware,
            "limits": {
                "queue_pairs": device.max_pairs,
                "work_of_a_queue_pair": device.max_work,
                "registration_bytes": device.max_registration,
            },
            "ports": device.ports.iter().map(port).collect::<Vec<_>>(),
        })
    };
    json!({
        "devices": found.iter().map(device).collect::<Vec<_>>(),
        "cannot_connect_because": hindrance,
    })
}

fn for_people(found: &[DeviceInfo], hindrance: Option<&str>) -> String {
    let mut text = String::new();
    for device in found {
        let DeviceInfo { name, transport, firmware, max_pairs, max_work, max_registration, .. } = device;
        let firmware = if firmware.is_empty() { String::new() } else { format!(", firmware {firmware}") };
        let _ = writeln!(text, "{name}: {transport}{firmware}");
        let _ = writeln!(
            text,
            "  limits: {max_pairs} queue pairs, {max_work} pieces of work on each, {} at once registered",
            bytes(*max_registration)
        );
        for PortInfo { number, state, link, mtu, gids, .. } in &device.ports {
            let _ = writeln!(text, "  port {number}: {state}, {link}, MTU {mtu}");
            for gid in gids {
                let kind = if gid.kind.is_empty() { String::new() } else { format!(" ({})", gid.kind) };
                let _ = writeln!(text, "    GID {}: {}{kind}", gid.index, gid.address);
            }
        }
    }
    match (found, hindrance) {
        ([], None) => text.push_str(NONE),
        (_, Some(why)) => {
            let _ = writeln!(text, "no connections: {why}");
        }
        (_, None) => text.push_str("connections can come about (librdmacm)\n"),
    }
    text
}

/// In the largest unit that it is a whole number of.
fn bytes(count: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (count.max(1).trailing_zeros() / 10) as usize;
    match count {
        // The device takes any amount.
        u64::MAX => "any memory".to_owned(),
        _ => format!("{} {}", count >> (10 * power), units[power]),
    }
}

#[cfg(test)]
mod tests {
    use gradfs_rdma::GidInfo;

    use super::*;

    fn device() -> DeviceInfo {
        let gid = GidInfo { index: 1, address: "10.0.0.1".into(), kind: "RoCE v2".into() };
        let port = PortInfo {
            number: 1,
            state: "active".into(),
            active: true,
            link: "Ethernet",
            mtu: 4096,
            gids: vec![gid],
        };
        DeviceInfo {
            name: "rxe0".into(),
            transport: "InfiniBand",
            firmware: String::new(),
            max_pairs: 1024,
            max_work: 4096,
            max_registration: u64::MAX,
            ports: vec![port],
        }
    }

    #[test]
    fn people_read_what_they_need() {
        assert_eq!(
            for_people(&[device()], None),
            "rxe0: InfiniBand\n  limits: 1024 queue pairs, 4096 pieces of work on each, any memory at once \
             registered\n  port 1: active, Ethernet, MTU 4096\n    GID 1: 10.0.0.1 (RoCE v2)\n\
             connections can come about (librdmacm)\n"
        );
        let hindered = for_people(&[device()], Some("why"));
        assert!(hindered.ends_with("no connections: why\n"), "{hindered}");
        assert!(for_people(&[], None).contains("rdma link add rxe0"));
    }

    #[test]
    fn programs_read_the_same() {
        let value = for_programs(&[device()], None);
        assert_eq!(value["devices"][0]["ports"][0]["gids"][0]["kind"], "RoCE v2");
        assert_eq!(value["devices"][0]["limits"]["queue_pairs"], 1024);
        assert_eq!(value["cannot_connect_because"], Value::Null);
        assert_eq!(for_programs(&[], Some("why"))["cannot_connect_because"], "why");
    }

    #[test]
    fn devices_that_librdmacm_does_not_know_are_named() {
        assert_eq!(hindrance(&[device()], &["rxe0".into()]), None);
        let why = hindrance(&[device()], &["rxe1".into()]).unwrap();
        assert!(why.ends_with("rxe0"), "{why}");
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!(bytes(0), "0 bytes");
        assert_eq!(bytes(1 << 63), "8 EiB");
        assert_eq!(bytes(3 << 20), "3 MiB");
        assert_eq!(bytes(4097), "4097 bytes");
    }
}
