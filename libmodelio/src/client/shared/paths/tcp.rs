//! Connections over sockets: to the coordinator, and to shards that blocks are sent to.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Instant;

use super::{BlockPath, Connection};
use crate::client::conversation::{Control, Data};
use crate::client::peers::routes::Route;
use crate::client::shared::Shared;
use crate::client::shared::blocks::DUE_MAX;
use crate::transport::frames::{Framed, Link, Outgoing};
use crate::transport::reactor::Thread;
use crate::transport::tcp::SocketOptions;
use crate::vocabulary::ids::PlanId;
use crate::wire::Role;

/// Blocks go as the payload of messages.
#[derive(Default)]
struct Sent {
    /// The plan that the client last followed over this connection.
    followed: PlanId,
}

impl BlockPath for Sent {
    fn next(&mut self, to: &Connection, due: usize) -> Option<(Outgoing, usize)> {
        to.shared.next_sent(&to.route, &to.link, due, &mut self.followed)
    }
}

/// Blocks come from a relay.
struct FromRelay;

impl BlockPath for FromRelay {
    fn next(&mut self, to: &Connection, due: usize) -> Option<(Outgoing, usize)> {
        to.shared.pull_request(&mut to.shared.inner.lock(), &to.route, due, DUE_MAX)
    }
}

impl Shared {
    /// Opens a connection over a socket.
    pub(in crate::client) fn connect_by_tcp(&self, route: Route) {
        let address = route.address();
        if let Ok(resolved) = address.parse() {
            return self.connect_to(route, resolved);
        }
        // The resolver of names may take a while. No deadline and no lease waits for it.
        let (this, name, of_thread) = (self.this.clone(), address.to_owned(), route.clone());
        let resolve = move || {
            let resolved = name.to_socket_addrs().map(|mut all| all.next());
            let Some(shared) = this.upgrade() else { return };
            match resolved {
                Ok(Some(resolved)) => shared.connect_to(of_thread, resolved),
                Ok(None) => shared.ended(&of_thread, &Link::default(), "the address leads nowhere"),
                Err(error) => shared.ended(&of_thread, &Link::default(), &error.to_string()),
            }
        };
        if let Err(error) = std::thread::Builder::new().name("client-resolver".into()).spawn(resolve) {
            self.ended(&route, &Link::default(), &format!("no thread to resolve its name: {error}"));
        }
    }

    fn connect_to(&self, route: Route, resolved: SocketAddr) {
        let (Some(this), Some(net)) = (self.this.upgrade(), self.shards.reactor()) else { return };
        let link = Link::default();
        let deadline = Instant::now() + self.options.patience;
        let options = SocketOptions::default();
        let connected = if route.role == Role::Control {
            let stream = Framed::new(Control::new(this, route.clone()), link.clone(), 16 << 10);
            net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(0))
        } else if route.role == Role::Relay {
            let stream = Framed::new(Data::new(this, route.clone(), FromRelay), link.clone(), 128);
            net.connect(resolved, options, deadline, Box::new(stream), Thread::Number(route.number))
        } else {
            let stream = Framed::new(Data::new(this, route.clone(), Sent::default()), link.clone(), 128);
            // The connections to one shard are on different threads, so that all threads have work until the last
            // shard is done.
            let thread = Thread::Number(route.partition + route.number);
            net.connect(resolved, options, deadline, Box::new(stream), thread)
        };
        if let Err(error) = connected {
            self.ended(&route, &link, &error.to_string());
        }
    }
}
