//! Lines over a real device (software RDMA will do): frames through rings, payload past them, and what peers do wrong.
//! Skipped, with the reason, where there is none.
#![cfg(feature = "rdma")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use libmodelio::net::Buffer;
use libmodelio::net::{Close, Connection, Receive, ReceiveSlices, SendSlices, Stream};
use libmodelio::rdma::{Fabric, Line, Mtu, RdmaOptions};

/// An address that leads over the device, as `GRADFS_RDMA_ADDRESS` says.
fn address() -> Option<SocketAddr> {
    match std::env::var("GRADFS_RDMA_ADDRESS") {
        Ok(text) => Some(SocketAddr::new(text.parse().expect("GRADFS_RDMA_ADDRESS is an address"), 0)),
        Err(_) => {
            eprintln!("skipped: GRADFS_RDMA_ADDRESS names no address of an RDMA device");
            None
        }
    }
}

fn options() -> RdmaOptions {
    RdmaOptions { arena: 4 << 20, ..RdmaOptions::default() }
}

/// Sends `to_send` bytes of a pattern, checks as many that come, and tells when it is over.
struct Pattern {
    to_send: usize,
    sent: usize,
    got: usize,
    expected: usize,
    out: Buffer,
    into: Buffer,
    news: Sender<String>,
}

const PIECE: usize = 8192;

impl Pattern {
    fn new(to_send: usize, expected: usize, news: Sender<String>) -> Pattern {
        let (out, into) = (Buffer::zeroed(PIECE), Buffer::zeroed(PIECE));
        Pattern { to_send, sent: 0, got: 0, expected, out, into, news }
    }

    fn at(position: usize) -> u8 {
        (position.wrapping_mul(2_654_435_761) >> 13) as u8
    }
}

impl Stream for Pattern {
    fn opened(&mut self, _: &Connection) {}

    fn receive(&mut self, into: &mut ReceiveSlices) -> Receive {
        // SAFETY: the buffer is this stream's, and is looked at only in `received`.
        unsafe { into.push(self.into.start(), PIECE) };
        Receive::Into { least: 1 }
    }

    fn received(&mut self, bytes: usize) -> Result<(), Close> {
        // SAFETY: nothing is received just now.
        let bytes = unsafe { std::slice::from_raw_parts(self.into.start(), bytes) };
        for &byte in bytes {
            if byte != Pattern::at(self.got) {
                return Err(Close::Asked(format!("byte {} is wrong", self.got).into()));
            }
            self.got += 1;
        }
        if self.got == self.expected {
            let _ = self.news.send("all".into());
        }
        Ok(())
    }

    fn transmit(&mut self, out: &mut SendSlices) {
        let len = PIECE.min(self.to_send - self.sent);
        // SAFETY: nothing is being sent; the buffer is long enough, and left alone until it is.
        unsafe {
            for index in 0..len {
                self.out.start().add(index).write(Pattern::at(self.sent + index));
            }
            out.push(self.out.start(), len);
        }
    }

    fn transmitted(&mut self, bytes: usize) -> Result<(), Close> {
        self.sent += bytes;
        Ok(())
    }

    fn closed(&mut self, why: &Close) {
        let _ = self.news.send(format!("closed: {why}"));
    }
}

fn hear(news: &Receiver<String>) -> String {
    news.recv_timeout(Duration::from_secs(20)).expect("news in time")
}

#[test]
fn bytes_go_both_ways() {
    let Some(at) = address() else { return };
    const UP: usize = 3_000_001;
    const DOWN: usize = 1_234_567;
    let fabric = Fabric::open(&options()).unwrap();
    let (sender, server) = channel();
    let to = fabric
        .listen(at, move |_: &Arc<Line>, peer| {
            assert!(peer.is_some());
            Some(Box::new(Pattern::new(DOWN, UP, sender.clone())) as Box<dyn Stream>)
        })
        .unwrap();
    let (sender, client) = channel();
    let begun = Instant::now();
    fabric.connect(to, begun + Duration::from_secs(5), 1, move |line| {
        line.expect("a line");
        Some(Box::new(Pattern::new(UP, DOWN, sender)) as Box<dyn Stream>)
    });
    assert_eq!(hear(&client), "all");
    assert_eq!(hear(&server), "all");
    eprintln!("{} bytes in {:?}", UP + DOWN, begun.elapsed());
    assert_eq!(fabric.lines(), 2);
    fabric.shut_down(Duration::from_secs(2));
    assert!(hear(&client).starts_with("closed: "));
    assert!(hear(&server).starts_with("closed: "));
}

/// What both ends of a connection use, if they want these.
fn agreed(at: SocketAddr, server: Option<u32>, client: Option<u32>) -> [Option<u32>; 2] {
    let open = |bytes: Option<u32>| {
        let mtu = bytes.map(|bytes| Mtu::from_bytes(bytes).expect("an MTU"));
        Fabric::open(&RdmaOptions { mtu, ..options() }).unwrap()
    };
    let ask = |line: &Arc<Line>| line.mtu().unwrap().map(Mtu::bytes);
    let (server, client) = (open(server), open(client));
    let (tell, told) = channel();
    let (news, heard) = channel();
    let of_server = (tell.clone(), news.clone());
    let to = server
        .listen(at, move |line: &Arc<Line>, _| {
            of_server.0.send((0, ask(line))).unwrap();
            Some(Box::new(Pattern::new(20_000, 20_000, of_server.1.clone())) as Box<dyn Stream>)
        })
        .unwrap();
    client.connect(to, Instant::now() + Duration::from_secs(5), 0, move |line| {
        tell.send((1, ask(line.expect("a line")))).unwrap();
        Some(Box::new(Pattern::new(20_000, 20_000, news)) as Box<dyn Stream>)
    });
    let mut found = [None; 2];
    for _ in 0..2 {
        let (end, mtu) = told.recv_timeout(Duration::from_secs(20)).expect("a line in time");
        found[end] = mtu;
    }
    assert_eq!([hear(&heard), hear(&heard)], ["all", "all"]);
    found
}

#[test]
fn packets_are_no_longer_than_either_end_wants() {
    let Some(at) = address() else { return };
    let mtu = Mtu::from_bytes(1024);
    if let Err(why) = Fabric::open(&RdmaOptions { mtu, ..options() }) {
        assert!(why.to_string().contains("speaks iWARP, which has no MTU of its own"), "{why}");
        assert_eq!(agreed(at, None, None), [None; 2]);
        return;
    }
    let [Some(most), same] = agreed(at, None, None) else { panic!("no MTU") };
    assert_eq!(same, Some(most));
    assert!(most >= 1024, "the path of a test takes {most}");
    for (server, client, expected) in [
        (Some(512), None, 512),
        (None, Some(256), 256),
        (Some(256), Some(1024), 256),
        (Some(1024), Some(512), 512),
    ] {
        assert_eq!(agreed(at, server, client), [Some(expected); 2], "{server:?}, {client:?}");
    }
}

#[test]
fn nobody_listens() {
    let Some(mut at) = address() else { return };
    at.set_port(9);
    let fabric = Fabric::open(&options()).unwrap();
    let (sender, client) = channel();
    fabric.connect(at, Instant::now() + Duration::from_secs(5), 0, move |line| {
        sender.send(line.map(drop).unwrap_err()).unwrap();
        None
    });
    let why = hear(&client);
    assert!(why.contains(&at.to_string()), "{why}");
}
