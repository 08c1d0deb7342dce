// gRPC as fast as it could be made: gradients and weights as streams of chunks, or as whole tensors in unary calls,
// as TensorFlow sends them. The server adds what comes straight to the weights, as the one with bare sockets does.
//
// Messages are raw ByteBuffers whose bytes gRPC sends from where they are: what comes is added, or copied to its
// place, from the slices in which it was received. There is no protobuf, which would copy all of it twice more.
//
// C++ and not Rust, because it is faster: a step of one learner with 64 MiB took 48 ms by streams and 58 ms by
// tensors, with 574 and 607 ms of CPU a GB, and tonic 0.14, tuned likewise (windows of 2 MiB, frames of 256 KiB, two
// connections, an allocator that keeps its memory, payloads as bytes::Bytes), 60 and 81 ms, with 676 and 905.
//
// Memory is kept by the allocator, on huge pages, as the driver's environment has it: without, it is up to a third slower.

#include "common.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/impl/codegen/method_handler.h>
#include <grpcpp/impl/codegen/service_type.h>
#include <grpcpp/impl/codegen/sync_stream.h>
#include <grpcpp/support/byte_buffer.h>

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

using grpc::ByteBuffer;
using grpc::Slice;
using grpc::Status;
using grpc::internal::RpcMethod;

namespace {

constexpr char kPush[] = "/baselines.Parameters/Push", kPushTensor[] = "/baselines.Parameters/PushTensor";
constexpr char kPull[] = "/baselines.Parameters/Pull", kPullTensor[] = "/baselines.Parameters/PullTensor";

auto Deadline() { return std::chrono::system_clock::now() + std::chrono::seconds(kDeadline); }

void Check(const Status& status, const char* what) {
  if (!status.ok()) Fail(std::string(what) + ": " + status.error_message());
}

// The settings that were fastest of those that were tried, for servers and clients alike.
template <typename Set>
void Tune(Set set) {
  set(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, 16777215);
  set(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 8 << 20);
  set(GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, 1 << 20);
  // Read in pieces that stay in cache.
  for (auto name : {"grpc.experimental.tcp_read_chunk_size", "grpc.experimental.tcp_min_read_chunk_size",
                    "grpc.experimental.tcp_max_read_chunk_size"}) {
    set(name, 256 << 10);
  }
}

// What is in front of every message: where it belongs. `added` is for requests: answer once as many bytes are added.
struct Head {
  uint64_t offset, length, added;
};

ByteBuffer Message(const Head& head, char* bytes) {
  Slice slices[] = {Slice(&head, sizeof head), Slice(bytes, head.length, Slice::STATIC_SLICE)};
  return ByteBuffer(slices, bytes ? 2 : 1);
}

// Calls `take(offset, bytes, count)` for each piece of what came, in order.
template <typename Take>
Head Parse(const ByteBuffer& message, Take take) {
  std::vector<Slice> slices;
  message.Dump(&slices);
  Head head = {};
  size_t known = 0, at = 0;
  for (const Slice& slice : slices) {
    const char* bytes = reinterpret_cast<const char*>(slice.begin());
    size_t left = slice.size();
    size_t of_head = std::min(left, sizeof head - known);
    memcpy(reinterpret_cast<char*>(&head) + known, bytes, of_head);
    known += of_head;
    left -= of_head;
    if (left) take(head.offset + at, bytes + of_head, left);
    at += left;
  }
  if (known < sizeof head) Fail("a message without a head");
  return head;
}

class Shard : public grpc::Service {
 public:
  Shard(size_t bytes, size_t chunk)
      : bytes_(bytes), chunk_(chunk), weights_(Memory(bytes)), locks_((bytes + kLocked - 1) / kLocked) {
    using namespace grpc::internal;
    Serve<RpcMethodHandler<Shard, ByteBuffer, ByteBuffer>>(
        kPushTensor, RpcMethod::NORMAL_RPC, [this](auto*, auto*, const ByteBuffer* request, ByteBuffer* answer) {
          Note(Take(*request));
          *answer = Message({}, nullptr);
          return Status::OK;
        });
    Serve<RpcMethodHandler<Shard, ByteBuffer, ByteBuffer>>(
        kPullTensor, RpcMethod::NORMAL_RPC, [this](auto*, auto*, const ByteBuffer* request, ByteBuffer* answer) {
          Head wanted = Wanted(*request);
          *answer = Message(wanted, weights_ + wanted.offset);
          return Status::OK;
        });
    Serve<ClientStreamingHandler<Shard, ByteBuffer, ByteBuffer>>(
        kPush, RpcMethod::CLIENT_STREAMING, [this](auto*, auto*, auto* reader, ByteBuffer* answer) {
          ByteBuffer chunk;
          uint64_t bytes = 0;
          for (; reader->Read(&chunk); chunk.Clear()) bytes += Take(chunk);
          Note(bytes);
          *answer = Message({}, nullptr);
          return Status::OK;
        });
    Serve<ServerStreamingHandler<Shard, ByteBuffer, ByteBuffer>>(
        kPull, RpcMethod::SERVER_STREAMING, [this](auto*, auto*, const ByteBuffer* request, auto* writer) {
          Head wanted = Wanted(*request);
          for (size_t done = 0; done < wanted.length; done += chunk_) {
            size_t length = std::min<size_t>(chunk_, wanted.length - done), at = wanted.offset + done;
            if (!writer->Write(Message({at, length, 0}, weights_ + at))) break;
          }
          return Status::OK;
        });
  }

 private:
  template <typename Handler, typename Call>
  void Serve(const char* name, RpcMethod::RpcType type, Call call) {
    AddMethod(new grpc::internal::RpcServiceMethod(name, type, new Handler(call, this)));
  }

  // Adds what came, from where it was received; a value may lie across two slices.
  uint64_t Take(const ByteBuffer& message) {
    char value[4];
    size_t known = 0;
    uint64_t taken = 0;
    Parse(message, [&](size_t offset, const char* bytes, size_t count) {
      if (offset > bytes_ || count > bytes_ - offset) Fail("gradients beyond the model");
      taken += count;
      while (known && count) {
        value[known++] = *bytes++;
        offset++;
        count--;
        if (known == 4) {
          AddLocked(offset - 4, value, 4);
          known = 0;
        }
      }
      size_t whole = count & ~size_t{3};
      AddLocked(offset, bytes, whole);
      if (count > whole) memcpy(value, bytes + whole, known = count - whole);
    });
    return taken;
  }

  void AddLocked(size_t offset, const char* bytes, size_t count) {
    while (count) {
      size_t piece = std::min(count, kLocked - offset % kLocked);
      std::lock_guard<std::mutex> lock(locks_[offset / kLocked]);
      Add(reinterpret_cast<float*>(weights_ + offset), bytes, piece / 4);
      offset += piece;
      bytes += piece;
      count -= piece;
    }
  }

  void Note(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    added_ += bytes;
    changed_.notify_all();
  }

  // What a request is for, once it can be had.
  Head Wanted(const ByteBuffer& request) {
    Head wanted = Parse(request, [](size_t, const char*, size_t) {});
    if (wanted.offset > bytes_ || wanted.length > bytes_ - wanted.offset) Fail("weights beyond the model");
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(kDeadline), [&] { return added_ >= wanted.added; })) Fail("not all gradients came");
    return wanted;
  }

  const size_t bytes_, chunk_;
  char* const weights_;
  std::vector<std::mutex> locks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t added_ = 0;  // Bytes of all gradients so far.
};

// What one call at a time moves.
struct Part {
  std::shared_ptr<grpc::Channel> channel;
  size_t offset, place, length, shard;  // `offset` is within the shard of `shard` bytes, `place` within the model.
};

class Learner {
 public:
  explicit Learner(const Options& options)
      : bytes_(options.Number("bytes")),
        learners_(options.Number("learners")),
        chunk_(options.Number("chunk", 1 << 20)),
        tensors_(options.Number("tensors", 0)),
        gradients_(Memory(bytes_)),
        weights_(Memory(bytes_)) {
    Fill(gradients_, bytes_, options.Number("rank"));
    size_t calls = options.Number("calls", 1), shards = options.rest.size();
    for (size_t index = 0; index < shards; index++) {
      size_t start = ShareStart(bytes_, index, shards), shard = ShareStart(bytes_, index + 1, shards) - start;
      auto channel = Connect(options.rest[index]);
      for (size_t i = 0; i < calls; i++) {
        size_t from = ShareStart(shard, i, calls), to = ShareStart(shard, i + 1, calls);
        parts_.push_back({channel, from, start + from, to - from, shard});
      }
    }
    if (parts_.empty()) Fail("no servers");
  }

  // One push, pull or step; gives the bytes that were moved.
  size_t Round(const std::string& what) {
    bool push = what != "pull", pull = what != "push";
    if (what != "step" && push && pull) Fail("unknown round " + what);
    pushes_ += push;
    AtOnce(parts_.size(), [&](size_t index) {
      if (push) Push(parts_[index]);
      if (pull) Pull(parts_[index], push ? pushes_ * learners_ * parts_[index].shard : 0);
    });
    return bytes_ * (push + pull);
  }

  void Verify(size_t pushes) { CheckWeights(weights_, bytes_, learners_, pushes); }

 private:
  static std::shared_ptr<grpc::Channel> Connect(const std::string& server) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetMaxSendMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection for each channel.
    Tune([&](const char* name, int value) { arguments.SetInt(name, value); });
    auto channel = grpc::CreateCustomChannel(server, grpc::InsecureChannelCredentials(), arguments);
    if (!channel->WaitForConnected(Deadline())) Fail("cannot connect to " + server);
    return channel;
  }

  // The context of a call, with a deadline.
  struct Context : grpc::ClientContext {
    Context() { set_deadline(Deadline()); }
  };

  // A call for each chunk of a part, of which `request(done)` is about one; `take(answer)` has what came.
  template <typename Request, typename Take>
  void Unary(const Part& part, const char* name, Request request, Take take) {
    RpcMethod method(name, RpcMethod::NORMAL_RPC, part.channel);
    for (size_t done = 0; done < part.length; done += chunk_) {
      Context context;
      ByteBuffer answer;
      Check(grpc::internal::BlockingUnaryCall<ByteBuffer, ByteBuffer>(part.channel.get(), method, &context, request(done),
                                                                      &answer), name);
      take(answer);
    }
  }

  ByteBuffer Gradients(const Part& part, size_t done) {
    return Message({part.offset + done, std::min(chunk_, part.length - done), 0}, gradients_ + part.place + done);
  }

  void Push(const Part& part) {
    if (tensors_) {
      auto ignored = [](const ByteBuffer&) {};
      return Unary(part, kPushTensor, [&](size_t done) { return Gradients(part, done); }, ignored);
    }
    ByteBuffer answer;
    Context context;
    RpcMethod method(kPush, RpcMethod::CLIENT_STREAMING, part.channel);
    std::unique_ptr<grpc::ClientWriter<ByteBuffer>> writer(grpc::internal::ClientWriterFactory<ByteBuffer>::Create(
        part.channel.get(), method, &context, &answer));
    for (size_t done = 0; done < part.length; done += chunk_) {
      if (!writer->Write(Gradients(part, done))) break;
    }
    writer->WritesDone();
    Check(writer->Finish(), "Push");
  }

  // Waits until the shard has added up `added` bytes.
  void Pull(const Part& part, uint64_t added) {
    size_t taken = 0;
    auto take = [&](const ByteBuffer& answer) {
      Parse(answer, [&](size_t offset, const char* bytes, size_t count) {
        if (offset < part.offset || offset + count > part.offset + part.length) Fail("weights that were not wanted");
        memcpy(weights_ + part.place + offset - part.offset, bytes, count);
        taken += count;
      });
    };
    if (tensors_) {
      auto wanted = [&](size_t done) {
        return Message({part.offset + done, std::min(chunk_, part.length - done), added}, nullptr);
      };
      Unary(part, kPullTensor, wanted, take);
    } else {
      Context context;
      RpcMethod method(kPull, RpcMethod::SERVER_STREAMING, part.channel);
      std::unique_ptr<grpc::ClientReader<ByteBuffer>> reader(grpc::internal::ClientReaderFactory<ByteBuffer>::Create(
          part.channel.get(), method, &context, Message({part.offset, part.length, added}, nullptr)));
      for (ByteBuffer answer; reader->Read(&answer); answer.Clear()) take(answer);
      Check(reader->Finish(), "Pull");
    }
    if (taken != part.length) Fail("weights are missing");
  }

  const size_t bytes_, learners_, chunk_;
  const bool tensors_;
  char *const gradients_, *const weights_;
  std::vector<Part> parts_;
  size_t pushes_ = 0;
};

[[noreturn]] void RunServer(const Options& options) {
  Shard shard(options.Number("bytes"), options.Number("chunk", 1 << 20));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&shard);
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  Tune([&](const char* name, int value) { builder.AddChannelArgument(name, value); });
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (!server) Fail("cannot serve");
  Serve(port);
}

}  // namespace

// Congestion control for each socket that gRPC opens, for which it has no option: cubic as with bare sockets.
extern "C" int socket(int domain, int type, int protocol) noexcept {
  static auto real = reinterpret_cast<int (*)(int, int, int)>(dlsym(RTLD_NEXT, "socket"));
  int opened = real(domain, type, protocol);
  if (opened >= 0 && (type & 0xf) == SOCK_STREAM && (domain == AF_INET || domain == AF_INET6)) {
    setsockopt(opened, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5);
  }
  return opened;
}

int main(int count, char** words) {
  std::string mode = count > 1 ? words[1] : "";
  Options options(count, words, 2);
  if (mode == "server") RunServer(options);
  if (mode != "learner") Fail("usage: grpc server|learner [--name value]... [SERVER]...");
  Learner learner(options);
  Learn([&](const std::string& what) { return learner.Round(what); }, [&](size_t pushes) { learner.Verify(pushes); });
}
