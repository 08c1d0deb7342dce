//! How RDMA is to be used, said alike to shards and mounts. All of it is read and checked in builds without RDMA, too:
//! one file serves hosts that have it and hosts that have not.

use std::ops::RangeInclusive;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use libmodelio::transport::rdma::{Buffers, Mtu, Notice, Placement, Polling, RdmaOptions};
use ps_backend::server::RdmaUse;

use super::values::{size, whole, word};
use crate::error::Error;

const POLLINGS: &[&str] = &["busy", "event", "adaptive"];
const NOTICES: &[&str] = &["auto", "immediate", "flag"];
const BUFFERS: &[&str] = &["shared", "looped", "own"];
const PLACEMENTS: &[&str] = &["auto", "static", "dynamic"];
/// Bytes of registered memory that rings and slots can have.
const ARENAS: RangeInclusive<usize> = 4 << 20..=64 << 30;
const ANY_PORT: &str = "0 is any free one; left out, it is the number of the TCP port";
const GIDS: &str = "gradfs rdma devices lists the GIDs of each port with their indices";
const DSCP: &str = "with RoCE it is the DSCP times 4, and the ECN bits: 104 is DSCP 26";

/// Whether and where a shard takes connections by RDMA.
#[derive(Args, Debug)]
#[command(next_help_heading = "RDMA")]
pub struct RdmaListenArgs {
    /// Take connections by RDMA: auto if there is a device, on or the shard does not start
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(["off", "auto", "on"]).map(rdma_use))]
    pub rdma: RdmaUse,
    /// Port for them [default: the number of the TCP port; with iWARP any free one]
    #[arg(long, value_name = "PORT", value_parser = whole(0..=u16::MAX, ANY_PORT))]
    pub rdma_port: Option<u16>,
}

/// How RDMA is used. docs/operate/rdma.md tells how to choose.
#[derive(Args, Debug)]
#[command(next_help_heading = "RDMA")]
pub struct RdmaArgs {
    /// Device, with a port of it: mlx5_0, mlx5_0/1 [default: the first active one]
    #[arg(long, value_name = "NAME", value_parser = device)]
    rdma_device: Option<(String, Option<u8>)>,
    /// Which of the port's GIDs connections are opened from [default: the one that leads there]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(0..=65535, GIDS))]
    rdma_gid_index: Option<u32>,
    /// Traffic class of packets, 0 to 255 [default: the system's]
    #[arg(long, value_name = "N", value_parser = whole(0..=u8::MAX, DSCP))]
    rdma_traffic_class: Option<u8>,
    /// Bytes of payload in a packet at most, 256 to 4096; not with iWARP [default: what the ports take]
    #[arg(long, value_name = "BYTES", value_parser = mtu)]
    rdma_mtu: Option<Mtu>,
    /// Bytes that go with the work itself
    #[arg(long, value_name = "BYTES", default_value_t = 128, value_parser = whole::<u32>(0..=4096, "left out, it is 128"))]
    rdma_inline: u32,
    /// Pieces of work outstanding on a queue pair
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = whole::<u32>(16..=1024, "left out, it is 128"))]
    rdma_depth: u32,
    /// Every how many pieces of work one is reported
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = whole::<u32>(1..=1024, "left out, it is 16"))]
    rdma_report_every: u32,
    /// Completion queues, with a thread each
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole::<usize>(1..=64, "left out, it is 2"))]
    rdma_queues: usize,
    /// How those threads wait: busy takes a core each
    #[arg(long, default_value = "adaptive", value_parser = word::<Polling>(POLLINGS))]
    rdma_polling: Polling,
    /// How an end learns of what was written; the same at both ends
    #[arg(long, default_value = "auto", value_parser = word::<Notice>(NOTICES))]
    rdma_notice: Notice,
    /// Memory that a shard fetches into: common to its connections, or each one's
    #[arg(long, default_value = "shared", value_parser = word::<Buffers>(BUFFERS))]
    rdma_buffers: Buffers,
    /// Blocks are written into the shard's slots (static), or fetched by it (dynamic)
    #[arg(long, default_value = "auto", value_parser = word::<Placement>(PLACEMENTS))]
    rdma_placement: Placement,
    /// Slots that a shard fetches into
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = whole::<usize>(1..=4096, "left out, it is 16"))]
    rdma_slots: usize,
    /// Registered memory for rings and slots
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = arena)]
    rdma_arena: usize,
    /// Messages waited for by all queue pairs of a queue together; 0: by each its own
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = whole::<u32>(0..=65536, "left out, it is 1024"))]
    rdma_shared_receives: u32,
    /// Reads outstanding on a queue pair
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = whole::<u8>(1..=u8::MAX, "left out, it is 16"))]
    rdma_reads: u8,
    /// How often a packet is sent again, 0 to 7
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = whole::<u8>(0..=7, "left out, it is 7"))]
    rdma_retries: u8,
}

impl From<RdmaArgs> for RdmaOptions {
    fn from(args: RdmaArgs) -> RdmaOptions {
        let (device, port) = args.rdma_device.unzip();
        RdmaOptions {
            device,
            port: port.flatten(),
            gid_index: args.rdma_gid_index,
            traffic_class: args.rdma_traffic_class,
            mtu: args.rdma_mtu,
            inline: args.rdma_inline,
            depth: args.rdma_depth,
            report_every: args.rdma_report_every,
            queues: args.rdma_queues,
            polling: args.rdma_polling,
            shared_receives: args.rdma_shared_receives,
            notice: args.rdma_notice,
            buffers: args.rdma_buffers,
            placement: args.rdma_placement,
            slots: args.rdma_slots,
            arena: args.rdma_arena,
            reads: args.rdma_reads,
            retries: args.rdma_retries,
        }
    }
}

fn rdma_use(word: String) -> RdmaUse {
    match word.as_str() {
        "off" => RdmaUse::Off,
        "on" => RdmaUse::On,
        _ => RdmaUse::Auto,
    }
}

/// `mlx5_0`, or with a port of it as `rdma link` writes it, `mlx5_0/1`.
fn device(text: &str) -> Result<(String, Option<u8>), Error> {
    let wrong = |why: &str| {
        Error::usage(format!("{text:?} is no RDMA device: {why}"))
            .hint("gradfs rdma devices lists them; write mlx5_0, or mlx5_0/1 for its port 1")
    };
    let (name, port) = match text.split_once('/') {
        None => (text, None),
        Some((name, port)) => match port.parse() {
            Ok(port @ 1..=u8::MAX) => (name, Some(port)),
            _ => return Err(wrong("ports are numbered from 1 to 255")),
        },
    };
    match name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
        true => Err(wrong("it has no name")),
        false => Ok((name.to_owned(), port)),
    }
}

fn mtu(text: &str) -> Result<Mtu, Error> {
    text.parse().ok().and_then(Mtu::from_bytes).ok_or_else(|| {
        Error::usage(format!("{text:?} is not 256, 512, 1024, 2048 or 4096"))
            .hint("both ends use the smaller one of theirs; left out, it is what the ports take")
    })
}

fn arena(text: &str) -> Result<usize, Error> {
    match size(text)?.try_into() {
        Ok(bytes) if ARENAS.contains(&bytes) => Ok(bytes),
        _ => Err(Error::usage(format!("{text} is not 4MiB to 64GiB"))
            .hint("rings and slots of all connections lie in it; left out, it is 64MiB")),
    }
}

#[cfg(test)]
mod tests;
