//! A device in use: its arena, its completion queues, and the memory that is registered with it (RPCH §3.1).

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Weak};

use super::device_memory::DeviceMemory;
use super::options::{Notice, RdmaOptions};
use super::verbs::{
    Access, Arena, Context, Domain, Notify, Pair, PairLimits, Poller, Registration, Reserved, Rings, Spare,
    Trouble, VerbsError, contexts,
};
use modelio_base::bytes::mmap::Mapping;

/// The number of queue pairs that a completion queue is made for.
const PAIRS_A_QUEUE: u32 = 64;

/// One device, opened for this process.
#[derive(Debug)]
pub struct Device {
    context: Context,
    port: u8,
    domain: Arc<Domain>,
    arena: Arc<Arena>,
    /// Memory of another device.
    far: Option<Arc<Arena>>,
    pollers: Vec<Arc<Poller>>,
    notify: Notify,
    options: RdmaOptions,
}

impl Device {
    /// Finds the device and takes its memory.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn open(options: &RdmaOptions) -> Result<Arc<Device>, VerbsError> {
        Device::open_with(options, None)
    }

    /// Like [`Self::open`], with memory of another device, such as a GPU, for payload from peers. iRDMA found that
    /// memory best for writes to a shard, and the host's for reads from it (§IV-A). No command passes one: that waits for a
    /// GPU beside an RDMA device to try it on.
    ///
    /// # Errors
    /// [`VerbsError`], which says what is missing.
    pub fn open_with(
        options: &RdmaOptions,
        far: Option<Arc<dyn DeviceMemory>>,
    ) -> Result<Arc<Device>, VerbsError> {
        let context = find(options)?;
        let port = port_of(context, options.port)?;
        if let Some(index) = options.gid_index
            && context.gid(port, index).is_none()
        {
            return Err(VerbsError::Gid { device: context.name(), port, index });
        }
        if let Some(gid) = options.gid_index.and_then(|index| context.gid(port, index))
            && (context.is_iwarp()
                || !gid.kind.is_empty() && !gid.kind.contains("RoCE")
                || gid.is_link_local())
        {
            let why = format!(
                "has no IP address that a connection could come from at GID {}: leave --rdma-gid-index out",
                gid.index
            );
            return Err(VerbsError::Port { device: context.name(), port, why });
        }
        if let Some(mtu) = options.mtu {
            let down = |why| Err(VerbsError::Port { device: context.name(), port, why });
            let most = context.port(port)?.mtu;
            if context.is_iwarp() {
                return down(format!(
                    "speaks iWARP, which has no MTU of its own: leave --rdma-mtu {mtu} out"
                ));
            } else if mtu.bytes() > most {
                return down(format!("takes packets of {most} bytes, fewer than --rdma-mtu {mtu}"));
            }
        }
        let notify = match options.notice {
            Notice::Auto if context.is_iwarp() => Notify::Flag,
            Notice::Auto => Notify::Immediate,
            Notice::Immediate if context.is_iwarp() => {
                let (device, why) = (context.name(), "speaks iWARP, which has no immediate data".into());
                return Err(VerbsError::Port { device, port, why });
            }
            Notice::Immediate => Notify::Immediate,
            Notice::Flag => Notify::Flag,
        };
        context.listen_for_trouble()?;
        let domain = Domain::new(context)?;
        let arena = Arena::new(&domain, options.arena)?;
        let far = far.map(|memory| Arena::on_device(&domain, memory)).transpose()?;
        let shared = if notify == Notify::Immediate { options.shared_receives } else { 0 };
        let depth = PAIRS_A_QUEUE.saturating_mul(options.depth).saturating_add(shared);
        let pollers = (0..options.queues.max(1)).map(|_| Poller::new(&domain, depth, shared));
        let pollers = pollers.collect::<Result<_, _>>()?;
        let options = options.clone();
        Ok(Arc::new(Device { context, port, domain, arena, far, pollers, notify, options }))
    }

    /// Registers all of `memory` for peers to read. A mapping is registered once, as long as it lives.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`], [`VerbsError::Call`].
    pub fn register(self: &Arc<Device>, memory: &Mapping) -> Result<Arc<Registration>, VerbsError> {
        self.registered(memory, Access::Read)
    }

    /// Registers memory that this end's READs fill. No peer has a key to it.
    ///
    /// # Errors
    /// [`VerbsError::Memlock`], [`VerbsError::Call`].
    pub fn register_to_fill(self: &Arc<Device>, memory: &Mapping) -> Result<Arc<Registration>, VerbsError> {
        self.registered(memory, Access::Local)
    }

    fn registered(&self, memory: &Mapping, access: Access) -> Result<Arc<Registration>, VerbsError> {
        let make = || Registration::new(&self.domain, memory, 0..memory.len(), access);
        memory.attached(self.key(access), make)
    }

    /// Adds registrations that are given up when no more memory may be pinned.
    pub fn spare(&self, what: Weak<dyn Spare>) {
        self.domain.spare(what);
    }

    /// Whether `memory` is registered for peers.
    pub fn knows(&self, memory: &Mapping) -> bool {
        memory.attached::<Registration, ()>(self.key(Access::Read), || Err(())).is_ok()
    }

    /// Ends the registration of `memory` for peers, once nothing uses it.
    pub fn forget(&self, memory: &Mapping) {
        memory.detach(self.key(Access::Read));
    }

    /// Ends the registration of memory that READs fill.
    pub fn forget_to_fill(&self, memory: &Mapping) {
        memory.detach(self.key(Access::Local));
    }

    /// The key under which a registration with these rights is attached to a mapping. It is unique to the domain.
    fn key(&self, access: Access) -> usize {
        Arc::as_ptr(&self.domain).addr() + access as usize
    }

    /// Reserves the completion queue of this number for one more queue pair.
    pub(super) fn reserve(&self, number: usize) -> Result<Reserved, VerbsError> {
        Pair::reserve(&self.pollers[number % self.pollers.len()], self.limits())
    }

    /// Becomes readable when the device has an event.
    pub(super) fn trouble(&self) -> BorrowedFd<'_> {
        self.context.trouble()
    }

    /// Logs the device's events, such as a port that goes down or a queue that fails. Each connection notices the
    /// consequences itself, at the latest by its peer's silence.
    pub(super) fn log_device_events(&self) {
        while let Some(Trouble { what, is_bad }) = self.context.next_trouble() {
            let device = self.context.name();
            match is_bad {
                true => tracing::warn!(device, "the RDMA device reports: {what}"),
                false => tracing::debug!(device, "the RDMA device reports: {what}"),
            }
        }
    }

    /// The name and port, as messages show them.
    pub fn name(&self) -> String {
        format!("{} port {}", self.context.name(), self.port)
    }

    pub(super) fn rings(&self) -> Result<Rings, VerbsError> {
        Rings::new(&self.arena, self.notify)
    }

    pub(super) fn limits(&self) -> PairLimits {
        PairLimits {
            // There are no more words for flags than that.
            depth: self.options.depth.clamp(16, 1024),
            inline: self.options.inline,
            report_every: self.options.report_every.max(1),
            // With flags no messages come, and some devices (siw) refuse to wait for a message that has no memory.
            receives: if self.notify == Notify::Immediate { self.options.depth } else { 0 },
        }
    }

    /// Whether the device speaks iWARP.
    pub fn is_iwarp(&self) -> bool {
        self.context.is_iwarp()
    }

    /// Memory for rings and for all else that the CPU reads and writes.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Memory for payload that peers send.
    pub fn payload_arena(&self) -> &Arc<Arena> {
        self.far.as_ref().unwrap_or(&self.arena)
    }

    /// Its completion queues.
    pub fn pollers(&self) -> &[Arc<Poller>] {
        &self.pollers
    }

    /// How peers notify this end of written data.
    pub fn notify(&self) -> Notify {
        self.notify
    }

    /// The options.
    pub fn options(&self) -> &RdmaOptions {
        &self.options
    }

    pub(super) fn context(&self) -> Context {
        self.context
    }

    /// The address of the GID that packets must come from, if the options name one.
    pub(super) fn source(&self) -> Option<std::net::IpAddr> {
        let gid = self.context.gid(self.port, self.options.gid_index?)?;
        gid.address.parse().ok()
    }
}

fn find(options: &RdmaOptions) -> Result<Context, VerbsError> {
    let all = contexts()?;
    if let Some(wanted) = &options.device {
        let found = all.iter().find(|context| context.name() == *wanted).copied();
        return found.ok_or_else(|| {
            let there: Vec<String> = all.iter().map(|context| context.name()).collect();
            VerbsError::UnknownDevice { wanted: wanted.clone(), there: there.join(", ") }
        });
    }
    let active = |context: &&Context| port_of(**context, options.port).is_ok();
    match all.iter().find(active) {
        Some(found) => Ok(*found),
        // If no device has such a port, the error names the first device.
        None => port_of(all[0], options.port).map(|_| all[0]),
    }
}

fn port_of(context: Context, wanted: Option<u8>) -> Result<u8, VerbsError> {
    let info = context.info()?;
    let down = |port: u8, why: String| VerbsError::Port { device: info.name.clone(), port, why };
    match wanted {
        Some(number) => match info.ports.iter().find(|port| port.number == number) {
            Some(port) if port.active => Ok(number),
            Some(port) => Err(down(number, format!("is {}", port.state))),
            None => Err(down(number, format!("is not there: it has {}", info.ports.len()))),
        },
        None => match info.ports.iter().find(|port| port.active) {
            Some(port) => Ok(port.number),
            None if info.ports.len() > 1 => Err(down(1, "is down, and so are the others".into())),
            None => Err(down(1, "is down".into())),
        },
    }
}
