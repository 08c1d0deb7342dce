//! Memory that the kernel reads and writes on behalf of a stream, and the two system calls that do it on the spot.
//! One of the modules that hold `unsafe`.
//!
//! Slices are raw because the memory is: blocks of a shared mapping, that no Rust reference may cover while bytes
//! come in. Who pushes a slice promises what [`ReceiveSlices::push`] and [`SendSlices::push`] ask; everything above
//! can then be safe.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

use nix::errno::Errno;

/// How many slices an operation takes at most.
pub const SLICES_MAX: usize = 64;

/// Where the kernel looks: it stays at one address while an operation is outstanding.
struct Header {
    message: libc::msghdr,
    slices: [libc::iovec; SLICES_MAX],
}

/// A list of slices, used up from its front.
struct Slices {
    header: NonNull<Header>,
    first: usize,
    end: usize,
    bytes: usize,
}

// SAFETY: `header` is owned by this value alone; what the slices point to is promised to be usable from any thread
// by those who push them.
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

    /// Forgets the first `bytes`, which are done.
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

    /// Those that are left, in order.
    fn each(&self) -> impl Iterator<Item = (*mut u8, usize)> {
        (self.first..self.end).map(|at| {
            // SAFETY: in bounds; no operation is outstanding that would change it.
            let slice = unsafe { (*self.header.as_ptr()).slices[at] };
            (slice.iov_base.cast(), slice.iov_len)
        })
    }

    /// What describes all slices to the kernel; valid, at this address, until the list changes.
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
            /// Empty. Its list of slices is allocated here, once for a connection.
            #[allow(clippy::new_without_default, reason = "it allocates 1 KiB: nothing to have by default")]
            pub fn new() -> $name {
                $name(Slices::new())
            }

            /// How many bytes the slices hold.
            pub fn bytes(&self) -> usize {
                self.0.bytes
            }

            /// How many more slices can be pushed.
            pub fn room(&self) -> usize {
                SLICES_MAX - self.0.end
            }

            /// Forgets all slices. For who drives a stream, between operations.
            pub fn clear(&mut self) {
                self.0.clear();
            }

            /// Forgets the first `bytes`, which are done. For who drives a stream, between operations.
            ///
            /// # Panics
            /// If there are fewer.
            pub fn advance(&mut self, bytes: usize) {
                self.0.advance(bytes);
            }

            /// The only slice, if there is just one.
            pub(super) fn single(&self) -> Option<(*mut u8, usize)> {
                self.0.single()
            }

            /// Those that are left, in order.
            pub(crate) fn each(&self) -> impl Iterator<Item = (*mut u8, usize)> {
                self.0.each()
            }

            pub(super) fn message(&mut self) -> *mut libc::msghdr {
                self.0.message()
            }
        }
    };
}

slices! {
    /// Where received bytes go, in order.
    ReceiveSlices
}

slices! {
    /// What is to be sent, in order.
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
    ///   stream's own fields, which `&mut self` covers: a [`Buffer`] or a mapping is right, an array in the stream
    ///   is not;
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

    /// Adds bytes that are never changed.
    ///
    /// # Panics
    /// When there is no [`room`](Self::room).
    pub fn push_static(&mut self, bytes: &'static [u8]) {
        self.0.push(bytes.as_ptr().cast_mut(), bytes.len());
    }
}

/// Memory of fixed size that is no part of what owns it: what headers and tests are received into and sent from.
/// Whoever pushes a slice of it promises not to call [`bytes`](Buffer::bytes) or
/// [`bytes_mut`](Buffer::bytes_mut), nor to drop it, in the meantime.
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Buffer {}
// SAFETY: through a shared reference it can only be read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeros, aligned to 64 bytes.
    ///
    /// # Panics
    /// If `len` is zero or more than the address space.
    pub fn zeroed(len: usize) -> Buffer {
        assert!(len > 0, "an empty buffer");
        let layout = Layout::from_size_align(len, 64).expect("a length within the address space");
        // SAFETY: the length is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Buffer { start, layout }
    }

    /// Where it starts.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// In bytes.
    #[allow(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.layout.size()
    }

    /// What it holds.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated, initialised, and nobody writes meanwhile: see the type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len()) }
    }

    /// What it holds, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Receives what is there, at most what `into` holds. Zero: the peer's end of stream.
pub(super) fn receive_now(socket: BorrowedFd<'_>, into: &mut ReceiveSlices) -> Result<usize, Errno> {
    let message = into.message();
    loop {
        // SAFETY: `message` describes memory that who pushed it keeps writable; the call is over when it returns.
        let done = unsafe { libc::recvmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT) };
        match Errno::result(done) {
            Ok(bytes) => return Ok(bytes.cast_unsigned()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Sends what the socket takes.
pub(super) fn send_now(socket: BorrowedFd<'_>, out: &mut SendSlices) -> Result<usize, Errno> {
    let message = out.message();
    loop {
        // SAFETY: as above, for reading.
        let done =
            unsafe { libc::sendmsg(socket.as_raw_fd(), message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        match Errno::result(done) {
            Ok(bytes) => return Ok(bytes.cast_unsigned()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// From how many waiting bytes on the socket counts as readable (SO_RCVLOWAT). The end of the stream, an error and a
/// full window always count.
pub(super) fn set_low_water(socket: BorrowedFd<'_>, bytes: u32) -> Result<(), Errno> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: the option takes an int, which is passed with its size.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            ptr::from_ref(&value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    Errno::result(done).map(drop)
}

/// Bytes that have come and were not received yet (FIONREAD).
pub(super) fn waiting(socket: BorrowedFd<'_>) -> Result<usize, Errno> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes an int, which lives until the call is over.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    Errno::result(done).map(|_| usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
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
            slices.push_static(b"x");
        }
    }
}
