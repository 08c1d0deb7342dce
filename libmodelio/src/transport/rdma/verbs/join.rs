//! How the queue pair of a connection gets ready: by librdmacm with iWARP, and else here, step by step, so that packets
//! can be shorter than the path allows (RPCH §3.1; the steps are InfiniBand's: init, ready to receive, ready to send).

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::errno::Errno;
use rdma_sys as sys;

use super::{Context, Domain, VerbsError};
use crate::transport::rdma::Mtu;

/// After how long a peer tries again when no message was waited for: 0.64 ms, as InfiniBand numbers it. The connection
/// manager's 0 stands for 655 ms.
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
    /// READs outstanding at most, asked for and answered; `None` is as much as was agreed.
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
            // SAFETY: as the caller promises.
            let result = unsafe { sys::rdma_create_qp(id, domain.raw(), &raw mut *init) };
            VerbsError::check(DOING, result)?;
            // SAFETY: it has one now.
            let pair = unsafe { (*id).qp };
            self.pair.store(pair, Ordering::Release);
            return Ok(pair);
        }
        // SAFETY: as the caller promises.
        let pair = unsafe { sys::ibv_create_qp(domain.raw(), &raw mut *init) };
        if pair.is_null() {
            return Err(VerbsError::last(DOING));
        }
        self.pair.store(pair, Ordering::Release);
        // SAFETY: both live.
        let begun = unsafe { step(id, pair, sys::ibv_qp_state::IBV_QPS_INIT, |_| Ok(())) };
        if begun.is_err() {
            // SAFETY: nobody else knows of it.
            unsafe { self.destroy(id) };
        }
        begun.map(|()| pair)
    }

    /// Makes the queue pair ready to receive and to send. With iWARP there is nothing to do.
    ///
    /// # Safety
    /// `id` lives, and is one that the peer has answered, or asked.
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
        // SAFETY: both live. The first step is taken again, for now the path is known.
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

    /// Its number, for the peer; 0 where librdmacm tells it.
    pub(super) fn number(&self, context: Context) -> u32 {
        let pair = self.pair.load(Ordering::Acquire);
        match pair.is_null() || context.is_iwarp() {
            true => 0,
            // SAFETY: it lives as long as it is here.
            false => unsafe { (*pair).qp_num },
        }
    }

    /// Whether there is a queue pair.
    pub(super) fn is_made(&self) -> bool {
        !self.pair.load(Ordering::Acquire).is_null()
    }

    /// Has it do nothing more, if there is one: its work is flushed.
    ///
    /// # Safety
    /// Nobody destroys the queue pair meanwhile.
    pub(super) unsafe fn fail(&self) {
        let pair = self.pair.load(Ordering::Acquire);
        if pair.is_null() {
            return;
        }
        // SAFETY: all of it is numbers, for which zero is a value.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::ibv_qp_state::IBV_QPS_ERR;
        let mask = sys::ibv_qp_attr_mask::IBV_QP_STATE.0.cast_signed();
        // SAFETY: it lives, as the caller promises; the attributes are read during the call.
        let result = unsafe { sys::ibv_modify_qp(pair, &raw mut attributes, mask) };
        if let Err(error) = VerbsError::check_number("ending a queue pair", result) {
            // The queue pair may be in that state by itself.
            tracing::debug!(%error, "RDMA");
        }
    }

    /// Destroys it, if there is one.
    ///
    /// # Safety
    /// `id` lives. Nobody uses the queue pair, now or later.
    pub(super) unsafe fn destroy(&self, id: *mut sys::rdma_cm_id) {
        let pair = self.pair.swap(ptr::null_mut(), Ordering::AcqRel);
        if pair.is_null() {
            return;
        }
        // SAFETY: it was made by `make`, in the one way or the other, and the caller promises the rest.
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

/// One step, with the connection manager's attributes of the connection, and `change`.
///
/// # Safety
/// Both live.
unsafe fn step(
    id: *mut sys::rdma_cm_id,
    pair: *mut sys::ibv_qp,
    to: sys::ibv_qp_state::Type,
    change: impl FnOnce(&mut sys::ibv_qp_attr) -> Result<(), VerbsError>,
) -> Result<(), VerbsError> {
    const DOING: &str = "getting a queue pair ready";
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
    attributes.qp_state = to;
    let mut mask = 0;
    // SAFETY: the caller's promise; attributes and mask are written during the call.
    let known = unsafe { sys::rdma_init_qp_attr(id, &raw mut attributes, &raw mut mask) };
    VerbsError::check(DOING, known)?;
    // Kernels also set bits for the addresses of RoCE, which are not among those of verbs.
    const ROCE: libc::c_int = 0x00e0_0000;
    change(&mut attributes)?;
    // SAFETY: the attributes are read during the call.
    let result = unsafe { sys::ibv_modify_qp(pair, &raw mut attributes, mask & !ROCE) };
    VerbsError::check_number(DOING, result)
}

/// The MTU that a queue pair uses; `None` with iWARP, which has none of its own.
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
    // SAFETY: the call writes both, which are numbers and pointers, for which zero is a value.
    let code = unsafe {
        let result = sys::ibv_query_qp(pair, attributes.as_mut_ptr(), mask, init.as_mut_ptr());
        VerbsError::check_number("asking a queue pair", result)?;
        attributes.assume_init().path_mtu
    };
    u8::try_from(code).ok().and_then(Mtu::from_code).map(Some).ok_or_else(|| {
        VerbsError::Broken(format!("the queue pair has an MTU numbered {code}: {}", Errno::EINVAL))
    })
}
