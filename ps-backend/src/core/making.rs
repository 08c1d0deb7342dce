//! The version that is being made, and whether one may be.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::actions::{JobPlan, Now, Ticket};
use super::readers::Readers;

/// The plan all of whose contributions are committed, and what keeps the next one from beginning.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Making {
    #[serde(skip)]
    plan: Option<Arc<JobPlan>>,
    /// The request whose new weights the plan publishes.
    ticket: Option<(Ticket, Now)>,
    /// Whether the next version has a buffer.
    has_buffer: bool,
    /// Whether no new work begins once earlier work is done.
    #[serde(skip)]
    holds: bool,
    pub(super) readers: Readers,
}

impl Making {
    /// Nothing is made, and the next version has a buffer.
    pub(super) fn new() -> Making {
        Making { plan: None, ticket: None, has_buffer: true, holds: false, readers: Readers::default() }
    }

    /// Whether a version is being made.
    pub(super) fn is_under_way(&self) -> bool {
        self.plan.is_some()
    }

    /// The contributions that the plan under way reads.
    pub(super) fn inputs(&self) -> impl Iterator<Item = &super::Contribution> {
        self.plan.iter().flat_map(|plan| &plan.inputs).map(|input| &**input)
    }

    /// Whether a version is being made of contributions.
    pub(super) fn is_reducing(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.weights.is_none())
    }

    /// A plan begins.
    pub(super) fn begins(&mut self, plan: &Arc<JobPlan>) {
        self.plan = Some(Arc::clone(plan));
    }

    /// The plan that begins now publishes the weights of this request.
    pub(super) fn publishes(&mut self, ticket: Ticket, deadline: Now) {
        self.ticket = Some((ticket, deadline));
    }

    /// The plan is over, whether its version is made or not.
    pub(super) fn ends(&mut self) -> Option<Arc<JobPlan>> {
        self.plan.take()
    }

    /// If the plan publishes new weights, it is over; returns the request.
    pub(super) fn ends_publication(&mut self) -> Option<Ticket> {
        self.plan.take_if(|plan| plan.weights.is_some())?;
        self.published()
    }

    /// The request whose weights were published, if it still waits.
    pub(super) fn published(&mut self) -> Option<Ticket> {
        self.ticket.take().map(|(ticket, _)| ticket)
    }

    /// The deadline of that request.
    pub(super) fn deadline(&self) -> Option<Now> {
        self.ticket.map(|(_, deadline)| deadline)
    }

    /// That request, if its deadline has passed: it gets no answer from here any more.
    pub(super) fn late(&mut self, now: Now) -> Option<Ticket> {
        self.ticket.take_if(|(_, deadline)| *deadline <= now).map(|(ticket, _)| ticket)
    }

    /// Whether the next version has a buffer.
    pub(super) fn has_buffer(&self) -> bool {
        self.has_buffer
    }

    /// Whether the next version has a buffer from now on.
    pub(super) fn set_buffer(&mut self, is_there: bool) {
        self.has_buffer = is_there;
    }

    /// No new work begins.
    pub(super) fn hold(&mut self) {
        self.holds = true;
    }

    /// New work may begin. Returns whether that is new.
    pub(super) fn release(&mut self) -> bool {
        std::mem::take(&mut self.holds)
    }

    /// Whether no new work begins.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }
}
