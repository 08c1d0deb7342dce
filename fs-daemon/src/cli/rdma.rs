//! The command that lists RDMA devices.

use clap::Subcommand;

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
