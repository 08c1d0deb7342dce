//! `gradfs up`: load the models, mount, serve until told to stop.

use std::sync::Arc;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::vocabulary::controls::Controls;
use ps_backend::device::DeviceName;
use ps_backend::memory::{MemoryUse, gib};
use ps_backend::partition::executor::{Executor, Pool};
use ps_backend::server::local::{self, Beginning, LocalError, Saver};
use ps_backend::state_copies::StateCopies;
use ps_backend::stores;

use crate::background::Ready;
use crate::companions;
use crate::config::{ModelSource, ModelSpec, UpConfig};
use crate::device;
use crate::error::Error;
use crate::memory;
use crate::progress;
use crate::serve::{self, Loaded};
use crate::session::model::{Model, OWN_LEARNER, Snapshots};
use crate::source::Source;

/// Bytes read from a model file at once.
const CHUNK: usize = 8 << 20;

/// Runs the daemon described by `config` until it is told to stop.
///
/// # Errors
/// Anything that keeps it from mounting; nothing is left mounted then.
pub fn run(config: UpConfig, ready: Ready) -> Result<(), Error> {
    let controls = config.controls.clone();
    serve::serve(&config.mounting, ready, || {
        let device = device::open(config.device)?;
        let mut sources = Vec::new();
        let mut needed = MemoryUse::default();
        for spec in &config.models {
            let source = open(spec, &config, &controls).map_err(|error| of_state(&config, error))?;
            source.check_owner(&spec.name, config.owns_store)?;
            needed = needed.with(MemoryUse::of_one_process(&source.layout, &controls, copies_of(&config)));
            let dir = match &spec.source {
                ModelSource::File(path) if path.is_dir() => Some(path),
                _ => None,
            };
            let asked = config.mounting.with_files.as_ref();
            let dir = asked.or(dir);
            let files = dir.map_or_else(|| Ok(Vec::new()), |dir| companions::read(dir, asked.is_some()))?;
            sources.push((&spec.name, source, files));
        }
        memory::check_together(needed)?;
        let executor = Pool::start(config.mounting.threads, device)
            .map_err(|error| Error::new("cannot start the threads that reduce").caused_by(error))?;
        let (mut models, mut savers) = (Vec::new(), Vec::new());
        for (name, source, companions) in sources {
            let store = stores::absolute_url(&controls.snapshots.to);
            let takes_over = config.owns_store || source.goes_on_in(&store, name);
            let takes_over = takes_over.then_some(store);
            let loaded = load(name, source, (&executor, config.state), &controls);
            let mut model = loaded.map_err(|error| of_state(&config, error))?;
            model.companions = companions;
            savers.extend(saver(&model, takes_over));
            models.push(Arc::new(model));
        }
        let all: Vec<Arc<Saver>> = savers.iter().map(|(_, saver)| Arc::clone(saver)).collect();
        std::thread::Builder::new()
            .name("snapshots".into())
            .spawn(move || Saver::run(all))
            .map_err(|error| Error::new("cannot start the thread that takes snapshots").caused_by(error))?;
        let at_end = move || {
            // All of them, also if one fails.
            let saved: Vec<Result<(), Error>> = savers.iter().map(save_last).collect();
            saved.into_iter().collect()
        };
        Ok(Loaded { models, later: None, at_end: Some(Box::new(at_end)) })
    })
}

/// The size of a model up to which `--dry-run` makes its table of blocks, to show the memory that it takes,
/// whatever memory there is.
const MOST_SHOWN: u64 = 1 << 40;

/// Shows the memory that the models would take of this machine's, and the memory it has.
///
/// # Errors
/// Models that cannot be loaded, or that the memory does not suffice for.
pub fn dry_run(config: &UpConfig) -> Result<(), Error> {
    let controls = config.controls.clone();
    let device = device::open(config.device)?;
    let (mut needed, mut of_device) = (0u64, 0u64);
    for ModelSpec { name, source } in &config.models {
        match source {
            ModelSource::Blank { bytes, .. } if *bytes > MOST_SHOWN => {
                memory::check_size(name, *bytes, &controls)?;
            }
            _ => {}
        }
        let source = Source::open(name, source, config.block_size)?;
        source.check_types(name, &controls)?;
        let layout = source.layout;
        print!("{}", memory::table(name, &layout, &controls, copies_of(config)));
        needed =
            needed.saturating_add(MemoryUse::of_one_process(&layout, &controls, copies_of(config)).total());
        if device.is_some() {
            of_device = of_device.saturating_add(MemoryUse::on_device(&layout, &controls));
        }
    }
    memory::compare(needed)?;
    let Some(accelerator) = device else { return Ok(()) };
    println!("{:<12}{of_device:>16}  {:>8.3} GiB of {}", "on device", gib(of_device), accelerator.name());
    accelerator.check(of_device).map_err(|error| Error::new(error.to_string()))
}

/// The copies of optimizer state in the host's memory, if it is there.
fn copies_of(config: &UpConfig) -> Option<StateCopies> {
    (config.device == DeviceName::Cpu).then_some(config.state)
}

/// What takes the snapshots of a model, if its job has a place for them, then or later.
fn saver(model: &Model, takes_over: Option<String>) -> Option<(String, Arc<Saver>)> {
    let Snapshots::Here(shard) = &model.snapshots else { return None };
    let (name, metadata) = (model.name.clone(), model.metadata.clone());
    let saver = Saver::new(shard, (&name, &model.layout), metadata, takes_over);
    Some((name, saver))
}

/// Takes the last snapshot of a model.
fn save_last((name, saver): &(String, Arc<Saver>)) -> Result<(), Error> {
    match saver.save_now() {
        Ok(None) => Ok(()),
        Ok(Some(version)) => {
            println!("gradfs: version {version} of {name} is in its store");
            Ok(())
        }
        Err(why) => {
            let lost = format!("the newest version of {name} is lost: no snapshot was saved");
            Err(Error::new(lost).caused_by(why))
        }
    }
}

/// Opens the source of a model, if this machine has memory for it.
fn open(spec: &ModelSpec, config: &UpConfig, controls: &Controls) -> Result<Source, Error> {
    let name = &spec.name;
    if let ModelSource::Blank { bytes, .. } = &spec.source {
        memory::check_size(name, *bytes, controls)?;
    }
    let source = Source::open(name, &spec.source, config.block_size)?;
    source.check_types(name, controls)?;
    memory::check(name, &source.layout, controls, copies_of(config))?;
    Ok(source)
}

/// Why a job does not go on from its own store, with what to do.
fn of_state(config: &UpConfig, error: Error) -> Error {
    let is_snapshot = |source: &ModelSource| matches!(source, ModelSource::Snapshot { .. });
    if !config.owns_store || !config.models.iter().any(|spec| is_snapshot(&spec.source)) {
        return error;
    }
    error.of_own_store(&config.controls.snapshots.to)
}

fn load(
    name: &str,
    mut source: Source,
    executor: (&Arc<dyn Executor>, StateCopies),
    controls: &Controls,
) -> Result<Model, Error> {
    let snapshot = source.verified_snapshot(&|| Ok(()))?;
    let failed = |error: std::io::Error| Error::new(format!("model {name}")).caused_by(error);
    let Source { layout, metadata, files, ranges, .. } = source;
    let layout = Arc::new(layout);
    let mut unread = None;
    let fill = |target: &Mapping| {
        if files.is_empty() {
            return Ok(());
        }
        let progress = progress::bar(progress::BYTES, layout.size(), format!("loading {name}"));
        for range in ranges {
            let mut done = 0;
            while done < range.len {
                let len = (range.len - done).min(CHUNK as u64) as usize;
                let (from, to) = (range.file_offset + done, (range.flat_offset + done) as usize);
                if let Err(error) = target.fill_from(&files[range.file], from, to, len) {
                    let kind = error.kind();
                    unread = Some(error);
                    return Err(kind.into());
                }
                done += len as u64;
                progress.inc(len as u64);
            }
        }
        progress.finish_and_clear();
        Ok(())
    };
    let beginning = match &snapshot {
        None => Beginning::Weights(Box::new(fill)),
        Some(stored) => Beginning::Snapshot(stored),
    };
    let started = local::start_from(name, &layout, controls, executor, beginning);
    if let Some(error) = unread {
        return Err(failed(error));
    }
    let (job, shard) = started.map_err(|error| match error {
        LocalError::Load(_) | LocalError::Make(_) => Error::new(format!("model {name}: not enough memory"))
            .caused_by(error)
            .hint("`gradfs up --dry-run` shows what the model takes, and what there is"),
        error => Error::new(format!("model {name}: {error}")),
    })?;
    Ok(Model::new(name.to_owned(), job, metadata, OWN_LEARNER.to_owned(), Snapshots::Here(shard)))
}
