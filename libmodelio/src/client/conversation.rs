//! The client's end of a connection: the one to the coordinator, and those for blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::client::patching::Patched;
use crate::client::peers::fallback::FastPath;
use crate::client::peers::routes::Route;
use crate::client::shared::Shared;
use crate::client::shared::{BlockPath, Connection};
use crate::transport::frames::{Conversation, Link, Outgoing, Take};
use crate::transport::stream::{Close, Target};
use crate::transport::tally::Flow;
use crate::vocabulary::ids::{BlockId, Version};
use crate::wire::{Limits, MAX_PAYLOAD, Message, Protocol, Received, Refusal, Role, WireError};

/// The greeting, the same for all connections of a client.
struct Greeting {
    to: Connection,
    /// Longest silence, once the peer has welcomed the client.
    silence: Option<Duration>,
}

impl Greeting {
    fn new(shared: Arc<Shared>, route: Route) -> Greeting {
        Greeting { to: Connection { shared, route, link: Link::default() }, silence: None }
    }

    fn begin(&mut self, link: &Link) -> Result<(), Close> {
        self.to.link = link.clone();
        let Connection { shared, route, .. } = &self.to;
        shared.check_in_force(route)?;
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role: route.role,
            model: shared.model.clone(),
            generation: shared.record.generation,
            client: shared.client,
        };
        link.send(Outgoing { epoch: route.epoch(), ..Outgoing::new(0, hello) });
        Ok(())
    }

    /// Takes the peer's welcome. True if this message was it.
    fn welcomed(&mut self, message: &Message) -> Result<bool, Close> {
        match message {
            _ if self.silence.is_some() => Ok(false),
            Message::Welcome { silence_ms, epoch, .. } => {
                if *epoch != self.to.route.epoch() {
                    let (got, expected) = (self.to.route.epoch(), *epoch);
                    let why = format!("the client's block map is {got}, the shard's is {expected}");
                    return Err(Close::Asked(why.into()));
                }
                self.silence = Some(Duration::from_millis((*silence_ms).into()));
                Ok(true)
            }
            Message::Refused(refusal) => Err(turned_away(refusal)),
            other => Err(Close::Asked(format!("expected Welcome, got {}", other.name()).into())),
        }
    }

    /// A peer may announce a move at any time, and the new map is a payload. No other payload is longer than a block;
    /// `Message::Block` or `expect_payload` checks its length.
    fn limits(&self) -> Limits {
        match self.silence {
            None => Limits { payload: MAX_PAYLOAD, ..Limits::GREETING },
            Some(_) => Limits::MAX,
        }
    }

    /// Takes the payload of a message. True if this was a move.
    fn payload(&self, received: &Received, bytes: &[u8]) -> Result<bool, Close> {
        let moved = matches!(received.message, Message::Moved);
        if moved {
            self.to.shared.on_moved(&self.to.route, bytes)?;
        }
        Ok(moved)
    }
}

/// Requests to the coordinator, and its messages.
pub(super) struct Control(Greeting);

impl Control {
    pub(super) fn new(shared: Arc<Shared>, route: Route) -> Control {
        Control(Greeting::new(shared, route))
    }
}

impl Conversation for Control {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.0.begin(link)
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        if matches!(received.message, Message::Moved) {
            return Ok(Take::Buffered);
        }
        if matches!(received.message, Message::State(_)) && received.header.payload_len() > 0 {
            return match self.0.silence {
                Some(_) => Ok(Take::Buffered),
                None => Err(Close::Asked("expected Welcome, got State".into())),
            };
        }
        received.expect_payload(0).map_err(malformed)?;
        if let Message::Refused(
            refusal @ (Refusal::NoModel(_) | Refusal::Generation { .. } | Refusal::Deleted(_)),
        ) = &received.message
            && self.0.silence.is_none()
        {
            self.0.to.shared.coordinator_has_not(&self.0.to.route, refusal);
        }
        let welcomed = self.0.welcomed(&received.message)?;
        let Connection { shared, route, link } = &self.0.to;
        if welcomed {
            shared.greeted(route, link, None)?;
            return Ok(Take::Nothing);
        }
        let (request, message) = (received.header.request(), received.message.clone());
        if request == 0
            && let Message::Refused(refusal) = &message
        {
            return Err(turned_away(refusal));
        }
        shared.with_core_by(route, |core, now, actions| {
            core.from_coordinator(request, message, now, actions);
        })?;
        Ok(Take::Nothing)
    }

    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close> {
        if let Message::State(state) = &received.message {
            let Connection { shared, route, .. } = &self.0.to;
            if received.header.payload_crc().is_none() {
                shared.accounts.tally.unchecked(bytes.len());
            }
            return shared.state_with_version(route, (**state).clone(), bytes);
        }
        self.0.payload(received, bytes).map(drop)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn silence(&self) -> Option<Duration> {
        self.0.silence
    }

    fn alive(&mut self) {
        self.0.to.shared.heard(&self.0.to.route);
    }

    fn closed(&mut self, why: &Close) {
        let Connection { shared, route, link } = &self.0.to;
        shared.ended(route, link, &why.to_string());
    }
}

/// A connection for blocks to and from one shard.
pub(super) struct Data<P> {
    greeting: Greeting,
    path: P,
    /// The block that this connection is receiving.
    reserved: Option<(Version, BlockId)>,
    /// How that is made, if what has changed in it is received.
    patched: Option<(Patched, Option<u32>)>,
    /// The number of blocks that were asked for here and have not come.
    due: usize,
    /// When a block last came, or was first asked for.
    came: Instant,
    /// Why the shard refuses the fast path of this connection.
    refused: Option<String>,
}

/// A shard that has sent no block for so long did not have the requested ones.
const OVERDUE: Duration = Duration::from_secs(1);

impl<P: BlockPath> Data<P> {
    pub(super) fn new(shared: Arc<Shared>, route: Route, path: P) -> Data<P> {
        let greeting = Greeting::new(shared, route);
        Data { greeting, path, reserved: None, patched: None, due: 0, came: Instant::now(), refused: None }
    }

    /// The payload that follows is this block of a version, if it is wanted.
    fn takes(&mut self, block: BlockId, target: Option<(Version, Target)>) -> Take {
        let Some((version, target)) = target else { return Take::Nothing };
        self.reserved = Some((version, block));
        Take::Into(target)
    }

    /// The payload that follows is what has changed in this block of a version, if it is wanted.
    fn takes_changes(
        &mut self,
        of: Option<Version>,
        block: BlockId,
        (base, crc): (Version, Option<u32>),
    ) -> Take {
        let Connection { shared, route, .. } = &self.greeting.to;
        let Some(version) = of else { return Take::Nothing };
        let Some(patched) = shared.reserve_patched(route, version, block, base) else {
            return Take::Nothing;
        };
        self.patched = Some((patched, crc));
        self.reserved = Some((version, block));
        Take::Buffered
    }

    /// Makes the block whose patch has come. True if it is the shard's, or came as a whole.
    fn is_made(&mut self, patch: &[u8]) -> bool {
        let Some((patched, crc)) = self.patched.take() else { return true };
        let (shared, (version, block)) = (&self.greeting.to.shared, patched.place());
        let made = patched.patch(&shared.layout, (patch, crc));
        match &made {
            Ok(bytes) => shared.accounts.tally.patched(*bytes),
            Err(why) => shared.not_patched(version, block, why),
        }
        made.is_ok()
    }

    fn end_reservation(&mut self, whole: bool) {
        self.patched = None;
        if let Some((version, block)) = self.reserved.take() {
            self.greeting.to.shared.end_reservation(version, block, whole);
        }
    }
}

impl<P: BlockPath> Conversation for Data<P> {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.greeting.begin(link)
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        match &received.message {
            Message::Moved if self.greeting.to.route.role != Role::Relay => return Ok(Take::Buffered),
            // Its length is checked below.
            Message::Block { .. } | Message::BlockAhead { .. } => {}
            Message::Changes { block, .. } | Message::ChangesAhead { block, .. } => {
                let shared = &self.greeting.to.shared;
                let len = shared.layout.block_len(*block);
                if len.is_none_or(|len| received.header.payload_len() > len) {
                    let why = format!("more changes than block {block} has bytes");
                    return Err(Close::Asked(why.into()));
                }
            }
            _ => received.expect_payload(0).map_err(malformed)?,
        }
        if let Message::Refused(Refusal::NoRdma(why)) = &received.message
            && self.greeting.silence.is_none()
            && self.path.fast() == Some(FastPath::Rdma)
        {
            self.refused = Some(format!("refused by the shard: {why}"));
        }
        let welcomed = self.greeting.welcomed(&received.message)?;
        let to = &self.greeting.to;
        let Connection { shared, route, link } = to;
        if welcomed {
            link.expect_much();
            shared.greeted(route, link, self.path.end_of_loan())?;
            return Ok(Take::Nothing);
        }
        if matches!(
            received.message,
            Message::Block { .. } | Message::BlockAt { .. } | Message::Changes { .. }
        ) {
            self.due = self.due.saturating_sub(1);
            self.came = Instant::now();
        }
        if self.path.receive(to, received)? {
            return Ok(Take::Nothing);
        }
        match &received.message {
            &Message::Block { version, block } => {
                to.expect_block(received, block)?;
                let target = shared.reserve(route, version, block).map(|target| (version, target));
                return Ok(self.takes(block, target));
            }
            &Message::BlockAhead { plan, block } => {
                to.expect_block(received, block)?;
                let target = shared.reserve_ahead(route, plan, block);
                return Ok(self.takes(block, target));
            }
            &Message::Changes { version, block, base, crc } => {
                return Ok(self.takes_changes(Some(version), block, (base, crc)));
            }
            &Message::ChangesAhead { plan, block, base, crc } => {
                let version = shared.followed(plan);
                return Ok(self.takes_changes(version, block, (base, crc)));
            }
            Message::Refused(Refusal::NoVersion { .. }) => self.due = 0,
            // All other refusals end the connection.
            Message::Refused(refusal) => return Err(turned_away(refusal)),
            &Message::Park { parked } => {
                to.park(parked);
                return Ok(Take::Nothing);
            }
            _ => {}
        }
        let message = received.message.clone();
        shared.with_core_by(route, |core, now, actions| match route.role {
            Role::Relay => core.from_relay(&message, now, actions),
            _ => core.from_shard(route.partition, message, now, actions),
        })?;
        Ok(Take::Nothing)
    }

    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close> {
        if !self.greeting.payload(received, bytes)? {
            let (tally, len) =
                (&self.greeting.to.shared.accounts.tally, received.header.payload_len() as usize);
            tally.moved(Flow::Pull, len);
            if received.header.payload_crc().is_none() {
                tally.unchecked(len);
            }
            if self.path.fast().is_some() {
                // The payload came out of the ring.
                tally.copied(Flow::Pull, len);
            }
            let is_made = self.is_made(bytes);
            self.end_reservation(is_made);
        }
        Ok(())
    }

    fn copied(&mut self, bytes: usize) {
        if self.reserved.is_some() {
            self.greeting.to.shared.accounts.tally.copied(Flow::Pull, bytes);
        }
    }

    fn next(&mut self) -> Option<Outgoing> {
        self.greeting.silence?;
        let to = &self.greeting.to;
        if self.due > 0 && self.came.elapsed() > OVERDUE {
            self.due = 0;
        }
        let (outgoing, asked) = self.path.next(to, self.due)?;
        if self.due == 0 {
            self.came = Instant::now();
        }
        self.due += asked;
        Some(outgoing)
    }

    fn tick(&mut self, _: Instant) -> Result<Option<Instant>, Close> {
        Ok(self.path.tick(&self.greeting.to))
    }

    fn limits(&self) -> Limits {
        self.greeting.limits()
    }

    fn silence(&self) -> Option<Duration> {
        self.greeting.silence
    }

    fn closed(&mut self, why: &Close) {
        self.end_reservation(false);
        self.path.closed(&self.greeting.to);
        let Connection { shared, route, link } = &self.greeting.to;
        match self.refused.take() {
            Some(why) => shared.without(FastPath::Rdma, route.clone(), &why),
            None => shared.ended(route, link, &why.to_string()),
        }
    }
}

fn turned_away(refusal: &Refusal) -> Close {
    Close::Asked(format!("refused by the shard: {refusal}").into())
}

fn malformed(error: WireError) -> Close {
    Close::Asked(error.to_string().into())
}
