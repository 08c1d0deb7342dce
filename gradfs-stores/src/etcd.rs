//! etcd: keys are read at one revision, and written in one transaction if one key, the guard, is as it was.
//!
//! Each member has a connection of its own. A call goes to the member that answered last, and to the next one when that
//! one fails, until the deadline. So nothing of the client needs to be watched: what ends is made anew by the next call.

mod rpc;
mod url;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::future::Future;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use tonic::Status;
use tonic::transport::Endpoint;

use self::rpc::{Compare, DeleteRangeRequest, Member, PutRequest, RangeRequest, RequestOp, TxnRequest};
use crate::runtime;
pub use url::{Credentials, EtcdUrl};

/// The comparison of a guard, in etcd's numbers.
const EQUAL: i32 = 0;
const MOD_REVISION: i32 = 2;
/// The pause after all members have failed.
const PAUSE: Duration = Duration::from_millis(100);
/// The least time that one member has to answer, where the deadline leaves it.
const LEAST: Duration = Duration::from_millis(500);

/// Why etcd did not do it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdError {
    /// The URL is none.
    #[error("{url} is no URL of etcd: {why}")]
    Url {
        /// The URL, without a password.
        url: String,
        /// The fault.
        why: String,
    },
    /// A setting is missing, or wrong.
    #[error("{0}")]
    Setting(String),
    /// etcd answers, and does not do it: another try would fail, too.
    #[error("etcd at {members} refuses: {why}")]
    Refused {
        /// The members of the etcd.
        members: String,
        /// The reason, and what to do.
        why: String,
    },
    /// No member did it before the deadline. It is unknown whether a write took effect.
    #[error("etcd at {members} does not answer: {why}")]
    Unavailable {
        /// The members of the etcd.
        members: String,
        /// Why not, and what to do.
        why: String,
    },
}

/// What is read.
#[derive(Clone, Debug)]
pub enum Read {
    /// This key.
    Key(String),
    /// All keys that begin so.
    Prefix(String),
}

/// What is written.
#[derive(Clone, Debug)]
pub enum Write {
    /// The key has this value, for as long as the lease lives, if it is not 0.
    Put(String, Vec<u8>, i64),
    /// The key is gone.
    Delete(String),
    /// All keys from the first one on are gone, up to the second one.
    DeleteRange(String, String),
}

/// A key that was read.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Its value.
    pub value: Vec<u8>,
    /// The revision of its last write.
    pub revision: i64,
    /// Its lease, or 0.
    pub lease: i64,
}

/// A client of one etcd.
pub struct Etcd {
    url: EtcdUrl,
    user: Option<(String, String)>,
    /// How each member is reached.
    endpoints: Vec<Endpoint>,
    /// The connections, and which member is asked first.
    members: Mutex<(Vec<Option<Member>>, usize)>,
}

impl std::fmt::Debug for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Etcd").field("url", &self.url).finish_non_exhaustive()
    }
}

/// What becomes of a call that failed at one member.
enum Failure {
    /// Another try fails, too.
    Final(String),
    /// Another try may succeed.
    Passing(String),
}

impl Etcd {
    /// The etcd at `url`. Connects at the first call.
    ///
    /// # Errors
    /// [`EtcdError::Setting`] if the credentials do not go with the URL.
    pub fn new(url: EtcdUrl, credentials: &Credentials) -> Result<Etcd, EtcdError> {
        let (user, endpoints) = (credentials.user().cloned(), credentials.endpoints(&url)?);
        let members = Mutex::new((vec![None; url.members.len()], 0));
        Ok(Etcd { url, user, endpoints, members })
    }

    /// Its URL.
    pub fn url(&self) -> &EtcdUrl {
        &self.url
    }

    /// Reads all at one revision: the newest one, or the one `at`. The answer has that revision.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub fn read(
        &self,
        reads: &[Read],
        at: Option<i64>,
        deadline: Instant,
    ) -> Result<(Vec<Vec<Entry>>, i64), EtcdError> {
        let range = |read: &Read| {
            let (key, range_end) = match read {
                Read::Key(key) => (key, Vec::new()),
                Read::Prefix(prefix) => (prefix, end_of(prefix)),
            };
            let range = RangeRequest { key: key.clone().into(), range_end, revision: at.unwrap_or_default() };
            RequestOp { range: Some(range), ..RequestOp::default() }
        };
        let request = TxnRequest { compare: Vec::new(), success: reads.iter().map(range).collect() };
        let answer = self.call(deadline, |member| {
            let request = request.clone();
            async move { member.txn(request).await }
        })?;
        let revision = at.or_else(|| Some(answer.header?.revision)).unwrap_or_default();
        let entries = |range: rpc::RangeResponse| range.kvs.into_iter().map(Entry::from).collect();
        Ok((
            answer.responses.into_iter().map(|one| one.range.map(entries).unwrap_or_default()).collect(),
            revision,
        ))
    }

    /// Writes all, if the guard's last write is of this revision (0: it is not there). False if it is not, or a lease is
    /// over: then nothing is written.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub fn write(
        &self,
        guard: Option<(&str, i64)>,
        writes: Vec<Write>,
        deadline: Instant,
    ) -> Result<bool, EtcdError> {
        let compare = |(key, revision): (&str, i64)| Compare {
            result: EQUAL,
            target: MOD_REVISION,
            key: key.into(),
            mod_revision: Some(revision),
        };
        let delete = |key: String, to: String| DeleteRangeRequest { key: key.into(), range_end: to.into() };
        let op = |write| match write {
            Write::Put(key, value, lease) => {
                let put = PutRequest { key: key.into(), value, lease };
                RequestOp { put: Some(put), ..RequestOp::default() }
            }
            Write::Delete(key) => {
                RequestOp { delete_range: Some(delete(key, String::new())), ..RequestOp::default() }
            }
            Write::DeleteRange(from, to) => {
                RequestOp { delete_range: Some(delete(from, to)), ..RequestOp::default() }
            }
        };
        let compare = guard.into_iter().map(compare).collect();
        let request = TxnRequest { compare, success: writes.into_iter().map(op).collect() };
        self.call(deadline, |member| {
            let request = request.clone();
            async move {
                match member.txn(request).await {
                    Err(status) if status.message().contains("lease not found") => Ok(false),
                    answer => answer.map(|answer| answer.succeeded),
                }
            }
        })
    }

    /// A new lease.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub fn grant(&self, seconds: i64, deadline: Instant) -> Result<i64, EtcdError> {
        self.call(deadline, |member| async move { member.grant(seconds).await })
    }

    /// Renews a lease, and returns for how many seconds; 0 if it is over.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub fn renew(&self, lease: i64, deadline: Instant) -> Result<i64, EtcdError> {
        self.call(deadline, |member| async move { member.renew(lease).await })
    }

    /// Ends a lease, and all keys that it holds.
    ///
    /// # Errors
    /// [`EtcdError`].
    pub fn revoke(&self, lease: i64, deadline: Instant) -> Result<(), EtcdError> {
        self.call(deadline, |member| async move { member.revoke(lease).await })
    }

    /// Asks one member after the other, until one answers.
    fn call<T, F: Future<Output = Result<T, Status>>>(
        &self,
        deadline: Instant,
        ask: impl Fn(Member) -> F,
    ) -> Result<T, EtcdError> {
        let members = self.url.members.join(",");
        let mut said: BTreeMap<usize, String> = BTreeMap::new();
        let mut tries = 0;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let all = said.iter().map(|(member, why)| format!("{}: {why}", self.url.members[*member]));
                let why = match said.is_empty() {
                    true => "there was no time to ask it".to_owned(),
                    false => all.collect::<Vec<_>>().join("; "),
                };
                let why = format!("{why} ({})", hint(&why));
                return Err(EtcdError::Unavailable { members, why });
            }
            // Half of the time is left for the others.
            let patience = (left / 2).max(LEAST).min(left);
            let (index, known) = self.chosen();
            let attempt = async {
                let member = match known {
                    Some(member) => member,
                    None => self.connected(index).await?,
                };
                ask(member).await.map_err(|status| self.failure(&status))
            };
            let timed = runtime::block_on(async { tokio::time::timeout(patience, attempt).await });
            let timed = timed.map_err(|error| EtcdError::Setting(format!("no thread for etcd: {error}")))?;
            match timed {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(Failure::Final(why))) => {
                    self.forget(index);
                    return Err(EtcdError::Refused { members, why });
                }
                Ok(Err(Failure::Passing(why))) => {
                    self.forget(index);
                    said.insert(index, why);
                }
                // What it has said before tells more than its silence.
                Err(_) => {
                    self.forget(index);
                    said.entry(index).or_insert_with(|| "no answer".to_owned());
                }
            }
            tries += 1;
            if tries % self.url.members.len() == 0 {
                std::thread::sleep(PAUSE.min(deadline.saturating_duration_since(Instant::now())));
            }
        }
    }

    /// The member to ask, and the connection to it, if there is one.
    fn chosen(&self) -> (usize, Option<Member>) {
        let members = self.members.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        (members.1, members.0[members.1].clone())
    }

    /// Connects to a member, and gives the password where there is one.
    async fn connected(&self, index: usize) -> Result<Member, Failure> {
        let mut member = Member::new(self.endpoints[index].connect_lazy());
        if let Some((name, password)) = &self.user {
            member.authenticate(name, password).await.map_err(|status| self.failure(&status))?;
        }
        let mut members = self.members.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        members.0[index] = Some(member.clone());
        Ok(member)
    }

    /// The member has failed: the next one is asked.
    fn forget(&self, index: usize) {
        let mut members = self.members.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        members.0[index] = None;
        // Another thread may have gone on already.
        if members.1 == index {
            members.1 = (index + 1) % members.0.len();
        }
    }

    fn failure(&self, status: &Status) -> Failure {
        let said = status.message().trim_start_matches("etcdserver: ");
        let is_one = |texts: &[&str]| texts.iter().any(|text| said.contains(text));
        let hint = if is_one(&["authentication failed"]) {
            "check GRADFS_ETCD_USER and its password"
        } else if is_one(&["user name is empty"]) {
            "it wants a user: set GRADFS_ETCD_USER and GRADFS_ETCD_PASSWORD_FILE"
        } else if is_one(&["authentication is not enabled"]) {
            "unset GRADFS_ETCD_USER, or enable authentication in etcd"
        } else if is_one(&["permission denied"]) {
            return Failure::Final(format!(
                "{said}: grant the user's role readwrite on the prefix {}/",
                self.url.prefix
            ));
        } else if is_one(&["database space exceeded"]) {
            "compact and defragment it, or raise its --quota-backend-bytes"
        } else if is_one(&["request is too large", "too many operations"]) {
            "leave its --max-request-bytes and --max-txn-ops at their defaults, or raise them"
        } else {
            // A status that a member did not send has the reason below it.
            return Failure::Passing(if status.source().is_some() {
                deepest(status)
            } else {
                said.to_owned()
            });
        };
        Failure::Final(format!("{said}: {hint}"))
    }
}

/// What to do when members have failed so.
fn hint(why: &str) -> &'static str {
    let is_one = |texts: &[&str]| texts.iter().any(|text| why.contains(text));
    if is_one(&["certificate", "HandshakeFailure"]) {
        "check GRADFS_ETCD_CA, GRADFS_ETCD_CERT and GRADFS_ETCD_KEY"
    } else if is_one(&["refused", "no leader", "no answer", "timed out", "unreachable", "no time"]) {
        "more than half of its members must run and reach each other; write etcds:// if it wants TLS"
    } else if is_one(&["lookup"]) {
        "check the names in the URL"
    } else {
        "is that an etcd? Write etcds:// if it wants TLS"
    }
}

/// The first cause of an error, which says most.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// The first key behind all that begin with `prefix`, which ends in no byte of 255.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

impl From<rpc::KeyValue> for Entry {
    fn from(found: rpc::KeyValue) -> Entry {
        let rpc::KeyValue { key, value, mod_revision: revision, lease } = found;
        Entry { key: String::from_utf8_lossy(&key).into_owned(), value, revision, lease }
    }
}
