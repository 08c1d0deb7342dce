//! What happens in a run.

/// So often things have happened.
#[derive(Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) arrived: u64,
    pub(super) repeats: u64,
    pub(super) refused: u64,
    pub(super) in_flight: u64,
    pub(super) undone: u64,
    pub(super) of_zombies: u64,
    pub(super) durable: u64,
    pub(super) torn: u64,
    pub(super) passed_over: u64,
    pub(super) restored: u64,
    pub(super) brought: u64,
    pub(super) rivals: u64,
    pub(super) old_blocks: u64,
    pub(super) refused_lives: u64,
}

type Count = fn(&Counts) -> u64;

/// The counted events, and in how many runs each must occur once on average: rare events check nothing.
pub(super) const COUNTED: &[(&str, Count, u64)] = &[
    ("commits", |of| of.sent, 1),
    ("commits that came again after they were taken", |of| of.repeats, 1),
    ("commits that were refused because their life was over", |of| of.refused, 1),
    ("commits that were under way when their learner left its life", |of| of.in_flight, 1),
    ("contributions that were undone", |of| of.undone, 1),
    ("acknowledgements of lives before the one that counts", |of| of.of_zombies, 10),
    ("durable versions", |of| of.durable, 1),
    ("descriptions whose writers ended", |of| of.torn, 1),
    ("restorations that passed snapshots over", |of| of.passed_over, 2),
    ("restorations", |of| of.restored, 1),
    ("restorations with weights of mounts", |of| of.brought, 1),
    ("restorations that began while another was under way", |of| of.rivals, 10),
    ("partitions of lives that were over", |of| of.old_blocks, 4),
    ("refusals of lives that were over", |of| of.refused_lives, 10),
];
