//! A progress bar for loading and moving models: on a terminal it is drawn, elsewhere it costs nothing.

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of one long operation, hidden where stderr is not a terminal: logs are no place for a bar. Dropping it
/// erases the bar, which would garble the message of an error that follows.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Starts a bar for `total` bytes; `label` names them.
    pub fn bytes(total: u64, label: impl Into<String>) -> Progress {
        Progress::new(
            total,
            label,
            "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
        )
    }

    /// Starts a bar for things that are not known yet: see [`Self::set`].
    pub fn things(label: impl Into<String>) -> Progress {
        Progress::new(0, label, "{msg} {wide_bar} {pos}/{len}")
    }

    /// Starts a bar for so many seconds.
    pub fn seconds(total: u64, label: impl Into<String>) -> Progress {
        Progress::new(total, label, "{msg} {wide_bar} {pos}/{len} s")
    }

    /// So much is done by now.
    pub fn set_position(&self, done: u64) {
        self.0.set_position(done);
    }

    fn new(total: u64, label: impl Into<String>, template: &str) -> Progress {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress(ProgressBar::new(total).with_style(style).with_message(label.into()))
    }

    /// Whether the bar is visible.
    pub fn is_shown(&self) -> bool {
        !self.0.is_hidden()
    }

    /// Shows `done` of `total`, and `label` as the current work.
    pub fn set(&self, done: u64, total: u64, label: impl Into<String>) {
        self.0.set_message(label.into());
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// `bytes` more are done.
    pub fn inc(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// All is done: erases the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_is_valid_and_counting_past_the_end_is_harmless() {
        let progress = Progress::bytes(10, "model");
        progress.inc(7);
        progress.inc(7);
        progress.finish();
        progress.finish();
        let progress = Progress::things("moving");
        progress.set(1, 2, "still moving");
    }
}
