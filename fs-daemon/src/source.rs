//! What a model starts from: a safetensors file, or nothing but a size.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use libmodelio::layout::ModelLayout;
use libmodelio::safetensors_file::{self, CopyRange};

use crate::config::ModelSource;
use crate::error::Error;

/// A model that is about to be loaded.
pub struct Source {
    /// Tensors and blocks.
    pub layout: ModelLayout,
    /// `__metadata__` of its file.
    pub metadata: BTreeMap<String, String>,
    /// The file, and where which part of the layout lies in it; `None` for zeros.
    pub file: Option<(File, Vec<CopyRange>)>,
}

impl Source {
    /// Looks at what model `name` starts from.
    ///
    /// # Errors
    /// A file that is none, or no model; a size that does not fit.
    pub fn open(name: &str, source: &ModelSource, block_size: u32) -> Result<Source, Error> {
        match source {
            ModelSource::Blank { bytes, dtype } => {
                let layout = ModelLayout::blank(*bytes, *dtype, block_size)
                    .map_err(|error| Error::usage(format!("model {name}: {error}")))?;
                Ok(Source { layout, metadata: BTreeMap::new(), file: None })
            }
            ModelSource::File(path) => {
                let shown = path.display();
                let bad = |error: safetensors_file::ModelFileError| {
                    Error::new(format!("cannot load {shown}")).caused_by(error)
                };
                let file = File::options()
                    .read(true)
                    // Opening a FIFO would wait for its writer; what is not a file is refused by the reader.
                    .custom_flags(libc::O_NONBLOCK)
                    .open(path)
                    .map_err(|error| Error::new(format!("cannot open {shown}")).caused_by(error))?;
                let header = safetensors_file::read_header(&file).map_err(bad)?;
                let (layout, ranges) = safetensors_file::plan_load(&header, block_size).map_err(bad)?;
                Ok(Source { layout, metadata: header.metadata, file: Some((file, ranges)) })
            }
        }
    }

    /// Fills `bytes` with what the layout has at `offset`.
    ///
    /// # Errors
    /// What reading says.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let Some((file, ranges)) = &self.file else {
            bytes.fill(0);
            return Ok(());
        };
        let end = offset + bytes.len() as u64;
        for range in ranges {
            let from = offset.max(range.flat_offset);
            let to = end.min(range.flat_offset + range.len);
            if from < to {
                let local = (from - offset) as usize..(to - offset) as usize;
                file.read_exact_at(&mut bytes[local], range.file_offset + (from - range.flat_offset))?;
            }
        }
        Ok(())
    }
}
