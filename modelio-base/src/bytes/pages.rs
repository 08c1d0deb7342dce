//! Private pages that have one owner.
//!
//! This is one of the modules that may hold `unsafe`.

use std::io;
use std::ops::{Deref, DerefMut};

use super::mmap::Mapping;

/// Bytes that begin on a page, in huge pages where the kernel has them. They are zero to begin with, and all pages are there.
#[derive(Debug, Default)]
pub struct Pages(Option<Mapping>);

impl Pages {
    /// So many zero bytes.
    ///
    /// # Errors
    /// ENOMEM when the memory is not there.
    pub fn new(len: usize) -> io::Result<Pages> {
        if len == 0 {
            return Ok(Pages(None));
        }
        let mapping = Mapping::anonymous(len)?;
        mapping.prefault()?;
        Ok(Pages(Some(mapping)))
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: nobody else has the mapping, and `self` is borrowed for as long as the slice lives.
        self.0.as_ref().map_or(&[], |mapping| unsafe { mapping.bytes(0..mapping.len()) })
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: nobody else has the mapping, and `self` is borrowed mutably for as long as the slice lives.
        self.0.as_ref().map_or(&mut [], |mapping| unsafe { mapping.bytes_mut(0..mapping.len()) })
    }
}
