//! Connections by rdma_cm: addresses are resolved and queue pairs are joined. No call here waits.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use rdma_sys as sys;
use socket2::{SockAddr, SockAddrStorage};

use super::VerbsError;
use super::cm_channel::CmChannel;
use super::context::Context;
use super::join::{Joint, Wanted};
use super::registration::Domain;
use crate::Mtu;

/// Bytes that may go with a request or its answer.
pub const PRIVATE_DATA: usize = 56;

/// The parameters that are agreed when a connection begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Private data for the peer, up to [`PRIVATE_DATA`] bytes.
    pub private: Vec<u8>,
    /// Reads that each end may have outstanding, at most.
    pub reads: u8,
    /// How often a packet is sent again before the connection is broken, 0 to 7.
    pub retries: u8,
}

/// One end of a connection, or a listener: an `rdma_cm_id`. Dropping it destroys the identifier and its queue pair.
/// The drop waits for a moment while another thread reads an event of the identifier.
#[derive(Debug)]
pub struct CmId {
    id: NonNull<sys::rdma_cm_id>,
    joint: Joint,
    /// The index of the GID that packets must come from.
    gid: Option<u32>,
    channel: Arc<CmChannel>,
}

// SAFETY: librdmacm allows calls on an identifier from all threads.
unsafe impl Send for CmId {}
// SAFETY: functions that take `&self` are single calls into librdmacm, which locks where it must.
unsafe impl Sync for CmId {}

impl CmId {
    /// The identifier of a request that the kernel has just reported.
    pub(super) fn of_request(id: NonNull<sys::rdma_cm_id>, channel: &Arc<CmChannel>) -> CmId {
        CmId { id, joint: Joint::default(), gid: None, channel: Arc::clone(channel) }
    }

    /// A new identifier, whose events carry `token`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn new(channel: &Arc<CmChannel>, token: u64) -> Result<CmId, VerbsError> {
        let mut id = ptr::null_mut();
        // SAFETY: the channel lives as long as the identifier. The context is a number, and nobody follows it.
        let result = unsafe {
            let port_space = sys::rdma_port_space::RDMA_PS_TCP;
            sys::rdma_create_id(channel.raw(), &raw mut id, token as *mut c_void, port_space)
        };
        VerbsError::check("making an RDMA connection", result)?;
        let id = NonNull::new(id).ok_or(VerbsError::Broken("librdmacm made nothing".into()))?;
        Ok(CmId { id, joint: Joint::default(), gid: None, channel: Arc::clone(channel) })
    }

    fn raw(&self) -> *mut sys::rdma_cm_id {
        self.id.as_ptr()
    }

    /// Gives the identifier of a new request its token, which its events carry from now on.
    pub fn rename(&mut self, token: u64) {
        // SAFETY: the identifier is not shared yet.
        unsafe { self.id.as_mut().context = token as *mut c_void };
    }

    /// The device of the connection. `None` before that is resolved.
    pub fn context(&self) -> Option<Context> {
        // SAFETY: the identifier lives, and the field is set before the event that reports it.
        Context::of(unsafe { self.id.as_ref().verbs })
    }

    /// The device's port of the connection.
    pub fn port(&self) -> u8 {
        // SAFETY: as above.
        unsafe { self.id.as_ref().port_num }
    }

    /// Packets must come from the GID with this index. With `None` the connection manager chooses a GID for the
    /// address, of RoCE v1 or v2.
    pub fn must_come_from(&mut self, gid: Option<u32>) {
        self.gid = gid;
    }

    /// Sets the traffic class of its packets (RoCE: DSCP and ECN; InfiniBand: by the subnet manager).
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn set_traffic_class(&self, class: u8) -> Result<(), VerbsError> {
        const LEVEL: libc::c_int = 0;
        const TYPE_OF_SERVICE: libc::c_int = 0;
        let mut class = class;
        // SAFETY: the option is one byte, which is read during the call.
        let result =
            unsafe { sys::rdma_set_option(self.raw(), LEVEL, TYPE_OF_SERVICE, (&raw mut class).cast(), 1) };
        VerbsError::check("setting the traffic class", result)
    }

    /// Finds the device that leads to `to`, from `from` if that is given.
    ///
    /// # Errors
    /// [`VerbsError::Call`], at once.
    pub fn resolve_address(
        &self,
        from: Option<SocketAddr>,
        to: SocketAddr,
        millis: i32,
    ) -> Result<(), VerbsError> {
        let (from, to) = (from.map(SockAddr::from), SockAddr::from(to));
        let from = from.as_ref().map_or(ptr::null_mut(), |from| from.as_ptr().cast_mut().cast());
        // SAFETY: both addresses are read during the call.
        let result =
            unsafe { sys::rdma_resolve_addr(self.raw(), from, to.as_ptr().cast_mut().cast(), millis) };
        VerbsError::check("resolving an RDMA address", result)
    }

    /// Finds the route.
    ///
    /// # Errors
    /// [`VerbsError::Call`], at once.
    pub fn resolve_route(&self, millis: i32) -> Result<(), VerbsError> {
        // SAFETY: a single call.
        VerbsError::check("resolving an RDMA route", unsafe { sys::rdma_resolve_route(self.raw(), millis) })
    }

    /// Listens.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn listen(&self, at: SocketAddr, backlog: i32) -> Result<SocketAddr, VerbsError> {
        let raw = SockAddr::from(at);
        // SAFETY: the address is read during the call.
        let result = unsafe { sys::rdma_bind_addr(self.raw(), raw.as_ptr().cast_mut().cast()) };
        VerbsError::check("binding an RDMA address", result)?;
        // SAFETY: a single call.
        VerbsError::check("listening for RDMA connections", unsafe {
            sys::rdma_listen(self.raw(), backlog)
        })?;
        // SAFETY: as above.
        let port = u16::from_be(unsafe { sys::rdma_get_src_port(self.raw()) });
        Ok(SocketAddr::new(at.ip(), port))
    }

    /// The peer's address, where it is known.
    pub fn peer(&self) -> Option<SocketAddr> {
        let mut storage = SockAddrStorage::zeroed();
        // SAFETY: the address of a connection is a `sockaddr_storage`, and so is the destination of the copy.
        let address = unsafe {
            let from = &raw const (*self.raw()).route.addr.dst_addr_union;
            ptr::copy_nonoverlapping(
                from.cast::<u8>(),
                (&raw mut storage).cast::<u8>(),
                storage.size_of() as usize,
            );
            let len = storage.size_of();
            SockAddr::new(storage, len)
        };
        address.as_socket()
    }

    pub(super) fn make_pair(
        &self,
        domain: &Arc<Domain>,
        init: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp, VerbsError> {
        if self.context() != Some(domain.context()) {
            return Err(VerbsError::Broken("the connection leads over another device".into()));
        }
        if self.joint.is_made() {
            return Err(VerbsError::Broken("the connection has a queue pair already".into()));
        }
        // SAFETY: the identifier has no queue pair. Its holder holds the domain and the queues, so they live longer
        // than the pair.
        unsafe { self.joint.make(self.raw(), domain, init) }
    }

    /// Asks the peer for a connection.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn connect(&self, parameters: &Parameters) -> Result<(), VerbsError> {
        let mut raw = self.parameters(parameters)?;
        // SAFETY: the parameters are read during the call.
        VerbsError::check("connecting by RDMA", unsafe { sys::rdma_connect(self.raw(), &raw mut raw) })
    }

    /// Establishes a connection that the peer has accepted. Packets are no longer than `mtu`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn establish(&self, mtu: Option<Mtu>) -> Result<(), VerbsError> {
        let Some(context) = self.context() else {
            return Err(VerbsError::Broken("the connection has no device yet".into()));
        };
        // SAFETY: the identifier lives, and the peer has answered.
        unsafe { self.joint.ready(self.raw(), context, Wanted { mtu, reads: None, gid: self.gid })? };
        // SAFETY: a single call.
        VerbsError::check("taking an RDMA connection's answer", unsafe { sys::rdma_establish(self.raw()) })
    }

    /// Accepts the connection that the peer has asked for. Packets are no longer than `mtu`.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn accept(&self, parameters: &Parameters, mtu: Option<Mtu>) -> Result<(), VerbsError> {
        let mut raw = self.parameters(parameters)?;
        if let Some(context) = self.context() {
            let reads = (raw.initiator_depth, raw.responder_resources);
            // SAFETY: the identifier lives, and the peer has asked for the connection.
            unsafe {
                let reads = Some(reads);
                self.joint.ready(self.raw(), context, Wanted { mtu, reads, gid: self.gid })?;
            };
        }
        // SAFETY: as above.
        VerbsError::check("accepting an RDMA connection", unsafe {
            sys::rdma_accept(self.raw(), &raw mut raw)
        })
    }

    fn parameters(&self, of: &Parameters) -> Result<sys::rdma_conn_param, VerbsError> {
        let context = self.context();
        let (initiated, answered) = context.map_or(Ok((1, 1)), Context::reads)?;
        if of.private.len() > PRIVATE_DATA {
            let (len, all) = (of.private.len(), PRIVATE_DATA as u64);
            return Err(VerbsError::OutOfRange { offset: 0, len, of: "private data", all });
        }
        Ok(sys::rdma_conn_param {
            private_data: of.private.as_ptr().cast(),
            private_data_len: of.private.len() as u8,
            responder_resources: of.reads.min(answered),
            initiator_depth: of.reads.min(initiated),
            flow_control: 1,
            retry_count: of.retries.min(7),
            // 7 is no limit. A peer that exists and takes nothing is given up for its silence.
            rnr_retry_count: 7,
            srq: 0,
            qp_num: context.map_or(0, |context| self.joint.number(context)),
        })
    }

    /// Refuses the connection.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn reject(&self, private: &[u8]) -> Result<(), VerbsError> {
        let private = &private[..private.len().min(PRIVATE_DATA)];
        // SAFETY: the data is read during the call.
        let result = unsafe { sys::rdma_reject(self.raw(), private.as_ptr().cast(), private.len() as u8) };
        VerbsError::check("refusing an RDMA connection", result)
    }

    /// Its queue pair, if it has one, does nothing more: outstanding work is flushed.
    ///
    /// # Safety
    /// Nobody destroys the queue pair meanwhile.
    pub(super) unsafe fn fail_pair(&self) {
        // SAFETY: as the caller promises.
        unsafe { self.joint.fail() };
    }

    /// Destroys its queue pair, if it has one.
    ///
    /// # Safety
    /// Nobody uses the queue pair, now or later.
    pub(super) unsafe fn end_pair(&self) {
        // SAFETY: as the caller promises.
        unsafe { self.joint.destroy(self.raw()) };
    }

    /// Ends the connection: outstanding work is flushed, and the peer is notified.
    pub fn disconnect(&self) {
        // SAFETY: a single call. A connection that is over already is no error.
        unsafe { sys::rdma_disconnect(self.raw()) };
    }
}

impl Drop for CmId {
    fn drop(&mut self) {
        // SAFETY: nobody else has it; the queue pair, which is destroyed first, is used by nobody who does not hold the
        // identifier.
        unsafe {
            self.end_pair();
            if sys::rdma_destroy_id(self.raw()) != 0 {
                tracing::error!(errno = %Errno::last(), channel = ?self.channel, "an RDMA connection is lost");
            }
        }
    }
}
