//! The errors of calls on a model, with what its users know the data by: tensors, element types, learners.

use crate::client::Job;
use crate::client::core::{BUFFERS_HELD, NOT_HERE, OUT_OF_REACH};
use crate::contributor::ContributeError;
use crate::tracker::WriteRefused;
use crate::vocabulary::controls::Consistency;
use crate::vocabulary::ids::BlockId;
use crate::vocabulary::layout::{DType, ModelLayout, Tensor};
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::shard_error::{
    ALL_BUFFERS_HELD, HELD_BY_READERS, NOT_COMMITTED, SET_LACKS, ShardError,
};

/// Where a program finds what it must know of offsets.
pub const ORDER: &str = " (the model's file layout says where each tensor lies)";

/// How reasons begin to which the learners that are waited for add nothing.
const COMPLETE: [&str; 7] =
    [NOT_COMMITTED, NOT_HERE, BUFFERS_HELD, ALL_BUFFERS_HELD, OUT_OF_REACH, SET_LACKS, HELD_BY_READERS];

/// What users know the data by, after the text of an error of `job`.
pub fn detail(job: &Job, error: &ContributeError) -> String {
    let layout = job.layout();
    match error {
        ContributeError::Refused(WriteRefused::PastEnd { offset, end, size }) => {
            past_end(layout, *offset, *end, *size) + ORDER
        }
        ContributeError::Refused(WriteRefused::Rewrite(block)) => {
            let bytes = layout.block_bytes(*block);
            format!(" (bytes {}..{}, {})", bytes.start, bytes.end, tensors_of(layout, *block))
        }
        ContributeError::HalfElement(byte) => match tensor_at(layout, *byte) {
            Some(tensor) => {
                format!(
                    " (tensor {:?} is {}, {} bits an element){ORDER}",
                    tensor.name,
                    tensor.dtype,
                    tensor.dtype.size_bits()
                )
            }
            None => String::new(),
        },
        ContributeError::Shard(ShardError::NonFinite(block)) => format!(" ({})", tensors_of(layout, *block)),
        ContributeError::Shard(ShardError::Uncovered(byte)) => {
            tensor_at(layout, *byte).map_or_else(String::new, |tensor| format!(" (tensor {:?})", tensor.name))
        }
        ContributeError::Shard(ShardError::TimedOut(what))
            if !COMPLETE.iter().any(|reason| what.starts_with(reason)) =>
        {
            waited_for(job)
        }
        _ => String::new(),
    }
}

fn tensor_at(layout: &ModelLayout, byte: u64) -> Option<&Tensor> {
    let at = layout.tensors().partition_point(|tensor| tensor.bytes.end <= byte);
    layout.tensors().get(at)
}

/// The tensors in a block, in words.
fn tensors_of(layout: &ModelLayout, block: BlockId) -> String {
    let bytes = layout.block_bytes(block);
    let tensors = layout.tensors();
    let first = tensors.partition_point(|tensor| tensor.bytes.end <= bytes.start);
    let last = tensors.partition_point(|tensor| tensor.bytes.start < bytes.end).saturating_sub(1);
    match (tensors.get(first), tensors.get(last)) {
        (Some(only), _) if last <= first => format!("tensor {:?}", only.name),
        (Some(one), Some(other)) => format!("tensors {:?} to {:?}", one.name, other.name),
        _ => format!("block {block}"),
    }
}

/// Types of NumPy's that people send by mistake: the size of an element in bytes, and its name.
const WIDER: [(u64, &str); 4] = [(16, "complex128"), (8, "float64"), (4, "float32"), (2, "float16")];

/// Longer writes come in pieces of this many bytes.
const KERNEL_PIECE: u64 = 1 << 20;

/// The type of all trained tensors, and the bytes of an element. The types of counters beside them do not matter.
pub fn trained_type(layout: &ModelLayout) -> Option<(DType, usize)> {
    let mut trained = layout.tensors().iter().map(|tensor| tensor.dtype).filter(|dtype| dtype.is_reducible());
    let dtype = trained.next()?;
    let bytes = dtype.size_bytes().filter(|_| trained.all(|other| other == dtype))?;
    Some((dtype, bytes))
}

/// A hint at the kind of array that may have been too long.
fn past_end(layout: &ModelLayout, offset: u64, end: u64, size: u64) -> String {
    let Some((dtype, own)) = trained_type(layout) else { return String::new() };
    // The kernel cuts long arrays: only of one that is written at once is it known how long it is.
    let written = (end - offset < KERNEL_PIECE && offset == 0).then_some(end);
    let fits = WIDER.iter().find(|(bytes, _)| written.is_some_and(|len| len * own as u64 == size * bytes));
    match fits {
        Some((bytes, name)) => format!(
            ": that is an array of {name}, {}x the size; the model is {dtype}, convert the array first",
            bytes / own as u64
        ),
        None => match WIDER.iter().rev().find(|(bytes, _)| *bytes > own as u64) {
            Some((bytes, name)) => format!(
                "; the model is {dtype}, {own} bytes an element: an array of {name} is {}x the size, convert it first",
                bytes / own as u64
            ),
            None => format!("; the model is {dtype}, {own} bytes an element"),
        },
    }
}

/// The learners that have not contributed.
fn waited_for(job: &Job) -> String {
    let status = job.status();
    if status.state == JobPhase::Forming {
        let (joined, expected) = (status.members.len(), job.controls().learners);
        return format!("; {joined} of {expected} learners have joined (control/learners)");
    }
    let late: Vec<_> = status.members.iter().filter(|member| !member.unpublished).collect();
    if late.is_empty() || late.len() == status.members.len() {
        // Learners that are ahead wait for the slowest, whose contribution need not be missing.
        let is_bounded = matches!(job.controls().consistency, Consistency::Ssp(_));
        let slowest = status.late.filter(|_| is_bounded);
        return slowest.map_or(String::new(), |(slowest, _)| format!("; waiting for {slowest}"));
    }
    let shown: Vec<_> =
        late.iter().take(8).map(|member| format!("{:?} ({})", member.name, member.phase)).collect();
    let more = if late.len() > 8 { format!(" and {} more", late.len() - 8) } else { String::new() };
    format!("; not committed: {}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_an_array_that_is_too_long_is_recognised() {
        let layout = ModelLayout::blank(1 << 12, DType::parse("f32").unwrap(), 64 << 10).unwrap();
        let error = |offset, end| past_end(&layout, offset, end, 1 << 12);
        assert!(error(0, 1 << 13).contains("float64, 2x the size; the model is F32"));
        let across = error((1 << 12) - 8, (1 << 12) + 8);
        assert!(across.contains("an array of float64 is 2x the size"), "it may be one: {across}");
        assert!(error(0, 5000).contains("F32, 4 bytes an element"));
        assert!(error(1 << 12, 1 << 13).contains("an array of float64 is 2x the size"), "a piece of one");
    }
}
