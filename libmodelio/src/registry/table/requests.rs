//! Requests, and their answers.

use std::net::IpAddr;
use std::time::Duration;

use crate::vocabulary::ids::ShardId;
use crate::wire::{Refusal, RegistryAnswer, RegistryRequest, ShardRecord};

use super::{Answer, Given, MAX_LEASE, Now, RegistryCore, Shard, check_shard};

impl RegistryCore {
    /// Answers a request of this process that came with `payload`. What is refused changes nothing, and what is
    /// repeated changes nothing the second time.
    ///
    /// # Errors
    /// The [`Refusal`] to send.
    pub fn handle(&mut self, request: &RegistryRequest, payload: &[u8], now: Now) -> Result<Answer, Refusal> {
        self.handle_from(None, request, payload, now)
    }

    /// Answers a request that came from an address.
    ///
    /// # Errors
    /// The [`Refusal`] to send.
    pub fn handle_from(
        &mut self,
        from: Option<IpAddr>,
        request: &RegistryRequest,
        payload: &[u8],
        now: Now,
    ) -> Result<Answer, Refusal> {
        self.answer(from, request, Given::of(request, payload)?, now)
    }

    /// Answers a request whose payload was read before, which may take long.
    ///
    /// # Errors
    /// The [`Refusal`] to send.
    pub fn answer(
        &mut self,
        from: Option<IpAddr>,
        request: &RegistryRequest,
        given: Option<Given<'_>>,
        now: Now,
    ) -> Result<Answer, Refusal> {
        let given = || given.ok_or_else(|| Refusal::other("a request without a record"));
        let done = |()| RegistryAnswer::Done;
        let message = match request {
            RegistryRequest::Announce { record, lease_ms, bound } => self
                .announce(record, (from, *bound), Duration::from_millis((*lease_ms).into()), now)
                .map(RegistryAnswer::Shard),
            RegistryRequest::Withdraw { shard } => {
                self.withdraw(*shard, now);
                Ok(RegistryAnswer::Done)
            }
            RegistryRequest::Drain { shard } => self.drain(*shard, true).map(done),
            RegistryRequest::Undrain { shard } => self.drain(*shard, false).map(done),
            RegistryRequest::Shards => Ok(RegistryAnswer::Shards(self.living(now).cloned().collect())),
            RegistryRequest::Refused => Ok(RegistryAnswer::Refused(self.refused.until_now(now))),
            RegistryRequest::Models => Ok(RegistryAnswer::Models(self.models.keys().cloned().collect())),
            RegistryRequest::Model { name } => {
                let record = self.model(name)?.bytes.clone();
                return Ok(Answer { message: RegistryAnswer::Model, payload: Some(record) });
            }
            RegistryRequest::Put { replaces } => self.put(*replaces, given()?).map(done),
            RegistryRequest::Delete { name, generation } => self.delete(name, *generation).map(done),
            RegistryRequest::Holding { shard, held, deleted } => {
                self.are_deleted(deleted)?;
                let draining = self.shards.get(shard).is_some_and(|shard| shard.record.draining);
                let fates = held.iter().map(|held| self.fate(held)).collect();
                Ok(RegistryAnswer::Fates { draining, fates })
            }
            RegistryRequest::Restore { shards } => self.restore(shards, given()?, now).map(done),
            RegistryRequest::Keep { model, generation, epoch, reserved, store, newest } => {
                self.keep(model, (*generation, *epoch), *reserved, (store, *newest)).map(done)
            }
            RegistryRequest::Succeed { generation, epoch } => {
                self.succeed((*generation, *epoch), given()?).map(done)
            }
            RegistryRequest::Lost { shard, held, makes } => {
                Ok(RegistryAnswer::Losses(self.losses(*shard, (held, makes), now)))
            }
        };
        message.map(|message| Answer { message, payload: None })
    }

    fn announce(
        &mut self,
        record: &ShardRecord,
        (from, bound): (Option<IpAddr>, bool),
        lease: Duration,
        now: Now,
    ) -> Result<ShardId, Refusal> {
        check_shard(record)?;
        if lease.is_zero() || lease > MAX_LEASE {
            return Err(Refusal::other(format_args!(
                "a lease of {} ms, expected 1 to {}",
                lease.as_millis(),
                MAX_LEASE.as_millis()
            )));
        }
        let known = self.at(&record.address);
        let number = match known {
            _ if bound && record.shard.0 != 0 => self.claimed(record, known, now),
            Some(number) => Ok(number),
            None => self.number_for(record.shard, now),
        };
        let number = number.inspect_err(|refusal| self.refused.add(record, refusal, now, now + lease))?;
        self.refused.remove(&record.address);
        // The registry knows whether the shard is drained. Only a restarted registry takes the word of the shard.
        let before = known.and_then(|known| self.shards.remove(&known));
        let draining = before.map_or(record.draining, |before| before.record.draining);
        let record = ShardRecord { shard: number, draining, ..record.clone() };
        self.shards.insert(
            number,
            Shard {
                record,
                until: now + lease,
                last_announced: Some(now),
                announced: true,
                holds: bound,
                from,
                hint: false,
            },
        );
        Ok(number)
    }
}
