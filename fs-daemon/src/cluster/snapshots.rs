//! Snapshots in stores: `gradfs snapshot` has the shards of a job write one, `gradfs snapshots` lists and exports them, and
//! `gradfs verify` reads all of one.

use std::path::Path;
use std::time::Instant;

use libmodelio::admin::AdminError;
use ps_backend::snapshot::{AskedSnapshot, Shelf, SnapshotError, Stored, Writer};
use serde_json::json;

use super::{coordinated, deadline, registry};
use crate::config::snapshots::SnapshotConfig;
use crate::error::Error;
use crate::progress;
use crate::signals::Interrupt;

/// Has the shards of a model write a snapshot.
///
/// # Errors
/// Why there is none.
pub fn take(config: &SnapshotConfig) -> Result<(), Error> {
    let (registry, name) = (registry(&config.registry)?, &config.name);
    let failed = |error: AdminError| {
        Error::new(format!("no snapshot can be taken of {name}")).caused_by(error.to_string())
    };
    let find = || {
        let (record, _, address) = coordinated(&*registry, &config.registry, name)?;
        Ok((record, address))
    };
    let to = config.to.as_deref().unwrap_or_default();
    let mut asked = AskedSnapshot::begin((to, false), deadline(), find, failed)?;
    if !config.wait && !asked.told.ended {
        let to = config.to.as_deref().unwrap_or("its store");
        println!("gradfs: a snapshot of {name} is being written into {to}: gradfs snapshots lists it then");
        return Ok(());
    }
    let progress = progress::bar(progress::BYTES, asked.told.of, format!("saving {name}"));
    while !asked.told.ended {
        asked.look(deadline()).map_err(failed)?;
        progress.set_length(asked.told.of);
        progress.set_position(asked.told.dealt);
    }
    progress.finish_and_clear();
    let (to, told) = (config.to.as_deref().unwrap_or("its store"), asked.told);
    println!(
        "gradfs: saved version {} of {name} in {to}: {} bytes, of which {} were written",
        told.version, told.of, told.written
    );
    Ok(())
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
