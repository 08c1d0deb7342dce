//! A line for people about the mounts of a model that pull versions from each other.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::super::{list, string};

/// Adds a line with the ways that a version goes, if there are relays. `job` is as a shard's status has it.
pub fn tell(text: &mut String, indent: &str, job: &Value) {
    let relays = list(&job["relays"]);
    if relays.is_empty() {
        return;
    }
    let mut line = String::from("versions go");
    for (at, relay) in relays.iter().enumerate() {
        let follows = at > 0 && relay["via"] == relays[at - 1]["address"];
        let start = if at == 0 { " shards" } else { "; shards" };
        let _ = write!(line, "{} -> {}", if follows { "" } else { start }, string(&relay["address"]));
        let zone = string(&relay["zone"]);
        if !zone.is_empty() {
            let _ = write!(line, " ({zone})");
        }
        if relay["shunned"] == json!(true) {
            line.push_str(" (has failed, and serves nobody for a while)");
        }
    }
    let _ = writeln!(text, "{indent}{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_says_which_ways_a_version_goes_through_mounts() {
        let relay = |address: &str, via: Option<&str>, zone: &str, shunned| json!({ "address": address, "via": via, "zone": zone, "shunned": shunned });
        let relays = [
            relay("a:1", None, "east", false),
            relay("b:1", Some("a:1"), "", false),
            relay("c:1", None, "", true),
        ];
        let mut text = String::new();
        tell(&mut text, "  ", &json!({ "relays": relays }));
        assert_eq!(
            text,
            "  versions go shards -> a:1 (east) -> b:1; shards -> c:1 (has failed, and serves nobody for a while)\n"
        );
        text.clear();
        tell(&mut text, "", &json!({ "relays": null }));
        assert_eq!(text, "");
    }
}
