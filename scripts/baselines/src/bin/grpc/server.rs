//! The server: weights, and what is added to them.
//!
//! This file holds `unsafe` code: the model's memory, which calls share by pieces.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use bytes::Bytes;
use net_baselines::add::add;
use net_baselines::memory::Memory;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use crate::Common;
use crate::messages::{Chunk, Done, Wanted};
use crate::service::parameters_server::{Parameters, ParametersServer};

/// Pieces of the weights that have a lock each.
const LOCKED: usize = 256 << 10;

struct Shard {
    weights: Arc<Memory>,
    locks: Vec<Mutex<()>>,
    /// Bytes of all gradients so far.
    added: watch::Sender<u64>,
    chunk: usize,
}

impl Shard {
    fn add(&self, chunk: &Chunk) -> Result<(), Status> {
        let outside = || Status::out_of_range(format!("{} bytes at {}", chunk.data.len(), chunk.offset));
        let mut at = usize::try_from(chunk.offset).map_err(|_| outside())?;
        if at > self.weights.len() || chunk.data.len() > self.weights.len() - at || !chunk.data.len().is_multiple_of(4)
        {
            return Err(outside());
        }
        let mut left = &chunk.data[..];
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(LOCKED - at % LOCKED));
            let _lock = self.locks[at / LOCKED].lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            // SAFETY: whoever writes to this piece holds its lock, and nobody reads weights during a push.
            add(unsafe { self.weights.values_mut(at, piece.len()) }, piece);
            at += piece.len();
            left = rest;
        }
        Ok(())
    }

    fn note(&self, bytes: usize) {
        self.added.send_modify(|added| *added += bytes as u64);
    }

    /// Weights, uncopied, once they are as far as is wanted.
    async fn wanted(&self, wanted: Wanted) -> Result<Bytes, Status> {
        let mut added = self.added.subscribe();
        let far_enough = added.wait_for(|added| *added >= wanted.added);
        tokio::time::timeout(net_baselines::sockets::DEADLINE, far_enough)
            .await
            .map_err(|_| Status::deadline_exceeded("not all gradients came"))?
            .map_err(|_| Status::internal("the shard is gone"))?;
        let all = Bytes::from_owner(Weights(Arc::clone(&self.weights)));
        let (offset, length) = (wanted.offset as usize, wanted.length as usize);
        if offset > all.len() || length > all.len() - offset {
            return Err(Status::out_of_range(format!("{length} bytes at {offset}")));
        }
        Ok(all.slice(offset..offset + length))
    }
}

struct Weights(Arc<Memory>);

impl AsRef<[u8]> for Weights {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: nobody pushes while weights are pulled.
        unsafe { self.0.bytes(0, self.0.len()) }
    }
}

#[tonic::async_trait]
impl Parameters for Shard {
    async fn push(&self, request: Request<Streaming<Chunk>>) -> Result<Response<Done>, Status> {
        let mut chunks = request.into_inner();
        let mut bytes = 0;
        while let Some(chunk) = chunks.message().await? {
            self.add(&chunk)?;
            bytes += chunk.data.len();
        }
        self.note(bytes);
        Ok(Response::new(Done {}))
    }

    type PullStream = Pin<Box<dyn Stream<Item = Result<Chunk, Status>> + Send>>;

    async fn pull(&self, request: Request<Wanted>) -> Result<Response<Self::PullStream>, Status> {
        let wanted = request.into_inner();
        let weights = self.wanted(wanted).await?;
        Ok(Response::new(Box::pin(chunks(weights, wanted.offset, self.chunk).map(Ok))))
    }

    async fn push_tensor(&self, request: Request<Chunk>) -> Result<Response<Done>, Status> {
        let chunk = request.into_inner();
        self.add(&chunk)?;
        self.note(chunk.data.len());
        Ok(Response::new(Done {}))
    }

    async fn pull_tensor(&self, request: Request<Wanted>) -> Result<Response<Chunk>, Status> {
        let wanted = request.into_inner();
        Ok(Response::new(Chunk { offset: wanted.offset, data: self.wanted(wanted).await? }))
    }
}

/// `bytes`, which begin at `offset`, in chunks.
pub fn chunks(bytes: Bytes, offset: u64, chunk: usize) -> impl Stream<Item = Chunk> + Send + 'static {
    let starts = (0..bytes.len()).step_by(chunk);
    tokio_stream::iter(starts.map(move |start| {
        let data = bytes.slice(start..bytes.len().min(start + chunk));
        Chunk { offset: offset + start as u64, data }
    }))
}

/// Serves on a port that the kernel chooses, for as long as `runtime` lives.
pub fn start(runtime: &tokio::runtime::Runtime, common: &Common, bytes: usize) -> Result<SocketAddr> {
    let shard = Shard {
        weights: Arc::new(Memory::new("shard", bytes)?),
        locks: (0..bytes.div_ceil(LOCKED)).map(|_| Mutex::new(())).collect(),
        added: watch::Sender::new(0),
        chunk: common.chunk,
    };
    let (listener, address) = common.tuning.listen()?;
    listener.set_nonblocking(true)?;
    let service =
        ParametersServer::new(shard).max_decoding_message_size(usize::MAX).max_encoding_message_size(usize::MAX);
    let server = tonic::transport::Server::builder()
        .initial_connection_window_size(common.window)
        .initial_stream_window_size(common.window)
        .max_frame_size(common.frame)
        .add_service(service);
    let listener = {
        let _inside = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    runtime.spawn(async move {
        if let Err(error) = server.serve_with_incoming(TcpListenerStream::new(listener)).await {
            eprintln!("grpc server: {error:#}");
        }
    });
    Ok(address)
}
