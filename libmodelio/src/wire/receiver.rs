//! Frames from a stream of bytes, without a socket: says what to read next, and where a frame ends.

use super::{HEADER, Header, Limits, Message, WireError};

/// The number of bytes that the buffer for bodies keeps between frames. Messages with blocks are far shorter.
const KEPT: usize = 16 << 10;

/// Header and message of a frame. Its payload, if it has one, follows.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    /// The header.
    pub header: Header,
    /// The message.
    pub message: Message,
}

impl Received {
    /// Checks that the payload has the length that the model makes the caller expect.
    ///
    /// # Errors
    /// [`WireError::Payload`].
    pub fn expect_payload(&self, bytes: u32) -> Result<(), WireError> {
        let got = self.header.payload_len();
        if got == bytes {
            return Ok(());
        }
        Err(WireError::Payload { message: self.message.name(), least: bytes, most: bytes, got })
    }
}

/// One direction of one connection. After an error it takes nothing more.
#[derive(Debug)]
pub struct Receiver {
    limits: Limits,
    bytes: Vec<u8>,
    header: Option<Header>,
    /// Header and message were handed out, the payload is being delivered.
    in_payload: bool,
    broken: Option<WireError>,
}

impl Receiver {
    /// At the beginning of a frame.
    pub fn new(limits: Limits) -> Receiver {
        Receiver { limits, bytes: Vec::new(), header: None, in_payload: false, broken: None }
    }

    /// Sets other limits from the next header on: the peers now know each other, and the model.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Whether a frame has begun and is not complete.
    pub fn is_within_frame(&self) -> bool {
        self.header.is_some() || !self.bytes.is_empty()
    }

    /// How many more bytes it wants for header or body. 0 while a payload is due, and after an error. A caller who
    /// reads no more than that has no payload to copy.
    pub fn wanted(&self) -> usize {
        match self.header {
            _ if self.in_payload || self.broken.is_some() => 0,
            None => HEADER - self.bytes.len(),
            Some(header) => header.body_len() - self.bytes.len(),
        }
    }

    /// Takes bytes of header and body, and returns how many it took: fewer than given if they go beyond the
    /// frame's body. The bytes behind it are the payload's, then the next frame's.
    ///
    /// If the header announces a payload, its bytes follow the message, and their CRC32C then goes to
    /// [`Receiver::payload_done`]. Before that nothing is taken.
    ///
    /// # Errors
    /// [`WireError`]: the connection is to be closed.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(usize, Option<Received>), WireError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        self.take(bytes).inspect_err(|error| self.broken = Some(error.clone()))
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(usize, Option<Received>), WireError> {
        if self.in_payload {
            return if bytes.is_empty() {
                Ok((0, None))
            } else {
                Err(WireError::Order("bytes of a payload"))
            };
        }
        let mut used = 0;
        let header = match self.header {
            Some(header) => header,
            None => {
                used = self.fill(bytes);
                let Ok(complete) = <&[u8; HEADER]>::try_from(self.bytes.as_slice()) else {
                    return Ok((used, None));
                };
                let header = Header::parse(complete, self.limits)?;
                self.bytes.clear();
                // The length is within the limit.
                self.bytes.reserve_exact(header.body_len());
                *self.header.insert(header)
            }
        };
        used += self.fill(&bytes[used..]);
        if self.bytes.len() < header.body_len() {
            return Ok((used, None));
        }
        header.check_body(&self.bytes)?;
        let message = Message::decode(&self.bytes, header.payload_len())?;
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.in_payload = header.payload_len() > 0;
        if !self.in_payload {
            header.check_payload(0)?;
            self.header = None;
        }
        Ok((used, Some(Received { header, message })))
    }

    /// Takes as many of `bytes` as it needs.
    fn fill(&mut self, bytes: &[u8]) -> usize {
        let count = self.wanted().min(bytes.len());
        self.bytes.extend_from_slice(&bytes[..count]);
        count
    }

    /// Bytes of the payload that is due; `None` where none is.
    pub fn payload_due(&self) -> Option<u32> {
        self.header.filter(|_| self.in_payload).map(|header| header.payload_len())
    }

    /// The payload was delivered whole and has this CRC32C, which counts for nothing if the frame has no checksum of its
    /// payload ([`Header::payload_crc`]).
    ///
    /// # Errors
    /// [`WireError::Checksum`]: the delivered bytes are worthless, and the caller must close the connection.
    pub fn payload_done(&mut self, crc: u32) -> Result<(), WireError> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        let done = match self.header.filter(|_| self.in_payload) {
            Some(header) => header.check_payload(crc),
            None => Err(WireError::Order("the end of a payload")),
        };
        match &done {
            Ok(()) => (self.header, self.in_payload) = (None, false),
            Err(error) => self.broken = Some(error.clone()),
        }
        done
    }
}
