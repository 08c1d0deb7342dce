//! Any requests with any payloads at any times: the registry answers, and what it lists it has.

#![no_main]

use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use libmodelio::registry::table::RegistryCore;
use libmodelio::wire::{ModelRecord, RegistryAnswer, RegistryRequest};

// Pieces of a conversation: a request as postcard has it, its payload, milliseconds since the one before.
fuzz_target!(|conversation: Vec<(&[u8], &[u8], u16)>| {
    let mut core = RegistryCore::new();
    let mut now = Duration::ZERO;
    for (request, payload, pause) in conversation {
        now += Duration::from_millis(pause.into());
        let Ok(request) = postcard::from_bytes::<RegistryRequest>(request) else { continue };
        if ModelRecord::decode(payload)
            .is_ok_and(|record| record.owners.iter().any(|&(_, run)| run > 1 << 12))
        {
            continue;
        }
        let answer = core.handle(&request, payload, now);
        if answer.is_ok() {
            assert!(
                core.handle(&request, payload, now).is_ok(),
                "the second time changes nothing: {request:?}"
            );
        }
        let models = core.handle(&RegistryRequest::Models, &[], now).expect("it is always answered").message;
        let RegistryAnswer::Models(names) = models else { panic!("{models:?}") };
        for name in names {
            let answer = core.handle(&RegistryRequest::Model { name }, &[], now).expect("it is listed");
            let record = ModelRecord::decode(&answer.payload.expect("a record")).expect("it was checked");
            record.check().expect("it was checked");
        }
    }
});
