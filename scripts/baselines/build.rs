//! Makes the gRPC service's client and server from here, so that no protoc is needed.

use tonic_build::manual::{Builder, Method, Service};

fn method(name: &str, route: &str, input: &str, output: &str) -> tonic_build::manual::MethodBuilder {
    let message = |name: &str| format!("crate::messages::{name}");
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(message(input))
        .output_type(message(output))
        .codec_path("crate::messages::Codec")
}

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let service = Service::builder()
        .package("baselines")
        .name("Parameters")
        .method(method("push", "Push", "Chunk", "Done").client_streaming().build())
        .method(method("pull", "Pull", "Wanted", "Chunk").server_streaming().build())
        .method(method("push_tensor", "PushTensor", "Chunk", "Done").build())
        .method(method("pull_tensor", "PullTensor", "Wanted", "Chunk").build())
        .build();
    Builder::new().compile(&[service]);
}
