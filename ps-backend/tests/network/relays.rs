//! Clients that pull versions from each other.

use std::io::ErrorKind;
use std::sync::Arc;

use libmodelio::client::{RelayPort, RelayView};
use libmodelio::transport::reactor::{Choice, Reactor, ReactorOptions};
use libmodelio::transport::tcp::{SocketOptions, bind};
use libmodelio::vocabulary::controls::PullPolicy;
use libmodelio::vocabulary::ids::{ClientId, Version};
use libmodelio::wire::{Message, ModelRecord, Refusal, Role};

use crate::raw::Raw;
use crate::world::{BLOCK, Client, Learner, Way, World, is_all, read, until};

/// The last block is shorter.
const BYTES: u64 = 40 * BLOCK as u64 - 12;

/// A client that is a relay, and pulls by those that the coordinator names, or by the one at this address.
fn relay(world: &World, via: Option<String>) -> Client {
    let reactor = ReactorOptions { threads: 2, choice: world.io, ..ReactorOptions::default() };
    let reactor = Arc::new(Reactor::start(&reactor).unwrap());
    let listener = bind("127.0.0.1:0".parse().unwrap(), &SocketOptions::default()).unwrap();
    let address = listener.local_addr().unwrap();
    let port = RelayPort::listen(&reactor.handle(), listener, address, "here".into()).unwrap();
    world.client_with(|options| {
        (options.reactor, options.relay, options.via) = (Some(reactor), Some(port), via);
        options.pulls = Some(PullPolicy::Eager);
    })
}

fn view(client: &Client) -> RelayView {
    client.relays().unwrap()
}

/// All of them but one are connected to another one.
fn form(relays: &[&Client]) {
    let has_relay = |client: &&&Client| view(client).relay.is_some() && view(client).connected;
    until("a chain has formed", || relays.iter().filter(has_relay).count() == relays.len() - 1);
}

#[track_caller]
fn all_show(relays: &[&Client], version: u64) {
    for client in relays {
        until("the version is shown", || client.version() == Version(version));
        is_all(&read(client, Version(version)).1, version as f32);
    }
}

fn sent_by_shards(world: &World) -> u64 {
    let payloads = |server: &ps_backend::server::Server| {
        let models = server.status()["models"].clone();
        models[0]["payload"]["pulled_bytes"].as_u64().unwrap()
    };
    world.servers.iter().map(payloads).sum()
}

fn world(shards: usize, io: Choice) -> (World, Client, Learner) {
    let world = World::new(shards, BYTES, &[("reducer", "sum"), ("learners", "1")], Way::Tcp(io));
    let (client, learner) = world.learner("l");
    (world, client, learner)
}

#[test]
fn relays_pull_from_each_other_so_that_shards_send_a_version_once() {
    for (shards, io) in [(1, Choice::Auto), (2, Choice::Poll)] {
        let (world, _client, learner) = world(shards, io);
        let relays = [(); 4].map(|()| relay(&world, None));
        let all = relays.each_ref();
        form(&all);
        let (before, versions) = (sent_by_shards(&world), 10);
        for version in 1..=versions {
            learner.pushes(1.0);
            all_show(&all, version);
        }
        let sent = sent_by_shards(&world) - before;
        let views = all.map(view);
        let replaced: u64 = views.iter().map(|view| view.replaced_blocks).sum::<u64>() * u64::from(BLOCK);
        let relayed: u64 = views.iter().map(|view| view.relayed_bytes).sum();
        // The learner's own client pulls, too.
        assert!(sent <= 2 * versions * BYTES + replaced, "{sent}, {views:?}");
        assert!(relayed + replaced >= 3 * versions * BYTES, "{relayed}, {views:?}");
        assert!(replaced < versions * BYTES, "{views:?}");
    }
}

#[test]
fn a_relay_that_ends_is_replaced_by_the_one_before_it() {
    let (world, _client, learner) = world(2, Choice::Auto);
    let relays = [(); 3].map(|()| relay(&world, None));
    form(&relays.each_ref());
    learner.pushes(1.0);
    all_show(&relays.each_ref(), 1);
    let middle = relays.iter().position(|client| {
        let address = view(client).listens.unwrap().to_string();
        view(client).relay.is_some()
            && relays.iter().any(|other| view(other).relay.as_ref() == Some(&address))
    });
    let middle = middle.unwrap();
    relays[middle].shut_down();
    let others: Vec<&Client> =
        relays.iter().enumerate().filter(|(at, _)| *at != middle).map(|(_, client)| client).collect();
    for version in 2..=4 {
        learner.pushes(1.0);
        all_show(&others, version);
    }
    form(&others);
    let before = others.iter().map(|client| view(client).relayed_bytes).sum::<u64>();
    learner.pushes(1.0);
    all_show(&others, 5);
    assert!(others.iter().map(|client| view(client).relayed_bytes).sum::<u64>() > before);
}

#[test]
fn a_client_pulls_by_the_relay_that_it_was_told_by_hand_and_without_it() {
    let (world, _client, learner) = world(1, Choice::Auto);
    let first = relay(&world, None);
    let address = view(&first).listens.unwrap().to_string();
    let second = relay(&world, Some(address.clone()));
    until("it is connected", || view(&second).connected);
    assert_eq!(view(&first).relay, None, "the chain has one relay");
    for version in 1..=3 {
        learner.pushes(1.0);
        all_show(&[&first, &second], version);
    }
    assert!(view(&first).relayed_bytes > 0 && !view(&first).followers.is_empty());
    first.shut_down();
    learner.pushes(1.0);
    all_show(&[&second], 4);
    assert_eq!(view(&second).relay, Some(address));
}

#[test]
fn a_relay_refuses_what_it_does_not_serve() {
    let (world, _client, learner) = world(1, Choice::Auto);
    let relay = relay(&world, None);
    learner.makes(1.0, 1, 1.0);
    all_show(&[&relay], 1);
    let address = view(&relay).listens.unwrap().to_string();
    let greets = |role, record: &ModelRecord| {
        let mut raw = Raw::greet(&address, role, record, ClientId(7));
        let answer = raw.receive().0.message;
        (raw, answer)
    };
    let refused = |role, record: &ModelRecord| match greets(role, record).1 {
        Message::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    };
    for role in [Role::Control, Role::Data, Role::Coordinator, Role::Admin] {
        assert!(matches!(refused(role, &world.record), Refusal::Other(_)));
    }
    let other = ModelRecord { name: "other".into(), ..world.record.clone() };
    assert_eq!(refused(Role::Relay, &other), Refusal::NoModel("other".into()));
    let again = libmodelio::vocabulary::ids::Generation(world.record.generation.0 + 1);
    let other = ModelRecord { generation: again, ..world.record.clone() };
    assert!(matches!(refused(Role::Relay, &other), Refusal::Generation { .. }));
    let shard = world.address_of(world.record.coordinator);
    let answer = Raw::greet(&shard, Role::Relay, &world.record, ClientId(7)).receive().0.message;
    assert!(matches!(answer, Message::Refused(Refusal::Other(_))), "{answer:?}");

    let (mut raw, answer) = greets(Role::Relay, &world.record);
    assert!(matches!(answer, Message::Welcome { .. }), "{answer:?}");
    raw.say(0, &Message::Pull { version: Version(1), blocks: 39..50, base: None });
    let (received, payload) = raw.receive_of(|message| matches!(message, Message::Block { .. }));
    assert_eq!(
        received.message,
        Message::Block { version: Version(1), block: libmodelio::vocabulary::ids::BlockId(39) }
    );
    assert_eq!(payload.len(), BLOCK as usize - 12, "and the model has no more");
    // One that is gone is refused at once, and one that does not come after a while.
    for wanted in [Version(0), Version(9)] {
        raw.say(0, &Message::Pull { version: wanted, blocks: 0..1, base: None });
        let answer = raw.receive_of(|message| matches!(message, Message::Refused(_))).0.message;
        assert_eq!(answer, Message::Refused(Refusal::NoVersion { wanted, newest: Version(1) }));
    }
    raw.say(0, &Message::Probe { plan: libmodelio::vocabulary::ids::PlanId(1) });
    let answer = raw.receive_of(|message| matches!(message, Message::Refused(_))).0.message;
    assert!(matches!(answer, Message::Refused(Refusal::Role { .. })), "{answer:?}");
}

#[test]
fn a_relay_takes_so_many_followers_and_no_more() {
    let (world, _client, _learner) = world(1, Choice::Auto);
    let relay = relay(&world, None);
    let address = view(&relay).listens.unwrap().to_string();
    let greets = || Raw::greet(&address, Role::Relay, &world.record, ClientId(7));
    let mut taken: Vec<Raw> = (0..64).map(|_| greets()).collect();
    for raw in &mut taken {
        assert!(matches!(raw.receive().0.message, Message::Welcome { .. }));
    }
    assert_eq!(view(&relay).followers.len(), 64);
    assert!(matches!(greets().receive().0.message, Message::Refused(Refusal::Other(_))));
    // So many may be silent, and others are hung up.
    let silent: Vec<_> = (0..64).map(|_| std::net::TcpStream::connect(&address).unwrap()).collect();
    let hangs_up = || {
        let mut another = std::net::TcpStream::connect(&address).unwrap();
        another.set_read_timeout(Some(std::time::Duration::from_millis(200))).unwrap();
        // Its end, or a reset. What is not hung up waits for the greeting.
        let read = std::io::Read::read(&mut another, &mut [0]);
        !read.is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    };
    until("no more may be silent", hangs_up);
    drop((taken, silent));
    until("the silent ones have gone", || !hangs_up());
    until("there is room", || matches!(greets().receive().0.message, Message::Welcome { .. }));
}
