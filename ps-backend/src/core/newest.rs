//! What the newest version was made of.

use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::meta::Meta;
use libmodelio::vocabulary::norm::Norm;
use serde::{Deserialize, Serialize};

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Newest {
    /// The contributions that are part of it or of an earlier version.
    pub(super) all_contributions: u64,
    /// The contributions that it has added. 0 if new weights were published.
    pub(super) contributions: u32,
    /// The norm of its gradient, if its step had to know it.
    pub(super) norm: Option<Norm>,
    /// Its learning rate, if that was divided by the staleness of a contribution or could be.
    pub(super) rate: Option<f32>,
    /// What its publisher has said of it.
    pub(super) meta: Meta,
    /// The newest version of which there is a snapshot in the job's store.
    pub(super) durable: Option<Version>,
    /// Versions have numbers below this one.
    pub(super) reserved: Option<Version>,
}

impl Newest {
    /// It was made of so many contributions.
    pub(super) fn reduced(&mut self, contributions: usize, norm: Option<Norm>, rate: Option<f32>) {
        let all_contributions = self.all_contributions + contributions as u64;
        let (contributions, durable, reserved) = (contributions as u32, self.durable, self.reserved);
        let meta = Meta::default();
        *self = Newest { all_contributions, contributions, norm, rate, meta, durable, reserved };
    }

    /// It has new weights, of which their publisher says this.
    pub(super) fn assigned(&mut self, meta: Meta) {
        let Newest { all_contributions, durable, reserved, .. } = *self;
        *self = Newest { all_contributions, durable, reserved, meta, ..Newest::default() };
    }
}
