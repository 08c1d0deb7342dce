//! The page of a scrape: names, labels and values, in Prometheus' text format.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::observe::histogram::Counts;
use libmodelio::transport::tally::Payloads;
use libmodelio::vocabulary::phase::JobPhase;
use parking_lot::Mutex;
use prometheus::core::{AtomicU64, Collector, Desc, GenericGaugeVec};
use prometheus::proto::{Bucket, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{CounterVec, GaugeVec, IntCounterVec, Opts, Registry, TextEncoder};

/// The histograms of phases, of mounts and of shards.
pub const PHASES: &str = "gradfs_phase_seconds";
pub const PHASES_HELP: &str = "How long each phase of a step takes.";

/// One answer. It is filled for one scrape and then written, so a thing that is gone, such as a shard that
/// models have left, has no line any more.
pub struct Page(Registry);

/// Values of one name that go up and down, by labels.
pub struct Gauge(GenericGaugeVec<AtomicU64>);

/// Durations of one name, by labels.
pub struct Seconds(GaugeVec);

/// Totals of one name, by labels.
pub struct Counter(IntCounterVec);

/// Durations of one name that only grow, by labels.
pub struct TotalSeconds(CounterVec);

/// Numbers of one name, by labels.
pub struct Number(GaugeVec);

/// Histograms of one name, by labels. Their counts are kept elsewhere: the page only tells them.
#[derive(Clone)]
pub struct Histograms(Arc<Told>);

struct Told {
    desc: Desc,
    labels: Vec<String>,
    of: Mutex<Vec<Metric>>,
}

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

    pub fn total_seconds(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<TotalSeconds, prometheus::Error> {
        let totals = CounterVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(totals.clone()))?;
        Ok(TotalSeconds(totals))
    }

    pub fn number(&self, name: &str, help: &str, labels: &[&str]) -> Result<Number, prometheus::Error> {
        let values = GaugeVec::new(Opts::new(name, help), labels)?;
        self.0.register(Box::new(values.clone()))?;
        Ok(Number(values))
    }

    pub fn histograms(
        &self,
        name: &str,
        help: &str,
        labels: &[&str],
    ) -> Result<Histograms, prometheus::Error> {
        let labels: Vec<String> = labels.iter().map(|label| (*label).to_owned()).collect();
        let desc = Desc::new(name.to_owned(), help.to_owned(), labels.clone(), HashMap::new())?;
        let told = Histograms(Arc::new(Told { desc, labels, of: Mutex::default() }));
        self.0.register(Box::new(told.clone()))?;
        Ok(told)
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

impl TotalSeconds {
    /// The total so far. To be called once for the same labels.
    pub fn total(&self, labels: &[&str], total: Duration) -> Result<(), prometheus::Error> {
        self.0.get_metric_with_label_values(labels)?.inc_by(total.as_secs_f64());
        Ok(())
    }
}

impl Number {
    pub fn set(&self, labels: &[&str], value: f64) -> Result<(), prometheus::Error> {
        self.0.get_metric_with_label_values(labels)?.set(value);
        Ok(())
    }
}

impl Histograms {
    /// The counts so far. To be called once for the same labels.
    pub fn tell(&self, labels: &[&str], counts: &Counts) -> Result<(), prometheus::Error> {
        if labels.len() != self.0.labels.len() {
            let (expect, got) = (self.0.labels.len(), labels.len());
            return Err(prometheus::Error::InconsistentCardinality { expect, got });
        }
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
        let label = |(name, value): (&String, &&str)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.clone());
            pair.set_value((*value).to_owned());
            pair
        };
        let mut metric = Metric::from_label(self.0.labels.iter().zip(labels).map(label).collect());
        metric.set_histogram(histogram);
        self.0.of.lock().push(metric);
        Ok(())
    }
}

impl Collector for Histograms {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.0.desc]
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut family = MetricFamily::default();
        family.set_name(self.0.desc.fq_name.clone());
        family.set_help(self.0.desc.help.clone());
        family.set_field_type(MetricType::HISTOGRAM);
        family.set_metric(self.0.of.lock().clone());
        vec![family]
    }
}

/// A job's state, and the learners that it waits for.
pub struct JobWaits {
    state: Gauge,
    learner: Number,
    more: Gauge,
}

impl JobWaits {
    pub fn new(page: &Page) -> Result<JobWaits, prometheus::Error> {
        Ok(JobWaits {
            state: page.gauge(
                "gradfs_job_state",
                "1 for the state that the job of a model is in, 0 for the others.",
                &["model", "state"],
            )?,
            learner: page.number(
                "gradfs_learner_waited_for_seconds",
                "For how long other learners have been waiting for this one; absent before 5 s.",
                &["model", "learner"],
            )?,
            more: page.gauge(
                "gradfs_learners_waited_for",
                "How many learners others have been waiting for, for 5 s at least; those too that have yet to join.",
                &["model"],
            )?,
        })
    }

    /// `late`: the names of learners that are waited for, how many more there are, and for how long.
    pub fn tell(
        &self,
        model: &str,
        state: &str,
        late: Option<(&[String], usize, Duration)>,
    ) -> Result<(), prometheus::Error> {
        for phase in JobPhase::ALL {
            self.state.set(&[model, phase.name()], (phase.name() == state).into())?;
        }
        let (names, more, waited) = late.unwrap_or_default();
        for name in names {
            self.learner.set(&[model, name], waited.as_secs_f64())?;
        }
        self.more.set(&[model], (names.len() + more) as u64)
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
    fn a_histogram_tells_its_counts_and_the_values_above_all_bounds() {
        let page = Page::new().unwrap();
        let phases = page.histograms("gradfs_y_seconds", "Why.", &["model", "phase"]).unwrap();
        let counts = Counts { up_to: vec![(0.001, 2), (1.0, 3)], count: 4, sum: 12.5 };
        phases.tell(&["m", "wire"], &counts).unwrap();
        assert!(phases.tell(&["m"], &counts).is_err());
        let text = page.text().unwrap();
        let told = "# TYPE gradfs_y_seconds histogram\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"0.001\"} 2\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"1\"} 3\n\
                    gradfs_y_seconds_bucket{model=\"m\",phase=\"wire\",le=\"+Inf\"} 4\n\
                    gradfs_y_seconds_sum{model=\"m\",phase=\"wire\"} 12.5\n\
                    gradfs_y_seconds_count{model=\"m\",phase=\"wire\"} 4\n";
        assert!(text.contains(told), "{text}");
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
