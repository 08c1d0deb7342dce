//! What is said, as protobuf. In a .proto file:
//!
//! ```proto
//! message Chunk  { uint64 offset = 1; bytes data = 2; }
//! message Wanted { uint64 offset = 1; uint64 length = 2; uint64 added = 3; }
//! message Done   {}
//! service Parameters {
//!   rpc Push(stream Chunk) returns (Done);
//!   rpc Pull(Wanted) returns (stream Chunk);
//!   rpc PushTensor(Chunk) returns (Done);
//!   rpc PullTensor(Wanted) returns (Chunk);
//! }
//! ```

use bytes::Bytes;
use prost::Message;
use tonic::codec::{BufferSettings, Codec as TonicCodec};
use tonic_prost::ProstCodec;

/// Some of the gradients or weights; `data` is not copied where it is decoded.
#[derive(Clone, PartialEq, Message)]
pub struct Chunk {
    #[prost(uint64, tag = "1")]
    pub offset: u64,
    #[prost(bytes = "bytes", tag = "2")]
    pub data: Bytes,
}

/// Weights to send once the shard has added up `added` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Wanted {
    #[prost(uint64, tag = "1")]
    pub offset: u64,
    #[prost(uint64, tag = "2")]
    pub length: u64,
    #[prost(uint64, tag = "3")]
    pub added: u64,
}

/// All is added.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Done {}

/// Protobuf with buffers for whole chunks: what does not grow is not copied again.
#[derive(Clone, Copy)]
pub struct Codec<T, U>(std::marker::PhantomData<(T, U)>);

impl<T, U> Default for Codec<T, U> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<T, U> TonicCodec for Codec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = <ProstCodec<T, U> as TonicCodec>::Encoder;
    type Decoder = <ProstCodec<T, U> as TonicCodec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(settings())
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(settings())
    }
}

fn settings() -> BufferSettings {
    let number = |name: &str, usual: usize| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(usual);
    BufferSettings::new(number("CODEC_BUFFER", 8 << 10), number("CODEC_YIELD", 32 << 10))
}
