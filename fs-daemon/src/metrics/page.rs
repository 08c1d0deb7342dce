//! The page of a scrape: names, labels and values, in Prometheus' text format.

use std::time::Duration;

use libmodelio::transport::tally::Payloads;
use prometheus::core::{AtomicU64, GenericGaugeVec};
use prometheus::{GaugeVec, IntCounterVec, Opts, Registry, TextEncoder};

/// One answer. It is filled for one scrape and then written, so a thing that is gone, such as a shard that
/// models have left, has no line any more.
pub struct Page(Registry);

/// Values of one name that go up and down, by labels.
pub struct Gauge(GenericGaugeVec<AtomicU64>);

/// Durations of one name, by labels.
pub struct Seconds(GaugeVec);

/// Totals of one name, by labels.
pub struct Counter(IntCounterVec);

impl Page {
    /// With what every program of gradfs tells.
    pub fn new() -> Result<Page, prometheus::Error> {
        let page = Page(Registry::new());
        let info = page.gauge(
            "gradfs_build_info",
            "Which gradfs this is, and whether it was built with RDMA.",
            &["version", "rdma"],
        )?;
        info.set(&[env!("CARGO_PKG_VERSION"), if cfg!(feature = "rdma") { "true" } else { "false" }], 1)?;
        Ok(page)
    }

    pub fn gauge(&self, name: &str, help: &str, labels: &[&str]) -> Result<Gauge, prometheus::Error> {
        let values = GenericGaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(values.clone()))?;
        Ok(Gauge(values))
    }

    pub fn seconds(&self, name: &str, help: &str, labels: &[&str]) -> Result<Seconds, prometheus::Error> {
        let values = GaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(values.clone()))?;
        Ok(Seconds(values))
    }

    pub fn counter(&self, name: &str, help: &str, labels: &[&str]) -> Result<Counter, prometheus::Error> {
        let totals = IntCounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(totals.clone()))?;
        Ok(Counter(totals))
    }

    /// The text. Names without a value are not in it.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        TextEncoder::new().encode_to_string(&self.0.gather())
    }
}

impl Gauge {
    pub fn set(&self, labels: &[&str], value: u64) -> Result<(), prometheus::Error> {
        self.0.get_metric_with_label_values(labels)?.set(value);
        Ok(())
    }
}

impl Seconds {
    pub fn set(&self, labels: &[&str], value: Duration) -> Result<(), prometheus::Error> {
        self.0.get_metric_with_label_values(labels)?.set(value.as_secs_f64());
        Ok(())
    }
}

impl Counter {
    /// The total so far. To be called once for the same labels.
    pub fn total(&self, labels: &[&str], total: u64) -> Result<(), prometheus::Error> {
        self.0.get_metric_with_label_values(labels)?.inc_by(total);
        Ok(())
    }
}

/// Payload between learners and shards, by direction.
pub struct Payload {
    moved: Counter,
    copied: Counter,
}

impl Payload {
    pub fn new(page: &Page) -> Result<Payload, prometheus::Error> {
        let labels = &["model", "direction"];
        Ok(Payload {
            moved: page.counter(
                "gradfs_payload_bytes_total",
                "Payload between learners and shards elsewhere: pushed to shards, or pulled from them.",
                labels,
            )?,
            copied: page.counter(
                "gradfs_payload_copied_bytes_total",
                "Of it, what a CPU has copied in this process.",
                labels,
            )?,
        })
    }

    /// Adds the counts so far.
    pub fn total(&self, model: &str, payloads: &Payloads) -> Result<(), prometheus::Error> {
        self.moved.total(&[model, "push"], payloads.pushed_bytes)?;
        self.copied.total(&[model, "push"], payloads.push_copied_bytes)?;
        self.moved.total(&[model, "pull"], payloads.pulled_bytes)?;
        self.copied.total(&[model, "pull"], payloads.pull_copied_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_text_that_prometheus_reads() {
        let page = Page::new().unwrap();
        let versions = page.gauge("gradfs_x", "Why.", &["model"]).unwrap();
        versions.set(&["a\"b\\c\nd"], u64::MAX >> 12).unwrap();
        page.counter("gradfs_unused_total", "Never.", &["model"]).unwrap();
        let text = page.text().unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let rdma = cfg!(feature = "rdma");
        assert_eq!(
            text,
            format!(
                "# HELP gradfs_build_info Which gradfs this is, and whether it was built with RDMA.\n\
                 # TYPE gradfs_build_info gauge\n\
                 gradfs_build_info{{rdma=\"{rdma}\",version=\"{version}\"}} 1\n\
                 # HELP gradfs_x Why.\n\
                 # TYPE gradfs_x gauge\n\
                 gradfs_x{{model=\"a\\\"b\\\\c\\nd\"}} 4503599627370495\n"
            )
        );
    }

    #[test]
    fn a_mistake_is_an_error() {
        let page = Page::new().unwrap();
        let versions = page.gauge("gradfs_x", "Why.", &["model"]).unwrap();
        assert!(versions.set(&["a", "b"], 1).is_err());
        assert!(page.gauge("gradfs_x", "Why.", &["model"]).is_err());
        assert!(page.counter("no name", "Why.", &[]).is_err());
    }
}
