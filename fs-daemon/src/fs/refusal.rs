//! Why a learner's call failed, in words: kept for `error` and `user.gradfs.error`, and said of the model at hand.

use std::borrow::Cow;

use libmodelio::contributor::ContributeError;
use libmodelio::tracker::WriteRefused;
use libmodelio::transport::ShardError;
use libmodelio::vocabulary::controls::Consistency;
use libmodelio::vocabulary::ids::BlockId;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::vocabulary::phase::JobPhase;
use parking_lot::Mutex;
use ps_backend::core::NOT_COMMITTED;

use super::errno::FsError;
use super::model::Model;

/// The text of the last refusal of a learner's calls.
///
/// A program that fails closes its files on the way out, and such a close may succeed. So the text stays until a
/// contribution has been taken in which no call was refused.
#[derive(Default)]
pub struct LastRefusal(Mutex<Last>);

#[derive(Default)]
struct Last {
    text: Option<String>,
    /// Some call of the open contribution was refused.
    in_open: bool,
}

impl LastRefusal {
    /// A call was refused. `is_open`: the contribution that it was part of goes on.
    pub fn note(&self, error: &FsError, is_open: bool) {
        if !error.is_quiet() {
            *self.0.lock() = Last { text: Some(error.message.clone()), in_open: is_open };
        }
    }

    /// A contribution ended without a refusal of its end. `taken`: something was written.
    pub fn ended(&self, taken: bool) {
        let mut last = self.0.lock();
        if taken && !last.in_open {
            last.text = None;
        }
        last.in_open = false;
    }

    /// Whether a call of the open contribution was refused.
    pub fn is_in_open(&self) -> bool {
        self.0.lock().in_open
    }

    /// The text, if there is one.
    pub fn text(&self) -> Option<String> {
        self.0.lock().text.clone()
    }
}

/// The error of a call on `model`, with what its user knows the data by: tensors, element types, learners.
pub fn explained(model: &Model, error: impl Into<ContributeError>) -> FsError {
    let error = error.into();
    let detail = detail(model, &error);
    let plain = FsError::from(error);
    FsError::new(plain.errno, plain.message + &detail)
}

fn detail(model: &Model, error: &ContributeError) -> String {
    let layout = &model.layout;
    match error {
        ContributeError::Refused(WriteRefused::PastEnd { offset, end, size }) => {
            past_end(layout, *offset, *end, *size)
        }
        ContributeError::Refused(WriteRefused::Rewrite(block)) => {
            let bytes = layout.block_bytes(*block);
            format!(" (bytes {}..{}, {})", bytes.start, bytes.end, tensors_of(layout, *block))
        }
        ContributeError::HalfElement(byte) => match tensor_at(layout, *byte) {
            Some(tensor) => {
                format!(
                    " (tensor {:?} is {}, {} bits an element)",
                    tensor.name,
                    tensor.dtype,
                    tensor.dtype.size_bits()
                )
            }
            None => String::new(),
        },
        ContributeError::Shard(ShardError::NonFinite(block)) => format!(" ({})", tensors_of(layout, *block)),
        ContributeError::Shard(ShardError::TimedOut(what)) if !what.starts_with(NOT_COMMITTED) => {
            waited_for(model)
        }
        _ => String::new(),
    }
}

fn tensor_at(layout: &ModelLayout, byte: u64) -> Option<&libmodelio::vocabulary::layout::Tensor> {
    let at = layout.tensors().partition_point(|tensor| tensor.bytes.end <= byte);
    layout.tensors().get(at)
}

/// What lies in a block, in words.
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

/// What kind of array may have been too long.
fn past_end(layout: &ModelLayout, offset: u64, end: u64, size: u64) -> String {
    // That of what is trained: counters beside it are of no interest.
    let mut trained = layout.tensors().iter().map(|tensor| tensor.dtype).filter(|dtype| dtype.is_reducible());
    let Some(dtype) = trained.next() else { return String::new() };
    let Some(own) = dtype.size_bytes().filter(|_| trained.all(|other| other == dtype)) else {
        return String::new();
    };
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

/// Which learners have not contributed.
fn waited_for(model: &Model) -> String {
    let status = model.job.status();
    if status.state == JobPhase::Forming {
        let (joined, expected) = (status.members.len(), model.job.controls().learners);
        return format!("; {joined} of {expected} learners have joined (control/learners)");
    }
    let late: Vec<_> = status.members.iter().filter(|member| !member.unpublished).collect();
    if late.is_empty() || late.len() == status.members.len() {
        // Learners that are ahead wait for the slowest, whose contribution need not be missing.
        let is_bounded = matches!(model.job.controls().consistency, Consistency::Ssp(_));
        let slowest = status.late.filter(|_| is_bounded);
        return slowest.map_or(String::new(), |(slowest, _)| format!("; waiting for {slowest}"));
    }
    let shown: Vec<_> =
        late.iter().take(8).map(|member| format!("{:?} ({})", member.name, member.phase)).collect();
    let more = if late.len() > 8 { format!(" and {} more", late.len() - 8) } else { String::new() };
    format!("; not committed: {}{more}", shown.join(", "))
}

/// What is written at the start of a model, where it is a file with a header instead of raw bytes.
///
/// # Errors
/// EINVAL with the file's kind.
pub fn refuse_header(offset: u64, data: &[u8]) -> Result<(), FsError> {
    let kind: Cow<'static, str> = match offset {
        0 if is_npy(data) => ".npy".into(),
        0 if is_safetensors(data) => "safetensors".into(),
        _ => return Ok(()),
    };
    Err(FsError::new(
        libc::EINVAL,
        format!(
            "this is a {kind} file with its header: write the array's raw bytes, at the offsets of weights"
        ),
    ))
}

/// Magic, a version there is, and the dictionary behind the header's length: no gradients begin like that.
fn is_npy(data: &[u8]) -> bool {
    let dictionary = |at: usize| data.get(at) == Some(&b'{');
    match data.strip_prefix(b"\x93NUMPY") {
        Some([1, 0, ..]) => dictionary(10),
        Some([2 | 3, 0, ..]) => dictionary(12),
        _ => false,
    }
}

/// The header's length, and JSON of it: an object with a quoted name first, printable as far as it is looked at.
fn is_safetensors(data: &[u8]) -> bool {
    const LOOK: usize = 256;
    const LONGEST: u64 = 100_000_000;
    let Some((length, text)) = data.split_first_chunk() else { return false };
    let length = u64::from_le_bytes(*length);
    let text = &text[..text.len().min(LOOK).min(length.min(LONGEST) as usize)];
    let is_text = |byte: &u8| (b' '..=b'~').contains(byte) || *byte >= 0x80;
    (2..=LONGEST).contains(&length) && text.len() >= 8 && text.starts_with(b"{\"") && text.iter().all(is_text)
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::layout::DType;

    use super::*;

    #[test]
    fn files_with_headers_are_known_and_numbers_are_not() {
        let npy = |version: u8| [b"\x93NUMPY".as_slice(), &[version, 0, 118, 0], b"{'descr': '<f4'"].concat();
        assert!(is_npy(&npy(1)));
        assert!(!is_npy(&npy(9)) && !is_npy(&npy(2)) && !is_npy(b"\x93NUMPY"));
        let mut header = 60u64.to_le_bytes().to_vec();
        header.extend(br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}      "#);
        assert!(is_safetensors(&header));
        assert!(refuse_header(0, &header).is_err_and(|error| error.errno == libc::EINVAL));
        assert_eq!(refuse_header(4, &header), Ok(()), "elsewhere it is data");
        header[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(!is_safetensors(&header), "no header is that long");
        for numbers in [vec![0; 64], vec![0xff; 64], 1.5f32.to_le_bytes().repeat(16)] {
            assert_eq!(refuse_header(0, &numbers), Ok(()));
        }
    }

    #[test]
    fn a_refusal_stays_until_a_contribution_without_one() {
        let last = LastRefusal::default();
        let refused = FsError::new(libc::EFBIG, "too long");
        last.note(&refused, true);
        last.ended(true);
        assert_eq!(last.text().as_deref(), Some("too long"), "its program has only closed the file");
        last.ended(false);
        assert!(last.text().is_some(), "nothing was taken");
        last.ended(true);
        assert_eq!(last.text(), None);
        last.note(&refused, false);
        last.ended(true);
        assert_eq!(last.text(), None, "the refusal was the end of its contribution");
        last.note(&FsError::not_found(), false);
        assert_eq!(last.text(), None, "of no interest");
    }

    #[test]
    fn the_type_of_an_array_that_is_too_long_is_recognised() {
        let layout = ModelLayout::blank(1 << 12, DType::parse("f32").unwrap(), 64 << 10).unwrap();
        let says = |offset, end| past_end(&layout, offset, end, 1 << 12);
        assert!(says(0, 1 << 13).contains("float64, 2x the size; the model is F32"));
        let across = says((1 << 12) - 8, (1 << 12) + 8);
        assert!(across.contains("an array of float64 is 2x the size"), "it may be one: {across}");
        assert!(says(0, 5000).contains("F32, 4 bytes an element"));
        assert!(says(1 << 12, 1 << 13).contains("an array of float64 is 2x the size"), "a piece of one");
    }
}
