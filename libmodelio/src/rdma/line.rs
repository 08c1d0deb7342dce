//! A line: one queue pair with its rings. Frames go through the rings as through any stream; payload goes past them,
//! by READ and WRITE, straight to and from where it belongs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::verbs::{
    Done, Endpoint, Outcome, Pair, Registration, Remote, Reserved, Rings, Slot, VerbsError, Work,
};
use super::{Device, Mtu};
use crate::link::{Piece, Target};
use crate::net::{Close, Connection, ReceiveSlices, SendSlices};

/// Pieces of work that are kept for the rings.
const KEPT: usize = 8;

/// One end of a connection by RDMA.
#[derive(Debug)]
pub struct Line {
    pair: Arc<Pair>,
    talk: Mutex<Talk>,
    /// Where the peer's ring is.
    peer: OnceLock<Remote>,
    device: Arc<Device>,
    /// The peer is gone, or its network is.
    gone: AtomicBool,
    connection: OnceLock<Connection>,
    /// Why it is to end, if that was found before there was a connection, too.
    broken: OnceLock<String>,
}

#[derive(Debug)]
struct Talk {
    rings: Rings,
    /// What they want done; empty but while it is being asked for.
    work: Vec<Work>,
}

impl Line {
    /// Of a connection that knows its way, with `rings` of the device's, and room that was reserved there.
    pub(super) fn new(
        device: &Arc<Device>,
        endpoint: Endpoint,
        rings: Rings,
        reserved: Reserved,
    ) -> Result<Arc<Line>, VerbsError> {
        let talk = Mutex::new(Talk { rings, work: Vec::new() });
        let pair = Pair::new(endpoint, reserved, device.limits())?;
        let (peer, connection, broken) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let (device, gone) = (Arc::clone(device), AtomicBool::new(false));
        Ok(Arc::new(Line { pair, talk, peer, device, gone, connection, broken }))
    }

    /// Where the peer is to write what it says.
    pub(super) fn invitation(&self) -> Remote {
        self.talk.lock().rings.invitation()
    }

    /// Where this end writes what it says.
    pub(super) fn invited(&self, to: Remote) {
        let _ = self.peer.set(to);
    }

    pub(super) fn endpoint(&self) -> &Endpoint {
        self.pair.endpoint()
    }

    /// The number of its queue pair.
    pub fn number(&self) -> u32 {
        self.pair.number()
    }

    /// Bytes of payload in a packet, at most; `None` with iWARP.
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

    /// Chains of work that were posted, and pieces in them.
    pub fn counts(&self) -> (u64, u64) {
        self.pair.counts()
    }

    // What a conversation does with it.

    /// Pieces of work that [`Self::read`] and the like take just now.
    pub fn room(&self) -> usize {
        self.pair.room().saturating_sub(KEPT)
    }

    /// Fetches `len` bytes of the peer's into a slot. With `fence`, not before all READs that were added earlier.
    /// Posted by [`Self::post`].
    ///
    /// # Errors
    /// [`VerbsError`]; the slot comes back.
    pub fn read(
        &self,
        token: u64,
        slot: Slot,
        len: usize,
        from: Remote,
        fence: bool,
    ) -> Result<(), (VerbsError, Slot)> {
        self.pair.add(token, Work::Read { slot, len, from, fence }).map_err(|(error, work)| match work {
            Work::Read { slot, .. } => (error, slot),
            _ => unreachable!("what was added comes back"),
        })
    }

    /// Fetches bytes of the peer's to where they belong.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn read_to(
        &self,
        token: u64,
        target: Target,
        registration: Arc<Registration>,
        from: Remote,
    ) -> Result<(), VerbsError> {
        let work = Work::ReadTo { target, registration, from, fence: false };
        self.pair.add(token, work).map_err(|(error, _)| error)
    }

    /// Puts a payload where the peer wants it. What is said afterwards comes after it.
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn write(
        &self,
        token: u64,
        piece: Piece,
        registration: Arc<Registration>,
        to: Remote,
    ) -> Result<(), VerbsError> {
        self.pair.add(token, Work::Write { piece, registration, to }).map_err(|(error, _)| error)
    }

    /// Posts what was added, with one doorbell.
    ///
    /// # Errors
    /// [`VerbsError::Broken`].
    pub fn post(&self) -> Result<(), VerbsError> {
        self.pair.post()
    }

    /// Takes what is done, in order.
    pub fn take(&self, done: &mut Done) {
        self.pair.take(done);
    }

    /// Ends the connection, for something on it went wrong.
    pub fn give_up(&self, why: &VerbsError) {
        self.break_off(why.to_string());
    }

    /// The same, for any reason, and also before it is served: then it ends as soon as it is.
    pub(crate) fn break_off(&self, why: String) {
        let _ = self.broken.set(why);
        self.close_if_broken();
    }

    fn close_if_broken(&self) {
        if let (Some(why), Some(connection)) = (self.broken.get(), self.connection.get()) {
            connection.close(Close::Asked(format!("RDMA: {why}").into()));
        }
    }

    // What drives it.

    /// It is served by this connection.
    pub(crate) fn attach(&self, connection: &Connection) {
        let _ = self.connection.set(connection.clone());
        self.close_if_broken();
    }

    /// The connection is over, or its peer is.
    pub(crate) fn hang_up(&self) {
        self.gone.store(true, Ordering::Release);
        if let Some(connection) = self.connection.get() {
            connection.wake();
        }
    }

    /// Ends it, for the peer, too: the device touches no memory for it any more when this returns.
    pub(crate) fn end(&self) {
        self.endpoint().disconnect();
        self.pair.end();
    }

    /// News of it. True if its conversation has something to take.
    pub(crate) fn hear(&self, outcome: Outcome) -> Result<bool, String> {
        match self.pair.hear(outcome) {
            Ok(Some(word)) => {
                self.talk.lock().rings.hear(word).map(|()| false).map_err(|broken| broken.to_string())
            }
            Ok(None) => Ok(self.pair.has_finished()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Its connection, once it has one.
    pub fn connection(&self) -> Option<&Connection> {
        self.connection.get()
    }

    /// Looks at what the peer has written, where that is not told.
    pub(crate) fn look(&self) -> Result<(), String> {
        self.talk.lock().rings.look().map_err(|broken| broken.to_string())
    }

    /// Copies what has come. `Some(0)` is the end, `None` nothing.
    pub(crate) fn receive(&self, into: &ReceiveSlices) -> Result<Option<usize>, VerbsError> {
        if self.broken.get().is_some() {
            // It is about to be closed, for that reason and no other.
            return Ok(None);
        }
        let mut talk = self.talk.lock();
        let bytes = talk.rings.read(into);
        if bytes == 0 {
            let over = talk.rings.is_ended() || self.gone.load(Ordering::Acquire);
            return Ok(over.then_some(0));
        }
        drop(talk);
        self.acknowledge()?;
        Ok(Some(bytes))
    }

    /// Tells the peer how much was read, if that is due.
    pub(crate) fn acknowledge(&self) -> Result<(), VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(()) };
        if self.pair.room() < 1 {
            return Ok(());
        }
        self.say(|rings, work| rings.tell(peer, work))
    }

    /// Sends as much as there is room for. `None` if there is none.
    pub(crate) fn send(&self, out: &SendSlices) -> Result<Option<usize>, VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(None) };
        if self.gone.load(Ordering::Acquire) {
            return Err(VerbsError::Broken("the peer is gone".into()));
        }
        // Two parts of the ring and a flag.
        if self.pair.room() < 4 {
            return Ok(None);
        }
        let bytes = self.say(|rings, work| rings.write(out, peer, work))?;
        Ok((bytes > 0).then_some(bytes))
    }

    /// Tells the peer that nothing more comes.
    pub(crate) fn finish(&self) -> Result<(), VerbsError> {
        let Some(&peer) = self.peer.get() else { return Ok(()) };
        self.say(|rings, work| rings.end(peer, work))
    }

    /// Has done what the rings want.
    fn say<T>(&self, what: impl FnOnce(&mut Rings, &mut Vec<Work>) -> T) -> Result<T, VerbsError> {
        let talk = &mut *self.talk.lock();
        let said = what(&mut talk.rings, &mut talk.work);
        if talk.work.is_empty() {
            return Ok(said);
        }
        talk.work.drain(..).try_for_each(|work| self.pair.add(0, work).map_err(|(error, _)| error))?;
        self.pair.post()?;
        Ok(said)
    }

    /// Whether it can go on: bytes to take, or room to send.
    pub(crate) fn possible(&self, receiving: bool, sending: bool) -> bool {
        if self.broken.get().is_some() {
            return false;
        }
        let gone = self.gone.load(Ordering::Acquire);
        let talk = self.talk.lock();
        let readable = talk.rings.readable() > 0 || talk.rings.is_ended() || gone;
        let room = gone || talk.rings.room() > 0 && self.peer.get().is_some();
        drop(talk);
        receiving && readable || sending && room && self.pair.room() >= 4
    }
}
