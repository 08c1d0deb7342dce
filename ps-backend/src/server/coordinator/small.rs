//! Small models: the blocks of a contribution come with its commit, and a version goes with the state that announces
//! it.
//!
//! The coordinator's own partition has all blocks of the model. When a contribution is granted, its blocks go there at
//! once, in place of the grant. If they are not taken, the client gets its grant after all, and sends them.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::transport::frames::Outgoing;
use libmodelio::transport::local::{Granted, Mail, MailboxEnd};
use libmodelio::transport::stream::LentPayload;
use libmodelio::vocabulary::block_ranges::BlockRanges;
use libmodelio::vocabulary::ids::{ClientId, LearnerId, Step, Version};
use libmodelio::wire::{self, JobState, MAX_SMALL_MODEL, Message};

use super::{Coordinator, CoordinatorState, ShardRoute};

/// The most bytes of blocks that wait for their grants.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// What came with commits, and what goes with states.
#[derive(Default)]
pub(super) struct Small {
    /// Blocks that came with commits and were not granted yet.
    came: BTreeMap<(ClientId, LearnerId), Came>,
    bytes: usize,
    /// Clients that send blocks with commits, and the newest version that went with a state.
    clients: BTreeMap<ClientId, Version>,
    /// The newest version that went with a state: its bytes and the CRC32C that they are sent with, for
    /// all clients.
    newest: Option<(Version, Arc<Vec<u8>>, Option<u32>)>,
}

struct Came {
    step: Step,
    blocks: BlockRanges,
    bytes: Arc<[u8]>,
}

impl Small {
    /// A client commits. These blocks have come with the commit.
    pub(super) fn commits(&mut self, client: ClientId, message: &Message, bytes: &[u8]) {
        let Message::Commit { learner, step, blocks, .. } = message else { return };
        self.drop_of(|of| of == (client, *learner));
        if bytes.is_empty() || self.bytes + bytes.len() > MAX_WAITING_BYTES {
            return;
        }
        self.clients.entry(client).or_default();
        self.bytes += bytes.len();
        let came = Came { step: *step, blocks: blocks.clone(), bytes: bytes.into() };
        self.came.insert((client, *learner), came);
    }

    /// The client is not connected any more.
    pub(super) fn leaves(&mut self, client: ClientId) {
        self.drop_of(|(of, _)| of == client);
        self.clients.remove(&client);
    }

    fn drop_of(&mut self, is_over: impl Fn((ClientId, LearnerId)) -> bool) {
        let dropped = self.came.extract_if(.., |key, _| is_over(*key));
        self.bytes -= dropped.map(|(_, came)| came.bytes.len()).sum::<usize>();
    }

    /// What has come of the contribution that this message grants, if that is all it grants.
    fn granted(&mut self, client: ClientId, message: &Message) -> Option<Granted> {
        let Message::Grant { plan, payload: wire::Granted::Contributions { of, open: None, .. }, .. } =
            message
        else {
            return None;
        };
        let &[(learner, step)] = &of[..] else { return None };
        let came = self.came.remove(&(client, learner))?;
        self.bytes -= came.bytes.len();
        let Came { blocks, bytes, .. } = Some(came).filter(|came| came.step == step)?;
        Some(Granted { client, plan: *plan, blocks, bytes, grant: Box::new(message.clone()) })
    }
}

impl Coordinator {
    /// Whether contributions come with their commits: the model is small, and all of it is here.
    pub(super) fn is_small(&self) -> bool {
        let here = self.here.upgrade();
        here.is_some_and(|here| here.model_bytes() <= u64::from(MAX_SMALL_MODEL))
            && matches!(self.ways[..], [ShardRoute::Here])
    }

    /// Blocks have come with a commit. The sender has left their checksum out.
    pub(in crate::server) fn unchecked(&self, bytes: usize) {
        if let Some(here) = self.here.upgrade() {
            here.store().tally().unchecked(bytes);
        }
    }

    /// Puts the blocks that this message grants into the mailbox to the partition. False if they have not come.
    pub(super) fn grants_here(
        &self,
        state: &mut CoordinatorState,
        client: ClientId,
        message: &Message,
    ) -> bool {
        let Some(granted) = state.small.granted(client, message) else { return false };
        self.mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Partition, Mail::Granted(granted));
        true
    }

    /// The version that goes with this state, if the client does not have it.
    pub(super) fn version_with(
        &self,
        state: &mut CoordinatorState,
        client: ClientId,
        sent: &JobState,
    ) -> Option<LentPayload> {
        let Small { clients, newest, .. } = &mut state.small;
        let before = clients.get_mut(&client).filter(|before| **before < sent.version)?;
        if newest.as_ref().is_none_or(|(version, ..)| *version != sent.version) {
            let here = self.here.upgrade()?;
            let bytes = here.whole(sent.version)?;
            let crc = here.checksum().of(&bytes);
            *newest = Some((sent.version, Arc::new(bytes), crc));
        }
        *before = sent.version;
        newest.as_ref().map(|(_, bytes, crc)| LentPayload::shared(bytes, *crc))
    }

    /// The partition has not taken blocks that came with a commit: the client sends them.
    pub(super) fn not_taken(&self, granted: Granted) {
        let Granted { client, grant, .. } = granted;
        if let Some(link) = self.state.lock().clients.get(&client) {
            link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(0, *grant) });
        }
    }
}
