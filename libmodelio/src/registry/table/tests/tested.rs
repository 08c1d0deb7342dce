//! The tables that the tests are run with: one in this process, and one in an etcd of its own.

use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::*;
use crate::registry::etcd::EtcdRegistry;
use crate::registry::{EtcdUrl, Registry};

/// A lease in etcd, where the test's own time decides when it is over.
const LONG_MS: u32 = 3_600_000;
const PATIENCE: Duration = Duration::from_secs(300);

/// A table under test.
pub(super) enum Tested {
    Here(RegistryCore),
    /// With the keys that live until some time: a shard's address, and whether it is refused.
    Etcd(EtcdRegistry, BTreeMap<(String, bool), Now>),
}

/// Runs a test with each kind of table. It makes as many as it wants.
pub(super) fn on_each(test: impl Fn(&dyn Fn() -> Tested)) {
    test(&|| Tested::Here(RegistryCore::new()));
    let Some(server) = EtcdServer::start() else { return };
    let made = std::cell::Cell::new(0);
    test(&|| {
        made.set(made.get() + 1);
        let url = format!("etcd://{}/{}", server.address, made.get());
        let registry = EtcdRegistry::open(EtcdUrl::parse(&url).unwrap()).unwrap();
        Tested::Etcd(registry, BTreeMap::new())
    });
}

impl Tested {
    pub(super) fn handle(
        &mut self,
        request: &RegistryRequest,
        payload: &[u8],
        now: Now,
    ) -> Result<Answer, Refusal> {
        let Tested::Etcd(registry, leases) = self else {
            let Tested::Here(core) = self else { unreachable!() };
            return core.handle(request, payload, now);
        };
        for (address, refused) in leases.extract_if(.., |_, until| *until <= now).map(|(key, _)| key) {
            registry.expire(&address, refused, Instant::now() + PATIENCE).unwrap();
        }
        let mut asked = request.clone();
        let announced = match &mut asked {
            RegistryRequest::Announce { record, lease_ms, .. } => {
                let until = now + Duration::from_millis((*lease_ms).into());
                if (1..LONG_MS).contains(lease_ms) {
                    *lease_ms = LONG_MS;
                }
                Some((record.address.clone(), until))
            }
            _ => None,
        };
        let answer = registry.ask(asked, payload, Instant::now() + PATIENCE);
        if let Some((address, until)) = announced {
            leases.insert((address.clone(), answer.is_err()), until);
            if answer.is_ok() {
                leases.remove(&(address, true));
            }
        }
        match answer {
            Ok((RegistryAnswer::Model, bytes)) => {
                Ok(Answer { message: RegistryAnswer::Model, payload: Some(bytes.into()) })
            }
            Ok((message, _)) => Ok(Answer { message, payload: None }),
            Err(error) => Err(Refusal::try_from(error).unwrap()),
        }
    }

    /// The shards that are listed.
    pub(super) fn living(&mut self, now: Now) -> Vec<ShardRecord> {
        match self.handle(&RegistryRequest::Shards, &[], now).unwrap().message {
            RegistryAnswer::Shards(shards) => shards,
            other => panic!("{other:?}"),
        }
    }

    /// All shards that are known.
    pub(super) fn known(&self) -> Vec<ShardRecord> {
        match self {
            Tested::Here(core) => core.shards.values().map(|shard| shard.record.clone()).collect(),
            Tested::Etcd(registry, _) => registry.known(Instant::now() + PATIENCE).unwrap(),
        }
    }

    /// Bytes of all records, as they are stored.
    pub(super) fn record_bytes(&self) -> usize {
        match self {
            Tested::Here(core) => core.record_bytes(),
            Tested::Etcd(registry, _) => registry.record_bytes(Instant::now() + PATIENCE).unwrap(),
        }
    }
}

/// An etcd of one member, which ends with this value, or with this process.
pub(in crate::registry) struct EtcdServer {
    pub(in crate::registry) address: String,
    shell: Child,
    _dir: tempfile::TempDir,
}

impl EtcdServer {
    /// None, and a word about it, where there is no etcd on this machine.
    pub(in crate::registry) fn start() -> Option<EtcdServer> {
        let is_there = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
        if !is_there {
            assert!(std::env::var_os("CI").is_none(), "there is no etcd: scripts/setup test");
            eprintln!("not tested with etcd, for there is none: scripts/setup test");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        // Both are free at once, so they differ.
        let ports = [free(), free()].map(|listener| listener.local_addr().unwrap().to_string());
        let [address, peers] = &ports;
        // The shell ends it when the pipe is closed, however this process ends.
        let script = "etcd --data-dir \"$1\" --logger zap --log-level error --listen-client-urls http://$2 \
            --advertise-client-urls http://$2 --listen-peer-urls http://$3 --initial-advertise-peer-urls http://$3 \
            --initial-cluster default=http://$3 >/dev/null 2>&1 </dev/null & read _; kill -9 $!; wait";
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script, "sh"]).arg(dir.path()).args([address, peers]);
        let shell = shell.stdin(Stdio::piped()).spawn().unwrap();
        Some(EtcdServer { address: address.clone(), shell, _dir: dir })
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        let _ = self.shell.stdin.take().map(|mut pipe| pipe.write_all(b"\n"));
        let _ = self.shell.wait();
    }
}
