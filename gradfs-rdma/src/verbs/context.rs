//! RDMA devices and their properties.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rdma_sys as sys;

use super::VerbsError;
use crate::device_info::{DeviceInfo, GidInfo, PortInfo};

/// The vendor of soft-iWARP's devices.
const SIW: u32 = 0x62_6d74;
/// A queue of so many completions, of 32 bytes each, covers the offset 0x90000, which soft-iWARP's part of libibverbs takes
/// for an error (`SIW_INVAL_UOBJ_KEY`).
const SIW_COVER: libc::c_int = 1 << 15;

/// A device as librdmacm has opened it, once and for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context(NonNull<sys::ibv_context>);

// SAFETY: libibverbs allows calls on a context from all threads; it is never closed.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A report of a device that is no outcome of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Trouble {
    /// The name in libibverbs.
    pub(crate) what: String,
    /// Whether something fails or is about to.
    pub(crate) is_bad: bool,
}

/// All devices, whether librdmacm can use them or not.
///
/// # Errors
/// [`VerbsError::Call`]. Without devices the list is empty.
pub fn devices() -> Result<Vec<DeviceInfo>, VerbsError> {
    let mut count = 0;
    // SAFETY: the call writes the count; the list is given back below.
    let list = unsafe { sys::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return match Errno::last() {
            // Without the kernel's modules there are none.
            Errno::ENOSYS | Errno::ENOENT => Ok(Vec::new()),
            errno => Err(VerbsError::Call { doing: "listing RDMA devices", errno }),
        };
    }
    let mut found = Vec::new();
    let mut failed = None;
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has that many entries; a device lives as long as the list does.
        let opened = unsafe { NonNull::new(sys::ibv_open_device(*list.add(index))) };
        let Some(opened) = opened else {
            failed = Some(VerbsError::last("opening an RDMA device"));
            continue;
        };
        found.push(Context(opened).info());
        // SAFETY: the context was opened above, and no object of it exists.
        unsafe { sys::ibv_close_device(opened.as_ptr()) };
    }
    // SAFETY: the list is that of `ibv_get_device_list`, and none of its devices is open any more.
    unsafe { sys::ibv_free_device_list(list) };
    match failed {
        Some(error) if found.is_empty() => Err(error),
        _ => found.into_iter().collect(),
    }
}

/// All devices that librdmacm connects over.
///
/// # Errors
/// [`VerbsError::NoDevice`], [`VerbsError::NoCm`].
pub fn contexts() -> Result<&'static [Context], VerbsError> {
    static ALL: OnceLock<Vec<Context>> = OnceLock::new();
    if let Some(known) = ALL.get() {
        return Ok(known);
    }
    let mut count = 0;
    // SAFETY: the call writes the count. The list is never given back: contexts stay open as long as the process.
    let list = unsafe { sys::rdma_get_devices(&raw mut count) };
    if list.is_null() {
        // Read before another call changes it.
        let errno = Errno::last();
        return Err(match devices() {
            Ok(there) if there.is_empty() => VerbsError::NoDevice,
            _ => VerbsError::NoCm(errno),
        });
    }
    let all = (0..usize::try_from(count).unwrap_or(0))
        // SAFETY: the list has that many entries.
        .filter_map(|index| NonNull::new(unsafe { *list.add(index) }).map(Context))
        .collect::<Vec<_>>();
    match all.is_empty() {
        // A device that is plugged in later can then be found.
        true => Err(VerbsError::NoDevice),
        false => Ok(ALL.get_or_init(|| {
            all.iter().for_each(|context| context.cover_bad_offset());
            all
        })),
    }
}

/// The names of the devices that librdmacm connects over.
///
/// # Errors
/// [`VerbsError::NoDevice`], [`VerbsError::NoCm`].
pub fn usable() -> Result<Vec<String>, VerbsError> {
    Ok(contexts()?.iter().map(|context| context.name()).collect())
}

impl Context {
    /// Soft-iWARP maps a context's queues at offsets of the device's file, each at the lowest that is free. Its part of
    /// libibverbs takes one of these offsets for an error, and gives up the queue that lies there. So another queue is put
    /// over that offset, before all others. Nothing uses it, and it stays as long as the context.
    fn cover_bad_offset(self) {
        if self.attributes().is_ok_and(|attributes| attributes.vendor_id == SIW) {
            // SAFETY: the context is open.
            let queue =
                unsafe { sys::ibv_create_cq(self.raw(), SIW_COVER, ptr::null_mut(), ptr::null_mut(), 0) };
            if queue.is_null() {
                tracing::debug!(error = %VerbsError::last("making a completion queue"), "connections may fail");
            }
        }
    }

    pub(super) fn raw(self) -> *mut sys::ibv_context {
        self.0.as_ptr()
    }

    /// The context of a connection. `None` before its address is resolved.
    pub(super) fn of(raw: *mut sys::ibv_context) -> Option<Context> {
        NonNull::new(raw).map(Context)
    }

    /// Its name, such as `mlx5_0`.
    pub fn name(self) -> String {
        // SAFETY: an open context has its device, whose name is a C string that lives as long.
        let name = unsafe { CStr::from_ptr(sys::ibv_get_device_name((*self.raw()).device)) };
        name.to_string_lossy().into_owned()
    }

    /// Whether the device speaks iWARP. Then it has no immediate data, and peers must be allowed to write memory that a
    /// READ fills.
    pub fn is_iwarp(self) -> bool {
        // SAFETY: an open context has its device.
        unsafe { (*(*self.raw()).device).transport_type == sys::ibv_transport_type::IBV_TRANSPORT_IWARP }
    }

    /// From now on, [`Self::next_trouble`] does not wait.
    pub(crate) fn listen_for_trouble(self) -> Result<(), VerbsError> {
        let fd = self.trouble();
        let flags = fcntl(fd, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
        let set = flags.and_then(|flags| fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)));
        set.map(drop).map_err(|errno| VerbsError::Call { doing: "listening to an RDMA device", errno })
    }

    /// Becomes readable when there is trouble.
    pub(crate) fn trouble<'a>(self) -> BorrowedFd<'a> {
        // SAFETY: an open context has this descriptor, and is never closed.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// The next event of the device that is not the completion of work. If the process uses the device several times,
    /// each use gets some of the events.
    pub(crate) fn next_trouble(self) -> Option<Trouble> {
        let mut event = std::mem::MaybeUninit::<sys::ibv_async_event>::zeroed();
        // SAFETY: the call fills the event if it returns 0. Each event is acknowledged once, before its object is
        // destroyed.
        let (kind, text) = unsafe {
            if sys::ibv_get_async_event(self.raw(), event.as_mut_ptr()) != 0 {
                return None;
            }
            let kind = event.assume_init_ref().event_type;
            sys::ibv_ack_async_event(event.as_mut_ptr());
            (kind, CStr::from_ptr(sys::ibv_event_type_str(kind)))
        };
        use sys::ibv_event_type as kinds;
        let is_bad = matches!(
            kind,
            kinds::IBV_EVENT_CQ_ERR
                | kinds::IBV_EVENT_QP_FATAL
                | kinds::IBV_EVENT_QP_REQ_ERR
                | kinds::IBV_EVENT_QP_ACCESS_ERR
                | kinds::IBV_EVENT_SRQ_ERR
                | kinds::IBV_EVENT_PORT_ERR
                | kinds::IBV_EVENT_DEVICE_FATAL
        );
        Some(Trouble { what: text.to_string_lossy().into_owned(), is_bad })
    }

    fn attributes(self) -> Result<sys::ibv_device_attr, VerbsError> {
        let mut attributes = std::mem::MaybeUninit::zeroed();
        // SAFETY: the call fills the attributes, which are plain numbers.
        unsafe {
            let result = sys::ibv_query_device(self.raw(), attributes.as_mut_ptr());
            VerbsError::check_number("asking an RDMA device", result)?;
            Ok(attributes.assume_init())
        }
    }

    /// The READs that a queue pair may have outstanding: its own, and the peer's.
    pub(super) fn reads(self) -> Result<(u8, u8), VerbsError> {
        let attributes = self.attributes()?;
        let narrow = |count: libc::c_int| u8::try_from(count.clamp(1, 255)).unwrap_or(1);
        Ok((narrow(attributes.max_qp_init_rd_atom), narrow(attributes.max_qp_rd_atom)))
    }

    /// The most work of a queue pair, the most completions of a queue, and the most shared receives.
    pub(super) fn depths(self) -> Result<(u32, u32, u32), VerbsError> {
        let attributes = self.attributes()?;
        let wide = |count: libc::c_int| u32::try_from(count).unwrap_or(0);
        Ok((wide(attributes.max_qp_wr), wide(attributes.max_cqe), wide(attributes.max_srq_wr)))
    }

    /// A port of the device.
    ///
    /// # Errors
    /// [`VerbsError::Port`] if there is none of that number.
    pub fn port(self, number: u8) -> Result<PortInfo, VerbsError> {
        let mut raw = std::mem::MaybeUninit::<sys::ibv_port_attr>::zeroed();
        // SAFETY: the call fills the attributes, which are plain numbers.
        let raw = unsafe {
            if sys::___ibv_query_port(self.raw(), number, raw.as_mut_ptr()) != 0 {
                let why = format!("cannot be asked: {}", Errno::last());
                return Err(VerbsError::Port { device: self.name(), port: number, why });
            }
            raw.assume_init()
        };
        let gids = (0..u32::try_from(raw.gid_tbl_len).unwrap_or(0).min(256))
            .filter_map(|index| self.gid(number, index))
            .collect();
        // SAFETY: the call returns a constant string for any number.
        let state = unsafe { CStr::from_ptr(sys::ibv_port_state_str(raw.state)) };
        const ETHERNET: u8 = 2;
        Ok(PortInfo {
            number,
            state: state.to_string_lossy().trim_start_matches("PORT_").to_lowercase(),
            active: raw.state == sys::ibv_port_state::IBV_PORT_ACTIVE,
            link: if raw.link_layer == ETHERNET { "Ethernet" } else { "InfiniBand" },
            mtu: 128 << raw.active_mtu.min(5),
            gids,
        })
    }

    /// The GID of an index; `None` if there is none.
    pub fn gid(self, port: u8, index: u32) -> Option<GidInfo> {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        let number = libc::c_int::try_from(index).ok()?;
        // SAFETY: the call fills the GID, which is 16 bytes.
        let raw = unsafe {
            if sys::ibv_query_gid(self.raw(), port, number, &raw mut gid) != 0 {
                return None;
            }
            gid.raw
        };
        if raw == [0; 16] {
            return None;
        }
        let address = std::net::Ipv6Addr::from(raw);
        let address = match address.to_ipv4_mapped() {
            Some(mapped) => mapped.to_string(),
            None => address.to_string(),
        };
        let path = format!("/sys/class/infiniband/{}/ports/{port}/gid_attrs/types/{index}", self.name());
        let kind = std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        Some(GidInfo { index, address, kind })
    }

    /// The description of the device.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn info(self) -> Result<DeviceInfo, VerbsError> {
        let raw = self.attributes()?;
        let firmware = raw.fw_ver.iter().take_while(|&&c| c != 0).map(|&c| char::from(c.cast_unsigned()));
        Ok(DeviceInfo {
            name: self.name(),
            transport: if self.is_iwarp() { "iWARP" } else { "InfiniBand" },
            firmware: firmware.collect(),
            max_pairs: raw.max_qp.max(0).cast_unsigned(),
            max_work: raw.max_qp_wr.max(0).cast_unsigned(),
            max_registration: raw.max_mr_size,
            ports: (1..=raw.phys_port_cnt).map(|number| self.port(number)).collect::<Result<_, _>>()?,
        })
    }
}
