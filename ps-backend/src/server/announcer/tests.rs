//! A shard that speaks to the registry while others ask how it is.

use std::mem::ManuallyDrop;
use std::sync::mpsc::channel;

use libmodelio::transport::reactor::Choice;
use libmodelio::wire::Checksum;

use super::*;
use crate::server::{RdmaUse, Server, ServerOptions};

#[test]
fn the_status_of_a_shard_and_its_announcer_do_not_wait_for_each_other() {
    const TIMES: usize = 20_000;
    let options = ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        registry: None,
        registry_state: None,
        holds_blocks: true,
        checksum: Checksum::On,
        threads: 1,
        state: Default::default(),
        io: Choice::Poll,
        rdma: RdmaUse::Off,
        rdma_port: None,
        rdma_options: libmodelio::transport::rdma::RdmaOptions::default(),
        device: None,
        device_memory: None,
        snapshot_rate: None,
    };
    // Its end would wait, too.
    let server = ManuallyDrop::new(Server::start(options).unwrap());
    let (done, both) = channel();
    let (announcer, announced) = (Arc::clone(&server.shared), done.clone());
    std::thread::spawn(move || {
        let outcome = (0..TIMES).try_for_each(|_| report_to_registry(&announcer));
        announced.send(outcome.is_ok()).unwrap();
    });
    let asker = Arc::clone(&server.shared);
    std::thread::spawn(move || {
        done.send((0..TIMES).all(|_| crate::server::admin::status(&asker)["not_listed"].is_null())).unwrap();
    });
    for _ in 0..2 {
        assert_eq!(both.recv_timeout(Duration::from_secs(600)), Ok(true));
    }
    drop(ManuallyDrop::into_inner(server));
}
