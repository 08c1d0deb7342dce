//! What a client says: on its connection to the coordinator, and on those for blocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::Part;
use super::edge::{Memory, Shared, Shortcut, Way};
use crate::transport::frames::{Conversation, Link, Outgoing, Take};
use crate::transport::stream::Close;
use crate::transport::tally::Flow;
use crate::wire::{Limits, MAX_PAYLOAD, Message, Protocol, Received, Refusal, Role, WireError};

/// The greeting, the same for all connections of a client.
struct Greeting {
    shared: Arc<Shared>,
    way: Way,
    link: Link,
    /// Longest silence, once the peer has welcomed the client.
    silence: Option<Duration>,
}

impl Greeting {
    fn new(shared: Arc<Shared>, way: Way) -> Greeting {
        Greeting { shared, way, link: Link::default(), silence: None }
    }

    fn begin(&mut self, link: &Link, role: Role) -> Result<(), Close> {
        self.link = link.clone();
        self.shared.check_in_force(&self.way)?;
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role,
            model: self.shared.model.clone(),
            generation: self.shared.generation,
            client: self.shared.client,
        };
        link.send(Outgoing { epoch: self.way.epoch(), ..Outgoing::new(0, hello) });
        Ok(())
    }

    /// True when the peer has just welcomed the client.
    fn welcomed(&mut self, message: &Message) -> Result<bool, Close> {
        match message {
            _ if self.silence.is_some() => Ok(false),
            Message::Welcome { silence_ms, epoch, .. } => {
                if *epoch != self.way.epoch() {
                    let (got, expected) = (self.way.epoch(), *epoch);
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

    /// At any time the model may have moved, and where to is a payload. No other is longer than a block, which its
    /// message says, or `expect_payload`.
    fn limits(&self) -> Limits {
        match self.silence {
            None => Limits { payload: MAX_PAYLOAD, ..Limits::GREETING },
            Some(_) => Limits::MAX,
        }
    }

    /// What comes with a message that has come. True if that was it.
    fn payload(&self, received: &Received, bytes: &[u8]) -> Result<bool, Close> {
        let moved = matches!(received.message, Message::Moved);
        if moved {
            self.shared.hear_moved(&self.way, bytes)?;
        }
        Ok(moved)
    }
}

/// Requests, and what the coordinator says.
pub(super) struct Control(Greeting);

impl Control {
    pub(super) fn new(shared: Arc<Shared>, way: Way) -> Control {
        Control(Greeting::new(shared, way))
    }
}

impl Conversation for Control {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.0.begin(link, Role::Control)
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        if matches!(received.message, Message::Moved) {
            return Ok(Take::Buffered);
        }
        received.expect_payload(0).map_err(unfit)?;
        if let Message::Refused(
            refusal @ (Refusal::NoModel(_) | Refusal::Generation { .. } | Refusal::Deleted(_)),
        ) = &received.message
            && self.0.silence.is_none()
        {
            self.0.shared.coordinator_has_not(&self.0.way, refusal);
        }
        if self.0.welcomed(&received.message)? {
            self.0.shared.greeted(&self.0.way, &self.0.link, None)?;
            return Ok(Take::Nothing);
        }
        let (request, message) = (received.header.request(), received.message.clone());
        if request == 0
            && let Message::Refused(refusal) = &message
        {
            return Err(turned_away(refusal));
        }
        let Greeting { shared, way, .. } = &self.0;
        shared
            .with_core_by(way, |core, now, actions| core.from_coordinator(request, message, now, actions))?;
        Ok(Take::Nothing)
    }

    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close> {
        self.0.payload(received, bytes).map(drop)
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn silence(&self) -> Option<Duration> {
        self.0.silence
    }

    fn closed(&mut self, why: &Close) {
        self.0.shared.ended(&self.0.way, &self.0.link, &why.to_string());
    }
}

/// Blocks to and from one shard.
pub(super) struct Data {
    greeting: Greeting,
    part: Part,
    /// What is landing just now.
    landing: Option<(crate::vocabulary::ids::Version, crate::vocabulary::ids::BlockId)>,
    /// What both ends see, if the shard is on this host.
    memory: Option<Memory>,
    /// Blocks that were asked for here and have not come.
    due: usize,
    /// When one last came, or was first asked for.
    came: Instant,
    /// Why the shard does not serve it by RDMA.
    no_rdma: Option<String>,
}

/// Blocks that have not come after such a silence do not come any more: the shard did not have them.
const LOST: Duration = Duration::from_secs(1);

impl Data {
    pub(super) fn new(shared: Arc<Shared>, way: Way, part: Part, memory: Option<Memory>) -> Data {
        let greeting = Greeting::new(shared, way);
        Data { greeting, part, landing: None, memory, due: 0, came: Instant::now(), no_rdma: None }
    }

    fn landed(&mut self, whole: bool) {
        if let Some((version, block)) = self.landing.take() {
            let landed = |core: &mut super::core::ClientCore, now, actions: &mut Vec<_>| {
                core.landed(version, block, whole, now, actions);
            };
            self.greeting.shared.with_core(landed);
        }
    }
}

impl Conversation for Data {
    fn opened(&mut self, link: &Link) -> Result<(), Close> {
        self.greeting.begin(link, Role::Data)
    }

    fn message(&mut self, received: &Received) -> Result<Take, Close> {
        match &received.message {
            Message::Moved => return Ok(Take::Buffered),
            // Its length is looked at below.
            Message::Block { .. } => {}
            _ => received.expect_payload(0).map_err(unfit)?,
        }
        if let Message::Refused(Refusal::NoRdma(why)) = &received.message
            && self.greeting.silence.is_none()
            && self.memory.as_ref().is_some_and(Memory::is_by_rdma)
        {
            self.no_rdma = Some(format!("refused by the shard: {why}"));
        }
        if self.greeting.welcomed(&received.message)? {
            let by_memory = self.memory.as_ref().map(Memory::end_of_loan);
            self.greeting.link.expect_much();
            self.greeting.shared.greeted(&self.greeting.way, &self.greeting.link, by_memory)?;
            return Ok(Take::Nothing);
        }
        let Greeting { shared, way, .. } = &self.greeting;
        if matches!(received.message, Message::Block { .. } | Message::BlockAt { .. }) {
            self.due = self.due.saturating_sub(1);
            self.came = Instant::now();
        }
        if let Some(memory) = &mut self.memory
            && shared.hear_by_memory(received, memory, &self.greeting.link)?
        {
            return Ok(Take::Nothing);
        }
        if let Message::Block { version, block } = received.message {
            if block.0 >= shared.layout.blocks() {
                return Err(Close::Asked(format!("block {block} is outside of the model").into()));
            }
            let extent = shared.layout.block_bytes(block);
            let expected = (extent.end - extent.start) as u32;
            received.expect_payload(expected).map_err(unfit)?;
            return Ok(match shared.lands(way, version, block) {
                Some(target) => {
                    self.landing = Some((version, block));
                    Take::Into(target)
                }
                None => Take::Nothing,
            });
        }
        match &received.message {
            Message::Refused(Refusal::NoVersion { .. }) => self.due = 0,
            // All others end the connection.
            Message::Refused(refusal) => return Err(turned_away(refusal)),
            _ => {}
        }
        if let Message::Missing { blocks, .. } = &received.message
            && !blocks.is_empty()
        {
            shared.doubt_others(way, self.part, &self.greeting.link);
        }
        if let Message::Rest { rests } = received.message {
            shared.rest(way, self.part, &self.greeting.link, rests);
            return Ok(Take::Nothing);
        }
        let (part, message) = (self.part, received.message.clone());
        shared.with_core_by(way, |core, now, actions| core.from_shard(part, message, now, actions))?;
        Ok(Take::Nothing)
    }

    fn payload(&mut self, received: &Received, bytes: &[u8]) -> Result<(), Close> {
        if !self.greeting.payload(received, bytes)? {
            let (tally, len) = (&self.greeting.shared.tally, received.header.payload_len() as usize);
            tally.moved(Flow::Pull, len);
            if self.memory.is_some() {
                // Out of the ring.
                tally.copied(Flow::Pull, len);
            }
            self.landed(true);
        }
        Ok(())
    }

    fn copied(&mut self, bytes: usize) {
        if self.landing.is_some() {
            self.greeting.shared.tally.copied(Flow::Pull, bytes);
        }
    }

    fn next(&mut self) -> Option<Outgoing> {
        self.greeting.silence?;
        let Greeting { shared, way, link, .. } = &self.greeting;
        if self.due > 0 && self.came.elapsed() > LOST {
            self.due = 0;
            shared.doubt(way, self.part, link);
        }
        let (outgoing, asked) = match &mut self.memory {
            Some(memory) => shared.next_by_memory(self.part, memory, link, self.due)?,
            None => shared.next_for(way, self.part, link, self.due)?,
        };
        if self.due == 0 {
            self.came = Instant::now();
        }
        self.due += asked;
        Some(outgoing)
    }

    #[cfg(feature = "rdma")]
    fn tick(&mut self, _: Instant) -> Result<Option<Instant>, Close> {
        let Greeting { shared, link, .. } = &self.greeting;
        Ok(self.memory.as_mut().and_then(|memory| shared.hear_of_rdma(memory, link)))
    }

    fn limits(&self) -> Limits {
        self.greeting.limits()
    }

    fn silence(&self) -> Option<Duration> {
        self.greeting.silence
    }

    fn heard(&mut self) {
        let Greeting { shared, way, link, .. } = &self.greeting;
        shared.trust(way, self.part, link);
    }

    fn closed(&mut self, why: &Close) {
        self.landed(false);
        #[cfg(feature = "rdma")]
        if let Some(memory) = &mut self.memory {
            self.greeting.shared.rdma_is_over(memory);
        }
        let Greeting { shared, way, link, .. } = &self.greeting;
        match self.no_rdma.take() {
            Some(why) => shared.without(Shortcut::Rdma, way.clone(), self.part, &why),
            None => shared.ended(way, link, &why.to_string()),
        }
    }
}

fn turned_away(refusal: &Refusal) -> Close {
    Close::Asked(format!("refused by the shard: {refusal}").into())
}

fn unfit(error: WireError) -> Close {
    Close::Asked(error.to_string().into())
}
