//! Clients on this host. They connect through a Unix socket, and their blocks are read where they lie.
//!
//! A client names a block that it pushes, and the shard reduces it straight from the client's memory. If the shard has
//! all blocks of the model, it names a pulled version as a whole. The client shows the version from the shard's memory,
//! and says when it no longer does. Otherwise the shard names each block, and the client copies it. The version is
//! pinned until the client says that it has the copy.
//!
//! If the connection ends before that, the client may still be reading, however long it was silent. So the shard
//! gives up that version's buffer and never writes it again. The shard never writes a client's memory.
//!
//! This module holds `unsafe`: it reads a client's memory.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use libmodelio::bytes::mmap::Mapping;
use libmodelio::transport::frames::{Conversation, Framed, Link, Outgoing, Take};
use libmodelio::transport::reactor::leaves_room;
use libmodelio::transport::shm::{self, Descriptors, Lender, Meeting, Regions, Threads};
use libmodelio::transport::tally::Flow;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::wire::{HELLO_DEADLINE, Message, Received, Refusal};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, SockFlag, accept4, getsockopt, shutdown, sockopt::PeerCredentials};
use parking_lot::Mutex;

use super::complaints::Log;
use super::partition::{Lent, Partition, Push, Reserved, Room, Sender};
use crate::partition::store::{PinnedVersion, ShownVersion};

/// The most connections through shared memory. Each has a thread.
pub(super) const MAX_CONNECTIONS: usize = 512;
/// The most of one user of this host, and of all users, other than root and the shard's own.
const MAX_OF_USER: usize = 128;
const MAX_OF_OTHERS: usize = MAX_CONNECTIONS / 2;
/// The most blocks that one client may be copying, and the most versions that it may show.
const MAX_LENT: usize = 256;
/// The most bytes read from a ring at once. A few frames fit, so that answers go out between them.
const AHEAD: usize = 512;
/// The longest time in which a shutdown of the shard goes unnoticed, if nothing wakes the thread.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// The pause before the next client is accepted when descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A block in a client's memory. If the client wants to know, the request is answered when the block is done with.
struct Named {
    push: Push,
    request: u64,
    lent: Lent,
}

/// The shard's end of a connection through shared memory.
pub(super) struct ShmClient {
    descriptors: Descriptors,
    borrowed: Regions,
    lent: Lender,
    /// Blocks that the client is copying, by request, in order.
    copied: VecDeque<(u64, Arc<PinnedVersion>)>,
    /// Versions that the client shows, by request.
    shown: BTreeMap<u64, ShownVersion>,
    last_request: u64,
    ready: VecDeque<Outgoing>,
    /// Pushes that came too early, with the place of their payload. Later messages are still read: one may release a
    /// version whose memory the plan waits for.
    early: VecDeque<Named>,
}

impl ShmClient {
    /// A connection whose model is not known yet.
    fn new(meeting: &Meeting) -> ShmClient {
        ShmClient {
            descriptors: Descriptors::new(Arc::clone(&meeting.socket)),
            borrowed: Regions::new(0),
            lent: Lender::default(),
            copied: VecDeque::new(),
            shown: BTreeMap::new(),
            last_request: 0,
            ready: VecDeque::new(),
            early: VecDeque::new(),
        }
    }

    /// The connection is for this model.
    pub(super) fn serve(&mut self, partition: &Arc<Partition>) {
        self.borrowed = Regions::new(shm::longest_region(partition.model_bytes(), partition.layout()));
    }

    /// The message that must be sent before all others.
    pub(super) fn ready(&mut self) -> Option<Outgoing> {
        self.ready.pop_front()
    }

    /// Whether the client has enough blocks to copy.
    pub(super) fn is_full(&self) -> bool {
        self.copied.len() >= MAX_LENT
    }

    /// The client's number for memory of versions.
    fn lend(&mut self, partition: &Partition, memory: &Arc<Mapping>) -> Option<u32> {
        for region in self.lent.gone() {
            self.ready.push_back(outgoing(partition, 0, Message::Unshare { region }));
        }
        let lent = self.lent.lend(memory, &self.descriptors);
        let (region, new) = lent
            .inspect_err(
                |error| tracing::warn!(model = %partition.model, %error, "a version is sent, not shared"),
            )
            .ok()?;
        if let Some(bytes) = new {
            self.ready.push_back(outgoing(partition, 0, Message::Share { region, bytes }));
        }
        Some(region)
    }

    /// Names a version as a whole. None if its blocks must go instead.
    pub(super) fn whole(&mut self, partition: &Partition, version: &Arc<PinnedVersion>) -> Option<Outgoing> {
        if self.shown.len() >= MAX_LENT {
            return None;
        }
        let memory = version.region().0.memory();
        let region = self.lend(partition, memory)?;
        partition.store().tally().moved(Flow::Pull, memory.len());
        self.last_request += 1;
        self.shown.insert(self.last_request, version.show());
        let named = Message::VersionAt { version: version.version(), region };
        self.ready.push_back(outgoing(partition, self.last_request, named));
        self.ready()
    }

    /// Names a block of a version, or sends it through the ring if its memory cannot be shared.
    pub(super) fn block(
        &mut self,
        partition: &Partition,
        version: &Arc<PinnedVersion>,
        block: BlockId,
    ) -> Option<Outgoing> {
        let local = partition.store().partition().local(block)?;
        let (memory, offset) = version.place(local);
        let Some(region) = self.lend(partition, memory) else {
            // The block goes through the ring.
            partition.store().tally().copied(Flow::Pull, version.block(local).len());
            return partition.whole_block(version, block);
        };
        partition.store().tally().moved(Flow::Pull, version.block(local).len());
        self.last_request += 1;
        let named = Message::BlockAt { version: version.version(), block, region, offset };
        self.copied.push_back((self.last_request, Arc::clone(version)));
        self.ready.push_back(outgoing(partition, self.last_request, named));
        self.ready()
    }

    /// Takes a message about shared memory. None if it is another one.
    pub(super) fn message(
        &mut self,
        partition: &Arc<Partition>,
        received: &Received,
        sender: &mut Sender,
    ) -> Result<Option<Take>, Refusal> {
        let request = received.header.request();
        match received.message {
            Message::Share { region, bytes } => {
                self.borrowed.share(region, bytes, &self.descriptors).map_err(Refusal::other)?;
            }
            Message::Unshare { region } => self.borrowed.unshare(region).map_err(Refusal::other)?,
            Message::Done => match self.copied.front() {
                _ if self.shown.remove(&request).is_some() => {}
                Some((first, _)) if *first == request => drop(self.copied.pop_front()),
                _ => return Err(Refusal::other(format!("request {request} is not the next to be answered"))),
            },
            Message::PushAt { region, offset, .. } => {
                let push = partition.push(received)?;
                // The place must lie within a region, whatever the client says.
                let piece = self.borrowed.piece(region, offset, push.len).map_err(Refusal::other)?;
                let lent = Lent { piece, descriptors: self.descriptors.clone() };
                let named = Named { push, request, lent };
                if !self.early.is_empty() || !self.reduce(partition, &named, sender)? {
                    // A client names each block of a plan once, and once more when it checks its plan.
                    let most = 2 * partition.store().partition().blocks().len();
                    if self.early.len() >= most {
                        return Err(Refusal::other(format!("more than {most} blocks of plans to come")));
                    }
                    self.early.push_back(named);
                }
            }
            _ => return Ok(None),
        }
        Ok(Some(Take::Nothing))
    }

    /// Continues with pushes that came too early. The first one that must wait longer holds up the others.
    pub(super) fn again(&mut self, partition: &Arc<Partition>, sender: &mut Sender) -> Result<(), Refusal> {
        while let Some(named) = self.early.front() {
            if !self.reduce(partition, named, sender)? {
                break;
            }
            self.early.pop_front();
        }
        Ok(())
    }

    /// Reduces a block, and answers the client if it wants to know. False if the block has to wait: the connection is
    /// woken then.
    ///
    /// The memory is lent as long as the connection lasts. A client that needs it back ends the connection.
    fn reduce(
        &self,
        partition: &Arc<Partition>,
        named: &Named,
        sender: &mut Sender,
    ) -> Result<bool, Refusal> {
        // The client waits for the slots in which it makes sums. Other memory stays
        // untouched until the contribution ends, and after a dropped plan.
        let is_in_slot = (1..=u64::from(shm::SUMS)).contains(&named.request);
        let room = if is_in_slot { Room::None } else { Room::Lent(&named.lent) };
        match partition.reserve(sender, named.push, room)? {
            Reserved::Later => return Ok(false),
            Reserved::Ready(reservation) => reservation.complete_lent(&named.lent)?,
            Reserved::Kept | Reserved::Skip => {}
        }
        sender.is_done(partition, named.request);
        Ok(true)
    }
}

impl Drop for ShmClient {
    fn drop(&mut self) {
        let mut given_up = None;
        for (_, version) in &self.copied {
            if given_up.replace(version.version()) != Some(version.version()) {
                tracing::info!(version = %version.version(), "a client may still read a version: its buffer is not used again");
                version.give_up();
            }
        }
        if !self.shown.is_empty() {
            tracing::info!(
                count = self.shown.len(),
                "a client may still show versions: their buffers are not used again"
            );
        }
        self.shown.values().for_each(ShownVersion::give_up);
    }
}

fn outgoing(partition: &Partition, request: u64, message: Message) -> Outgoing {
    Outgoing { epoch: partition.epoch, ..Outgoing::new(request, message) }
}

/// The listener for clients on this host.
pub(super) struct Listening {
    listener: Arc<OwnedFd>,
    thread: JoinHandle<()>,
}

/// Makes the shard's end of a connection.
pub(super) trait Meets: Send + Sync + 'static {
    /// This end of a connection.
    type End: Conversation + 'static;

    /// Whether more connections are accepted.
    fn goes_on(&self) -> bool;

    /// The shard's end of a connection to a client. `None` if no more are accepted.
    fn end(&self, memory: ShmClient) -> Option<Self::End>;
}

impl Listening {
    /// Begins to listen, for the shard at `address`. `threads` serve the connections. The error says why that fails.
    pub(super) fn start(
        address: &str,
        threads: &Arc<Threads>,
        meets: impl Meets,
    ) -> Result<Listening, String> {
        let listener = Arc::new(shm::listen(address).map_err(|error| error.to_string())?);
        let (of_thread, threads, meets) = (Arc::clone(&listener), Arc::clone(threads), Arc::new(meets));
        let accepting = Accepting { threads, meets, users: Arc::default(), complaints: Log::new() };
        let thread = std::thread::Builder::new().name("shm-accept".into()).spawn(move || {
            if let Err(errno) = accepting.run(&of_thread) {
                tracing::error!(%errno, "clients on this host cannot share memory any more");
            }
        });
        Ok(Listening { listener, thread: thread.map_err(|error| error.to_string())? })
    }

    /// Stops listening. The socket's name is free afterwards.
    pub(super) fn end(self) {
        // This wakes the thread.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        if self.thread.join().is_err() {
            tracing::error!("the thread that meets clients on this host panicked");
        }
    }
}

/// What the accepting thread has.
struct Accepting<M> {
    threads: Arc<Threads>,
    meets: Arc<M>,
    users: Arc<Users>,
    complaints: Log,
}

impl<M: Meets> Accepting<M> {
    fn run(&self, listener: &OwnedFd) -> Result<(), Errno> {
        loop {
            let timeout = PollTimeout::try_from(CHECK_INTERVAL).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(listener.as_fd(), PollFlags::POLLIN)], timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno),
            }
            if !self.meets.goes_on() {
                return Ok(());
            }
            match accept4(listener.as_raw_fd(), SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK) {
                Ok(fd) => {
                    // SAFETY: the kernel has just made it for this process, and no other code knows it.
                    let met = self.meet(unsafe { OwnedFd::from_raw_fd(fd) });
                    met.unwrap_or_else(|why| self.complaints.turned_away("a process on this host", &why));
                }
                Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => {}
                Err(errno @ (Errno::EMFILE | Errno::ENFILE | Errno::ENOBUFS | Errno::ENOMEM)) => {
                    tracing::warn!(%errno, "no client on this host can be accepted for now");
                    std::thread::sleep(ACCEPT_PAUSE);
                }
                Err(errno) => return Err(errno),
            }
        }
    }

    fn meet(&self, socket: OwnedFd) -> io::Result<()> {
        if !leaves_room(&socket) {
            return Err(Errno::EMFILE.into());
        }
        let user = self.users.admit(getsockopt(&socket, PeerCredentials)?.uid())?;
        let meets = Arc::clone(&self.meets);
        self.threads.spawn(move |threads| {
            let _user = user;
            match shm::receive(socket, HELLO_DEADLINE) {
                Ok(meeting) => {
                    if let Some(end) = meets.end(ShmClient::new(&meeting)) {
                        threads.serve(meeting, Box::new(Framed::new(end, Link::default(), AHEAD)));
                    }
                }
                Err(error) => tracing::warn!(%error, "a process on this host is turned away"),
            }
        })
    }
}

/// The connections of users other than root and the shard's own. They leave places for those two.
#[derive(Default)]
struct Users(Mutex<BTreeMap<u32, usize>>);

/// The place of a connection. Root and the shard's own user need none.
struct Admitted(Option<(Arc<Users>, u32)>);

impl Users {
    fn admit(self: &Arc<Users>, user: u32) -> io::Result<Admitted> {
        if user == 0 || user == nix::unistd::geteuid().as_raw() {
            return Ok(Admitted(None));
        }
        let mut users = self.0.lock();
        let all: usize = users.values().sum();
        let count = users.get(&user).copied().unwrap_or(0);
        if count >= MAX_OF_USER || all >= MAX_OF_OTHERS {
            return Err(io::Error::other(format!(
                "user {user} has {count} connections through shared memory, users other than root and the shard's own {all}: \
                 the limits are {MAX_OF_USER} and {MAX_OF_OTHERS}"
            )));
        }
        users.insert(user, count + 1);
        Ok(Admitted(Some((Arc::clone(self), user))))
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let Some((users, user)) = self.0.take() else { return };
        let mut users = users.0.lock();
        match users.get_mut(&user) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(users.remove(&user)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_leaves_shared_memory_for_others_and_all_of_them_for_root() {
        let users = Arc::new(Users::default());
        let stranger = nix::unistd::geteuid().as_raw() + 1000;
        let mut of_one: Vec<Admitted> = (0..MAX_OF_USER).map(|_| users.admit(stranger).unwrap()).collect();
        assert!(users.admit(stranger).is_err());
        let of_other: Vec<Admitted> = (0..MAX_OF_USER).map(|_| users.admit(stranger + 1).unwrap()).collect();
        assert!(users.admit(stranger + 2).is_err(), "half of the places are taken");
        assert!((0..MAX_CONNECTIONS).all(|_| users.admit(0).is_ok()));
        drop(of_other);
        let _of_third = users.admit(stranger + 2).unwrap();
        assert!(users.admit(stranger).is_err());
        of_one.pop();
        drop(users.admit(stranger).unwrap());
        drop(of_one);
        assert_eq!(users.0.lock().keys().copied().collect::<Vec<_>>(), [stranger + 2]);
    }
}
