//! The page of a scrape: names, labels and values, in Prometheus' text format.

use std::collections::BTreeMap;
use std::time::Duration;

use libmodelio::observe::histogram::Counts;
use libmodelio::transport::tally::Payloads;
use libmodelio::vocabulary::phase::JobPhase;
use prometheus::TextEncoder;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

/// The histograms of phases, of mounts and of shards.
pub const PHASES: &str = "gradfs_phase_seconds";
pub const PHASES_HELP: &str = "How long each phase of a step takes.";

/// The labels of a metric, with their values.
pub type Labels<'a> = &'a [(&'a str, &'a str)];

/// One answer. It is filled for one scrape and then written, so a thing that is gone, such as a shard that
/// models have left, has no line any more.
pub struct Page(BTreeMap<&'static str, MetricFamily>);

impl Page {
    /// A page that says which program it is of.
    pub fn new() -> Page {
        let mut page = Page(BTreeMap::new());
        let rdma = if gradfs_rdma::IS_BUILT_IN { "true" } else { "false" };
        page.gauge(
            "gradfs_build_info",
            "Which gradfs this is, and whether it was built with RDMA.",
            &[("version", env!("CARGO_PKG_VERSION")), ("rdma", rdma)],
            1.0,
        );
        page
    }

    /// Adds a value that may rise and fall.
    pub fn gauge(&mut self, name: &'static str, help: &str, labels: Labels<'_>, value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        self.add(name, help, MetricType::GAUGE, labels, |metric| metric.set_gauge(gauge));
    }

    /// Adds a total that only rises.
    pub fn counter(&mut self, name: &'static str, help: &str, labels: Labels<'_>, total: f64) {
        let mut counter = Counter::default();
        counter.set_value(total);
        self.add(name, help, MetricType::COUNTER, labels, |metric| metric.set_counter(counter));
    }

    /// Adds counts of values by their size.
    pub fn histogram(&mut self, name: &'static str, help: &str, labels: Labels<'_>, counts: &Counts) {
        let mut histogram = Histogram::default();
        histogram.set_sample_count(counts.count);
        histogram.set_sample_sum(counts.sum);
        let bucket = |&(bound, count): &(f64, u64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(bound);
            bucket.set_cumulative_count(count);
            bucket
        };
        histogram.set_bucket(counts.up_to.iter().map(bucket).collect());
        self.add(name, help, MetricType::HISTOGRAM, labels, |metric| metric.set_histogram(histogram));
    }

    fn add(
        &mut self,
        name: &'static str,
        help: &str,
        kind: MetricType,
        labels: Labels<'_>,
        set: impl FnOnce(&mut Metric),
    ) {
        let label = |&(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        };
        let mut metric = Metric::from_label(labels.iter().map(label).collect());
        set(&mut metric);
        let family = self.0.entry(name).or_default();
        family.set_name(name.to_owned());
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.mut_metric().push(metric);
    }

    /// The page as text.
    pub fn text(self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.0.into_values().collect::<Vec<_>>())
    }

    /// Adds what the job of a model waits for: `late` are the names of learners, how many more there are, and for how
    /// long they have been waited for.
    pub fn waits(&mut self, model: &str, state: &str, late: Option<(&[String], usize, Duration)>) {
        for phase in JobPhase::ALL.map(JobPhase::name) {
            self.gauge(
                "gradfs_job_state",
                "1 for the state that the job of a model is in, 0 for the others.",
                &[("model", model), ("state", phase)],
                f64::from(phase == state),
            );
        }
        let (names, more, waited) = late.unwrap_or_default();
        for name in names {
            self.gauge(
                "gradfs_learner_waited_for_seconds",
                "For how long other learners have been waiting for this one; absent before 5 s.",
                &[("model", model), ("learner", name)],
                waited.as_secs_f64(),
            );
        }
        self.gauge(
            "gradfs_learners_waited_for",
            "How many learners others have been waiting for, for 5 s at least; those too that have yet to join.",
            &[("model", model)],
            (names.len() + more) as f64,
        );
    }

    /// Adds the readers of a model: the name of each, what it has applied, and what its mount has of versions.
    pub fn readers<'a>(
        &mut self,
        model: &str,
        readers: impl IntoIterator<Item = (&'a str, Option<u64>, u64)>,
        held_by: usize,
    ) {
        for (reader, applied, staged) in readers {
            let labels = &[("model", model), ("reader", reader)];
            let help = "The version that a reader runs; absent if it has run none yet.";
            if let Some(applied) = applied {
                self.gauge("gradfs_reader_applied_version", help, labels, applied as f64);
            }
            let help = "The newest version whose bytes a reader's mount has.";
            self.gauge("gradfs_reader_staged_version", help, labels, staged as f64);
        }
        let help = "How many readers the next version waits for; 16 stands for more, too.";
        self.gauge("gradfs_readers_waited_for", help, &[("model", model)], held_by as f64);
    }

    /// Adds the payload of a model.
    pub fn payload(&mut self, model: &str, payloads: &Payloads) {
        for (direction, moved, copied) in [
            ("push", payloads.pushed_bytes, payloads.push_copied_bytes),
            ("pull", payloads.pulled_bytes, payloads.pull_copied_bytes),
        ] {
            let labels = &[("model", model), ("direction", direction)];
            let help =
                "Payload between learners and shards elsewhere: pushed to shards, or pulled from them.";
            self.counter("gradfs_payload_bytes_total", help, labels, moved as f64);
            let help = "Of it, what a CPU has copied in this process.";
            self.counter("gradfs_payload_copied_bytes_total", help, labels, copied as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_text_that_prometheus_reads() {
        let mut page = Page::new();
        page.gauge("gradfs_x", "Why.", &[("model", "a\"b\\c\nd")], (u64::MAX >> 12) as f64);
        let text = page.text().unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let rdma = gradfs_rdma::IS_BUILT_IN;
        assert_eq!(
            text,
            format!(
                "# HELP gradfs_build_info Which gradfs this is, and whether it was built with RDMA.\n\
                 # TYPE gradfs_build_info gauge\n\
                 gradfs_build_info{{version=\"{version}\",rdma=\"{rdma}\"}} 1\n\
                 # HELP gradfs_x Why.\n\
                 # TYPE gradfs_x gauge\n\
                 gradfs_x{{model=\"a\\\"b\\\\c\\nd\"}} 4503599627370495\n"
            )
        );
    }

    #[test]
    fn a_histogram_tells_its_counts_and_the_values_above_all_bounds() {
        let mut page = Page::new();
        let counts = Counts { up_to: vec![(0.001, 2), (1.0, 3)], count: 4, sum: 12.5 };
        page.histogram("gradfs_y_seconds", "Why.", &[("model", "m"), ("phase", "wire")], &counts);
        let text = page.text().unwrap();
        let told = "# TYPE gradfs_y_seconds histogram\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"0.001\"} 2\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"1\"} 3\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"+Inf\"} 4\n\
                    gradfs_y_seconds_sum{model=\"m\",phase=\"wire\"} 12.5\n\
                    gradfs_y_seconds_count{model=\"m\",phase=\"wire\"} 4\n";
        assert!(text.contains(told), "{text}");
    }
}
