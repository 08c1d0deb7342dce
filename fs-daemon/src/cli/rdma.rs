//! The command that lists RDMA devices.

use clap::Subcommand;

/// What to ask of RDMA on this host.
#[derive(Debug, Subcommand)]
pub enum RdmaCommand {
    /// Tell which RDMA devices this host has, and whether gradfs can use them
    #[command(after_help = include_str!("help/rdma_devices.txt").trim_end())]
    Devices {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}
