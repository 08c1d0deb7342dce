// A client of Redis: SET and GET of one large value, through hiredis.
//
//   redis (--unix PATH | --port PORT) --key NAME --bytes COUNT --way plain|direct [--socket-buffer BYTES]
//
// `plain` is redisCommandArgv, which copies a value into its output buffer, and replies into an object. `direct` copies
// nothing: it sends the value from where it lies, with the command around it, and receives a value to where it is wanted.
// hiredis has the connection in both. Rounds are `set`, `get` and `setget`; `check` gets the value that was set last.

#include "common.h"

#include <hiredis/hiredis.h>
#include <sys/uio.h>

namespace {

class Client {
 public:
  explicit Client(const Options& options)
      : bytes_(options.Number("bytes")),
        key_(options.Word("key")),
        direct_(options.Word("way") == "direct"),
        value_(Memory(bytes_)),
        got_(Memory(bytes_)) {
    std::string path = options.Word("unix");
    context_ = path.empty() ? redisConnect("127.0.0.1", options.Number("port")) : redisConnectUnix(path.c_str());
    if (!context_ || context_->err) Fail(context_ ? context_->errstr : "no memory");
    SetBuffers(context_->fd, options);
    memset(value_, 1, bytes_);
    memset(got_, 1, bytes_);
  }

  // The bytes that were moved.
  size_t Round(const std::string& what) {
    bool sets = what != "get", gets = what != "set";
    if (sets && gets && what != "setget") Fail("unknown round " + what);
    if (sets) {
      // The value is another one each time.
      memset(value_, sets_++ % 100 + 1, 64);
      Set();
    }
    if (gets) Get();
    return bytes_ * (sets + gets);
  }

  void Check() {
    got_[0] = got_[bytes_ - 1] = 0;
    Get();
    if (got_[0] != value_[0] || got_[bytes_ - 1] != 1) Fail("the value is not the one that was set");
  }

 private:
  void Send(std::vector<iovec> parts) {
    for (size_t first = 0; first < parts.size();) {
      msghdr message = {};
      message.msg_iov = &parts[first];
      message.msg_iovlen = parts.size() - first;
      ssize_t sent = sendmsg(context_->fd, &message, MSG_NOSIGNAL);
      if (sent < 0) FailCall("sendmsg");
      size_t left = sent;
      for (; first < parts.size() && left >= parts[first].iov_len; first++) left -= parts[first].iov_len;
      if (first < parts.size()) parts[first] = {static_cast<char*>(parts[first].iov_base) + left, parts[first].iov_len - left};
    }
  }

  void Receive(char* to, size_t size) {
    if (!ReceiveAll(context_->fd, to, size)) Fail("the server has ended");
  }

  void ExpectOk(void* reply) {
    auto found = static_cast<redisReply*>(reply);
    if (!found || found->type != REDIS_REPLY_STATUS) Fail("SET was answered with something else");
    freeReplyObject(found);
  }

  void Set() {
    if (!direct_) {
      const char* words[] = {"SET", key_.c_str(), value_};
      const size_t lengths[] = {3, key_.size(), bytes_};
      return ExpectOk(redisCommandArgv(context_, 3, words, lengths));
    }
    std::string head = "*3\r\n$3\r\nSET\r\n$" + std::to_string(key_.size()) + "\r\n" + key_ + "\r\n$" +
                       std::to_string(bytes_) + "\r\n";
    Send({{head.data(), head.size()}, {value_, bytes_}, {const_cast<char*>("\r\n"), 2}});
    void* reply = nullptr;
    if (redisGetReply(context_, &reply) != REDIS_OK) Fail(context_->errstr);
    ExpectOk(reply);
  }

  void Get() {
    if (!direct_) {
      auto reply = static_cast<redisReply*>(redisCommand(context_, "GET %s", key_.c_str()));
      if (!reply || reply->type != REDIS_REPLY_STRING || reply->len != bytes_) Fail("GET was answered with another value");
      // The reply is the program's own buffer.
      got_[0] = reply->str[0];
      got_[bytes_ - 1] = reply->str[bytes_ - 1];
      return freeReplyObject(reply);
    }
    std::string words = "*2\r\n$3\r\nGET\r\n$" + std::to_string(key_.size()) + "\r\n" + key_ + "\r\n";
    std::string head = "$" + std::to_string(bytes_) + "\r\n", came(head.size() + 2, 0);
    Send({{words.data(), words.size()}});
    Receive(came.data(), head.size());
    if (came.compare(0, head.size(), head) != 0) Fail("GET was answered with another value");
    Receive(got_, bytes_);
    Receive(came.data(), 2);
  }

  const size_t bytes_;
  const std::string key_;
  const bool direct_;
  char *const value_, *const got_;
  redisContext* context_;
  unsigned sets_ = 0;
};

}  // namespace

int main(int count, char** words) {
  Options options(count, words, 1);
  Client client(options);
  Learn([&](const std::string& what) { return client.Round(what); }, [&](size_t) { client.Check(); });
}
