//! A progress bar for loading and moving models: on a terminal it is drawn, elsewhere it costs nothing.

use std::io::{IsTerminal, stderr};

use indicatif::{ProgressBar, ProgressStyle};

/// Progress of one long operation. Dropping it unfinished erases the bar.
#[derive(Debug)]
pub struct Progress {
    /// None where stderr is not a terminal: logs are no place for a bar.
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Starts a bar for `total` bytes of what `label` names.
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

    fn new(total: u64, label: impl Into<String>, template: &str) -> Progress {
        if !stderr().is_terminal() {
            return Progress { bar: None };
        }
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        Progress { bar: Some(ProgressBar::new(total).with_style(style).with_message(label.into())) }
    }

    /// Whether anybody sees it.
    pub fn is_shown(&self) -> bool {
        self.bar.is_some()
    }

    /// So many of so many are done, and what is being done is called so.
    pub fn set(&self, done: u64, total: u64, label: impl Into<String>) {
        if let Some(bar) = &self.bar {
            bar.set_message(label.into());
            bar.set_length(total);
            bar.set_position(done);
        }
    }

    /// `bytes` more are done.
    pub fn inc(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// All is done: erases the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Progress {
    /// A bar left behind by an error would garble the message that follows.
    fn drop(&mut self) {
        self.finish();
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
