//! Publishes whole new weights: all readers see them at once, and never a half. The model takes them at version 0, or if its
//! reducer is `assign`.
//!
//! ```sh
//! gradfs create m --registry 127.0.0.1:7070 --size 1MiB --reducer assign
//! cargo run -p libmodelio --example publish -- 127.0.0.1:7070 m 7.5
//! ```
//!
//! It fills an fp32 model with that number.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::{ClientOptions, Meta, Publisher, connect, wait_for};

const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [registry, model, value] = &arguments[..] else {
        return Err("give three arguments: REGISTRY MODEL VALUE".into());
    };
    let value: f32 = value.parse()?;
    let job = connect(registry, model, ClientOptions::default())?;
    let publisher = Publisher::new(Arc::clone(&job))?;
    // Blocks travel as soon as they are whole. What is not written keeps its value.
    let elements = job.layout().size() as usize / size_of::<f32>();
    publisher.write(0, &value.to_le_bytes().repeat(elements))?;
    wait_for(PATIENCE, |done| publisher.commit(Meta::default(), PATIENCE, done))?;
    println!("version {} is {value} everywhere", job.version());
    job.shut_down();
    Ok(())
}
