//! A learner that fits a model to a target, through the library. Start a shard and make the model first:
//!
//! ```sh
//! gradfs shard --listen 127.0.0.1:7070 &
//! gradfs create m --registry 127.0.0.1:7070 --size 1MiB --reducer sgd --set learning_rate=0.5
//! cargo run -p libmodelio --example join_and_train -- 127.0.0.1:7070 m worker-0 20
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use libmodelio::{ClientOptions, Contributor, DType, LeaveReason, Reader, Share, Wrote, connect, wait_for};

const PATIENCE: Duration = Duration::from_secs(30);
/// All weights shall become this.
const TARGET: f32 = 1.0;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [registry, model, name, steps] = &arguments[..] else {
        return Err("give four arguments: REGISTRY MODEL LEARNER STEPS".into());
    };
    let job = connect(registry, model, ClientOptions::default())?;
    if job.layout().tensors().iter().any(|tensor| tensor.dtype != DType::F32) {
        return Err("this example takes a model of fp32".into());
    }
    let size = job.layout().size();
    let (learner, incarnation) = wait_for(PATIENCE, |done| job.join(name.clone(), PATIENCE, done))?;
    let contributor = Arc::new(Contributor::new(Arc::clone(&job), (learner, incarnation), Arc::default())?);
    for _ in 0..steps.parse::<u32>()? {
        let weights = Reader::newest(&job).ok_or("the newest version is gone")?;
        let elements = weights.bytes(0..size).as_chunks::<4>().0;
        let errors = elements.iter().map(|element| f32::from_le_bytes(*element) - TARGET);
        let gradients: Vec<u8> = errors.clone().flat_map(f32::to_le_bytes).collect();
        let loss = errors.map(|error| error * error).sum::<f32>() / elements.len() as f32;
        println!("version {}: loss {loss:.6}", weights.version());
        let mut share = Share::None;
        // A write waits for nobody. If only the coordinator knows the step, it is asked first.
        while contributor.write(&mut share, 0, &gradients, PATIENCE)? == Wrote::Asks {
            wait_for(PATIENCE, |done| contributor.ask_step(PATIENCE, done))?;
        }
        wait_for(PATIENCE, |done| contributor.commit(share, PATIENCE, done))?;
        // The version with this step, so that the next gradient is of it.
        wait_for(PATIENCE, |done| job.await_step(learner, PATIENCE, done))?;
    }
    wait_for(PATIENCE, |done| job.leave(learner, LeaveReason::Asked, PATIENCE, done))?;
    job.shut_down();
    Ok(())
}
