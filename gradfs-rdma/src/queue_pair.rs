//! A queue pair with its rings: one end of a connection by RDMA. Frames go through the rings, as through any stream.
//! Payload goes past them by READ and WRITE, straight to and from its place.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::device::Device;
use super::options::Mtu;
use super::verbs::{
    CmId, Completion, Done, Pair, Registration, RemoteMemory, Reserved, Rings, Slot, VerbsError, Work,
};
use modelio_base::transport::stream::{Close, Connection, LentPayload, ReceiveSlices, SendSlices, Target};

/// The number of work requests that are kept for the rings.
const KEPT: usize = 8;

/// A queue pair with its rings: one end of a connection by RDMA.
#[derive(Debug)]
pub struct QueuePair {
    pair: Arc<Pair>,
    talk: Mutex<Talk>,
    /// The peer's ring.
    peer: OnceLock<RemoteMemory>,
    device: Arc<Device>,
    /// The peer has gone, or its network.
    gone: AtomicBool,
    connection: OnceLock<Connection>,
    /// The conversation found no room for work. It is woken when there is some.
    waits_for_room: AtomicBool,
    /// There was no room to tell the peer how much was read.
    owes: AtomicBool,
    /// Why the connection must end. This may be set before there is a connection.
    broken: OnceLock<String>,
}

#[derive(Debug)]
struct Talk {
    rings: Rings,
    /// Work that the rings have made. It is empty except during a call of them.
    work: Vec<Work>,
}

impl QueuePair {
    /// Makes a queue pair for a connection whose route is known, with `rings` of the device's and reserved room. If
    /// that fails, the identifier is returned.
    #[allow(clippy::result_large_err)] // Seldom.
    pub(super) fn new(
        device: &Arc<Device>,
        cm_id: CmId,
        rings: Rings,
        reserved: Reserved,
    ) -> Result<Arc<QueuePair>, (VerbsError, CmId)> {
        let talk = Mutex::new(Talk { rings, work: Vec::new() });
        let pair = Pair::new(cm_id, reserved, device.limits())?;
        let (peer, connection, broken) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let [gone, waits_for_room, owes] = [(); 3].map(|()| AtomicBool::new(false));
        let device = Arc::clone(device);
        Ok(Arc::new(QueuePair { pair, talk, peer, device, gone, connection, waits_for_room, owes, broken }))
    }

    /// The ring that the peer writes into.
    pub(super) fn invitation(&self) -> RemoteMemory {
        self.talk.lock().rings.invitation()
    }

    /// Sets the ring that this end writes into.
    pub(super) fn invited(&self, to: RemoteMemory) {
        let _ = self.peer.set(to);
    }

    pub(super) fn cm_id(&self) -> &CmId {
        self.pair.cm_id()
    }

    /// The number of the queue pair, unique on the device.
    pub fn number(&self) -> u32 {
        self.pair.number()
    }

    /// The largest payload of a packet. `None` with iWARP.
    ///
    /// # Errors
    /// [`VerbsError::Broken`].
    pub fn mtu(&self) -> Result<Option<Mtu>, VerbsError> {
        self.pair.mtu()
    }

    /// Its device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The number of posted chains, and of work requests in them.
    pub fn counts(&self) -> (u64, u64) {
        self.pair.counts()
    }

    // Calls of the conversation.

    /// The number of work requests that fit at the moment. If there are fewer than `least`, the conversation is woken
    /// when that may have changed.
    pub fn room(&self, least: usize) -> usize {
        // The flag is set first, so that a completion during the check wakes the conversation.
        self.waits_for_room.store(true, Ordering::SeqCst);
        let room = self.pair.room().saturating_sub(KEPT);
        if room >= least {
            self.waits_for_room.store(false, Ordering::SeqCst);
        }
        room
    }

    /// Adds work that fetches `len` bytes from the peer into a slot, with `fence` after all earlier READs.
    /// [`Self::post`] posts it.
    ///
    /// # Errors
    /// [`VerbsError`], with the slot.
    pub fn read(
        &self,
        token: u64,
        slot: Slot,
        len: usize,
        from: RemoteMemory,
        fence: bool,
    ) -> Result<(), (VerbsError, Slot)> {
        self.pair.add(token, Work::Read { slot, len, from, fence }).map_err(|(error, work)| match work {
            Work::Read { slot, .. } => (error, slot),
            _ => unreachable!("the added work comes back"),
        })
    }

    /// Adds work that fetches bytes from the peer into their place.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn read_to(
        &self,
        token: u64,
        target: Target,
        registration: Arc<Registration>,
        from: RemoteMemory,
    ) -> Result<(), VerbsError> {
        let work = Work::ReadTo { target, registration, from, fence: false };
        self.pair.add(token, work).map_err(|(error, _)| error)
    }

    /// Writes a payload to a place that the peer has named. It arrives before later messages.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn write(
        &self,
        token: u64,
        piece: LentPayload,
        registration: Arc<Registration>,
        to: RemoteMemory,
    ) -> Result<(), VerbsError> {
        self.pair.add(token, Work::Write { piece, registration, to }).map_err(|(error, _)| error)
    }

    /// Posts the added work, with one doorbell.
    ///
    /// # Errors
    /// [`VerbsError::Broken`].
    pub fn post(&self) -> Result<(), VerbsError> {
        self.pair.post()
    }

    /// Takes finished work, in order.
    pub fn take(&self, done: &mut Done) {
        self.pair.take(done);
    }

    /// Ends the connection after an error.
    pub fn give_up(&self, why: &VerbsError) {
        self.break_off(why.to_string());
    }

    /// Ends the connection. If it is not served yet, it ends as soon as it is.
    pub fn break_off(&self, why: String) {
        let _ = self.broken.set(why);
        self.close_if_broken();
    }

    fn close_if_broken(&self) {
        if let (Some(why), Some(connection)) = (self.broken.get(), self.connection.get()) {
            connection.close(Close::Asked(format!("RDMA: {why}").into()));
        }
    }

    // Calls of the driver.

    /// Sets the connection that is served.
    pub(crate) fn attach(&self, connection: &Connection) {
        let _ = self.connection.set(connection.clone());
        self.close_if_broken();
    }

    /// The connection has ended, or its peer's end has.
    pub(crate) fn hang_up(&self) {
        self.gone.store(true, Ordering::Release);
        if let Some(connection) = self.connection.get() {
            connection.wake();
        }
    }

    /// Ends the connection for the peer, too. When this returns, the device touches no memory for it any more.
    pub fn end(&self) {
        self.cm_id().disconnect();
        self.pair.end();
    }

    /// Whether the connection or the peer's end of it is over.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Takes a completion. True if the conversation can take finished work or has room again.
    pub(crate) fn complete(&self, news: Completion) -> Result<bool, String> {
        match self.pair.complete(news) {
            Ok(Some(word)) => {
                self.talk.lock().rings.notified(word).map(|()| false).map_err(|broken| broken.to_string())
            }
            Ok(None) => Ok(self.waits_for_room.swap(false, Ordering::SeqCst) || self.pair.has_finished()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Its connection, once it has one.
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.get()
    }

    /// Checks for data that the peer has written without notification.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.talk.lock().rings.check().map_err(|broken| broken.to_string())
    }

    /// Copies received bytes. `gone` says whether the peer had gone before. `Some(0)` is the end, `None` nothing.
    pub(crate) fn receive(&self, into: &ReceiveSlices, gone: bool) -> Result<Option<usize>, VerbsError> {
        if self.broken.get().is_some() {
            // The connection is about to be closed for that reason.
            return Ok(None);
        }
        let mut talk = self.talk.lock();
        let bytes = talk.rings.read(into);
        if bytes == 0 {
            return Ok((talk.rings.is_ended() || gone).then_some(0));
        }
        drop(talk);
        self.acknowledge()?;
        Ok(Some(bytes))
    }

    /// Tells the peer how much was read, if that is due. Without room it is done later ([`Self::owes`]).
    pub(crate) fn acknowledge(&self) -> Result<(), VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(()) };
        let has_room = self.pair.room() > 0;
        self.owes.store(!has_room, Ordering::Relaxed);
        if !has_room {
            return Ok(());
        }
        self.with_rings(|rings, work| rings.acknowledge(peer, work))
    }

    /// Sends as much as fits. `None` if nothing fits, or if the peer is `gone` and a stream that is `receiving` has
    /// not read its last bytes yet.
    pub(crate) fn send(
        &self,
        out: &SendSlices,
        receiving: bool,
        gone: bool,
    ) -> Result<Option<usize>, VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(None) };
        if gone {
            if receiving && self.talk.lock().rings.readable() > 0 {
                return Ok(None);
            }
            return Err(VerbsError::Broken("the peer is gone".into()));
        }
        // Two parts of the ring and a flag must fit.
        if self.pair.room() < 4 {
            return Ok(None);
        }
        let bytes = self.with_rings(|rings, work| rings.write(out, peer, work))?;
        Ok((bytes > 0).then_some(bytes))
    }

    /// Whether [`Self::acknowledge`] must be called again.
    pub(crate) fn owes(&self) -> bool {
        self.owes.load(Ordering::Relaxed)
    }

    /// Tells the peer that nothing more comes. False if there is no room for it.
    pub(crate) fn finish(&self) -> Result<bool, VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(true) };
        if self.pair.room() < 1 {
            return Ok(false);
        }
        self.with_rings(|rings, work| rings.end(peer, work))?;
        Ok(true)
    }

    /// Calls the rings, and posts the work that they make.
    fn with_rings<T>(&self, what: impl FnOnce(&mut Rings, &mut Vec<Work>) -> T) -> Result<T, VerbsError> {
        let talk = &mut *self.talk.lock();
        let said = what(&mut talk.rings, &mut talk.work);
        if talk.work.is_empty() {
            return Ok(said);
        }
        talk.work.drain(..).try_for_each(|work| self.pair.add(0, work).map_err(|(error, _)| error))?;
        self.pair.post()?;
        Ok(said)
    }

    /// Whether bytes can be received or sent.
    pub(crate) fn possible(&self, receiving: bool, sending: bool, gone: bool) -> bool {
        if self.broken.get().is_some() {
            return false;
        }
        let talk = self.talk.lock();
        let left = talk.rings.readable() > 0;
        let readable = left || talk.rings.is_ended() || gone;
        let room = talk.rings.room() > 0 && self.peer.get().is_some();
        drop(talk);
        let goes_out = if gone { !(receiving && left) } else { room && self.pair.room() >= 4 };
        receiving && readable || sending && goes_out
    }
}
