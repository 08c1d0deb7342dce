//! Lists of memory that a driver reads and writes for a stream. This module holds `unsafe`.
//!
//! Slices are raw pointers, because they name blocks of a shared mapping, which no Rust reference may cover while
//! bytes come in. The caller that pushes a slice makes the promises of [`ReceiveSlices::push`] and
//! [`SendSlices::push`]. Everything above can then be safe.

use std::ptr::NonNull;

/// The most slices in one operation.
pub const SLICES_MAX: usize = 64;

/// The kernel reads this, so it stays at one address while an operation is outstanding.
struct Header {
    message: libc::msghdr,
    slices: [libc::iovec; SLICES_MAX],
}

/// A list of slices that is used up from the front.
struct Slices {
    header: NonNull<Header>,
    first: usize,
    end: usize,
    bytes: usize,
}

// SAFETY: `header` is owned by this value alone; the callers that push slices promise that the memory is
// usable from any thread.
unsafe impl Send for Slices {}

impl Slices {
    fn new() -> Slices {
        // SAFETY: both parts of a header are plain C structs, for which zeros are valid.
        let header: Box<Header> = Box::new(unsafe { std::mem::zeroed() });
        Slices { header: NonNull::from(Box::leak(header)), first: 0, end: 0, bytes: 0 }
    }

    fn clear(&mut self) {
        (self.first, self.end, self.bytes) = (0, 0, 0);
    }

    fn push(&mut self, start: *mut u8, len: usize) {
        assert!(self.end < SLICES_MAX, "more than {SLICES_MAX} slices pushed");
        if len == 0 {
            return;
        }
        // SAFETY: the index is in bounds; only the kernel shares the header, and only while an operation is
        // outstanding, when nothing is pushed (the reactor clears and fills the list between operations).
        unsafe {
            (*self.header.as_ptr()).slices[self.end] = libc::iovec { iov_base: start.cast(), iov_len: len }
        };
        self.end += 1;
        self.bytes += len;
    }

    /// Removes the first `bytes`, which are done.
    fn advance(&mut self, bytes: usize) {
        assert!(bytes <= self.bytes, "{bytes} bytes done of {}", self.bytes);
        self.bytes -= bytes;
        let mut left = bytes;
        while left > 0 {
            // SAFETY: `first < end` while bytes are left, as `bytes` is the sum of the lengths; no operation is
            // outstanding when its bytes are counted.
            let slice = unsafe { &mut (*self.header.as_ptr()).slices[self.first] };
            let here = left.min(slice.iov_len);
            // SAFETY: `here` is within the slice.
            slice.iov_base = unsafe { slice.iov_base.cast::<u8>().add(here) }.cast();
            slice.iov_len -= here;
            left -= here;
            if slice.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// The only slice, if there is one.
    fn single(&self) -> Option<(*mut u8, usize)> {
        if self.end - self.first != 1 {
            return None;
        }
        // SAFETY: in bounds; reading beside the kernel, which only reads it, too.
        let slice = unsafe { (*self.header.as_ptr()).slices[self.first] };
        Some((slice.iov_base.cast(), slice.iov_len))
    }

    /// The remaining slices, in order.
    fn each(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        (self.first..self.end).map(|at| {
            // SAFETY: in bounds; no operation is outstanding that would change it.
            let slice = unsafe { (*self.header.as_ptr()).slices[at] };
            (slice.iov_base.cast(), slice.iov_len)
        })
    }

    /// The header that describes all slices to the kernel; valid, at this address, until the list changes.
    fn message(&mut self) -> *mut libc::msghdr {
        let header = self.header.as_ptr();
        // SAFETY: `header` is ours and no operation is outstanding when a new one is described.
        unsafe {
            (*header).message.msg_iov = (&raw mut (*header).slices).cast::<libc::iovec>().add(self.first);
            (*header).message.msg_iovlen = (self.end - self.first) as _;
            &raw mut (*header).message
        }
    }
}

impl Drop for Slices {
    fn drop(&mut self) {
        // SAFETY: leaked from a box in `new`, and freed once. The reactor drops it when nothing is outstanding.
        drop(unsafe { Box::from_raw(self.header.as_ptr()) });
    }
}

macro_rules! slices {
    ($(#[$attr:meta])* $name:ident) => {
        $(#[$attr])*
        pub struct $name(Slices);

        impl $name {
            /// An empty list. Its memory is allocated here, once for a connection.
            #[allow(clippy::new_without_default, reason = "it allocates 1 KiB: nothing to have by default")]
            pub fn new() -> $name {
                $name(Slices::new())
            }

            /// The number of bytes in the slices.
            pub fn bytes(&self) -> usize {
                self.0.bytes
            }

            /// The number of slices that can still be pushed.
            pub fn room(&self) -> usize {
                SLICES_MAX - self.0.end
            }

            /// Removes all slices. The driver of a stream calls this, between operations.
            pub fn clear(&mut self) {
                self.0.clear();
            }

            /// Removes the first `bytes`, which are done. The driver of a stream calls this, between operations.
            ///
            /// # Panics
            /// If there are fewer.
            pub fn advance(&mut self, bytes: usize) {
                self.0.advance(bytes);
            }

            /// The only slice, if there is just one.
            pub fn single(&self) -> Option<(*mut u8, usize)> {
                self.0.single()
            }

            /// The remaining slices, in order.
            pub fn each(&self) -> impl Iterator<Item = (*mut u8, usize)> {
                self.0.each()
            }

            pub(crate) fn message(&mut self) -> *mut libc::msghdr {
                self.0.message()
            }
        }
    };
}

slices! {
    /// The places of received bytes, in order.
    ReceiveSlices
}

slices! {
    /// The bytes to send, in order.
    SendSlices
}

impl ReceiveSlices {
    /// Adds `len` bytes at `start`. Zero bytes add nothing.
    ///
    /// # Safety
    /// From the return of [`Stream::receive`](super::Stream::receive) until the next call of `received` or `closed`,
    /// whichever is first:
    /// - the memory stays allocated and writable, at this address;
    /// - nobody else writes to it, and nobody reads it through a reference; in particular it must not be part of the
    ///   stream's own fields, which `&mut self` covers: a [`Buffer`](super::Buffer) or a mapping is right, an array in
    ///   the stream is not;
    /// - it may be written from any thread, and more of it than is reported in the end.
    ///
    /// During those calls and until `receive` is called again, no operation is outstanding: all of it is the
    /// stream's, what was not reported, too.
    ///
    /// # Panics
    /// When there is no [`room`](Self::room).
    pub unsafe fn push(&mut self, start: *mut u8, len: usize) {
        self.0.push(start, len);
    }
}

impl SendSlices {
    /// Adds `len` bytes at `start`. Zero bytes add nothing.
    ///
    /// # Safety
    /// From the return of [`Stream::transmit`](super::Stream::transmit) until `transmitted` has reported the bytes,
    /// or until `closed` is called, whichever is first: the memory stays allocated and readable, at this address,
    /// and nobody writes to it (as for receiving, it must not be part of the stream's own fields). The kernel takes
    /// a copy (or its own hold on the pages) before `transmitted` reports a byte.
    ///
    /// # Panics
    /// When there is no [`room`](Self::room).
    pub unsafe fn push(&mut self, start: *const u8, len: usize) {
        self.0.push(start.cast_mut(), len);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Buffer;
    use super::*;

    #[test]
    fn slices_are_used_up_from_the_front() {
        let buffer = Buffer::zeroed(100);
        let mut slices = SendSlices::new();
        // SAFETY: nothing is sent; the buffer outlives the slices.
        unsafe {
            slices.push(buffer.start(), 10);
            slices.push(buffer.start().add(10), 0);
            slices.push(buffer.start().add(10), 90);
        }
        assert_eq!((slices.bytes(), slices.room()), (100, SLICES_MAX - 2));
        assert_eq!(slices.single(), None);
        slices.advance(9);
        assert_eq!((slices.bytes(), slices.single()), (91, None));
        slices.advance(11);
        // SAFETY: within the buffer.
        let rest = unsafe { buffer.start().add(20) };
        assert_eq!(slices.single(), Some((rest, 80)));
        slices.advance(80);
        assert_eq!((slices.bytes(), slices.single()), (0, None));
    }

    #[test]
    #[should_panic(expected = "more than 64 slices")]
    fn too_many_slices() {
        let mut slices = SendSlices::new();
        for _ in 0..=SLICES_MAX {
            // SAFETY: nothing is sent, and the byte is never changed.
            unsafe { slices.push(b"x".as_ptr(), 1) };
        }
    }
}
