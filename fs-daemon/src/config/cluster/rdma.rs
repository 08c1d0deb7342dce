//! How RDMA is to be used, said alike to shards and mounts. All of it is read and checked in builds without RDMA, too:
//! one file serves hosts that have it and hosts that have not.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use libmodelio::transport::rdma::{Mtu, RdmaOptions};
use ps_backend::server::RdmaUse;

use super::super::{Merged, not_a_word, size};
use crate::error::Error;

/// Whether a shard takes connections by RDMA.
pub const RDMA_USES: &[&str] = &["off", "auto", "on"];
/// How threads learn of news.
pub const POLLINGS: &[&str] = &["busy", "event", "adaptive"];
/// The ways in which peers learn of written data.
pub const NOTICES: &[&str] = &["auto", "immediate", "flag"];
/// The kinds of memory that payload is fetched into.
pub const BUFFERS: &[&str] = &["shared", "looped", "own"];
/// How blocks are pushed.
pub const PLACEMENTS: &[&str] = &["auto", "static", "dynamic"];

/// Bytes of registered memory that rings and slots can have.
const ARENAS: RangeInclusive<usize> = 4 << 20..=64 << 30;

impl Merged<'_> {
    pub(super) fn rdma_use(&self) -> Result<RdmaUse, Error> {
        match self.text("rdma")? {
            None | Some((_, "auto")) => Ok(RdmaUse::Auto),
            Some((_, "off")) => Ok(RdmaUse::Off),
            Some((_, "on")) => Ok(RdmaUse::On),
            Some((origin, text)) => Err(not_a_word(&origin, text, RDMA_USES)),
        }
    }

    pub(super) fn rdma_port(&self) -> Result<Option<u16>, Error> {
        self.whole("rdma_port", 0..=u16::MAX, "0 is any free one; left out, it is the number of the TCP port")
    }

    pub(super) fn rdma(&self) -> Result<RdmaOptions, Error> {
        let default = RdmaOptions::default();
        let (device, port) = self.rdma_device()?;
        Ok(RdmaOptions {
            device,
            port,
            gid_index: self.whole(
                "rdma_gid_index",
                0..=65535,
                "gradfs rdma devices lists the GIDs of each port with their indices",
            )?,
            traffic_class: self.whole(
                "rdma_traffic_class",
                0..=u8::MAX,
                "with RoCE it is the DSCP times 4, and the ECN bits: 104 is DSCP 26",
            )?,
            mtu: self.rdma_mtu()?,
            inline: self.whole_or("rdma_inline", 0..=4096, default.inline)?,
            depth: self.whole_or("rdma_depth", 16..=1024, default.depth)?,
            report_every: self.whole_or("rdma_report_every", 1..=1024, default.report_every)?,
            queues: self.whole_or("rdma_queues", 1..=64, default.queues)?,
            polling: self.word("rdma_polling", POLLINGS, default.polling)?,
            shared_receives: self.whole_or("rdma_shared_receives", 0..=65536, default.shared_receives)?,
            notice: self.word("rdma_notice", NOTICES, default.notice)?,
            buffers: self.word("rdma_buffers", BUFFERS, default.buffers)?,
            placement: self.word("rdma_placement", PLACEMENTS, default.placement)?,
            slots: self.whole_or("rdma_slots", 1..=4096, default.slots)?,
            arena: self.rdma_arena()?.unwrap_or(default.arena),
            reads: self.whole_or("rdma_reads", 1..=u8::MAX, default.reads)?,
            retries: self.whole_or("rdma_retries", 0..=7, default.retries)?,
        })
    }

    /// `mlx5_0`, or with a port of it as `rdma link` writes it, `mlx5_0/1`.
    fn rdma_device(&self) -> Result<(Option<String>, Option<u8>), Error> {
        let Some((origin, text)) = self.text("rdma_device")? else { return Ok((None, None)) };
        let wrong = |why: &str| {
            Error::usage(format!("{origin}: {text:?} is no RDMA device: {why}"))
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
            false => Ok((Some(name.to_owned()), port)),
        }
    }

    fn rdma_mtu(&self) -> Result<Option<Mtu>, Error> {
        self.parsed("rdma_mtu", |origin, text| {
            text.parse().ok().and_then(Mtu::from_bytes).ok_or_else(|| {
                Error::usage(format!("{origin}: {text:?} is not 256, 512, 1024, 2048 or 4096"))
                    .hint("both ends use the smaller one of theirs; left out, it is what the ports take")
            })
        })
    }

    fn rdma_arena(&self) -> Result<Option<usize>, Error> {
        self.parsed("rdma_arena", |origin, text| match size(origin, text)?.try_into() {
            Ok(bytes) if ARENAS.contains(&bytes) => Ok(bytes),
            _ => Err(Error::usage(format!("{origin}: {text} is not 4MiB to 64GiB"))
                .hint("rings and slots of all connections lie in it; left out, it is 64MiB")),
        })
    }

    /// A whole number, or the default if none is given.
    fn whole_or<T: FromStr + PartialOrd + Display>(
        &self,
        key: &str,
        range: RangeInclusive<T>,
        default: T,
    ) -> Result<T, Error> {
        Ok(self.whole(key, range, &format!("left out, it is {default}"))?.unwrap_or(default))
    }
}

#[cfg(test)]
mod tests;
