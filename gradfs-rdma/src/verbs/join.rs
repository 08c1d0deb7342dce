//! Getting the queue pair of a connection ready. With iWARP, librdmacm does it. Otherwise this module does it step by
//! step, so that packets can be shorter than the path allows (RPCH §3.1). The steps are InfiniBand's: init, ready to
//! receive, ready to send.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::errno::Errno;
use rdma_sys as sys;

use super::{Context, Domain, VerbsError};
use crate::Mtu;

/// InfiniBand's number for 0.64 ms: after this time a peer sends a message again for which there was no receive. The
/// connection manager's 0 stands for 655 ms.
const NOT_READY: u8 = 12;

/// The queue pair of a connection, once it has one.
#[derive(Debug, Default)]
pub(super) struct Joint {
    pair: AtomicPtr<sys::ibv_qp>,
}

/// The wanted use of a queue pair.
pub(super) struct Wanted {
    /// Packets are no longer than this, or than the path allows.
    pub(super) mtu: Option<Mtu>,
    /// The most READs outstanding, this end's and the peer's. `None` is the agreed number.
    pub(super) reads: Option<(u8, u8)>,
    /// The index of the GID that packets come from; `None` is the connection manager's choice.
    pub(super) gid: Option<u32>,
}

impl Joint {
    /// Makes a queue pair for `id`, ready for receives to be posted.
    ///
    /// # Safety
    /// `id` lives, leads over the domain's device, and has no queue pair. Domain and queues live longer than the pair.
    pub(super) unsafe fn make(
        &self,
        id: *mut sys::rdma_cm_id,
        domain: &Arc<Domain>,
        init: &mut sys::ibv_qp_init_attr,
    ) -> Result<*mut sys::ibv_qp, VerbsError> {
        const DOING: &str = "making a queue pair";
        if domain.context().is_iwarp() {
            // SAFETY: the caller's promise.
            let result = unsafe { sys::rdma_create_qp(id, domain.raw(), &raw mut *init) };
            VerbsError::check(DOING, result)?;
            // SAFETY: the identifier has a queue pair now.
            let pair = unsafe { (*id).qp };
            self.pair.store(pair, Ordering::Release);
            return Ok(pair);
        }
        // SAFETY: the caller's promise.
        let pair = unsafe { sys::ibv_create_qp(domain.raw(), &raw mut *init) };
        if pair.is_null() {
            return Err(VerbsError::last(DOING));
        }
        self.pair.store(pair, Ordering::Release);
        // SAFETY: the identifier and the pair live.
        let begun = unsafe { step(id, pair, sys::ibv_qp_state::IBV_QPS_INIT, |_| Ok(())) };
        if begun.is_err() {
            // SAFETY: nobody else knows the pair.
            unsafe { self.destroy(id) };
        }
        begun.map(|()| pair)
    }

    /// Makes the queue pair ready to receive and to send. With iWARP there is nothing to do.
    ///
    /// # Safety
    /// `id` lives, and the peer has answered its request or has asked for the connection.
    pub(super) unsafe fn ready(
        &self,
        id: *mut sys::rdma_cm_id,
        context: Context,
        wanted: Wanted,
    ) -> Result<(), VerbsError> {
        let Wanted { mtu, reads, gid } = wanted;
        if context.is_iwarp() {
            return Ok(());
        }
        let pair = self.pair.load(Ordering::Acquire);
        if pair.is_null() {
            return Err(VerbsError::Broken("the connection has no queue pair".into()));
        }
        // SAFETY: the identifier and the pair live. The first step is repeated because the path is known now.
        unsafe {
            step(id, pair, sys::ibv_qp_state::IBV_QPS_INIT, |_| Ok(()))?;
            step(id, pair, sys::ibv_qp_state::IBV_QPS_RTR, |attributes| {
                let way = &attributes.ah_attr;
                let from = (way.is_global != 0).then_some(u32::from(way.grh.sgid_index));
                if let Some(wanted) = gid.filter(|&wanted| Some(wanted) != from) {
                    return Err(VerbsError::OtherGid { wanted, from });
                }
                if let Some(mtu) = mtu {
                    attributes.path_mtu = attributes.path_mtu.min(mtu.code().into());
                }
                attributes.min_rnr_timer = NOT_READY;
                if let Some((_, answered)) = reads {
                    attributes.max_dest_rd_atomic = answered;
                }
                Ok(())
            })?;
            step(id, pair, sys::ibv_qp_state::IBV_QPS_RTS, |attributes| {
                if let Some((asked, _)) = reads {
                    attributes.max_rd_atomic = attributes.max_rd_atomic.min(asked);
                }
                Ok(())
            })
        }
    }

    /// The number of the queue pair, for the peer. 0 if librdmacm sends it.
    pub(super) fn number(&self, context: Context) -> u32 {
        let pair = self.pair.load(Ordering::Acquire);
        match pair.is_null() || context.is_iwarp() {
            true => 0,
            // SAFETY: the pair lives as long as it is stored here.
            false => unsafe { (*pair).qp_num },
        }
    }

    /// Whether there is a queue pair.
    pub(super) fn is_made(&self) -> bool {
        !self.pair.load(Ordering::Acquire).is_null()
    }

    /// Stops the queue pair, if there is one. Its work is flushed.
    ///
    /// # Safety
    /// Nobody destroys the queue pair meanwhile.
    pub(super) unsafe fn fail(&self) {
        let pair = self.pair.load(Ordering::Acquire);
        if pair.is_null() {
            return;
        }
        // SAFETY: all fields are numbers, for which zero is valid.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: the caller promises that the pair lives. The attributes are read during the call.
        let result = unsafe { sys::ibv_modify_qp(pair, &raw mut attributes, mask) };
        if let Err(error) = VerbsError::check_number("ending a queue pair", result) {
            // The queue pair may be in that state by itself.
            tracing::debug!(%error, "RDMA");
        }
    }

    /// Destroys the queue pair, if there is one.
    ///
    /// # Safety
    /// `id` lives. Nobody uses the queue pair, now or later.
    pub(super) unsafe fn destroy(&self, id: *mut sys::rdma_cm_id) {
        let pair = self.pair.swap(ptr::null_mut(), Ordering::AcqRel);
        if pair.is_null() {
            return;
        }
        // SAFETY: `make` has made the pair in one of these two ways. The caller promises the rest.
        unsafe {
            if (*id).qp == pair {
                sys::rdma_destroy_qp(id);
            } else if let Err(error) =
                VerbsError::check_number("destroying a queue pair", sys::ibv_destroy_qp(pair))
            {
                tracing::error!(%error, "a queue pair is lost");
            }
        }
    }
}

/// One step, with the connection manager's attributes and `change`.
///
/// # Safety
/// The identifier and the pair live.
unsafe fn step(
    id: *mut sys::rdma_cm_id,
    pair: *mut sys::ibv_qp,
    to: sys::ibv_qp_state::Type,
    change: impl FnOnce(&mut sys::ibv_qp_attr) -> Result<(), VerbsError>,
) -> Result<(), VerbsError> {
    const DOING: &str = "getting a queue pair ready";
    // SAFETY: all fields are numbers, for which zero is valid.
    let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.qp_state = to;
    let mut mask = 0;
    // SAFETY: the caller's promise; attributes and mask are written during the call.
    let known = unsafe { sys::rdma_init_qp_attr(id, &raw mut attributes, &raw mut mask) };
    VerbsError::check(DOING, known)?;
    // Kernels also set bits for addresses of RoCE, which verbs do not have.
    const ROCE: libc::c_int = 0x00e0_0000;
    change(&mut attributes)?;
    // SAFETY: the attributes are read during the call.
    let result = unsafe { sys::ibv_modify_qp(pair, &raw mut attributes, mask & !ROCE) };
    VerbsError::check_number(DOING, result)
}

/// The MTU of a queue pair. `None` with iWARP, which has no MTU.
///
/// # Safety
/// The queue pair lives.
pub(super) unsafe fn mtu_of(pair: *mut sys::ibv_qp, context: Context) -> Result<Option<Mtu>, VerbsError> {
    if context.is_iwarp() {
        return Ok(None);
    }
    let mut attributes = std::mem::MaybeUninit::<sys::ibv_qp_attr>::zeroed();
    let mut init = std::mem::MaybeUninit::<sys::ibv_qp_init_attr>::zeroed();
    let mask = sys::ibv_qp_attr_mask::IBV_QP_PATH_MTU.0.cast_signed();
    // SAFETY: the call writes both. All fields are numbers and pointers, for which zero is valid.
    let code = unsafe {
        let result = sys::ibv_query_qp(pair, attributes.as_mut_ptr(), mask, init.as_mut_ptr());
        VerbsError::check_number("asking a queue pair", result)?;
        attributes.assume_init().path_mtu
    };
    u8::try_from(code).ok().and_then(Mtu::from_code).map(Some).ok_or_else(|| {
        VerbsError::Broken(format!("the queue pair has an MTU numbered {code}: {}", Errno::EINVAL))
    })
}
