//! RDMA on the command line: its settings, for shards and mounts alike, and the list of devices.

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use crate::config::cluster::rdma::{BUFFERS, NOTICES, PLACEMENTS, POLLINGS, RDMA_USES};

pub(super) const DEVICES_EXAMPLES: &str = "\
Examples:
  What there is, and the index of each GID, for --rdma-device and --rdma-gid-index:
    gradfs rdma devices

  For a program:
    gradfs rdma devices --json | jq '.devices[].name'

A host without RDMA hardware can have a device in software, with the module rdma_rxe (as root):
    rdma link add rxe0 type rxe netdev eth0";

/// What to ask of RDMA on this host.
#[derive(Debug, Subcommand)]
pub enum RdmaCommand {
    /// Tell which RDMA devices this host has, and whether gradfs can use them
    #[command(after_help = DEVICES_EXAMPLES)]
    Devices {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

/// Whether and where a shard takes connections by RDMA.
#[derive(Args, Debug)]
#[command(next_help_heading = "RDMA")]
pub(super) struct RdmaListenArgs {
    /// Take connections by RDMA: auto if there is a device, on or the shard does not start [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(RDMA_USES))]
    rdma: Option<String>,
    /// Port for them [default: the number of the TCP port; with iWARP any free one]
    #[arg(long, value_name = "PORT")]
    rdma_port: Option<String>,
}

/// How RDMA is used. docs/operate/rdma.md tells how to choose.
#[derive(Args, Debug)]
#[command(next_help_heading = "RDMA")]
pub(super) struct RdmaArgs {
    /// Device, with a port of it: mlx5_0, mlx5_0/1 [default: the first active one]
    #[arg(long, value_name = "NAME")]
    rdma_device: Option<String>,
    /// Which of the port's GIDs connections are opened from [default: the one that leads there]
    #[arg(long, value_name = "N")]
    rdma_gid_index: Option<String>,
    /// Traffic class of packets, 0 to 255 [default: the system's]
    #[arg(long, value_name = "N")]
    rdma_traffic_class: Option<String>,
    /// Bytes of payload in a packet at most, 256 to 4096; not with iWARP [default: what the ports take]
    #[arg(long, value_name = "BYTES")]
    rdma_mtu: Option<String>,
    /// Bytes that go with the work itself [default: 128]
    #[arg(long, value_name = "BYTES")]
    rdma_inline: Option<String>,
    /// Pieces of work outstanding on a queue pair [default: 128]
    #[arg(long, value_name = "N")]
    rdma_depth: Option<String>,
    /// Every how many pieces of work one is reported [default: 16]
    #[arg(long, value_name = "N")]
    rdma_report_every: Option<String>,
    /// Completion queues, with a thread each [default: 2]
    #[arg(long, value_name = "N")]
    rdma_queues: Option<String>,
    /// How those threads wait: busy takes a core each [default: adaptive]
    #[arg(long, value_parser = PossibleValuesParser::new(POLLINGS))]
    rdma_polling: Option<String>,
    /// How an end learns of what was written; the same at both ends [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(NOTICES))]
    rdma_notice: Option<String>,
    /// Memory that a shard fetches into: common to its connections, or each one's [default: shared]
    #[arg(long, value_parser = PossibleValuesParser::new(BUFFERS))]
    rdma_buffers: Option<String>,
    /// Blocks are written into the shard's slots (static), or fetched by it (dynamic) [default: auto]
    #[arg(long, value_parser = PossibleValuesParser::new(PLACEMENTS))]
    rdma_placement: Option<String>,
    /// Slots that a shard fetches into [default: 16]
    #[arg(long, value_name = "N")]
    rdma_slots: Option<String>,
    /// Registered memory for rings and slots [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    rdma_arena: Option<String>,
    /// Messages waited for by all queue pairs of a queue together; 0: by each its own [default: 1024]
    #[arg(long, value_name = "N")]
    rdma_shared_receives: Option<String>,
    /// Reads outstanding on a queue pair [default: 16]
    #[arg(long, value_name = "N")]
    rdma_reads: Option<String>,
    /// How often a packet is sent again, 0 to 7 [default: 7]
    #[arg(long, value_name = "N")]
    rdma_retries: Option<String>,
}
