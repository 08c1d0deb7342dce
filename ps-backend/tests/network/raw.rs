//! A connection to a shard that a test speaks over by itself.

use std::io::{Read, Write};
use std::net::TcpStream;

use libmodelio::vocabulary::ids::{ClientId, Epoch, LearnerId, Step};
use libmodelio::wire::{
    Limits, Message, ModelRecord, Moved, Protocol, Received, Receiver, Refusal, Role, frame,
};

use crate::world::{LONG, World};

/// The commit of so many whole blocks from the first on, to a model of one tensor.
pub fn committed(learner: LearnerId, step: u64, blocks: u32) -> Message {
    Message::Commit {
        learner,
        step: Step(step),
        blocks: std::iter::once(0..blocks).collect(),
        tensors: std::iter::once(0..1).collect(),
        partly: Some(Default::default()),
        contents: Default::default(),
        weight: Default::default(),
        timeout_ms: 20_000,
        lent: false,
        given_up: None,
        base: None,
    }
}

/// A connection to a shard that is spoken over by hand.
pub struct Raw {
    pub stream: TcpStream,
    receiver: Receiver,
    unread: Vec<u8>,
    epoch: Epoch,
}

impl Raw {
    pub fn greet(address: &str, role: Role, record: &ModelRecord, client: ClientId) -> Raw {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut receiver = Receiver::new(Limits::GREETING);
        receiver.set_limits(Limits::MAX);
        let mut raw = Raw { stream, receiver, unread: Vec::new(), epoch: record.epoch };
        let hello = Message::Hello {
            protocol: Protocol::NEWEST.number(),
            role,
            model: record.name.clone(),
            generation: record.generation,
            client,
        };
        raw.say(0, &hello);
        raw
    }

    /// Greets the shard that coordinates, and is welcomed.
    pub fn welcomed(world: &World, role: Role, client: u64) -> Raw {
        let address = world.address_of(world.record.coordinator);
        let mut raw = Raw::greet(&address, role, &world.record, ClientId(client));
        assert!(matches!(raw.receive().0.message, Message::Welcome { .. }));
        raw
    }

    /// A client that is spoken for by hand, with a learner.
    pub fn joined(world: &World, client: u64) -> (Raw, LearnerId) {
        let mut raw = Raw::welcomed(world, Role::Control, client);
        match raw.ask(1, &Message::Join { name: format!("l{client}") }) {
            Message::Joined { learner, .. } => (raw, learner),
            other => panic!("{other:?}"),
        }
    }

    pub fn say(&mut self, request: u64, message: &Message) {
        self.say_with(request, message, &[]);
    }

    pub fn say_with(&mut self, request: u64, message: &Message, payload: &[u8]) {
        let head = frame(message, request, self.epoch, payload).unwrap();
        self.stream.write_all(&[&head, payload].concat()).unwrap();
    }

    /// Says something with one payload's checksum and the bytes of another one.
    pub fn say_with_other(&mut self, message: &Message, told: &[u8], sent: &[u8]) {
        let head = frame(message, 0, self.epoch, told).unwrap();
        self.stream.write_all(&[&head, sent].concat()).unwrap();
    }

    /// The next message of this kind.
    pub fn receive_of(&mut self, is_it: impl Fn(&Message) -> bool) -> (Received, Vec<u8>) {
        loop {
            let received = self.receive();
            if is_it(&received.0.message) {
                return received;
            }
        }
    }

    pub fn receive(&mut self) -> (Received, Vec<u8>) {
        loop {
            let (used, received) = self.receiver.push(&self.unread).unwrap();
            self.unread.drain(..used);
            let Some(received) = received else {
                self.read();
                continue;
            };
            let len = received.header.payload_len() as usize;
            while self.unread.len() < len {
                self.read();
            }
            let payload: Vec<u8> = self.unread.drain(..len).collect();
            if len > 0 {
                self.receiver.payload_done(libmodelio::bytes::crc32c::crc32c(&payload)).unwrap();
            }
            if received.message == Message::Ping {
                // It lives, if the shard still listens.
                let _ = self.stream.write_all(&frame(&Message::Pong, 0, self.epoch, &[]).unwrap());
            }
            return (received, payload);
        }
    }

    fn read(&mut self) {
        let mut bytes = [0; 4096];
        let count = loop {
            match self.stream.read(&mut bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                outcome => break outcome.unwrap(),
            }
        };
        assert!(count > 0, "the connection ended");
        self.unread.extend_from_slice(&bytes[..count]);
    }

    /// The answer to a request, whatever else is said.
    pub fn answer(&mut self, request: u64) -> Message {
        loop {
            let (received, _) = self.receive();
            if received.header.request() == request {
                return received.message;
            }
        }
    }

    /// Says something and waits for the answer.
    pub fn ask(&mut self, request: u64, message: &Message) -> Message {
        self.say(request, message);
        self.answer(request)
    }

    /// The refusal that comes, whatever else is said before it.
    pub fn refusal(&mut self) -> Refusal {
        match self.receive_of(|message| matches!(message, Message::Refused(_))).0.message {
            Message::Refused(refusal) => refusal,
            other => unreachable!("{other:?}"),
        }
    }

    /// It is told where the model is now, and the connection ends.
    pub fn is_moved(&mut self, after: &ModelRecord) {
        loop {
            let (received, payload) = self.receive();
            if received.message == Message::Moved {
                let moved = Moved::decode(&payload).unwrap();
                assert_eq!(moved.record, *after);
                assert_eq!(received.header.epoch(), after.epoch);
                assert_eq!(self.stream.read(&mut [0]).unwrap(), 0, "nothing follows");
                return;
            }
        }
    }
}
