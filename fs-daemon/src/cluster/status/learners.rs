//! Lines for people about the learners of a job, and who waits for whom.

use std::fmt::Write as _;

use libmodelio::vocabulary::members::WaitedFor;
use serde_json::{Value, json};

use super::super::string;

/// Names in a line.
const NAMES: usize = 16;

/// Adds a line for each of the `learners`, or for the first `few`, and one that says who waits for whom. They are as a
/// shard's status has them, or `status.json` of a mount.
pub fn tell(text: &mut String, indent: &str, learners: &[Value], consistency: &str, few: Option<usize>) {
    let shown = few.unwrap_or(learners.len());
    for learner in learners.iter().take(shown) {
        let _ = writeln!(text, "{indent}{}", line(learner));
    }
    if learners.len() > shown {
        let _ = writeln!(text, "{indent}and {} more learners", learners.len() - shown);
    }
    if let Some(waits) = waits(learners, consistency) {
        let _ = writeln!(text, "{indent}{waits}");
    }
}

fn name(learner: &Value) -> &str {
    learner["name"].as_str().or_else(|| learner["id"].as_str()).unwrap_or_default()
}

fn line(learner: &Value) -> String {
    let host = learner["host"].as_str().map_or(String::new(), |host| format!(" on {host}"));
    let pace =
        learner["steps_per_second"].as_f64().map_or(String::new(), |pace| format!(", {pace:.3} steps/s"));
    let phase = string(&learner["phase"]);
    let silent = learner["silent_seconds"].as_f64().unwrap_or_default();
    let (name, step) = (name(learner), &learner["step"]);
    format!("learner {name}{host}: step {step}{pace}, {phase}, last heard of {silent:.0} s ago")
}

/// Where a version takes several contributions, who has committed waits for all who have not.
fn waits(learners: &[Value], consistency: &str) -> Option<String> {
    let waits = |learner: &&Value| learner["phase"] == json!("committed");
    if consistency == "async" || consistency.starts_with("ssp") {
        return None;
    }
    let (waiting, others): (Vec<&Value>, Vec<&Value>) = learners.iter().partition(waits);
    let some = |learners: &[&Value]| WaitedFor {
        learners: learners.iter().take(NAMES).map(|learner| name(learner).to_owned()).collect(),
        more: learners.len().saturating_sub(NAMES),
    };
    let verb = if waiting.len() == 1 { "waits" } else { "wait" };
    (!waiting.is_empty() && !others.is_empty())
        .then(|| format!("{} {verb} for {}", some(&waiting), some(&others)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_says_where_learners_are_how_fast_and_who_waits_for_whom() {
        let learners = [
            json!({ "id": 1, "name": "a", "host": "10.0.0.1", "step": 12, "steps_per_second": 3.25, "phase": "committed",
                    "silent_seconds": 0.4 }),
            json!({ "id": "b", "host": null, "step": 11, "steps_per_second": null, "phase": "idle",
                    "silent_seconds": 7.2 }),
        ];
        let said = |consistency, few| {
            let mut text = String::new();
            tell(&mut text, "  ", &learners, consistency, few);
            text
        };
        let lines = "  learner a on 10.0.0.1: step 12, 3.250 steps/s, committed, last heard of 0 s ago\n\
                     \x20 learner b: step 11, idle, last heard of 7 s ago\n";
        assert_eq!(said("sync", None), format!("{lines}  a waits for b\n"));
        assert_eq!(said("async", None), lines);
        assert!(said("sync", Some(1)).contains("  and 1 more learners\n  a waits for b\n"));
    }
}
