//! Any bytes of a client of block devices: the handshake wants and answers a bounded number, and opens only what there is.

#![no_main]

use libfuzzer_sys::fuzz_target;
use libmodelio::nbd::{Export, Exports, Handshake, Need, REQUEST_LEN, Request, Step};

struct One;

impl Exports for One {
    fn list(&self) -> Vec<Export> {
        self.find("m").into_iter().collect()
    }

    fn find(&self, name: &str) -> Option<Export> {
        let export =
            Export { name: "m".into(), description: "one".into(), size: 1 << 20, flags: 3, preferred: 4096 };
        (name == "m").then_some(export)
    }
}

fuzz_target!(|input: (&[u8], bool)| {
    let (mut bytes, opens) = input;
    let mut handshake = Handshake::default();
    while let Need::Bytes(need) = handshake.need() {
        assert!((1..=16 << 10).contains(&need));
        let Some((now, rest)) = bytes.split_at_checked(need) else { return };
        bytes = rest;
        match handshake.take(now, &One) {
            Ok(Step::Answer(answer)) => assert!(answer.len() < 1 << 10),
            Ok(Step::Open(opening)) => {
                assert_eq!(opening.export.name, "m");
                if !opens {
                    handshake.refused("no", true);
                    continue;
                }
                handshake.opened();
                while let Some((request, rest)) = bytes.split_first_chunk::<REQUEST_LEN>() {
                    bytes = rest;
                    let Some(request) = Request::decode(request) else { return };
                    assert!(!request.fits(1 << 20) || request.offset + u64::from(request.len) <= 1 << 20);
                }
                return;
            }
            Ok(Step::End(_)) | Err(_) => return,
        }
    }
});
