//! Progress bars for loading and moving models: on a terminal they are drawn, elsewhere they cost nothing.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar that counts bytes.
pub const BYTES: &str = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
/// A bar that counts anything.
pub const THINGS: &str = "{msg} {wide_bar} {pos}/{len}";
/// A bar that counts seconds.
pub const SECONDS: &str = "{msg} {wide_bar} {pos}/{len} s";

/// Progress of one long operation, hidden where stderr is not a terminal: logs are no place for a bar. Dropping it
/// erases the bar, which would garble the message of an error that follows.
pub fn bar(template: &str, total: u64, label: String) -> ProgressBar {
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style).with_message(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_valid_and_counting_past_the_end_is_harmless() {
        for template in [BYTES, THINGS, SECONDS] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
        let progress = bar(BYTES, 10, "model".to_owned());
        progress.inc(7);
        progress.inc(7);
        progress.finish_and_clear();
        progress.finish_and_clear();
    }
}
