//! The calls of etcd's API (v3) that are used, and their messages. `etcdserverpb/rpc.proto` of etcd has all of them. They
//! are written here so that a build needs no compiler of protocol buffers.

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::metadata::AsciiMetadataValue;
use tonic::transport::Channel;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

const TXN: &str = "/etcdserverpb.KV/Txn";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const RENEW: &str = "/etcdserverpb.Lease/LeaseKeepAlive";
const REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "4")]
    pub revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

/// One of its fields is set.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RequestOp {
    #[prost(message, optional, tag = "1")]
    pub range: Option<RangeRequest>,
    #[prost(message, optional, tag = "2")]
    pub put: Option<PutRequest>,
    #[prost(message, optional, tag = "3")]
    pub delete_range: Option<DeleteRangeRequest>,
}

/// A comparison of a key's last revision with a number: `result` 0 is "equal", `target` 2 the last revision.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Compare {
    #[prost(int32, tag = "1")]
    pub result: i32,
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(int64, optional, tag = "6")]
    pub mod_revision: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseHeader {
    #[prost(int64, tag = "3")]
    pub revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeResponse {
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub range: Option<RangeResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<ResponseHeader>,
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub responses: Vec<ResponseOp>,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseRequest {
    #[prost(int64, tag = "1")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseResponse {
    #[prost(int64, tag = "2")]
    id: i64,
    #[prost(int64, tag = "3")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    password: String,
}

#[derive(Clone, PartialEq, Message)]
struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    token: String,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

/// A connection to a member. It is made when the first call needs it.
#[derive(Clone)]
pub(super) struct Member {
    channel: Channel,
    token: Option<AsciiMetadataValue>,
}

impl Member {
    pub(super) fn new(channel: Channel) -> Member {
        Member { channel, token: None }
    }

    pub(super) async fn authenticate(&mut self, name: &str, password: &str) -> Result<(), Status> {
        let request = AuthenticateRequest { name: name.to_owned(), password: password.to_owned() };
        let AuthenticateResponse { token } = self.ask(AUTHENTICATE, request).await?;
        self.token = Some(token.parse().map_err(|_| Status::internal("a token that is none"))?);
        Ok(())
    }

    pub(super) async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, Status> {
        self.ask(TXN, request).await
    }

    /// A new lease.
    pub(super) async fn grant(&self, ttl: i64) -> Result<i64, Status> {
        self.ask(GRANT, LeaseGrantRequest { ttl }).await.map(|LeaseResponse { id, .. }| id)
    }

    /// Renews a lease, and returns for how many seconds; 0 if it is over.
    pub(super) async fn renew(&self, id: i64) -> Result<i64, Status> {
        self.ask(RENEW, LeaseRequest { id }).await.map(|LeaseResponse { ttl, .. }| ttl)
    }

    pub(super) async fn revoke(&self, id: i64) -> Result<(), Status> {
        self.ask(REVOKE, LeaseRequest { id }).await.map(|Nothing {}| ())
    }

    /// Sends one message, and takes the first one that comes back: enough for a call of streams, too.
    async fn ask<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Status>
    where
        Q: Message + Default + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        grpc.ready().await.map_err(|error| Status::from_error(Box::new(error)))?;
        let mut request = Request::new(message);
        // A member that has no leader says so, instead of having the call wait.
        request.metadata_mut().insert("hasleader", AsciiMetadataValue::from_static("true"));
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.clone());
        }
        let codec = ProstCodec::<Q, A>::default();
        let answers = grpc.server_streaming(request, PathAndQuery::from_static(path), codec).await?;
        let answer = answers.into_inner().message().await?;
        answer.ok_or_else(|| Status::internal("an answer without a message"))
    }
}
