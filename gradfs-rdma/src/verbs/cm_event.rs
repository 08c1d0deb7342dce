//! Events of rdma_cm: changes of connections, and requests for new ones.

use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use rdma_sys as sys;

use super::VerbsError;
use super::cm_channel::CmChannel;
use super::cm_id::CmId;

/// A change of a connection.
#[derive(Debug)]
pub enum CmKind {
    /// The address is resolved: the device is known.
    AddressResolved,
    /// The route is resolved: the connection can be made.
    RouteResolved,
    /// A peer connects.
    Request(CmId),
    /// The peer has accepted the connection, and waits for [`CmId::establish`].
    Answered,
    /// The connection is established.
    Established,
    /// The peer has refused the connection.
    Rejected,
    /// The connection has failed, for this reason.
    Failed(String),
    /// The connection is over.
    Disconnected,
    /// The device is being removed.
    DeviceRemoved,
    /// The event is of no consequence.
    Other,
}

/// An event of a connection, or of a listener.
#[derive(Debug)]
pub struct CmEvent {
    /// The token that was given when the identifier was made; for a request, the listener's.
    pub token: u64,
    /// The kind of event.
    pub kind: CmKind,
    /// The peer's private data; it may have zeros at its end.
    pub private: Vec<u8>,
}

impl CmChannel {
    /// The next event, if there is one.
    ///
    /// # Errors
    /// [`VerbsError::Call`].
    pub fn next(self: &Arc<CmChannel>) -> Result<Option<CmEvent>, VerbsError> {
        let mut event = ptr::null_mut();
        // SAFETY: the channel lives, and does not block.
        if unsafe { sys::rdma_get_cm_event(self.raw(), &raw mut event) } != 0 {
            return match Errno::last() {
                Errno::EAGAIN | Errno::EINTR => Ok(None),
                errno => Err(VerbsError::Call { doing: "reading an event of connections", errno }),
            };
        }
        // SAFETY: the call has filled the event, which stays until it is acknowledged. To destroy an identifier waits
        // for that, so `id` lives. Nobody else has the identifier of a request yet, and its listener lives.
        let event_read = unsafe { self.read(&*event) };
        // SAFETY: the event is acknowledged once, and not used afterwards.
        unsafe { sys::rdma_ack_cm_event(event) };
        Ok(Some(event_read))
    }

    /// # Safety
    /// The event is one of this channel, and not acknowledged yet.
    unsafe fn read(self: &Arc<CmChannel>, event: &sys::rdma_cm_event) -> CmEvent {
        use sys::rdma_cm_event_type as kinds;
        let is_request = event.event == kinds::RDMA_CM_EVENT_CONNECT_REQUEST;
        let of = if is_request { event.listen_id } else { event.id };
        // SAFETY: the identifier lives, as the caller promises. `CmId::new` has set its context.
        let token = unsafe { (*of).context } as u64;
        let has_private = matches!(
            event.event,
            kinds::RDMA_CM_EVENT_CONNECT_REQUEST
                | kinds::RDMA_CM_EVENT_ESTABLISHED
                | kinds::RDMA_CM_EVENT_CONNECT_RESPONSE
                | kinds::RDMA_CM_EVENT_REJECTED
        );
        let mut private = Vec::new();
        if has_private {
            // SAFETY: these kinds of events have parameters of connections.
            let conn = unsafe { &event.param.conn };
            if !conn.private_data.is_null() {
                let len = usize::from(conn.private_data_len);
                // SAFETY: the pointer leads to `len` bytes until the event is acknowledged.
                let bytes = unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len) };
                private.extend_from_slice(bytes);
            }
        }
        let status = event.status;
        let failed = |doing: &str| {
            let why = match status {
                0 => "no reason is given".to_owned(),
                number => Errno::from_raw(number.abs()).to_string(),
            };
            CmKind::Failed(format!("{doing}: {why}"))
        };
        let kind = match event.event {
            kinds::RDMA_CM_EVENT_ADDR_RESOLVED => CmKind::AddressResolved,
            kinds::RDMA_CM_EVENT_ROUTE_RESOLVED => CmKind::RouteResolved,
            kinds::RDMA_CM_EVENT_CONNECT_REQUEST => match NonNull::new(event.id) {
                Some(id) => CmKind::Request(CmId::of_request(id, self)),
                None => CmKind::Other,
            },
            kinds::RDMA_CM_EVENT_CONNECT_RESPONSE => CmKind::Answered,
            kinds::RDMA_CM_EVENT_ESTABLISHED => CmKind::Established,
            kinds::RDMA_CM_EVENT_REJECTED => CmKind::Rejected,
            kinds::RDMA_CM_EVENT_DISCONNECTED | kinds::RDMA_CM_EVENT_TIMEWAIT_EXIT => CmKind::Disconnected,
            kinds::RDMA_CM_EVENT_DEVICE_REMOVAL => CmKind::DeviceRemoved,
            kinds::RDMA_CM_EVENT_ADDR_ERROR => failed("no RDMA device leads there"),
            kinds::RDMA_CM_EVENT_ROUTE_ERROR => failed("no route"),
            kinds::RDMA_CM_EVENT_UNREACHABLE => failed("unreachable"),
            kinds::RDMA_CM_EVENT_CONNECT_ERROR => failed("cannot connect"),
            _ => CmKind::Other,
        };
        CmEvent { token, kind, private }
    }
}
