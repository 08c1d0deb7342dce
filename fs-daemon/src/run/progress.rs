//! The line that `gradfs run` prints each second.

use std::time::Duration;

use super::job::Status;

/// Makes lines from one status to the next.
#[derive(Debug, Default)]
pub struct Lines {
    last: Option<(Duration, u64)>,
}

impl Lines {
    /// The line at `now`, of the learners `own`, for which there are `processes`.
    pub fn next(&mut self, now: Duration, status: &Status, own: &[String], processes: usize) -> String {
        let before = self.last.replace((now, status.version));
        let rate = before.and_then(|(then, version)| {
            let took = now.checked_sub(then)?.as_secs_f64();
            (took > 0.0).then(|| status.version.saturating_sub(version) as f64 / took)
        });
        let shares: Vec<f64> = status
            .learners
            .iter()
            .filter(|learner| own.contains(&learner.id))
            .filter_map(|learner| learner.stall_share)
            .collect();
        let mut line = format!("version {}", status.version);
        if let Some(rate) = rate {
            line.push_str(&format!(", {rate:.1} versions/s"));
        }
        if !shares.is_empty() {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            line.push_str(&format!(", stall {:.0} %", mean * 100.0));
        }
        line.push_str(&format!(", {processes} learner{}", if processes == 1 { "" } else { "s" }));
        if status.state != "running" {
            line.push_str(&format!(", job {}", status.state));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::job::Learner;

    #[test]
    fn a_line_has_the_rate_and_the_stall_of_its_own_learners() {
        let learner =
            |id: &str, share| Learner { id: id.into(), incarnation: 1, step: 1, stall_share: Some(share) };
        let learners = vec![learner("run-0", 0.1), learner("run-1", 0.3), learner("other", 0.9)];
        let own = ["run-0".to_owned(), "run-1".to_owned()];
        let mut status = Status { state: "running".into(), version: 10, learners, ..Status::default() };
        let mut lines = Lines::default();
        assert_eq!(lines.next(Duration::ZERO, &status, &own, 2), "version 10, stall 20 %, 2 learners");
        status.version = 25;
        status.learners.clear();
        status.state = "forming".into();
        let line = lines.next(Duration::from_secs(2), &status, &own, 1);
        assert_eq!(line, "version 25, 7.5 versions/s, 1 learner, job forming");
    }
}
