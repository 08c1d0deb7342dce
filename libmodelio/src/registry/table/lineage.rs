//! Records of a life keep the lineage that is known of it.

use std::borrow::Cow;

use crate::wire::{ModelRecord, Refusal};

use super::{Given, RegistryCore};

impl RegistryCore {
    /// A record with the lineage that is known of its life: only the requests here change it.
    pub(super) fn of_known_lineage<'a>(
        &self,
        Given { mut record, bytes }: Given<'a>,
    ) -> Result<(ModelRecord, Cow<'a, [u8]>), Refusal> {
        let stored = self.models.get(&record.name).filter(|of| of.generation == record.generation);
        let Some(stored) = stored.filter(|stored| *stored.bytes != *bytes) else {
            return Ok((record, bytes.into()));
        };
        let known = ModelRecord::decode(&stored.bytes).map_err(Refusal::other)?;
        if known.lineage == record.lineage {
            return Ok((record, bytes.into()));
        }
        record.lineage = known.lineage;
        let bytes = record.encode().map_err(Refusal::other)?;
        Ok((record, bytes.into()))
    }
}
