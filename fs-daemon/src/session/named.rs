//! What is written to `gradients.safetensors` and `publish.safetensors`: a safetensors file, by tensors' names.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::formats::named::{NamedError, NamedStream};
use libmodelio::vocabulary::layout::ModelLayout;
use parking_lot::Mutex;

use super::error::{CallError, CallResult};

/// A file that goes on from write to write.
pub struct NamedWrites {
    layout: Arc<ModelLayout>,
    stream: Mutex<NamedStream>,
}

impl From<NamedError> for CallError {
    fn from(error: NamedError) -> CallError {
        CallError::new(libc::EINVAL, error.to_string())
    }
}

impl NamedWrites {
    /// A file of which nothing was written.
    pub fn new(layout: &Arc<ModelLayout>) -> NamedWrites {
        NamedWrites { layout: Arc::clone(layout), stream: Mutex::new(NamedStream::new(Arc::clone(layout))) }
    }

    /// Takes bytes of the file, and gives `sink` bytes of the model with their offset.
    ///
    /// # Errors
    /// EINVAL, and those of `sink`. Another file can follow once this one has ended, or was taken back.
    pub fn write(
        &self,
        offset: u64,
        data: &[u8],
        sink: impl FnMut(u64, &[u8]) -> CallResult<()>,
    ) -> CallResult<()> {
        self.stream.lock().write(offset, data, sink)
    }

    /// The file's `__metadata__`, once after its header has come.
    pub fn take_metadata(&self) -> Option<BTreeMap<String, String>> {
        self.stream.lock().take_metadata()
    }

    /// Whether what was written may count.
    ///
    /// # Errors
    /// EINVAL if the file is not whole.
    pub fn check_end(&self) -> CallResult<()> {
        let stream = self.stream.lock();
        if stream.is_untouched() { Ok(()) } else { Ok(stream.check_end()?) }
    }

    /// What is written next is another file.
    pub fn begin_anew(&self) {
        *self.stream.lock() = NamedStream::new(Arc::clone(&self.layout));
    }
}
