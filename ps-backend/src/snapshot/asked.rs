//! Asking the shards of a model for a snapshot in a store.

use std::time::Instant;

use libmodelio::admin::{AdminError, AdminPeer};
use libmodelio::vocabulary::ids::Version;
use libmodelio::wire::{Message, ModelRecord, Refusal};

/// How often it is begun when the model moves meanwhile.
const TRIES: u32 = 3;

/// How far a snapshot is, as the coordinator says.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Its version.
    pub version: Version,
    /// Bytes that have been written, or were there.
    pub dealt: u64,
    /// Its bytes.
    pub of: u64,
    /// Bytes that have been written.
    pub written: u64,
    /// It is in the store.
    pub ended: bool,
}

/// A snapshot that was asked for.
#[derive(Debug)]
pub struct AskedSnapshot {
    address: String,
    message: Message,
    /// How far it is.
    pub told: Told,
}

impl AskedSnapshot {
    /// Asks for a snapshot in a store, or in the job's own one if `to` is empty. If it does not hurry, it makes room for the
    /// steps of the job. `find` looks the model and the address of its coordinator up.
    ///
    /// # Errors
    /// Those of `find`, and what `failed` makes of the coordinator's.
    pub fn begin<E>(
        (to, hurries): (&str, bool),
        until: Instant,
        mut find: impl FnMut() -> Result<(ModelRecord, String), E>,
        failed: impl Fn(AdminError) -> E,
    ) -> Result<AskedSnapshot, E> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| failed(Refusal::other(error).into()))?;
        let (snapshot, mut tries) = (u64::from_le_bytes(random), 0);
        loop {
            tries += 1;
            let (ModelRecord { name: model, generation, epoch, .. }, address) = find()?;
            let to = to.to_owned();
            let message = Message::TakeSnapshot { model, generation, epoch, snapshot, to, hurries };
            match ask(&address, &message, until) {
                Ok(told) => return Ok(AskedSnapshot { address, message, told }),
                // It has moved since it was looked up.
                Err(AdminError::Refusal(Refusal::Epoch { .. })) if tries < TRIES => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Asks how far it is. The coordinator answers when there is something new.
    ///
    /// # Errors
    /// Why there is no snapshot, or that it is not known.
    pub fn look(&mut self, until: Instant) -> Result<(), AdminError> {
        self.told = ask(&self.address, &self.message, until)?;
        Ok(())
    }
}

fn ask(address: &str, message: &Message, until: Instant) -> Result<Told, AdminError> {
    match AdminPeer::connect(address, until)?.request(message, &[], until)?.0 {
        Message::Saved { version, dealt, of, written, ended } => {
            Ok(Told { version, dealt, of, written, ended })
        }
        other => Err(AdminError::Unexpected { address: address.to_owned(), what: other.name() }),
    }
}
