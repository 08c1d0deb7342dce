//! Follows the versions of a model, as an inference server does: each is read where it lies, without a copy.
//!
//! ```sh
//! cargo run -p libmodelio --example follow_versions -- 127.0.0.1:7070 m 5
//! ```
//!
//! It ends when so many have come.

use std::error::Error;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use libmodelio::{ClientOptions, Event, Job, PullPolicy, Reader, Version, connect};

const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [registry, model, count] = &arguments[..] else {
        return Err("give three arguments: REGISTRY MODEL COUNT".into());
    };
    // Each version is pulled as soon as it is complete.
    let options = ClientOptions { pulls: Some(PullPolicy::Eager), ..ClientOptions::default() };
    let job = connect(registry, model, options)?;
    let (sender, versions) = mpsc::channel();
    // The listener must not block: it may run on the thread that moves bytes.
    job.subscribe(Box::new(move |event| {
        if let Event::Published(version) = event {
            let _ = sender.send(version);
        }
    }));
    let mut shown = show(&job, job.version());
    let mut left: u32 = count.parse()?;
    while left > 0 {
        let version = versions.recv_timeout(PATIENCE).map_err(|_| "no version came")?;
        // A newer one may have been shown in its place.
        if version > shown {
            shown = show(&job, version);
            left -= 1;
        }
    }
    job.shut_down();
    Ok(())
}

/// Shows a version, and returns which one it was.
fn show(job: &Arc<Job>, version: Version) -> Version {
    // It may be gone already where versions follow each other fast. Then the newest one is as good.
    let Some(reader) = Reader::open(job, version).or_else(|| Reader::newest(job)) else { return version };
    for tensor in job.layout().tensors() {
        let bytes = reader.bytes(tensor.bytes.clone());
        println!(
            "version {}: {} begins with {:02x?}",
            reader.version(),
            tensor.name,
            &bytes[..bytes.len().min(8)]
        );
    }
    reader.version()
}
