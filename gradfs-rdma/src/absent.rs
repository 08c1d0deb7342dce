//! RDMA in a build without it. Opening a device fails, and nothing else can be called: none of these types has a value.
//!
//! Each name is as in the build with RDMA, which has the words on it.
#![allow(missing_docs, clippy::missing_safety_doc)]

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use modelio_base::bytes::mmap::Mapping;
use modelio_base::transport::stream::{Connection, LentPayload, Stream, Target};

use crate::device_info::DeviceInfo;
use crate::device_memory::DeviceMemory;
use crate::error::VerbsError;
use crate::memory::{RemoteMemory, Spare};
use crate::options::RdmaOptions;

/// There is none.
#[derive(Debug)]
enum Never {}

/// Types without a value, and their methods. Those that are written out are behind a plus.
macro_rules! absent {
    ($($name:ident {
        $(fn $method:ident $([$($generic:tt)*])? ($me:ident: $Me:ty $(, $argument:ty)*) $(-> $returned:ty)?;)*
    } $(+ { $($written_out:tt)* })?)*) => {$(
        #[derive(Debug)]
        pub struct $name(Never);

        impl $name {
            $(pub fn $method $(<$($generic)*>)? ($me: $Me $(, _: $argument)*) $(-> $returned)? {
                match $me.0 {}
            })*
            $($($written_out)*)?
        }
    )*};
}

absent! {
    Endpoint {
        fn over(device: Arc<Device>, u16) -> Result<Arc<Endpoint>, VerbsError>;
        fn device(self: &Self) -> &Arc<Device>;
        fn connections(self: &Self) -> usize;
        fn listen(self: &Self, SocketAddr, impl FnMut(&Arc<QueuePair>, Option<SocketAddr>) -> Served + Send + 'static)
            -> Result<SocketAddr, VerbsError>;
        fn connect(self: &Self, SocketAddr, Instant, usize, impl FnOnce(Connected<'_>) -> Served + Send + 'static);
        fn shut_down(self: &Self, Duration);
    } + {
        pub fn open(_: &RdmaOptions, _: u16) -> Result<Arc<Endpoint>, VerbsError> {
            Err(VerbsError::NotBuilt)
        }
    }

    Device {
        fn register(self: &Arc<Device>, &Mapping) -> Result<Arc<Registration>, VerbsError>;
        fn register_to_fill(self: &Arc<Device>, &Mapping) -> Result<Arc<Registration>, VerbsError>;
        fn spare(self: &Self, Weak<dyn Spare>);
        fn knows(self: &Self, &Mapping) -> bool;
        fn forget(self: &Self, &Mapping);
        fn forget_to_fill(self: &Self, &Mapping);
        fn name(self: &Self) -> String;
        fn is_iwarp(self: &Self) -> bool;
        fn arena(self: &Self) -> &Arc<Arena>;
        fn payload_arena(self: &Self) -> &Arc<Arena>;
        fn options(self: &Self) -> &RdmaOptions;
    } + {
        pub fn open_with(_: &RdmaOptions, _: Option<Arc<dyn DeviceMemory>>) -> Result<Arc<Device>, VerbsError> {
            Err(VerbsError::NotBuilt)
        }
    }

    QueuePair {
        fn device(self: &Self) -> &Arc<Device>;
        fn connection(self: &Self) -> Option<&Connection>;
        fn room(self: &Self, usize) -> usize;
        fn read(self: &Self, u64, Slot, usize, RemoteMemory, bool) -> Result<(), (VerbsError, Slot)>;
        fn read_to(self: &Self, u64, Target, Arc<Registration>, RemoteMemory) -> Result<(), VerbsError>;
        fn write(self: &Self, u64, LentPayload, Arc<Registration>, RemoteMemory) -> Result<(), VerbsError>;
        fn post(self: &Self) -> Result<(), VerbsError>;
        fn take(self: &Self, &mut Done);
        fn give_up(self: &Self, &VerbsError);
        fn break_off(self: &Self, String);
        fn end(self: &Self);
    }

    Arena {
        fn take(self: &Arc<Arena>, usize) -> Result<Chunk, VerbsError>;
        fn available(self: &Self) -> u64;
    }

    Chunk {
        fn open(self: &Self) -> Result<Arc<Registration>, VerbsError>;
    }

    Pool {
        fn new(chunk: Chunk, usize, bool) -> Arc<Pool>;
        fn count(self: &Self) -> usize;
        fn take(self: &Arc<Pool>, Option<&Connection>) -> Option<Slot>;
    }

    Slot {
        fn copied_out['a](self: &Self, usize, &'a mut Vec<u8>) -> Result<Option<&'a [u8]>, VerbsError>;
        fn copy[const N: usize](self: &Self) -> [u8; N];
    } + {
        pub unsafe fn bytes(&self, _: usize) -> &[u8] {
            match self.0 {}
        }
    }

    Registration {
        fn remote(self: &Self) -> RemoteMemory;
    }
}

/// The stream to serve on a connection.
type Served = Option<Box<dyn Stream>>;
/// A connection that was asked for, or why there is none.
type Connected<'a> = Result<&'a Arc<QueuePair>, String>;

pub fn devices() -> Result<Vec<DeviceInfo>, VerbsError> {
    Err(VerbsError::NotBuilt)
}

pub fn usable() -> Result<Vec<String>, VerbsError> {
    Err(VerbsError::NotBuilt)
}

#[derive(Debug)]
pub enum Work {
    ReadTo { target: Target },
    Read { slot: Slot },
    Write {},
    Ring {},
}

#[derive(Debug)]
pub struct Finished {
    pub token: u64,
    pub work: Work,
}

pub type Done = Vec<Finished>;
