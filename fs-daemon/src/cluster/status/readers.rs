//! Lines for people about the readers of a job, and what waits for them.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::super::{list, string};

/// Adds a line for each reader, and one that says which of them the next version waits for. `job` is as a shard's status
/// has it, or `status.json` of a mount.
pub fn tell(text: &mut String, indent: &str, job: &Value) {
    for reader in list(&job["readers"]) {
        let (name, host) = (string(&reader["id"]), string(&reader["host"]));
        let applied = match &reader["applied"] {
            Value::Null => "applied nothing yet".to_owned(),
            version => format!("applied {version}"),
        };
        let given_up = if reader["given_up"] == json!(true) { ", not waited for" } else { "" };
        let staged = &reader["staged"];
        let _ = writeln!(text, "{indent}reader {name} on {host}: {applied}, staged {staged}{given_up}");
    }
    let held_by: Vec<&str> = list(&job["held_by"]).iter().map(string).collect();
    if !held_by.is_empty() {
        let _ = writeln!(text, "{indent}the next version waits for readers: {}", held_by.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_says_what_readers_run_and_which_of_them_are_waited_for() {
        let reader = |id: &str, applied: Value, given_up| json!({ "id": id, "host": "h", "staged": 3, "applied": applied, "given_up": given_up });
        let readers =
            [reader("a", json!(2), false), reader("b", Value::Null, false), reader("c", json!(1), true)];
        let mut text = String::new();
        tell(&mut text, "  ", &json!({ "readers": readers, "held_by": ["a"] }));
        assert_eq!(
            text,
            "  reader a on h: applied 2, staged 3\n  reader b on h: applied nothing yet, staged 3\n\
             \x20 reader c on h: applied 1, staged 3, not waited for\n  the next version waits for readers: a\n"
        );
        text.clear();
        tell(&mut text, "", &json!({ "readers": null }));
        assert_eq!(text, "");
    }
}
