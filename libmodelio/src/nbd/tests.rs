//! Tests of the protocol: what each option is answered, to the byte, and that no bytes of a client do harm.

use proptest::prelude::*;

use super::numbers::{self, answer, info, option, transmission};
use super::*;

struct Two;

impl Exports for Two {
    fn list(&self) -> Vec<Export> {
        ["m/weights", "n/weights"].into_iter().filter_map(|name| self.find(name)).collect()
    }

    fn find(&self, name: &str) -> Option<Export> {
        let export = Export {
            name: name.to_owned(),
            description: format!("weights of {name}"),
            size: 1 << 20,
            flags: transmission::HAS_FLAGS | transmission::READ_ONLY,
            preferred: 4096,
        };
        ["m/weights", "n/weights", "m@3"].contains(&name).then_some(export)
    }
}

fn option_of(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = numbers::OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|kind| data.extend(kind.to_be_bytes()));
    data
}

/// Contexts of `name` that `queries` ask for.
fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(text(query)));
    data
}

/// A handshake of which the client's flags have come.
fn begun(flags: u32) -> Handshake {
    let mut handshake = Handshake::default();
    assert_eq!(handshake.take(&flags.to_be_bytes(), &Two), Ok(Step::Answer(Vec::new())));
    handshake
}

/// Feeds bytes, as many at a time as are needed. Returns the last step.
fn feed(handshake: &mut Handshake, mut bytes: &[u8]) -> Result<Step, String> {
    let mut said = Vec::new();
    while !bytes.is_empty() {
        let Need::Bytes(need) = handshake.need() else { panic!("{} bytes are not wanted", bytes.len()) };
        let (now, rest) = bytes.split_at_checked(need).expect("no more is needed than there is");
        bytes = rest;
        match handshake.take(now, &Two)? {
            Step::Answer(answer) => said.extend(answer),
            step => {
                assert!(bytes.is_empty());
                return Ok(step);
            }
        }
    }
    Ok(Step::Answer(said))
}

/// The kinds and the data of answers to `option`.
fn answers(option: u32, mut bytes: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let number = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(bytes[..8], numbers::OPTION_REPLY_MAGIC.to_be_bytes());
        assert_eq!(number(8), option);
        let end = 20 + number(16) as usize;
        all.push((number(12), bytes[20..end].to_vec()));
        bytes = &bytes[end..];
    }
    all
}

fn asked(handshake: &mut Handshake, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
    match feed(handshake, &option_of(option, data)) {
        Ok(Step::Answer(bytes)) => answers(option, &bytes),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_greeting_offers_the_fixed_newstyle() {
    assert_eq!(Handshake::greeting(), b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn exports_are_listed_with_their_descriptions() {
    let mut handshake = begun(3);
    let listed = asked(&mut handshake, option::LIST, &[]);
    let first = [text("m/weights"), b"weights of m/weights".to_vec()].concat();
    assert_eq!(listed.len(), 3);
    assert_eq!(listed[0], (answer::SERVER, first));
    assert_eq!(listed[2], (answer::ACK, vec![]));
    assert_eq!(asked(&mut handshake, option::LIST, b"x")[0].0, answer::INVALID);
}

#[test]
fn an_export_is_described_and_opened() {
    let mut handshake = begun(3);
    let size = [&info::EXPORT.to_be_bytes()[..], &(1u64 << 20).to_be_bytes(), &[0, 3]].concat();
    let blocks = [0, 3, 0, 0, 0, 1, 0, 0, 16, 0, 2, 0, 0, 0].to_vec();
    let description = [&[0, 2][..], b"weights of m/weights"].concat();
    let wanted = [info::BLOCK_SIZE, info::DESCRIPTION];
    let expected =
        [(answer::INFO, size), (answer::INFO, description), (answer::INFO, blocks), (answer::ACK, vec![])];
    assert_eq!(asked(&mut handshake, option::INFO, &go("m/weights", &wanted)), expected);
    let step = feed(&mut handshake, &option_of(option::GO, &go("m/weights", &wanted)));
    let Ok(Step::Open(opening)) = step else { panic!("{step:?}") };
    assert_eq!((opening.export.name.as_str(), opening.structured), ("m/weights", false));
    assert_eq!(handshake.need(), Need::Nothing);
    assert_eq!(answers(option::GO, &handshake.opened()), expected);
}

#[test]
fn an_export_that_is_gone_is_refused_and_another_one_may_be_chosen() {
    let mut handshake = begun(3);
    assert_eq!(asked(&mut handshake, option::GO, &go("x", &[]))[0].0, answer::UNKNOWN);
    assert!(matches!(feed(&mut handshake, &option_of(option::GO, &go("m@3", &[]))), Ok(Step::Open(_))));
    let refused = handshake.refused("the version is gone", false).unwrap();
    assert_eq!(answers(option::GO, &refused), [(answer::UNKNOWN, b"the version is gone".to_vec())]);
    assert!(matches!(feed(&mut handshake, &option_of(option::GO, &go("n/weights", &[]))), Ok(Step::Open(_))));
}

#[test]
fn the_old_way_to_open_has_no_answer_but_the_export() {
    for (flags, len) in [(1, 10 + 124), (3, 10)] {
        let mut handshake = begun(flags);
        let step = feed(&mut handshake, &option_of(option::EXPORT_NAME, b"m/weights"));
        assert!(matches!(step, Ok(Step::Open(_))));
        assert_eq!(handshake.opened().len(), len);
        let mut handshake = begun(flags);
        assert!(feed(&mut handshake, &option_of(option::EXPORT_NAME, b"x")).is_err());
    }
}

#[test]
fn contexts_are_listed_and_belong_to_the_export_that_they_were_chosen_for() {
    let mut handshake = begun(3);
    let all = contexts("m/weights", &[]);
    assert_eq!(asked(&mut handshake, option::LIST_META_CONTEXT, &all)[0].0, answer::INVALID);
    assert_eq!(asked(&mut handshake, option::STRUCTURED_REPLY, &[]), [(answer::ACK, vec![])]);
    let listed = asked(&mut handshake, option::LIST_META_CONTEXT, &all);
    let named = |number: u32, name: &str| {
        (answer::META_CONTEXT, [&number.to_be_bytes()[..], name.as_bytes()].concat())
    };
    let end = (answer::ACK, vec![]);
    assert_eq!(listed, [named(0, "base:allocation"), named(0, "gradfs:version"), end.clone()]);
    let of_base = contexts("m/weights", &["base:", "qemu:dirty-bitmap:x"]);
    assert_eq!(
        asked(&mut handshake, option::LIST_META_CONTEXT, &of_base),
        [named(0, "base:allocation"), end.clone()]
    );
    let chosen = contexts("m/weights", &["gradfs:version", "x:y"]);
    let answered = asked(&mut handshake, option::SET_META_CONTEXT, &chosen);
    assert_eq!(answered, [named(2, "gradfs:version"), end]);
    for (name, expected) in [("n/weights", vec![]), ("m/weights", vec![Context::Version])] {
        let step = feed(&mut handshake, &option_of(option::GO, &go(name, &[])));
        let Ok(Step::Open(opening)) = step else { panic!("{step:?}") };
        assert_eq!((opening.contexts, opening.structured), (expected, true));
        handshake.refused("no", false);
    }
}

#[test]
fn what_the_server_does_not_have_is_declined() {
    let mut handshake = begun(3);
    // STARTTLS, PEEK_EXPORT, EXTENDED_HEADERS, and one that nobody knows.
    for unknown in [5, 4, 11, 4711] {
        assert_eq!(asked(&mut handshake, unknown, &[])[0].0, answer::UNSUPPORTED);
        assert_eq!(asked(&mut handshake, unknown, &[0; 300])[0].0, answer::UNSUPPORTED);
        assert_eq!(asked(&mut handshake, unknown, &[0; 100_000])[0].0, answer::TOO_BIG);
    }
    for broken in [&b"xxx"[..], &[0, 0, 0, 9, 1, 0, 0], &[0, 0, 0, 0, 0, 2, 0, 0]] {
        assert_eq!(asked(&mut handshake, option::GO, broken)[0].0, answer::INVALID);
    }
    let end = feed(&mut handshake, &option_of(option::ABORT, &[]));
    assert!(matches!(end, Ok(Step::End(bytes)) if answers(option::ABORT, &bytes)[0].0 == answer::ACK));
}

#[test]
fn a_client_that_speaks_something_else_is_cut_off() {
    assert!(Handshake::default().take(&[0xff; 4], &Two).is_err());
    assert!(begun(3).take(b"GET / HTTP/1.1\r\n", &Two).is_err());
    assert_eq!(Request::decode(&[7; REQUEST_LEN]), None);
}

#[test]
fn requests_are_judged_by_the_export() {
    let request = |offset, len| Request { flags: 0, command: Command::Read, cookie: 1, offset, len };
    assert!(request(0, 10).fits(10) && request(9, 1).fits(10));
    for wrong in [request(0, 0), request(0, 11), request(10, 1), request(u64::MAX, 1), request(5, u32::MAX)] {
        assert!(!wrong.fits(10), "{wrong:?}");
    }
    assert!(Request { flags: numbers::flag::DONT_FRAGMENT, ..request(0, 1) }.is_well_flagged());
    assert!(!Request { flags: 1 << 9, ..request(0, 1) }.is_well_flagged());
}

#[test]
fn replies_are_simple_or_structured() {
    let (simple, structured) = (Replies { structured: false }, Replies { structured: true });
    assert_eq!(simple.ok(0x0102).as_slice(), [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2]);
    assert_eq!(simple.error(1, Errno::Invalid, "why")[4..8], [0, 0, 0, 22]);
    let read = structured.read(9, 4096, 512);
    assert_eq!(read[..4], 0x668e_33ef_u32.to_be_bytes());
    assert_eq!((&read[4..8], &read[16..20]), (&[0, 1, 0, 1][..], &520u32.to_be_bytes()[..]));
    assert_eq!(read[20..], 4096u64.to_be_bytes());
    let error = structured.error(9, Errno::Io, "why");
    assert_eq!((&error[6..8], &error[20..]), (&[0x80, 1][..], &b"\0\0\0\x05\0\x03why"[..]));
    let long = structured.error(9, Errno::Io, &"ä".repeat(4096));
    assert_eq!(long.len(), 20 + 6 + 4096);
    let status = structured.status(9, 64, &[(Context::Allocation, 0), (Context::Version, 7)]);
    assert_eq!(status.len(), 64);
    assert_eq!((status[5], status[37]), (0, 1), "the last chunk says so");
    assert_eq!(status[52..], [0, 0, 0, 2, 0, 0, 0, 64, 0, 0, 0, 7]);
}

proptest! {
    /// Whatever a client sends, the handshake takes it or ends, wants a bounded number of bytes, and answers a bounded
    /// number.
    #[test]
    fn no_bytes_of_a_client_do_harm(
        pieces in prop::collection::vec(
            (prop::sample::select(vec![1u32, 2, 3, 5, 6, 7, 8, 9, 10, 11, 99]),
             prop_oneof![prop::collection::vec(any::<u8>(), 0..64), Just(go("m@3", &[3])), Just(contexts("m@3", &["base:"]))],
             any::<bool>()),
            0..12,
        ),
    ) {
        let mut handshake = begun(3);
        for (option, data, breaks) in pieces {
            let mut bytes = option_of(option, &data);
            if breaks {
                let at = bytes.len() / 2;
                bytes[at] ^= 0x55;
            }
            let mut left = &bytes[..];
            while let Need::Bytes(need) = handshake.need() {
                prop_assert!((1..=16 << 10).contains(&need));
                let Some((now, rest)) = left.split_at_checked(need) else { return Ok(()) };
                left = rest;
                match handshake.take(now, &Two) {
                    Err(_) | Ok(Step::End(_)) => return Ok(()),
                    Ok(Step::Open(opening)) => {
                        prop_assert!(Two.find(&opening.export.name).is_some());
                        prop_assert!(handshake.refused("no", false).is_some() || option == option::EXPORT_NAME);
                    }
                    Ok(Step::Answer(answer)) => prop_assert!(answer.len() < 1 << 10),
                }
                if left.is_empty() {
                    break;
                }
            }
        }
    }
}
