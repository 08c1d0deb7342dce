//! Lines for people about the snapshots that a job takes by itself.

use std::fmt::Write as _;

use serde_json::Value;

/// Adds what has come of them, if the job has a store. `job` is as a shard's status has it.
pub fn tell(text: &mut String, indent: &str, job: &Value) {
    let snapshots = &job["snapshots"];
    if snapshots.is_null() {
        return;
    }
    let _ = match snapshots["age_seconds"].as_f64() {
        None => writeln!(text, "{indent}no snapshot yet"),
        Some(age) => writeln!(
            text,
            "{indent}newest snapshot: version {}, {age:.0} s ago, {} bytes, {} of them written in {:.1} s",
            snapshots["durable_version"],
            snapshots["bytes"],
            snapshots["written_bytes"],
            snapshots["seconds"].as_f64().unwrap_or_default(),
        ),
    };
    if let Some(why) = snapshots["why"].as_str() {
        let _ = writeln!(text, "{indent}no snapshot is saved now: {why}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_status_says_what_has_come_of_snapshots() {
        let told = |snapshots: Value| {
            let mut text = String::new();
            tell(&mut text, "  ", &json!({ "snapshots": snapshots }));
            text
        };
        assert_eq!(told(Value::Null), "");
        assert_eq!(
            told(json!({ "durable_version": null, "age_seconds": null, "why": "the disk is full" })),
            "  no snapshot yet\n  no snapshot is saved now: the disk is full\n"
        );
        let saved = json!({
            "durable_version": 7, "age_seconds": 61.7, "seconds": 1.26, "bytes": 100, "written_bytes": 9, "why": null
        });
        assert_eq!(
            told(saved),
            "  newest snapshot: version 7, 62 s ago, 100 bytes, 9 of them written in 1.3 s\n"
        );
    }
}
