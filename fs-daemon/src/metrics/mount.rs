//! The metrics of a mount's models: of `gradfs mount`, and of `gradfs up`, where the only shard is in the
//! process.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libmodelio::client::ShardView;
use libmodelio::vocabulary::norm::Norm;
use libmodelio::vocabulary::transport_kind::TransportKind;

use super::page::{PHASES, PHASES_HELP, Page};
use crate::session::model::Model;

/// The page, from what `status.json` is made of.
///
/// # Errors
/// Fails only if the encoder refuses what is here.
pub fn page(models: &[Arc<Model>]) -> Result<String, prometheus::Error> {
    let mut page = Page::new();
    for model in models {
        add_state(&mut page, model);
        add_traffic(&mut page, model);
        add_waits(&mut page, model);
    }
    page.text()
}

fn add_state(page: &mut Page, model: &Model) {
    let (name, status) = (model.name.as_str(), model.job.status());
    let of_model = &[("model", name)];
    let help = "The newest version that can be read here.";
    page.gauge("gradfs_model_version", help, of_model, status.version.0 as f64);
    let help = "Learners of this mount in the job.";
    page.gauge("gradfs_learners", help, of_model, status.members.len() as f64);
    let late = status.late.as_ref().map(|(late, waited)| (&late.learners[..], late.more, *waited));
    page.waits(name, status.state.name(), late);
    let readers = model.whole().job.readers();
    let told = readers.iter().map(|of| (&*of.name, of.applied.map(|version| version.0), of.staged.0));
    page.readers(name, told, model.whole().job.state().held_by.len());
    let help = "Contributions that are part of a version, those of other mounts included.";
    page.counter("gradfs_contributions_total", help, of_model, status.contributions as f64);
    if let Some(norm) = status.norm.map(Norm::get).filter(|norm| norm.is_finite()) {
        let help = "The norm of the gradient behind the newest version; absent if it was not needed, or is NaN or Inf.";
        page.gauge("gradfs_gradient_norm", help, of_model, norm);
    }
    if let Some(rate) = model.job.controls().learning_rate_after(status.version) {
        let help = "The learning rate that the next version is made with; absent if the reducer has none.";
        page.gauge("gradfs_learning_rate", help, of_model, rate);
    }
    let help = "Blocks that were reduced before their commit; 0 on a network.";
    page.counter("gradfs_blocks_reduced_on_arrival_total", help, of_model, status.blocks_on_arrival as f64);
    if let Some((_, report, _)) = status.pull {
        let help = "Versions that were pulled from shards.";
        page.counter("gradfs_pulls_total", help, of_model, report.pulls as f64);
        for (metric, help, value) in [
            (
                "gradfs_pull_seconds",
                "How long the pull of a version takes, as a moving average.",
                report.pull,
            ),
            (
                "gradfs_open_interval_seconds",
                "The time between two opens of weights, as a moving average, of the learner that opens most often.",
                report.interval,
            ),
            (
                "gradfs_bubble_seconds",
                "The time from the end of a pull to the next open of weights, as a moving average.",
                report.bubble,
            ),
        ] {
            page.gauge(metric, help, of_model, value.unwrap_or_default().as_secs_f64());
        }
    }
    model.whole().job.status().shards.iter().for_each(|shard| add_shard(page, name, shard));
}

fn add_shard(page: &mut Page, model: &str, view: &ShardView) {
    let (shard, transport) = (view.shard.to_string(), view.transport.to_string());
    let of_shard = &[("model", model), ("shard", &*shard)];
    let address = view.address.as_deref().unwrap_or_default();
    page.gauge(
        "gradfs_transport_info",
        "1 for the transport by which bytes go to a shard and come from it.",
        &[("model", model), ("shard", &shard), ("address", address), ("transport", &transport)],
        1.0,
    );
    let help = "1 if there is a connection to a shard.";
    page.gauge("gradfs_shard_connected", help, of_shard, f64::from(view.connected));
    let help = "For how long the job has been waiting for a shard that cannot be reached; 0 if it can.";
    let away = view.away.map_or(0, |away| away.as_secs());
    page.gauge("gradfs_shard_unreachable_seconds", help, of_shard, away as f64);
    for (wanted, fell_back) in fallbacks(view) {
        page.gauge(
            "gradfs_transport_fallback",
            "1 if another transport was taken than was looked for first; status.json and the log tell why.",
            &[("model", model), ("shard", &shard), ("wanted", wanted)],
            f64::from(fell_back),
        );
    }
}

fn add_traffic(page: &mut Page, model: &Model) {
    let (name, traffic) = (model.name.as_str(), &model.traffic);
    for (metric, help, bytes) in [
        ("gradfs_written_bytes_total", "Bytes that programs have written here.", &traffic.written),
        (
            "gradfs_reduced_on_arrival_bytes_total",
            "Bytes that were taken straight from where the program had them, without a copy into staging memory.",
            &traffic.reduced_on_arrival,
        ),
        ("gradfs_staged_bytes_total", "Bytes that were copied into staging memory.", &traffic.staged),
    ] {
        page.counter(metric, help, &[("model", name)], bytes.load(Ordering::Relaxed) as f64);
    }
    if let Some(payloads) = model.whole().job.payload() {
        page.payload(name, &payloads);
    }
    if let Some(via) = model.job.relays() {
        let of_model = &[("model", name)];
        let help = "1 if versions are pulled from another mount at the moment.";
        page.gauge("gradfs_relay_connected", help, of_model, f64::from(via.connected));
        let help = "Connections by which other mounts pull from this one.";
        page.gauge("gradfs_relay_followers", help, of_model, via.followers.len() as f64);
        let help = "Payload that was sent to other mounts.";
        page.counter("gradfs_relayed_bytes_total", help, of_model, via.relayed_bytes as f64);
        let help = "Blocks that were pulled from shards, because another mount did not send them.";
        page.counter("gradfs_relay_replaced_blocks_total", help, of_model, via.replaced_blocks as f64);
    }
    let (push, pull) = model.whole().times.rates(&model.whole().job).unzip();
    for (direction, rate) in [("push", push), ("pull", pull)] {
        let Some(rate) = rate else { continue };
        let help = "Payload that was pushed and pulled, over the last 10 seconds.";
        let labels = &[("model", name), ("direction", direction)];
        page.gauge("gradfs_payload_bytes_per_second", help, labels, rate);
    }
}

/// What learners wait for.
fn add_waits(page: &mut Page, model: &Model) {
    let (name, times) = (model.name.as_str(), &model.times);
    let help = "Of each step of a learner here, how long its program has waited inside calls.";
    page.histogram("gradfs_stall_seconds", help, &[("model", name)], &times.stall.read());
    let help = "How many versions each one that was opened was behind the newest known one.";
    page.histogram("gradfs_staleness_versions", help, &[("model", name)], &times.staleness.read());
    let (phases, is_here) = model.job.phases();
    let pull = (!is_here).then_some(("pull", &phases.pull));
    for (phase, histogram) in [
        ("staging", &times.staging),
        ("others", &phases.others),
        (if is_here { "reduce" } else { "wire" }, &phases.wire),
        ("conclude", &phases.conclude),
        ("open", &times.open),
    ]
    .into_iter()
    .chain(pull)
    {
        page.histogram(PHASES, PHASES_HELP, &[("model", name), ("phase", phase)], &histogram.read());
    }
    for learner in model.learners() {
        let (of_learner, stall) = (&[("model", name), ("learner", &*learner.name)], learner.times.stall());
        let help = "How long the program of a learner has waited inside calls since it joined.";
        page.counter("gradfs_learner_stall_seconds_total", help, of_learner, stall.stall.as_secs_f64());
        let help = "The share of its last steps that the program of a learner has waited, 0 to 1.";
        page.gauge("gradfs_learner_stall_share", help, of_learner, stall.share);
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
