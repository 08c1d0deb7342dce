//! The metrics of a mount's models: of `gradfs mount`, and of `gradfs up`, where the only shard is in the
//! process.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libmodelio::client::ShardView;
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::transport_kind::TransportKind;

use super::page::{Histograms, JobWaits, Number, PHASES, PHASES_HELP, Page, Payload, TotalSeconds};
use crate::session::model::Model;

/// The page, from what `status.json` is made of.
///
/// # Errors
/// Fails only if names or labels here are wrong.
pub fn page(models: &[Arc<Model>]) -> Result<String, prometheus::Error> {
    let page = Page::new()?;
    let of_model = &["model"];
    let of_shard = &["model", "shard"];
    let version =
        page.gauge("gradfs_model_version", "The newest version that can be read here.", of_model)?;
    let learners = page.gauge("gradfs_learners", "Learners of this mount in the job.", of_model)?;
    let transport = page.gauge(
        "gradfs_transport_info",
        "1 for the transport by which bytes go to a shard and come from it.",
        &["model", "shard", "address", "transport"],
    )?;
    let fallback = page.gauge(
        "gradfs_transport_fallback",
        "1 if another transport was taken than was looked for first; status.json and the log tell why.",
        &["model", "shard", "wanted"],
    )?;
    let connected =
        page.gauge("gradfs_shard_connected", "1 if there is a connection to a shard.", of_shard)?;
    let away = page.gauge(
        "gradfs_shard_unreachable_seconds",
        "For how long the job has been waiting for a shard that cannot be reached; 0 if it can.",
        of_shard,
    )?;
    let waits_of_job = JobWaits::new(&page)?;
    let contributions = page.counter(
        "gradfs_contributions_total",
        "Contributions that are part of a version, those of other mounts included.",
        of_model,
    )?;
    let norm = page.number(
        "gradfs_gradient_norm",
        "The norm of the gradient behind the newest version; absent if it was not needed, or is NaN or Inf.",
        of_model,
    )?;
    let rate = page.number(
        "gradfs_learning_rate",
        "The learning rate that the next version is made with; absent if the reducer has none.",
        of_model,
    )?;
    let written =
        page.counter("gradfs_written_bytes_total", "Bytes that programs have written here.", of_model)?;
    let reduced = page.counter(
        "gradfs_reduced_on_arrival_bytes_total",
        "Bytes that were taken straight from where the program had them, without a copy into staging memory.",
        of_model,
    )?;
    let staged =
        page.counter("gradfs_staged_bytes_total", "Bytes that were copied into staging memory.", of_model)?;
    let blocks = page.counter(
        "gradfs_blocks_reduced_on_arrival_total",
        "Blocks that were reduced before their commit; 0 on a network.",
        of_model,
    )?;
    let pulls = page.counter("gradfs_pulls_total", "Versions that were pulled from shards.", of_model)?;
    let pull = page.seconds(
        "gradfs_pull_seconds",
        "How long the pull of a version takes, as a moving average.",
        of_model,
    )?;
    let interval = page.seconds(
        "gradfs_open_interval_seconds",
        "The time between two opens of weights, as a moving average, of the learner that opens most often.",
        of_model,
    )?;
    let bubble = page.seconds(
        "gradfs_bubble_seconds",
        "The time from the end of a pull to the next open of weights, as a moving average.",
        of_model,
    )?;
    let payload = Payload::new(&page)?;
    let waits = Waits::new(&page)?;
    for model in models {
        let name = model.name.as_str();
        let status = model.job.status();
        version.set(&[name], status.version.0)?;
        learners.set(&[name], status.members.len() as u64)?;
        let late = status.late.as_ref();
        waits_of_job.tell(
            name,
            status.state.name(),
            late.map(|(late, waited)| (&late.learners[..], late.more, *waited)),
        )?;
        contributions.total(&[name], status.contributions)?;
        for (of, value) in [
            (&norm, status.norm.map(Norm::get).filter(|norm| norm.is_finite())),
            (&rate, model.job.controls().learning_rate_after(status.version)),
        ] {
            value.map_or(Ok(()), |value| of.set(&[name], value))?;
        }
        blocks.total(&[name], status.blocks_on_arrival)?;
        written.total(&[name], model.traffic.written.load(Ordering::Relaxed))?;
        reduced.total(&[name], model.traffic.reduced_on_arrival.load(Ordering::Relaxed))?;
        staged.total(&[name], model.traffic.staged.load(Ordering::Relaxed))?;
        if let Some((_, report)) = status.pull {
            pulls.total(&[name], report.pulls)?;
            for (of, value) in [(&pull, report.pull), (&interval, report.interval), (&bubble, report.bubble)]
            {
                of.set(&[name], value.unwrap_or_default())?;
            }
        }
        if let Some(payloads) = model.job.payload() {
            payload.total(name, &payloads)?;
        }
        waits.tell(model)?;
        for view in &status.shards {
            let shard = view.shard.to_string();
            let address = view.address.as_deref().unwrap_or_default();
            transport.set(&[name, &shard, address, &view.transport.to_string()], 1)?;
            connected.set(&[name, &shard], view.connected.into())?;
            away.set(&[name, &shard], view.away.map_or(0, |away| away.as_secs()))?;
            for (wanted, fell_back) in fallbacks(view) {
                fallback.set(&[name, &shard, wanted], fell_back.into())?;
            }
        }
    }
    page.text()
}

/// What learners wait for.
struct Waits {
    stall: Histograms,
    staleness: Histograms,
    phases: Histograms,
    stalled: TotalSeconds,
    share: Number,
    rates: Number,
}

impl Waits {
    fn new(page: &Page) -> Result<Waits, prometheus::Error> {
        let of_learner = &["model", "learner"];
        Ok(Waits {
            stall: page.histograms(
                "gradfs_stall_seconds",
                "Of each step of a learner here, how long its program has waited inside calls.",
                &["model"],
            )?,
            staleness: page.histograms(
                "gradfs_staleness_versions",
                "How many versions each one that was opened was behind the newest known one.",
                &["model"],
            )?,
            phases: page.histograms(PHASES, PHASES_HELP, &["model", "phase"])?,
            stalled: page.total_seconds(
                "gradfs_learner_stall_seconds_total",
                "How long the program of a learner has waited inside calls since it joined.",
                of_learner,
            )?,
            share: page.number(
                "gradfs_learner_stall_share",
                "The share of its last steps that the program of a learner has waited, 0 to 1.",
                of_learner,
            )?,
            rates: page.number(
                "gradfs_payload_bytes_per_second",
                "Payload that was pushed and pulled, over the last 10 seconds.",
                &["model", "direction"],
            )?,
        })
    }

    fn tell(&self, model: &Model) -> Result<(), prometheus::Error> {
        let (name, times) = (model.name.as_str(), &model.times);
        self.stall.tell(&[name], &times.stall.read())?;
        self.staleness.tell(&[name], &times.staleness.read())?;
        let (phases, is_here) = model.job.phases();
        let blocks = if is_here { "reduce" } else { "wire" };
        for (phase, histogram) in [
            ("staging", &times.staging),
            ("others", &phases.others),
            (blocks, &phases.wire),
            ("conclude", &phases.conclude),
            ("open", &times.open),
        ] {
            self.phases.tell(&[name, phase], &histogram.read())?;
        }
        if !is_here {
            self.phases.tell(&[name, "pull"], &phases.pull.read())?;
        }
        for learner in model.learners() {
            let stall = learner.times.stall();
            self.stalled.total(&[name, &learner.name], stall.stall)?;
            self.share.set(&[name, &learner.name], stall.share)?;
        }
        if let Some((push, pull)) = times.rates(&model.job) {
            self.rates.set(&[name, "push"], push)?;
            self.rates.set(&[name, "pull"], pull)?;
        }
        Ok(())
    }
}

/// The transports that were tried before the one in use. A transport that is required is never replaced.
fn fallbacks(view: &ShardView) -> [(&'static str, bool); 2] {
    let is_memory = view.transport == TransportKind::SharedMemory;
    [
        ("shm", view.no_memory.is_some() && !is_memory),
        // Shared memory comes before it.
        ("rdma", view.no_rdma.is_some() && !is_memory && view.transport != TransportKind::Rdma),
    ]
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::ids::ShardId;

    use super::*;

    #[test]
    fn a_fallback_is_a_path_that_was_tried_and_not_taken() {
        use TransportKind::{InProcess, Rdma, SharedMemory, Tcp};
        for (transport, no_memory, no_rdma, shm, rdma) in [
            (InProcess, false, false, false, false),
            (Tcp, false, false, false, false),
            (Tcp, true, false, true, false),
            (Tcp, false, true, false, true),
            (Tcp, true, true, true, true),
            (Rdma, true, false, true, false),
            // With `--transport rdma` or `shm` there is no other way: nothing was taken in its place.
            (Rdma, false, true, false, false),
            (SharedMemory, true, false, false, false),
            (SharedMemory, false, true, false, false),
        ] {
            let why = |is: bool| is.then(|| "so".to_owned());
            let view = ShardView {
                shard: ShardId(1),
                address: None,
                transport,
                checksum: None,
                coding: None,
                full_because: None,
                blocks: 1,
                no_memory: why(no_memory),
                no_rdma: why(no_rdma),
                lost: None,
                connected: true,
                away: None,
            };
            assert_eq!(fallbacks(&view), [("shm", shm), ("rdma", rdma)], "{view:?}");
        }
    }
}
