//! A learner that calls.
//!
//! This file holds `unsafe` code: the model's memory, which calls share by pieces.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use hyper_util::rt::TokioIo;
use net_baselines::memory::Memory;
use net_baselines::pattern;
use net_baselines::place::share;
use net_baselines::rounds::Learner;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::messages::{Chunk, Wanted};
use crate::server::chunks;
use crate::service::parameters_client::ParametersClient;
use crate::{Calling, Common};

/// What one call at a time moves.
#[derive(Clone)]
struct Part {
    client: ParametersClient<Channel>,
    /// Within the shard, and within the model.
    offset: usize,
    place: usize,
    length: usize,
    /// Bytes of the shard.
    shard: usize,
    gradients: Bytes,
    weights: Arc<Memory>,
    call: Calling,
    chunk: usize,
}

impl Part {
    async fn push(mut self) -> Result<()> {
        let gradients = self.gradients.slice(self.place..self.place + self.length);
        match self.call {
            Calling::Streams => {
                self.client.push(chunks(gradients, self.offset as u64, self.chunk)).await?;
            }
            Calling::Tensors => {
                for start in (0..self.length).step_by(self.chunk) {
                    let data = gradients.slice(start..self.length.min(start + self.chunk));
                    self.client.push_tensor(Chunk { offset: (self.offset + start) as u64, data }).await?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the shard has added up `added` bytes.
    async fn pull(mut self, added: u64) -> Result<()> {
        match self.call {
            Calling::Streams => {
                let wanted = Wanted { offset: self.offset as u64, length: self.length as u64, added };
                let mut stream = self.client.pull(wanted).await?.into_inner();
                let mut left = self.length;
                while let Some(chunk) = stream.message().await? {
                    left = left.checked_sub(self.take(&chunk)?).context("too much came")?;
                }
                ensure!(left == 0, "{left} bytes are missing");
            }
            Calling::Tensors => {
                for start in (0..self.length).step_by(self.chunk) {
                    let length = self.chunk.min(self.length - start);
                    let wanted = Wanted { offset: (self.offset + start) as u64, length: length as u64, added };
                    let chunk = self.client.pull_tensor(wanted).await?.into_inner();
                    ensure!(self.take(&chunk)? == length, "not as much as was wanted");
                }
            }
        }
        Ok(())
    }

    fn take(&self, chunk: &Chunk) -> Result<usize> {
        let within = (chunk.offset as usize).checked_sub(self.offset).context("from elsewhere")?;
        ensure!(within + chunk.data.len() <= self.length, "beyond what was wanted");
        // SAFETY: each part has a place of its own, and one call at a time.
        unsafe { self.weights.bytes_mut(self.place + within, chunk.data.len()) }.copy_from_slice(&chunk.data);
        Ok(chunk.data.len())
    }
}

struct Gradients(Memory);

impl AsRef<[u8]> for Gradients {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: gradients do not change.
        unsafe { self.0.bytes(0, self.0.len()) }
    }
}

/// A learner with its connections.
pub struct Client {
    parts: Vec<Part>,
    weights: Arc<Memory>,
    learners: usize,
    pushes: u64,
    runtime: Runtime,
}

impl Client {
    /// Connects to the shards.
    pub fn connect(common: &Common, bytes: usize, rank: usize, servers: &[SocketAddr]) -> Result<Self> {
        let runtime = common.runtime()?;
        let mut gradients = Memory::new("gradients", bytes)?;
        pattern::fill(&mut gradients, rank);
        let gradients = Bytes::from_owner(Gradients(gradients));
        let weights = Arc::new(Memory::new("weights", bytes)?);
        let mut parts = Vec::new();
        for (index, server) in servers.iter().enumerate() {
            let shard = share(bytes, index, servers.len());
            let count = common.connections * common.calls;
            let clients: Vec<_> =
                (0..common.connections).map(|_| runtime.block_on(client(common, *server))).collect::<Result<_>>()?;
            for part in 0..count {
                let within = share(shard.len(), part, count);
                parts.push(Part {
                    client: clients[part % clients.len()].clone(),
                    offset: within.start,
                    place: shard.start + within.start,
                    length: within.len(),
                    shard: shard.len(),
                    gradients: gradients.clone(),
                    weights: Arc::clone(&weights),
                    call: common.call,
                    chunk: common.chunk,
                });
            }
        }
        Ok(Self { parts, weights, learners: common.learners, pushes: 0, runtime })
    }
}

async fn client(common: &Common, server: SocketAddr) -> Result<ParametersClient<Channel>> {
    let tuning = common.tuning.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let tuning = tuning.clone();
        async move {
            let stream = tuning.connect(server).map_err(std::io::Error::other)?;
            stream.set_nonblocking(true)?;
            Ok::<_, std::io::Error>(TokioIo::new(tokio::net::TcpStream::from_std(stream)?))
        }
    });
    let channel = Endpoint::from_shared(format!("http://{server}"))?
        .initial_connection_window_size(common.window)
        .initial_stream_window_size(common.window)
        .max_frame_size(common.frame)
        .connect_with_connector(connector)
        .await?;
    let client = ParametersClient::new(channel);
    Ok(client.max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX))
}

impl Learner for Client {
    fn round(&mut self, what: &str) -> Result<usize> {
        let (push, pull) = match what {
            "push" => (true, false),
            "pull" => (false, true),
            "step" => (true, true),
            other => bail!("unknown round {other:?}"),
        };
        self.pushes += u64::from(push);
        let pushed = self.pushes * self.learners as u64;
        self.runtime.block_on(async {
            let mut calls = JoinSet::new();
            for part in &self.parts {
                if push {
                    calls.spawn(part.clone().push());
                }
                if pull {
                    // Asked for along with the push: the weights come as soon as the last gradients are in.
                    let added = if push { pushed * part.shard as u64 } else { 0 };
                    calls.spawn(part.clone().pull(added));
                }
            }
            while let Some(done) = calls.join_next().await {
                done??;
            }
            Ok::<_, anyhow::Error>(())
        })?;
        Ok(self.weights.len() * if what == "step" { 2 } else { 1 })
    }

    fn check(&mut self, pushes: usize) -> Result<()> {
        // The calls are over, and with them the other owners' use.
        let weights = &self.weights;
        // SAFETY: no call is under way.
        let values = unsafe { weights.values_mut(0, weights.len()) };
        pattern::check(values, self.learners, pushes)
    }
}
