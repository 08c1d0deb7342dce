//! Connections of several clients: a shard says which are to rest, so that as many are busy as it has threads.

use std::time::{Duration, Instant};

use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::ClientId;
use libmodelio::wire::{Message, Role};

use crate::moving::Raw;
use crate::world::{LONG, Way, World};

fn data(world: &World, client: u64) -> Raw {
    let address = world.address_of(world.record.coordinator);
    let mut raw = Raw::greet(&address, Role::Data, &world.record, ClientId(client));
    assert!(matches!(raw.hear().0.message, Message::Welcome { .. }));
    raw
}

/// The next word on whether a connection rests.
fn rests(raw: &mut Raw) -> bool {
    loop {
        match raw.hear().0.message {
            Message::Rest { rests } => return rests,
            Message::Ping => {}
            other => panic!("{other:?}"),
        }
    }
}

/// The one of them that is told something.
fn told(of: &mut [Raw; 2]) -> &mut Raw {
    let until = Instant::now() + LONG;
    let heard = |raw: &Raw| {
        raw.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let heard = raw.stream.peek(&mut [0]).is_ok_and(|bytes| bytes > 0);
        raw.stream.set_read_timeout(Some(LONG)).unwrap();
        heard
    };
    while Instant::now() < until {
        if let Some(at) = of.iter().position(heard) {
            return &mut of[at];
        }
    }
    panic!("nobody is told anything");
}

#[test]
fn a_shard_has_as_many_busy_connections_as_threads() {
    // Two threads.
    let world = World::new(1, 1 << 20, &[("learners", "2")], Way::Tcp(Choice::Auto));
    let mut one = [data(&world, 1), data(&world, 1)];
    // Alone, the first client uses both. A second one has one, and one of the first one's makes room for it.
    let second = data(&world, 2);
    let resting = told(&mut one);
    assert!(rests(resting));
    drop(second);
    assert!(!rests(resting), "it is needed again");
}
