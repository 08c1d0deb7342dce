//! Snapshots in stores: `gradfs snapshot` has the shards of a job write one, `gradfs snapshots` lists and exports them, and
//! `gradfs verify` reads all of one.

use std::path::Path;
use std::time::Instant;

use libmodelio::admin::AdminError;
use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::{Message, ModelRecord, Refusal};
use ps_backend::snapshot::{Shelf, SnapshotError, Stored, Writer};
use serde_json::json;

use super::{coordinated, deadline, registry, request};
use crate::config::snapshots::SnapshotConfig;
use crate::error::Error;
use crate::progress;
use crate::signals::Interrupt;

/// How often it is begun when the model moves meanwhile.
const TRIES: u32 = 3;

/// What a coordinator says of a snapshot.
struct Told {
    version: Version,
    dealt: u64,
    of: u64,
    written: u64,
    ended: bool,
}

/// Has the shards of a model write a snapshot.
///
/// # Errors
/// Why there is none.
pub fn take(config: &SnapshotConfig) -> Result<(), Error> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|error| Error::new("no random number").caused_by(error))?;
    let (snapshot, name) = (u64::from_le_bytes(random), &config.name);
    let to = config.to.as_deref().unwrap_or("its store");
    let (address, message, mut told) = begin(config, snapshot)?;
    if !config.wait && !told.ended {
        println!("gradfs: a snapshot of {name} is being written into {to}: gradfs snapshots lists it then");
        return Ok(());
    }
    let progress = progress::bar(progress::BYTES, told.of, format!("saving {name}"));
    while !told.ended {
        told = ask(&address, &message).map_err(|error| failed(name, &error))?;
        progress.set_length(told.of);
        progress.set_position(told.dealt);
    }
    progress.finish_and_clear();
    let Told { version, of, written, .. } = told;
    println!(
        "gradfs: saved version {version} of {name} in {to}: {of} bytes, of which {written} were written"
    );
    Ok(())
}

fn failed(name: &str, error: &AdminError) -> Error {
    Error::new(format!("no snapshot can be taken of {name}")).caused_by(error.to_string())
}

/// Has a snapshot begun. Returns the coordinator, what it was told, and its answer.
fn begin(config: &SnapshotConfig, snapshot: u64) -> Result<(String, Message, Told), Error> {
    let (registry, name, at) = (registry(&config.registry)?, &config.name, &config.registry);
    let mut tries = 0;
    loop {
        tries += 1;
        let (ModelRecord { generation, epoch, .. }, _, address) = coordinated(&*registry, at, name)?;
        let (model, to) = (name.clone(), config.to.clone().unwrap_or_default());
        let message = Message::TakeSnapshot { model, generation, epoch, snapshot, to };
        match ask(&address, &message) {
            Ok(told) => return Ok((address, message, told)),
            // It has moved since the registry was asked.
            Err(AdminError::Refusal(Refusal::Epoch { .. })) if tries < TRIES => {}
            Err(error) => return Err(failed(name, &error)),
        }
    }
}

fn ask(address: &str, message: &Message) -> Result<Told, AdminError> {
    match request(address, message, deadline())?.0 {
        Message::Saved { version, dealt, of, written, ended } => {
            Ok(Told { version, dealt, of, written, ended })
        }
        other => Err(AdminError::Unexpected { address: address.to_owned(), what: other.name() }),
    }
}

/// Lists the snapshots of a store.
///
/// # Errors
/// When it cannot be read. A snapshot that cannot be read is listed with the reason.
pub fn list(url: &Path, as_json: bool) -> Result<(), Error> {
    let failed =
        |error: &dyn std::fmt::Display| Error::new(format!("cannot list {}: {error}", url.display()));
    let shelf = Shelf::open(&url.to_string_lossy()).map_err(|error| failed(&error))?;
    let mut listed = Vec::new();
    for name in shelf.names().map_err(|error| failed(&error))? {
        listed.push(match shelf.description(&name) {
            Ok(of) => {
                let bytes: u64 = of.places.pieces().map(|(_, place)| u64::from(place.bytes)).sum();
                let version = of.head.record.version.0;
                json!({ "version": version, "model": of.head.model, "taken": of.taken, "bytes": bytes, "name": name })
            }
            Err(error) => json!({ "name": name, "error": error.to_string() }),
        });
    }
    if as_json {
        println!("{}", serde_json::Value::from(listed));
        return Ok(());
    }
    if listed.is_empty() {
        println!("no snapshot is in {}", shelf.url());
    }
    for of in listed {
        match &of["error"] {
            serde_json::Value::Null => println!(
                "version {}  {}  {} bytes  taken {}",
                of["version"],
                of["model"].as_str().unwrap_or_default(),
                of["bytes"],
                when(of["taken"].as_u64().unwrap_or_default()),
            ),
            error => println!("{}  {}", of["name"], error.as_str().unwrap_or_default()),
        }
    }
    Ok(())
}

/// A time in seconds since 1970, as a text.
fn when(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Reads all of a snapshot, and compares it with its checksums.
///
/// # Errors
/// What is damaged.
pub fn verify(place: &Path) -> Result<(), Error> {
    let interrupt = Interrupt::install()?;
    let (stored, begin) = (Stored::open(place, None)?, Instant::now());
    read_all(&stored, &interrupt)?;
    let (head, seconds) = (stored.head(), begin.elapsed().as_secs_f64());
    let (version, bytes) = (head.record.version, stored.len());
    println!(
        "gradfs: version {version} of {} is as it was written: {bytes} bytes in {seconds:.1} s",
        head.model
    );
    Ok(())
}

fn read_all(stored: &Stored, interrupt: &Interrupt) -> Result<(), Error> {
    let progress = progress::bar(progress::BYTES, stored.len(), format!("checking {}", stored.head().model));
    let checked = stored.verify(&mut |read| {
        progress.inc(read);
        if interrupt.why().is_some() { Err(SnapshotError::Interrupted) } else { Ok(()) }
    });
    progress.finish_and_clear();
    checked.map_err(Error::from)
}

/// Writes a snapshot of a store as a directory.
///
/// # Errors
/// When it cannot be read or written. The old contents of the directory are still there then.
pub fn export(place: &Path, dir: &Path, (replaces, piece_size): (bool, u64)) -> Result<(), Error> {
    let interrupt = Interrupt::install()?;
    Writer::check(dir, replaces)?;
    let mut stored = Stored::open(place, None)?;
    let head = stored.head().clone();
    let (name, version) = (head.model.clone(), head.record.version);
    let writer = Writer::create(dir, head, piece_size, replaces)?;
    let len = writer.len();
    let progress = progress::bar(progress::BYTES, len, format!("writing {name}"));
    let written = writer.write(&mut stored, &mut |bytes| {
        progress.inc(bytes);
        if interrupt.why().is_some() { Err(SnapshotError::Interrupted) } else { Ok(()) }
    });
    progress.finish_and_clear();
    written?;
    println!("gradfs: wrote version {version} of {name} into {}: {len} bytes", dir.display());
    Ok(())
}
