//! gRPC with tonic: gradients and weights as streams of chunks, or as whole tensors in unary calls, as TensorFlow has.
//!
//! The server adds what comes straight to the weights, as the one with bare sockets does.

mod client;
mod messages;
mod server;

/// Made by build.rs.
mod service {
    #![allow(missing_docs, clippy::pedantic)]
    include!(concat!(env!("OUT_DIR"), "/baselines.Parameters.rs"));
}

use std::net::SocketAddr;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use net_baselines::rounds::{learn, serve};
use net_baselines::sockets::Tuning;
use serde_json::json;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The largest that HTTP/2 has for each.
const MAX_FRAME: u32 = (1 << 24) - 1;
const MAX_WINDOW: u32 = (1 << 31) - 1;

#[derive(Parser)]
#[command(about = "gRPC with tonic")]
enum Options {
    /// Holds weights and adds gradients
    Server {
        #[command(flatten)]
        common: Common,
        /// Bytes of its part of the model
        #[arg(long)]
        bytes: usize,
    },
    /// Pushes and pulls
    Learner {
        #[command(flatten)]
        common: Common,
        /// Bytes of the whole model
        #[arg(long)]
        bytes: usize,
        /// Which learner it is
        #[arg(long)]
        rank: usize,
        /// Where the shards are, in order
        #[arg(required = true)]
        servers: Vec<SocketAddr>,
    },
}

#[derive(Clone, clap::Args)]
struct Common {
    /// Learners in the job
    #[arg(long)]
    learners: usize,
    /// Connections of each learner with each shard
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// Calls at the same time on each connection
    #[arg(long, default_value_t = 1)]
    calls: usize,
    /// How bytes are called for
    #[arg(long, value_enum, default_value_t = Calling::Streams)]
    call: Calling,
    /// Bytes of a chunk of a stream, or of a tensor
    #[arg(long, default_value_t = 1 << 20)]
    chunk: usize,
    /// Bytes that HTTP/2 lets be under way
    #[arg(long, default_value_t = MAX_WINDOW)]
    window: u32,
    /// Bytes of an HTTP/2 frame
    #[arg(long, default_value_t = MAX_FRAME)]
    frame: u32,
    /// Threads of the runtime
    #[arg(long, default_value_t = 2)]
    workers: usize,
    #[command(flatten)]
    tuning: Tuning,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Calling {
    /// Streams of chunks
    Streams,
    /// Unary calls of tensors
    Tensors,
}

impl Common {
    fn runtime(&self) -> Result<tokio::runtime::Runtime> {
        Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(self.workers).enable_all().build()?)
    }
}

fn main() -> Result<()> {
    match Options::parse() {
        Options::Server { common, bytes } => {
            let runtime = common.runtime()?;
            let address = server::start(&runtime, &common, bytes)?;
            serve(&json!({"what": "ready", "address": address}))
        }
        Options::Learner { common, bytes, rank, servers } => {
            learn(&mut client::Client::connect(&common, bytes, rank, &servers)?)
        }
    }
}
