//! The handshake: the client sends options, and the server answers each, until the client has chosen an export.

use super::numbers::{self, answer, info, option, transmission};
use super::request::MAX_LEN;
use super::{Context, Export, Exports};

/// The longest data of an option that is looked at. Names have 4096 bytes at most.
const MAX_DATA: usize = 16 << 10;
/// The longest name of an export.
const MAX_NAME: usize = 4096;
/// Data of an option that is too long is thrown away in pieces of this length.
const PIECE: usize = 4 << 10;

/// The bytes that the handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Exactly so many.
    Bytes(usize),
    /// None: the last step is not over.
    Nothing,
}

/// The server's reaction to the bytes of the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send this, which may be empty, and go on.
    Answer(Vec<u8>),
    /// Open this export, then call [`Handshake::opened`] or [`Handshake::refused`].
    Open(Opening),
    /// Send this, and end the connection.
    End(Vec<u8>),
}

/// The client's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The export.
    pub export: Export,
    /// The contexts that it asks the status of ranges for.
    pub contexts: Vec<Context>,
    /// Whether it takes structured replies.
    pub structured: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The client's flags.
    Flags,
    /// The head of an option.
    Option,
    /// The data of an option.
    Data { option: u32, len: usize },
    /// Data that is too long.
    Discard { option: u32, left: usize },
    /// The edge opens the export, as the answer to this option.
    Opening { option: u32 },
}

/// The state of one connection's handshake.
#[derive(Debug)]
pub struct Handshake {
    stage: Stage,
    zeroes: bool,
    structured: bool,
    /// The contexts that the client has chosen, and the export that they are of.
    contexts: (String, Vec<Context>),
    /// The kinds of information that the client wants of the export that is being opened.
    wanted: Vec<u16>,
    opening: Option<Export>,
}

impl Default for Handshake {
    fn default() -> Handshake {
        Handshake {
            stage: Stage::Flags,
            zeroes: true,
            structured: false,
            contexts: Default::default(),
            wanted: Vec::new(),
            opening: None,
        }
    }
}

impl Handshake {
    /// The first bytes of the server.
    pub fn greeting() -> Vec<u8> {
        let flags = numbers::FLAG_FIXED_NEWSTYLE | numbers::FLAG_NO_ZEROES;
        let mut bytes = Vec::with_capacity(18);
        bytes.extend_from_slice(&numbers::MAGIC.to_be_bytes());
        bytes.extend_from_slice(&numbers::OPTION_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&flags.to_be_bytes());
        bytes
    }

    /// The bytes that [`Self::take`] must get next.
    pub fn need(&self) -> Need {
        match self.stage {
            Stage::Flags => Need::Bytes(4),
            Stage::Option => Need::Bytes(16),
            Stage::Data { len, .. } => Need::Bytes(len),
            Stage::Discard { left, .. } => Need::Bytes(left.min(PIECE)),
            Stage::Opening { .. } => Need::Nothing,
        }
    }

    /// Takes the bytes that [`Self::need`] has asked for.
    ///
    /// # Errors
    /// Why the connection ends: the client does not speak this protocol, or must not be answered.
    pub fn take(&mut self, bytes: &[u8], exports: &dyn Exports) -> Result<Step, String> {
        match self.stage {
            Stage::Flags => {
                let flags = bytes.first_chunk().map_or(0, |flags| u32::from_be_bytes(*flags));
                let known = u32::from(numbers::FLAG_FIXED_NEWSTYLE | numbers::FLAG_NO_ZEROES);
                if flags & !known != 0 {
                    return Err(format!("the client has flags {flags:#x}, which the server does not offer"));
                }
                self.zeroes = flags & u32::from(numbers::FLAG_NO_ZEROES) == 0;
                self.stage = Stage::Option;
                Ok(Step::Answer(Vec::new()))
            }
            Stage::Option => self.head(bytes, exports),
            Stage::Data { option, .. } => {
                self.stage = Stage::Option;
                self.answer(option, bytes, exports)
            }
            Stage::Discard { option, left } => {
                let left = left - bytes.len().min(left);
                self.stage = if left > 0 { Stage::Discard { option, left } } else { Stage::Option };
                let why = "the option's data is too long";
                Ok(Step::Answer(if left > 0 { Vec::new() } else { error(option, answer::TOO_BIG, why) }))
            }
            Stage::Opening { .. } => Err("bytes came while an export is being opened".into()),
        }
    }

    fn head(&mut self, bytes: &[u8], exports: &dyn Exports) -> Result<Step, String> {
        let mut from = Fields(bytes);
        let (magic, option, len) = (from.u64(), from.u32(), from.u32());
        let (Some(numbers::OPTION_MAGIC), Some(option), Some(len)) = (magic, option, len) else {
            return Err("an option does not begin as one".into());
        };
        let len = len as usize;
        if len > MAX_DATA {
            if option == option::EXPORT_NAME {
                return Err("the name of an export is too long".into());
            }
            self.stage = Stage::Discard { option, left: len };
            return Ok(Step::Answer(Vec::new()));
        }
        if len > 0 {
            self.stage = Stage::Data { option, len };
            return Ok(Step::Answer(Vec::new()));
        }
        self.answer(option, &[], exports)
    }

    fn answer(&mut self, option: u32, data: &[u8], exports: &dyn Exports) -> Result<Step, String> {
        let answered = match option {
            option::EXPORT_NAME => {
                let name = name(data).ok_or("the name of an export is no UTF-8, or too long")?;
                let export = self.offered(exports.find(name).ok_or_else(|| no_export(name))?);
                return Ok(self.open(option, export, Vec::new()));
            }
            option::ABORT => return Ok(Step::End(reply(option, answer::ACK, &[]))),
            option::LIST if data.is_empty() => {
                let mut answers = Vec::new();
                for export in exports.list() {
                    let mut data = string(&export.name);
                    data.extend_from_slice(export.description.as_bytes());
                    answers.extend(reply(option, answer::SERVER, &data));
                }
                answers.extend(reply(option, answer::ACK, &[]));
                answers
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                reply(option, answer::ACK, &[])
            }
            option::LIST | option::STRUCTURED_REPLY => {
                error(option, answer::INVALID, "this option has no data")
            }
            option::INFO | option::GO => match wish(data) {
                None => error(option, answer::INVALID, "the option's data has the wrong form"),
                Some((name, wanted)) => match exports.find(name).map(|export| self.offered(export)) {
                    None => error(option, answer::UNKNOWN, &no_export(name)),
                    Some(export) if option == option::GO => return Ok(self.open(option, export, wanted)),
                    Some(export) => told(option, &export, &wanted),
                },
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(option, data, exports),
            _ => error(option, answer::UNSUPPORTED, "the server does not have this option"),
        };
        Ok(Step::Answer(answered))
    }

    /// The export as this client may use it: only a structured reply can come in fragments.
    fn offered(&self, export: Export) -> Export {
        let hidden = if self.structured { 0 } else { transmission::SEND_DF };
        Export { flags: export.flags & !hidden, ..export }
    }

    /// The answer to a list, or a choice, of contexts.
    fn contexts(&mut self, option: u32, data: &[u8], exports: &dyn Exports) -> Vec<u8> {
        let chooses = option == option::SET_META_CONTEXT;
        if chooses {
            self.contexts = Default::default();
        }
        if !self.structured {
            return error(option, answer::INVALID, "structured replies must be agreed on before contexts");
        }
        let Some((name, queries)) = queries(data) else {
            return error(option, answer::INVALID, "the option's data has the wrong form");
        };
        if exports.find(name).is_none() {
            return error(option, answer::UNKNOWN, &no_export(name));
        }
        let is_wanted = |context: &Context| match chooses {
            true => queries.contains(&context.name()),
            false => queries.is_empty() || queries.iter().any(|query| context.is_listed_by(query)),
        };
        let wanted: Vec<Context> = Context::ALL.into_iter().filter(is_wanted).collect();
        let mut answers = Vec::new();
        for context in &wanted {
            // The number means something in the answer to a choice only.
            let number = if chooses { *context as u32 } else { 0 };
            let mut data = number.to_be_bytes().to_vec();
            data.extend_from_slice(context.name().as_bytes());
            answers.extend(reply(option, answer::META_CONTEXT, &data));
        }
        if chooses {
            self.contexts = (name.to_owned(), wanted);
        }
        answers.extend(reply(option, answer::ACK, &[]));
        answers
    }

    fn open(&mut self, option: u32, export: Export, wanted: Vec<u16>) -> Step {
        self.stage = Stage::Opening { option };
        self.wanted = wanted;
        self.opening = Some(export.clone());
        let contexts = match self.contexts.0 == export.name && option == option::GO {
            true => self.contexts.1.clone(),
            false => Vec::new(),
        };
        Step::Open(Opening { export, contexts, structured: self.structured })
    }

    /// The export is open. Returns the last bytes of the handshake; requests follow.
    pub fn opened(&mut self) -> Vec<u8> {
        let (Stage::Opening { option }, Some(export)) = (self.stage, self.opening.take()) else {
            return Vec::new();
        };
        if option == option::GO {
            return told(option, &export, &self.wanted);
        }
        let mut bytes = export.size.to_be_bytes().to_vec();
        bytes.extend_from_slice(&export.flags.to_be_bytes());
        if self.zeroes {
            bytes.extend_from_slice(&[0; 124]);
        }
        bytes
    }

    /// The export cannot be opened. Returns the answer, after which the handshake goes on. `None` if the client takes
    /// no answer: the connection ends. `is_policy`: the export is there, and may not be opened.
    pub fn refused(&mut self, why: &str, is_policy: bool) -> Option<Vec<u8>> {
        let Stage::Opening { option } = self.stage else { return None };
        self.stage = Stage::Option;
        self.opening = None;
        let kind = if is_policy { answer::POLICY } else { answer::UNKNOWN };
        (option == option::GO).then(|| error(option, kind, why))
    }
}

fn no_export(name: &str) -> String {
    // The specification has 4096 bytes for a string, and a name may have as many.
    let shown: String = name.chars().take(64).collect();
    let name = if shown.len() < name.len() { shown + "..." } else { shown };
    format!("there is no export {name:?} (nbdinfo --list shows those that there are)")
}

/// One answer to an option.
fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(20 + data.len());
    bytes.extend_from_slice(&numbers::OPTION_REPLY_MAGIC.to_be_bytes());
    for number in [option, kind, data.len() as u32] {
        bytes.extend_from_slice(&number.to_be_bytes());
    }
    bytes.extend_from_slice(data);
    bytes
}

fn error(option: u32, kind: u32, message: &str) -> Vec<u8> {
    reply(option, kind, message.as_bytes())
}

/// What is told of an export, and that this is all.
fn told(option: u32, export: &Export, wanted: &[u16]) -> Vec<u8> {
    let tell = |kind: u16, rest: &[u8]| {
        let mut data = kind.to_be_bytes().to_vec();
        data.extend_from_slice(rest);
        reply(option, answer::INFO, &data)
    };
    let mut rest = export.size.to_be_bytes().to_vec();
    rest.extend_from_slice(&export.flags.to_be_bytes());
    let mut answers = tell(info::EXPORT, &rest);
    for (kind, text) in [(info::NAME, &export.name), (info::DESCRIPTION, &export.description)] {
        if wanted.contains(&kind) {
            answers.extend(tell(kind, text.as_bytes()));
        }
    }
    if wanted.contains(&info::BLOCK_SIZE) {
        let sizes = [1, export.preferred, MAX_LEN].map(u32::to_be_bytes).concat();
        answers.extend(tell(info::BLOCK_SIZE, &sizes));
    }
    answers.extend(reply(option, answer::ACK, &[]));
    answers
}

/// A string with its length before it.
fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn name(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|name| name.len() <= MAX_NAME)
}

/// The data of `INFO` and `GO`: an export, and what the client wants to know of it.
fn wish(data: &[u8]) -> Option<(&str, Vec<u16>)> {
    let mut from = Fields(data);
    let name = from.string()?;
    let count = from.u16()?;
    let wanted = (0..count).map(|_| from.u16()).collect::<Option<Vec<u16>>>()?;
    from.0.is_empty().then_some((name, wanted))
}

/// The data of options about contexts: an export, and queries.
fn queries(data: &[u8]) -> Option<(&str, Vec<&str>)> {
    let mut from = Fields(data);
    let name = from.string()?;
    let count = from.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        queries.push(from.string()?);
    }
    from.0.is_empty().then_some((name, queries))
}

/// Fields that follow each other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_be_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_be_bytes)
    }

    fn string(&mut self) -> Option<&'a str> {
        let len = self.u32()? as usize;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        name(text)
    }
}
