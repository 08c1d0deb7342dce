//! Parking: which of a partition's connections are in use.
//!
//! A connection that has a thread to itself moves a block while it is in that core's cache. Connections that take
//! turns on one thread evict each other's blocks from it. So as many connections are in use as there are threads: the
//! same number for each client, on different threads. The others are parked until something is lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use libmodelio::transport::frames::{Link, Outgoing};
use libmodelio::vocabulary::ids::ClientId;
use libmodelio::wire::Message;

use super::Partition;

/// A client's connection for blocks.
pub(super) struct Connected {
    pub(super) client: ClientId,
    pub(super) link: Link,
    parked: bool,
}

/// For each of these connections, with its client and thread: whether it must be parked when there are `threads`
/// threads. Each client keeps at least one.
fn to_park(connections: &[(ClientId, usize)], threads: usize) -> Vec<bool> {
    let mut clients: BTreeMap<ClientId, Vec<usize>> = BTreeMap::new();
    for (index, (client, _)) in connections.iter().enumerate() {
        clients.entry(*client).or_default().push(index);
    }
    let each = threads.div_ceil(clients.len().max(1)).max(1);
    let mut parks = vec![true; connections.len()];
    let mut busy: BTreeMap<usize, usize> = BTreeMap::new();
    // Clients with the least choice choose first.
    let mut clients: Vec<Vec<usize>> = clients.into_values().collect();
    clients.sort_by_key(Vec::len);
    for mut of_client in clients {
        for _ in 0..each.min(of_client.len()) {
            let load = |&index: &usize| busy.get(&connections[index].1).copied().unwrap_or(0);
            let Some(at) = (0..of_client.len()).min_by_key(|&at| load(&of_client[at])) else { break };
            let index = of_client.remove(at);
            parks[index] = false;
            *busy.entry(connections[index].1).or_default() += 1;
        }
    }
    parks
}

impl Partition {
    /// A client's connection is open.
    pub(in crate::server) fn client_up(&self, client: ClientId, link: &Link) {
        let mut links = self.links.lock();
        links.push(Connected { client, link: link.clone(), parked: false });
        self.share_out(&mut links);
        drop(links);
        if self.moved.get().is_some() {
            link.wake();
        }
    }

    /// A client's connection has ended.
    pub(in crate::server) fn client_down(self: &Arc<Partition>, link: &Link) {
        self.forget_kept(link);
        self.state.lock().following.retain(|following| !following.is(link));
        let mut links = self.links.lock();
        let of = links.iter().find(|known| known.link.is(link)).map(|known| known.client);
        links.retain(|known| !known.link.is(link));
        if let Some(client) = of.filter(|client| links.iter().all(|known| known.client != *client)) {
            self.state.lock().followers.remove(&client);
        }
        self.share_out(&mut links);
    }

    fn share_out(&self, links: &mut [Connected]) {
        let known: Vec<_> = links.iter().map(|known| (known.client, known.link.thread())).collect();
        let parks = to_park(&known, self.executor.threads());
        for (known, parked) in links.iter_mut().zip(parks) {
            if known.parked != parked {
                known.parked = parked;
                let message = Message::Park { parked };
                known.link.send(Outgoing { epoch: self.epoch, ..Outgoing::new(0, message) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(connections: &[(u64, usize)], threads: usize) -> Vec<bool> {
        let connections: Vec<_> =
            connections.iter().map(|&(client, thread)| (ClientId(client), thread)).collect();
        to_park(&connections, threads)
    }

    #[test]
    fn a_lone_client_uses_a_connection_for_each_thread() {
        assert_eq!(of(&[(1, 0), (1, 1)], 2), [false, false]);
        assert_eq!(of(&[(1, 0), (1, 0), (1, 1)], 2), [false, true, false]);
        assert_eq!(of(&[(1, 0), (1, 1)], 16), [false, false]);
    }

    #[test]
    fn two_clients_use_different_threads() {
        assert_eq!(of(&[(1, 0), (1, 1), (2, 0), (2, 1)], 2), [false, true, true, false]);
        // The client without a choice goes first.
        assert_eq!(of(&[(1, 0), (1, 1), (2, 0)], 2), [true, false, false]);
    }

    proptest! {
        #[test]
        fn nobody_is_left_without_and_threads_are_used_evenly(
            connections in proptest::collection::vec((0u64..6, 0usize..4), 0..24), threads in 1usize..8,
        ) {
            let parks = of(&connections, threads);
            let clients: std::collections::BTreeSet<_> = connections.iter().map(|(client, _)| client).collect();
            for client in &clients {
                let own = connections.iter().zip(&parks).filter(|((of, _), _)| of == *client);
                let (all, used) = own.fold((0, 0), |(all, used), (_, &parked)| (all + 1, used + usize::from(!parked)));
                prop_assert_eq!(used, all.min(threads.div_ceil(clients.len()).max(1)));
            }
        }
    }
}
