//! The interface of a device, as far as this crate needs it.

use std::fmt::Debug;
use std::ptr::NonNull;

use libmodelio::bytes::kernels::Wire;

use crate::memory::gib;
use crate::reducers::Formula;

/// A place in the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(pub u64);

impl Address {
    /// The place so many bytes further on.
    #[must_use]
    pub fn plus(self, bytes: usize) -> Address {
        Address(self.0 + bytes as u64)
    }
}

/// A queue of work: what is ordered in it happens in that order. Streams do not wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u64);

/// A point in the work of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub u64);

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The bytes that nobody uses.
    pub free: u64,
    /// The bytes of the whole memory.
    pub total: u64,
}

/// Why a device does not do something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// It has too little memory.
    #[error(
        "not enough memory on {device}: {needed} bytes ({:.1} GiB) are needed, {free} bytes ({:.1} GiB) are free",
        gib(*.needed), gib(*.free)
    )]
    Room {
        /// The device.
        device: String,
        /// The bytes that are needed.
        needed: u64,
        /// The bytes that are free.
        free: u64,
    },
    /// It has failed, and what a model has there is lost.
    #[error("{device} has failed: {what}")]
    Failed {
        /// The device.
        device: String,
        /// The error of its driver.
        what: String,
    },
    /// There is no such device.
    #[error("{0}")]
    Missing(String),
}

/// A pass over elements that follow one another in all arrays, in place.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The type of the elements.
    pub wire: Wire,
    /// The formula and its constants.
    pub formula: &'a Formula,
    /// The number of elements.
    pub count: usize,
    /// The weights, or the masters of narrow weights.
    pub values: Address,
    /// State, as much as the formula has.
    pub slots: [Option<Address>; 2],
    /// Sums of contributions, which are added up in this order. All arrays of words have the same distance from a
    /// multiple of 16 bytes.
    pub sums: &'a [Address],
    /// The place of narrow weights, with a half of that distance, or a quarter if they have 8 bits.
    pub out: Option<Address>,
}

/// New weights of a narrow type: where a weight is the old one, its master stays.
#[derive(Clone, Copy, Debug)]
pub struct Adoption {
    /// The type of the weights.
    pub wire: Wire,
    /// The number of elements.
    pub count: usize,
    /// The masters.
    pub values: Address,
    /// The old weights.
    pub before: Address,
    /// The new weights.
    pub after: Address,
}

/// A device with its own memory, and with streams of work.
///
/// Copies and kernels are ordered, and happen later. They are `unsafe` because nothing else knows when: the caller sees
/// to it that the memory that they use, of the device and of the host, exists and is used by nobody else in a
/// conflicting way until [`Self::synchronize`] has returned for a stream that has waited for them.
pub trait Device: Send + Sync + Debug {
    /// The device's name, for people.
    fn name(&self) -> &str;

    /// How much memory it has.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn room(&self) -> Result<Room, DeviceError>;

    /// Takes memory, at a multiple of 256 bytes. Its contents have no meaning.
    ///
    /// # Errors
    /// [`DeviceError::Room`], [`DeviceError::Failed`].
    fn allocate(&self, bytes: usize) -> Result<Address, DeviceError>;

    /// Gives back memory of [`Self::allocate`]. All work that uses it is done.
    fn free(&self, at: Address);

    /// Makes a stream.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn open_stream(&self) -> Result<Stream, DeviceError>;

    /// Ends a stream, whose work is done.
    fn close_stream(&self, stream: Stream);

    /// Makes an event. Whoever waits for it before it is recorded does not wait.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn open_event(&self) -> Result<Event, DeviceError>;

    /// Ends an event that nobody waits for.
    fn close_event(&self, event: Event);

    /// Makes the host's memory such that copies of it are fast and need no CPU, until [`Self::unpin`].
    ///
    /// # Errors
    /// [`DeviceError::Failed`]. Copies are correct all the same.
    ///
    /// # Safety
    /// The memory stays mapped until [`Self::unpin`], and its pages stay the same.
    unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<(), DeviceError>;

    /// Undoes [`Self::pin`].
    fn unpin(&self, start: NonNull<u8>);

    /// Copies to the device.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// See above.
    unsafe fn upload(&self, stream: Stream, from: *const [u8], to: Address) -> Result<(), DeviceError>;

    /// Copies from the device.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// See above.
    unsafe fn download(&self, stream: Stream, from: Address, to: *mut [u8]) -> Result<(), DeviceError>;

    /// Sets bytes to zero.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// See above.
    unsafe fn clear(&self, stream: Stream, at: Address, bytes: usize) -> Result<(), DeviceError>;

    /// Computes the next values and state of elements.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// See above. The arrays have room for the elements.
    unsafe fn reduce(&self, stream: Stream, launch: &Launch<'_>) -> Result<(), DeviceError>;

    /// Takes over new weights of a narrow type.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    ///
    /// # Safety
    /// See above. The arrays have room for the elements.
    unsafe fn adopt(&self, stream: Stream, adoption: &Adoption) -> Result<(), DeviceError>;

    /// The event stands for all work that the stream has now.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn record(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;

    /// Later work of the stream waits for what the event stands for now.
    ///
    /// # Errors
    /// [`DeviceError::Failed`].
    fn wait(&self, stream: Stream, event: Event) -> Result<(), DeviceError>;

    /// Waits until all work of the stream is done.
    ///
    /// # Errors
    /// [`DeviceError::Failed`]; work may have been left undone.
    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError>;
}
