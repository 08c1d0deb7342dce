// Bare blocking sockets: learners push all their gradients, a server adds them, learners pull the weights.
//
// A server has a thread for each connection. It receives into a buffer that stays in the core's cache and adds from there
// straight to the weights, piece by piece under a lock: no accumulator, no version, no second pass. So only who knows that
// nobody reads meanwhile may push. It does nothing of what a real shard has to do besides.
//
//   sockets server --bytes N --learners N [--connections N] [--send copied|pages] [--socket-buffer BYTES]
//   sockets learner --bytes N --rank N --learners N ... SERVER...

#include "common.h"

#include <arpa/inet.h>
#include <sys/sendfile.h>

#include <condition_variable>
#include <mutex>

namespace {

constexpr char kPush = 1, kPull = 2, kStep = 3, kDone = 4;

struct Model {
  int fd;
  char* bytes;

  Model(const char* name, size_t size) : fd(Memfd(name, size)), bytes(Memory(size, fd)) {}
};

int Socket(const Options& options) {
  int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  // BBR, the default of some systems, paces where there is nothing to be careful of.
  if (made < 0 || setsockopt(made, IPPROTO_TCP, TCP_CONGESTION, "cubic", 5)) FailCall("socket");
  SetBuffers(made, options);
  if (setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on)) FailCall("TCP_NODELAY");
  return made;
}

void Send(int socket, const void* from, size_t size, int flags = 0) {
  for (size_t sent = 0; sent < size;) {
    ssize_t count = send(socket, static_cast<const char*>(from) + sent, size - sent, MSG_NOSIGNAL | flags);
    if (count <= 0) FailCall("send");
    sent += count;
  }
}

// By send(2), or by sendfile(2): loopback passes the pages on then, and only the receiver copies.
void SendModel(int socket, const Model& model, size_t offset, size_t size, bool pages) {
  if (!pages) return Send(socket, model.bytes + offset, size);
  off_t at = offset;
  while (static_cast<size_t>(at) < offset + size) {
    if (sendfile(socket, model.fd, &at, offset + size - at) <= 0) FailCall("sendfile");
  }
}

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

class Shard {
 public:
  explicit Shard(const Options& options)
      : model_("shard", options.Number("bytes")),
        locks_((options.Number("bytes") + kLocked - 1) / kLocked),
        connections_(options.Number("learners") * options.Number("connections", 1)),
        pages_(options.Word("send") == "pages") {}

  // Serves one connection until it closes.
  void Handle(int socket) {
    uint64_t place[3];
    if (!ReceiveAll(socket, place, sizeof place)) return;
    auto [offset, first, size] = place;
    std::vector<char> buffer(kLocked);
    for (char request; ReceiveAll(socket, &request, 1);) {
      if (request != kPull) {
        Take(socket, offset + first, size - first, buffer);
        Take(socket, offset, first, buffer);
      }
      if (request == kPush) {
        Send(socket, &kDone, 1);
        continue;
      }
      if (request == kStep) Meet();
      SendModel(socket, model_, offset, size, pages_);
    }
    close(socket);
  }

 private:
  // Adds what comes.
  void Take(int socket, size_t at, size_t size, std::vector<char>& buffer) {
    for (size_t end = at + size; at < end;) {
      // Up to a border of the locked pieces, so that one lock does.
      size_t piece = std::min(end - at, kLocked - at % kLocked);
      if (!ReceiveAll(socket, buffer.data(), piece)) Fail("gradients are missing");
      std::lock_guard<std::mutex> lock(locks_[at / kLocked]);
      Add(reinterpret_cast<float*>(model_.bytes + at), buffer.data(), piece / 4);
      at += piece;
    }
  }

  // A round waits here until all connections are as far.
  void Meet() {
    std::unique_lock<std::mutex> lock(mutex_);
    size_t round = round_;
    if (++came_ == connections_) {
      came_ = 0;
      round_++;
      changed_.notify_all();
    } else if (!changed_.wait_for(lock, std::chrono::seconds(kDeadline), [&] { return round_ != round; })) {
      Fail("not all connections came");
    }
  }

  const Model model_;
  std::vector<std::mutex> locks_;
  const size_t connections_;
  const bool pages_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t came_ = 0, round_ = 0;
};

[[noreturn]] void RunServer(const Options& options) {
  auto shard = new Shard(options);
  int listener = Socket(options);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  auto name = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, name, length) || listen(listener, 128) || getsockname(listener, name, &length)) FailCall("listen");
  std::thread([=] {
    // What is accepted is tuned as the listener.
    for (int socket; (socket = accept(listener, nullptr, nullptr)) >= 0;) {
      std::thread([=] { shard->Handle(socket); }).detach();
    }
  }).detach();
  Serve(ntohs(address.sin_port));
}

struct Connection {
  int socket;
  // Within the whole model; pushes begin at `first`: learners begin at different places, and keep out of each other's way.
  size_t offset, first, size;
};

int Connect(const Options& options, const std::string& server) {
  int made = Socket(options);
  sockaddr_in address = Loopback(atoi(server.substr(server.find(':') + 1).c_str()));
  timeval deadline = {kDeadline, 0};
  setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &deadline, sizeof deadline);
  setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &deadline, sizeof deadline);
  if (connect(made, reinterpret_cast<sockaddr*>(&address), sizeof address)) FailCall("connect " + server);
  return made;
}

[[noreturn]] void RunLearner(const Options& options) {
  size_t bytes = options.Number("bytes"), rank = options.Number("rank"), learners = options.Number("learners");
  size_t servers = options.rest.size(), each = options.Number("connections", 1);
  bool pages = options.Word("send") == "pages";
  std::vector<Connection> connections;
  for (size_t index = 0; index < servers; index++) {
    size_t start = ShareStart(bytes, index, servers), part = ShareStart(bytes, index + 1, servers) - start;
    for (size_t i = 0; i < each; i++) {
      size_t offset = ShareStart(part, i, each), size = ShareStart(part, i + 1, each) - offset;
      uint64_t place[] = {offset, ShareStart(size, rank, learners), size};
      int socket = Connect(options, options.rest[index]);
      Send(socket, place, sizeof place);
      connections.push_back({socket, start + offset, place[1], size});
    }
  }
  if (connections.empty()) Fail("no servers");
  Model gradients("gradients", bytes), weights("weights", bytes);
  Fill(gradients.bytes, bytes, rank);

  auto round = [&](const std::string& what) {
    char request = what == "push" ? kPush : what == "pull" ? kPull : what == "step" ? kStep : 0;
    if (!request) Fail("unknown round " + what);
    AtOnce(connections.size(), [&](size_t index) {
      const Connection& to = connections[index];
      Send(to.socket, &request, 1, request == kPull ? 0 : MSG_MORE);
      if (request != kPull) {
        SendModel(to.socket, gradients, to.offset + to.first, to.size - to.first, pages);
        SendModel(to.socket, gradients, to.offset, to.first, pages);
      }
      char done = kDone;
      if (request == kPush ? !ReceiveAll(to.socket, &done, 1) || done != kDone
                           : !ReceiveAll(to.socket, weights.bytes + to.offset, to.size)) {
        Fail("the server has ended");
      }
    });
    return bytes * (request == kStep ? 2 : 1);
  };
  Learn(round, [&](size_t pushes) { CheckWeights(weights.bytes, bytes, learners, pushes); });
}

}  // namespace

int main(int count, char** words) {
  std::string mode = count > 1 ? words[1] : "";
  Options options(count, words, 2);
  if (mode == "server") RunServer(options);
  if (mode == "learner") RunLearner(options);
  Fail("usage: sockets server|learner [--name value]... [SERVER]...");
}
