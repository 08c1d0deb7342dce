//! Error feedback: what coded blocks have lost, which is added to the client's next sum of the same block.
//!
//! A block has two residuals. The *current* one is what plans that count have left. The *pending* one is what is left
//! if the plan under way counts. A block that is sent again within a plan is made from the current one again, so it has
//! the same bytes. The next grant says which plan of the client's was the last to count: if it is the one before,
//! pending residuals become current, else they are forgotten. So what a form loses is sent once, however often plans
//! are dropped.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::bytes::kernels::{self, Wire, coded};
use crate::client::payloads::sum::Written;
use crate::vocabulary::coding::Coding;
use crate::vocabulary::ids::{BlockId, PlanId};
use crate::vocabulary::layout::ModelLayout;

/// Why a block was not coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotCoded {
    /// Its plan is over.
    Over,
    /// This part of the sum holds NaN or Inf, which are refused.
    NonFinite(usize),
}

/// The residuals of a model's blocks. A block takes memory when it is first coded.
#[derive(Debug)]
pub(crate) struct Residuals {
    /// The plan that blocks are coded for.
    plan: AtomicU64,
    blocks: Box<[Mutex<Residual>]>,
    /// The blocks that have a pending residual.
    touched: Mutex<Vec<BlockId>>,
    taken: AtomicU64,
}

/// What one block has lost: an fp32 for each element that is coded. Empty if it has lost nothing.
#[derive(Debug, Default)]
struct Residual {
    current: Vec<f32>,
    pending: Vec<f32>,
    /// The plan that `pending` is of.
    pending_of: PlanId,
}

impl Residuals {
    /// No residual of any block yet, while `plan` is under way.
    pub(crate) fn new(blocks: u32, plan: PlanId) -> Residuals {
        Residuals {
            plan: AtomicU64::new(plan.0),
            blocks: (0..blocks).map(|_| Mutex::default()).collect(),
            touched: Mutex::default(),
            taken: AtomicU64::new(0),
        }
    }

    /// Blocks are coded for `plan` from now on. Of all plans that had contributions of this client's, `counted` is the
    /// newest that counts. A second call for the same plan changes nothing.
    pub(crate) fn begin(&self, plan: PlanId, counted: PlanId) {
        let before = PlanId(self.plan.swap(plan.0, Ordering::SeqCst));
        if before == plan {
            return;
        }
        for block in std::mem::take(&mut *self.touched.lock()) {
            let mut of = self.blocks[block.index()].lock();
            // A thread may have been late for a plan before that.
            if of.pending_of == before && before == counted {
                let Residual { current, pending, .. } = &mut *of;
                std::mem::swap(current, pending);
            }
            of.pending_of = PlanId(0);
        }
    }

    /// Whether plans that count have left anything of the block.
    pub(crate) fn holds(&self, block: BlockId) -> bool {
        !self.blocks[block.index()].lock().current.is_empty()
    }

    /// The bytes that are taken.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Codes the sum of `parts`, each a whole block, and of what the block has lost before. With `check`, the parts are
    /// searched for NaN and Inf. The last part counts for elements that cannot be reduced. `written` has the ranges of
    /// each part that were written, if not all were: of a tensor that nobody has written the shard takes nothing, so
    /// its elements are sent as zeros, and keep what they have lost.
    ///
    /// # Errors
    /// [`NotCoded`].
    pub(crate) fn encode(
        &self,
        layout: &ModelLayout,
        (block, plan): (BlockId, PlanId),
        coding: Coding,
        (parts, written): (&[&[u8]], &[Written]),
        check: bool,
        out: &mut Vec<u8>,
    ) -> Result<(), NotCoded> {
        let mut of = self.blocks[block.index()].lock();
        let of = &mut *of;
        if self.plan.load(Ordering::SeqCst) != plan.0 {
            return Err(NotCoded::Over);
        }
        // Until all of it is made, it is no plan's.
        let is_repeated = std::mem::take(&mut of.pending_of) == plan;
        let segments = layout.segments(block);
        let elements = segments.iter().filter_map(Coding::elements).sum();
        if of.pending.len() != elements {
            of.pending = vec![0.0; elements];
            self.taken.fetch_add(4 * elements as u64, Ordering::Relaxed);
        }
        out.resize(coding.block_bytes(layout, block), 0);
        let start = layout.block_bytes(block).start;
        let (mut rest, mut element) = (&mut out[..], 0);
        for segment in segments {
            let local = (segment.bytes.start - start) as usize..(segment.bytes.end - start) as usize;
            let (here, behind) = rest.split_at_mut(coding.segment_bytes(segment));
            rest = behind;
            let Some(wire) = Wire::of(segment.dtype) else {
                here.copy_from_slice(&parts[parts.len() - 1][local]);
                continue;
            };
            let sum_to = |to: &mut [u8]| {
                for (at, part) in parts.iter().enumerate() {
                    // The checked values are the very values that are added.
                    if !kernels::accumulate_bytes(wire, &part[local.clone()], to, at == 0) && check {
                        return Err(NotCoded::NonFinite(at));
                    }
                }
                Ok(())
            };
            let Some(count) = Coding::elements(segment) else {
                sum_to(here)?;
                continue;
            };
            let range = element..element + count;
            element = range.end;
            let values = &mut of.pending[range.clone()];
            sum_to(kernels::bytes_mut(values))?;
            if !is_written(written, &local) {
                coded::encode(coding, values, here);
                if let Some(lost) = of.current.get(range) {
                    values.copy_from_slice(lost);
                }
                continue;
            }
            if let Some(lost) = of.current.get(range) {
                kernels::accumulate(Wire::F32, kernels::bytes(lost), values, false);
            }
            coded::encode(coding, values, here);
        }
        of.pending_of = plan;
        if !is_repeated {
            self.touched.lock().push(block);
        }
        Ok(())
    }
}

/// Whether one of the parts has bytes of this piece of a block.
fn is_written(written: &[Written], piece: &Range<usize>) -> bool {
    let overlaps =
        |range: &Range<u32>| (range.start as usize) < piece.end && range.end as usize > piece.start;
    written.is_empty()
        || written.iter().any(|ranges| ranges.as_ref().is_none_or(|ranges| ranges.iter().any(overlaps)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::vocabulary::layout::DType;

    /// Two blocks, the second of which is short.
    const ELEMENTS: usize = 17_000;
    const BLOCK: u32 = 64 << 10;

    fn layout() -> ModelLayout {
        let tensors =
            vec![("a".into(), DType::F32, vec![ELEMENTS - 100]), ("b".into(), DType::BF16, vec![100])];
        ModelLayout::new(tensors, BLOCK).unwrap()
    }

    /// The bytes of a block in which all elements are whole numbers, so that sums of them are exact.
    fn block_of(layout: &ModelLayout, block: BlockId, seed: u64) -> (Vec<u8>, Vec<f64>) {
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for segment in layout.segments(block) {
            for i in 0..Coding::elements(segment).unwrap() as u64 {
                let value = ((seed * 31 + i * 17) % 128) as f32 - 64.0;
                values.push(f64::from(value));
                match segment.dtype {
                    DType::BF16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
                    _ => bytes.extend(value.to_le_bytes()),
                }
            }
        }
        (bytes, values)
    }

    fn decoded(layout: &ModelLayout, block: BlockId, coding: Coding, mut bytes: &[u8]) -> Vec<f64> {
        let mut all = Vec::new();
        for segment in layout.segments(block) {
            let count = Coding::elements(segment).unwrap();
            let (here, rest) = bytes.split_at(coding.bytes(count));
            let mut out = vec![0.0; count];
            coded::decode(coding, count, here, 0, &mut out);
            all.extend(out.into_iter().map(f64::from));
            bytes = rest;
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

        /// Plans count or are dropped, and blocks are sent again within a plan, or by a thread that is late.
        #[test]
        fn what_has_counted_and_what_is_left_is_all_that_was_contributed(
            plans in proptest::collection::vec((any::<bool>(), 0u8..4, 0u8..4, any::<bool>()), 1..12),
            coding in proptest::sample::select(vec!["bf16", "fp16", "int8", "fp8", "topk(0.05)"]),
        ) {
            let (layout, coding): (_, Coding) = (layout(), coding.parse().unwrap());
            let blocks = layout.blocks();
            let residuals = Residuals::new(blocks, PlanId(1));
            let count = |block: u32| block_of(&layout, BlockId(block), 0).1.len();
            let mut given: Vec<Vec<f64>> = (0..blocks).map(|block| vec![0.0; count(block)]).collect();
            let mut applied = given.clone();
            let mut counted = PlanId(0);
            for (plan, (counts, sent, again, late)) in (1u64..).zip(plans) {
                residuals.begin(PlanId(plan), counted);
                let mut out = Vec::new();
                for block in (0..blocks).filter(|block| sent >> block & 1 == 1) {
                    let (bytes, values) = block_of(&layout, BlockId(block), plan);
                    let (_, twice) = block_of(&layout, BlockId(block), plan);
                    let mut encode = |plan: u64, bytes: &[u8]| {
                        let at = (BlockId(block), PlanId(plan));
                        residuals.encode(&layout, at, coding, (&[bytes, bytes], &[]), true, &mut out).map(|()| out.clone())
                    };
                    let first = encode(plan, &bytes).unwrap();
                    if again >> block & 1 == 1 {
                        prop_assert_eq!(&encode(plan, &bytes).unwrap(), &first, "another payload of the same plan");
                    }
                    if late {
                        prop_assert_eq!(encode(plan - 1, &bytes), Err(NotCoded::Over));
                    }
                    if counts {
                        let come = decoded(&layout, BlockId(block), coding, &first);
                        let at = block as usize;
                        applied[at].iter_mut().zip(come).for_each(|(applied, come)| *applied += come);
                        given[at].iter_mut().zip(values.iter().zip(twice)).for_each(|(given, (a, b))| *given += a + b);
                    }
                }
                counted = if counts { PlanId(plan) } else { counted };
            }
            residuals.begin(PlanId(1000), counted);
            for block in 0..blocks as usize {
                let left = residuals.blocks[block].lock();
                for (at, (given, applied)) in given[block].iter().zip(&applied[block]).enumerate() {
                    let left = left.current.get(at).copied().map_or(0.0, f64::from);
                    // Numbers of this size are exact to 2^-16 in fp32, and each step rounds once.
                    prop_assert!((given - applied - left).abs() < 1e-2, "{given} given, {applied} came, {left} left");
                }
            }
        }
    }

    #[test]
    fn a_part_that_is_not_finite_is_named_and_leaves_nothing() {
        let layout = layout();
        let residuals = Residuals::new(layout.blocks(), PlanId(1));
        let (good, _) = block_of(&layout, BlockId(0), 1);
        let mut bad = good.clone();
        bad[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let mut out = Vec::new();
        let mut encode = |plan, parts: &[&[u8]], check| {
            residuals.encode(&layout, (BlockId(0), PlanId(plan)), Coding::Int8, (parts, &[]), check, &mut out)
        };
        assert_eq!(encode(1, &[&good, &bad], true), Err(NotCoded::NonFinite(1)));
        assert_eq!(encode(1, &[&good, &bad], false), Ok(()));
        residuals.begin(PlanId(2), PlanId(1));
        assert_eq!(encode(2, &[&good], true), Ok(()));
        assert_eq!(encode(1, &[&good], true), Err(NotCoded::Over));
        assert!(residuals.taken() >= 4 * 256);
        let of = residuals.blocks[0].lock();
        assert!(of.current.iter().chain(&of.pending).all(|left| left.is_finite()));
    }

    #[test]
    fn a_tensor_that_nobody_has_written_keeps_what_it_has_lost() {
        let (layout, block) = (layout(), BlockId(1));
        let residuals = Residuals::new(2, PlanId(1));
        let (bytes, values) = block_of(&layout, block, 3);
        let coding: Coding = "topk(0.01)".parse().unwrap();
        let mut came = vec![0.0; values.len()];
        // All is written once, then only the first tensor, then all again.
        let first = bytes.len() as u32 - 200;
        let zeros = vec![0; bytes.len()];
        for plan in 1..=240 {
            residuals.begin(PlanId(plan), PlanId(plan - 1));
            let parts: &[&[u8]] = if plan == 1 { &[&bytes] } else { &[&zeros] };
            let written: &[Written] =
                if (2..=120).contains(&plan) { &[Some(std::iter::once(0..first).collect())] } else { &[] };
            let mut out = Vec::new();
            residuals
                .encode(&layout, (block, PlanId(plan)), coding, (parts, written), true, &mut out)
                .unwrap();
            let sent = decoded(&layout, block, coding, &out);
            let counts = |at: usize| written.is_empty() || at < first as usize / 4;
            came.iter_mut()
                .zip(sent)
                .enumerate()
                .filter(|(at, _)| counts(*at))
                .for_each(|(_, (came, sent))| *came += sent);
        }
        assert_eq!(came, values);
    }
}
