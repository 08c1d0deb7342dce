//! Connections of several clients: a shard parks some, so that as many are busy as it has threads.

use std::time::{Duration, Instant};

use libmodelio::transport::reactor::Choice;
use libmodelio::wire::{Message, Role};

use crate::raw::Raw;
use crate::world::{LONG, Way, World};

/// Whether a connection is parked, by its next message.
fn parked(raw: &mut Raw) -> bool {
    loop {
        match raw.receive().0.message {
            Message::Park { parked } => return parked,
            Message::Ping => {}
            other => panic!("{other:?}"),
        }
    }
}

/// The one of them that is parked, by its next message.
fn parked_one(of: &mut [Raw; 2]) -> &mut Raw {
    let until = Instant::now() + LONG;
    let has_news = |raw: &Raw| {
        raw.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let has_news = raw.stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0);
        raw.stream.set_read_timeout(Some(LONG)).unwrap();
        has_news
    };
    while Instant::now() < until {
        let Some(at) = of.iter().position(has_news) else { continue };
        match of[at].receive().0.message {
            Message::Park { parked: true } => return &mut of[at],
            Message::Ping => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("no message comes");
}

#[test]
fn a_shard_has_as_many_busy_connections_as_threads() {
    // Two threads.
    let world = World::new(1, 1 << 20, &[("learners", "2")], Way::Tcp(Choice::Auto));
    let data = |client| Raw::welcomed(&world, Role::Data, client);
    let mut one = [data(1), data(1)];
    // Alone, the first client uses both. A second one has one, and one of the first one's makes room for it.
    let second = data(2);
    let in_use = parked_one(&mut one);
    drop(second);
    assert!(!parked(in_use), "it is needed again");
}
