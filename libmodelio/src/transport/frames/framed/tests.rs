//! A stream of frames, driven by hand.

use super::*;
use crate::transport::frames::Take;
use crate::vocabulary::coding::Form;
use crate::vocabulary::ids::{BlockId, Epoch, PlanId};
use crate::wire::{self, Limits, Message, Received};

const SILENCE: Duration = Duration::from_secs(9);

/// Takes no block before the test allows it.
#[derive(Default)]
struct Slow {
    takes: bool,
}

impl Conversation for Slow {
    fn opened(&mut self, _: &Link) -> Result<(), Close> {
        Ok(())
    }

    fn message(&mut self, _: &Received) -> Result<Take, Close> {
        Ok(if self.takes { Take::Buffered } else { Take::Later })
    }

    fn payload(&mut self, _: &Received, _: &[u8]) -> Result<(), Close> {
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits::MAX
    }

    fn silence(&self) -> Option<Duration> {
        Some(SILENCE)
    }

    fn closed(&mut self, _: &Close) {}
}

/// Asks what is to be received; false if it is nothing.
fn asks(framed: &mut Framed<Slow>) -> bool {
    let mut into = ReceiveSlices::new();
    matches!(framed.receive(&mut into), Receive::Into { .. })
}

#[test]
fn a_block_that_had_to_wait_is_watched_as_soon_as_it_is_taken() {
    let mut framed = Framed::new(Slow::default(), Link::default(), 512);
    assert!(asks(&mut framed));
    let push = Message::Push { plan: PlanId(1), block: BlockId(0), form: Form::Plain, ahead: false };
    let mut bytes = wire::frame(&push, 0, Epoch(1), &[7; 4096]).unwrap();
    bytes.extend([7; 100]);
    framed.reading.ahead.bytes_mut()[..bytes.len()].copy_from_slice(&bytes);
    framed.received(bytes.len()).unwrap();
    assert!(!asks(&mut framed), "it waits, and so does the rest");
    let pause = SILENCE / 3;
    assert_eq!(framed.watch.progress.check(framed.reading.seen(), Instant::now(), pause), Ok(None));
    // The conversation is woken, and nothing more ever comes.
    framed.conversation.takes = true;
    assert!(asks(&mut framed));
    let end = Instant::now() + pause;
    assert!(
        matches!(framed.watch.progress.check(framed.reading.seen(), end - pause, pause), Ok(Some(_))),
        "it is under way"
    );
    assert!(framed.watch.progress.check(framed.reading.seen(), end, pause).is_err(), "and has not moved on");
}

#[test]
fn a_connection_that_rests_gives_its_memory_back() {
    let mut framed = Framed::new(Slow { takes: true }, Link::default(), 512);
    let start = Instant::now();
    let push = |framed: &mut Framed<Slow>| {
        let push = Message::Push { plan: PlanId(1), block: BlockId(0), form: Form::Plain, ahead: false };
        let payload = vec![7; 1 << 20];
        let head = wire::frame(&push, 0, Epoch(1), &payload).unwrap();
        assert!(asks(framed));
        framed.reading.ahead.bytes_mut()[..head.len()].copy_from_slice(&head);
        framed.received(head.len()).unwrap();
        // The driver receives the rest where it is told to.
        let mut into = ReceiveSlices::new();
        framed.receive(&mut into);
        framed.reading.arriving.store(&payload);
        framed.received(0).unwrap();
    };
    let holds = |framed: &Framed<Slow>| {
        let scratch = framed.reading.arriving.scratch().unwrap().bytes();
        scratch.iter().filter(|byte| **byte != 0).count() > scratch.len() / 2
    };
    push(&mut framed);
    let look = |framed: &mut Framed<Slow>, after: Duration| framed.tick(start + after).unwrap().unwrap();
    assert_eq!(look(&mut framed, Duration::ZERO), start + UNUSED, "it looks again soon");
    push(&mut framed);
    look(&mut framed, UNUSED);
    assert!(holds(&framed), "it was used meanwhile");
    look(&mut framed, 2 * UNUSED);
    assert!(!holds(&framed));
    push(&mut framed);
    assert!(holds(&framed));
}
