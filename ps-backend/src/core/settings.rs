//! Settings: whether they are possible, and when they take effect.

use fixedbitset::FixedBitSet;
use libmodelio::vocabulary::controls::{ControlError, Controls};
use libmodelio::vocabulary::groups::Groups;
use libmodelio::vocabulary::partly::MAX_PIECES;

use super::{Action, JobCore, Now, OfTensors, Tensors};

impl JobCore {
    /// Freezes these tensors and reduces all others by these groups, from the next version of which nothing has been
    /// computed.
    ///
    /// # Panics
    /// If this is not a set of the model's tensors.
    pub fn set_tensors(&mut self, frozen: FixedBitSet, groups: Groups) {
        self.recipe.set_tensors(frozen, groups, self.controls.reducer);
    }

    /// New settings take effect at the next version. A formed job stays formed, however many `learners` are expected.
    pub fn set_controls(&mut self, mut controls: Controls, now: Now, actions: &mut Vec<Action>) {
        controls.begin_schedule(&self.controls, self.version);
        let is_new = controls.learners != self.controls.learners;
        let is_other = controls.hyper.learning_rate != self.controls.hyper.learning_rate;
        // The coming version has corrections of the old replicas. Averaging begins anew from it.
        if controls.reducer.restarts() && is_other {
            self.recipe.restart_at(self.version.next());
        }
        self.controls = controls;
        self.recipe.set_reducer(self.controls.reducer);
        self.drop_pending_contents(actions);
        if is_new {
            self.form(now);
        }
        self.stop_if_too_few(actions);
        self.advance(now, actions);
    }

    /// Checks that these settings are possible now.
    ///
    /// # Errors
    /// Contributions that were taken as gradients have too many pieces to be values. Or contributions that
    /// were taken are not what the reducer takes, or have values of other tensors than those that would be averaged.
    pub fn may_set(
        &self,
        controls: &Controls,
        frozen: &FixedBitSet,
        groups: &Groups,
    ) -> Result<(), ControlError> {
        let content = controls.reducer.content();
        let taken = self.committed.iter().map(|committed| committed.contribution.contents.content);
        let mut others = taken.chain(self.recipe.fixed().map(|(reducer, ..)| reducer.content()));
        if let Some(other) = others.find(|other| !other.fits(content)) {
            return Err(ControlError::Conflict(format!(
                "the coming version has contributions of {}, which reducer {} does not take: set it once that version is out",
                other.name(),
                controls.reducer
            )));
        }
        let of_tensors = OfTensors { frozen: Tensors(frozen.clone()), groups: groups.clone() };
        let mark = of_tensors.averaged(controls.reducer);
        let taken = self.committed.iter().map(|committed| committed.contribution.contents.averaged);
        let begun = self.recipe.fixed().map(|(reducer, _, of_tensors)| of_tensors.averaged(*reducer));
        if taken.chain(begun).any(|of| of != mark) {
            let why = "the coming version has contributions with values of averaged tensors, and the rules would \
                       have others averaged: set them once that version is out";
            return Err(ControlError::Conflict(why.into()));
        }
        let replaces = |controls: &Controls| controls.reducer.combine().replaces();
        let assigns = replaces(controls) && !replaces(&self.controls);
        if !assigns || self.pieces(None).is_some_and(|pieces| pieces <= MAX_PIECES) {
            return Ok(());
        }
        let why = "contributions of the coming version are written in too many pieces to be values: set it once that version is out";
        Err(ControlError::Conflict(why.into()))
    }
}
