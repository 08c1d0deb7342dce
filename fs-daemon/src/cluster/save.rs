//! `gradfs save`: a snapshot of a job that runs, written into a directory.

use std::time::{Duration, Instant};

use libmodelio::admin::AdminError;
use libmodelio::wire::{Message, ModelRecord, Refusal, ShardRecord};
use ps_backend::core::JobRecord;
use ps_backend::snapshot::{Fetched, Head, Shards, SnapshotError, Source, Stream, StreamHead, Writer};
use serde::Deserialize;

use super::{coordinated, deadline, registry, request};
use crate::config::cluster::{SaveConfig, SavedModel};
use crate::config::registry::RegistryAt;
use crate::error::{DAEMON_ENDED, Error};
use crate::progress;
use crate::signals::Interrupt;

/// Longest wait for the copies on the shards, whose memory has to be found first.
const CAPTURING: Duration = Duration::from_secs(330);
/// How often it is tried when the model moves meanwhile.
const TRIES: u32 = 3;

/// Saves a model.
///
/// # Errors
/// Fails with the reason why the model cannot be saved. The old contents of the directory are then still
/// there.
pub fn run(config: &SaveConfig) -> Result<(), Error> {
    // Before there are threads.
    let interrupt = Interrupt::install()?;
    // Checked first, so that nothing is held up for a directory that cannot be written.
    Writer::check(&config.dir, config.replaces)?;
    let model = match &config.model {
        SavedModel::Named(name, registry) => return save_from_shards(config, name, registry, &interrupt),
        SavedModel::Mounted(model) => model,
    };
    let (head, stream) = Stream::open(&model.join("snapshot")).map_err(|error| {
        let hint = hint(&error);
        Error::new(format!("no snapshot can be taken of {}", model.display())).caused_by(error).hint(hint)
    })?;
    match (head, stream) {
        (StreamHead::Here(head), Some(mut stream)) => write(config, *head, &mut stream, &interrupt),
        (StreamHead::Elsewhere { registry, model }, _) => {
            let registry = RegistryAt::parse(&registry).map_err(|error| error.of("the mount's registry"))?;
            save_from_shards(config, &model, &registry, &interrupt)
        }
        (StreamHead::Here(_), None) => Err(Error::new("the snapshot ends before it begins")),
    }
}

/// The advice for a mount whose snapshot does not open.
fn hint(error: &SnapshotError) -> &'static str {
    let errno = match error {
        SnapshotError::File { error, .. } => error.raw_os_error(),
        _ => None,
    };
    match errno {
        Some(libc::ENOTCONN | libc::ECONNABORTED) => DAEMON_ENDED,
        Some(libc::EBUSY) => "wait until the other command has ended (fuser -v MOUNT/NAME/snapshot shows it)",
        Some(libc::EACCES) => "run the command as the owner of the mount",
        None | Some(libc::ENOENT | libc::ENOTDIR) => {
            "name the directory of a model in a mount (gradfs save /mnt/job/llama /backup/llama), or its name in a registry"
        }
        Some(_) => "the log of the mount says why; the job goes on",
    }
}

/// The shards' answers about a snapshot.
#[derive(Deserialize)]
struct Captured {
    record: JobRecord,
    settings: std::collections::BTreeMap<String, String>,
}

/// A snapshot of which every shard has a copy, as long as this lives.
struct Copies {
    snapshot: u64,
    record: ModelRecord,
    shards: Vec<ShardRecord>,
}

impl Drop for Copies {
    /// A shard that misses this message gives its copy up by itself.
    fn drop(&mut self) {
        let release = Message::Release { generation: self.record.generation, snapshot: self.snapshot };
        for (owner, _) in unique(&self.record) {
            if let Some(shard) = self.shards.iter().find(|shard| shard.shard == owner) {
                let _ = request(&shard.address, &release, deadline());
            }
        }
    }
}

/// The owners of a model's blocks, each once.
fn unique(record: &ModelRecord) -> Vec<(libmodelio::vocabulary::ids::ShardId, u32)> {
    let mut owners = record.owners.clone();
    owners.sort_unstable();
    owners.dedup_by_key(|(owner, _)| *owner);
    owners
}

fn save_from_shards(
    config: &SaveConfig,
    name: &str,
    at: &RegistryAt,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let (copies, captured) = capture(name, at)?;
    let failed = |error: &dyn std::fmt::Display| Error::new(format!("cannot save {name}: {error}"));
    let record = &copies.record;
    let layout = record.layout().map_err(|error| failed(&error))?;
    let map = record.block_map().map_err(|error| failed(&error))?;
    let head = Head::of(record, captured.record, captured.settings)?;
    let addresses = copies.shards.iter().map(|shard| (shard.shard, shard.address.clone()));
    let fetched = Fetched::Copy(copies.snapshot);
    let epoch = record.epoch;
    let owner = |block| map.owner(epoch, block).map_err(Refusal::other);
    let mut source = Shards::new(record.generation, fetched, &layout, addresses, owner);
    write(config, head, &mut source, interrupt)
}

/// Has the shards of a model copy one version of it.
fn capture(name: &str, at: &RegistryAt) -> Result<(Copies, Captured), Error> {
    let registry = registry(at)?;
    let mut tries = 0;
    loop {
        tries += 1;
        let (record, shards, address) = coordinated(&*registry, at, name)?;
        let (model, generation, epoch) = (name.to_owned(), record.generation, record.epoch);
        let capture = Message::Capture { model, generation, epoch };
        let asked = request(&address, &capture, Instant::now() + CAPTURING);
        let failed = || Error::new(format!("no snapshot can be taken of {name}"));
        match asked {
            Ok((Message::Captured { snapshot }, payload)) => {
                let copies = Copies { snapshot, record, shards };
                let captured = serde_json::from_slice(&payload).map_err(|error| failed().caused_by(error))?;
                return Ok((copies, captured));
            }
            Ok((other, _)) => {
                let what = format!("{address} answers with {}", other.name());
                return Err(failed().caused_by(what).hint("use the same release on all hosts"));
            }
            // It has moved since the registry was asked.
            Err(AdminError::Refusal(Refusal::Epoch { .. })) if tries < TRIES => {}
            Err(error) => {
                let hint = "nothing was saved; gradfs status shows whether the job goes on";
                return Err(failed().caused_by(error).hint(hint));
            }
        }
    }
}

fn write(
    config: &SaveConfig,
    head: Head,
    source: &mut dyn Source,
    interrupt: &Interrupt,
) -> Result<(), Error> {
    let (name, version) = (head.model.clone(), head.record.version);
    let writer = Writer::create(&config.dir, head, config.piece_size, config.replaces)?;
    let len = writer.len();
    let progress = progress::bar(progress::BYTES, len, format!("saving {name}"));
    let written = writer.write(source, &mut |bytes| {
        progress.inc(bytes);
        if interrupt.why().is_some() { Err(SnapshotError::Interrupted) } else { Ok(()) }
    });
    progress.finish_and_clear();
    written.map_err(|error| match interrupt.why() {
        Some(why) => Error::new(format!("saving {name} was interrupted by {why}: nothing is left of it")),
        None => error.into(),
    })?;
    println!("gradfs: saved version {version} of {name} in {}: {len} bytes", config.dir.display());
    Ok(())
}
