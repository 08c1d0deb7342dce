// What the rivals of gradfs have in common: the model's memory, the adds, the rounds that a driver asks for.
//
// A server process holds the weights, learner processes push gradients and pull weights. All are made for speed alone:
// nothing is checked on the way, nothing survives an error, nobody may come late.
//
// A driver writes lines to a learner's standard input, and each is answered with a line of JSON:
//
//   round WHAT         does it: `what`, `bytes` (moved for this process), `start`, `end`, `seconds` (of CLOCK_MONOTONIC)
//                      and `cpu_seconds` (of this process, meanwhile)
//   repeat COUNT WHAT  does it so many times: `what` and a list of `seconds`
//   check PUSHES       compares what the last pull brought: `what`
//
// The end of the input is the end of the process. The first line of a process is {"what": "ready"}, with a server's `address`.

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

constexpr size_t kLocked = 256 << 10;  // Pieces of the weights that have a lock each.
constexpr size_t kPage = 4096, kHuge = 2 << 20;
constexpr int kDeadline = 60;  // Nothing that is waited for takes longer, in seconds.

// Ends the process; the driver sees that and says so.
[[noreturn]] inline void Fail(const std::string& why) {
  fprintf(stderr, "%s: %s\n", program_invocation_short_name, why.c_str());
  _exit(1);
}

[[noreturn]] inline void FailCall(const std::string& what) { Fail(what + ": " + strerror(errno)); }

// `--name value` pairs and the rest of the command line.
struct Options {
  std::map<std::string, std::string> named;
  std::vector<std::string> rest;

  Options(int count, char** words, int first) {
    for (int i = first; i < count; i++) {
      std::string word = words[i];
      if (word.rfind("--", 0) != 0) {
        rest.push_back(word);
      } else if (i + 1 < count) {
        named[word.substr(2)] = words[++i];
      } else {
        Fail(word + " needs a value");
      }
    }
  }

  std::string Word(const std::string& name, const std::string& otherwise = "") const {
    auto found = named.find(name);
    return found == named.end() ? otherwise : found->second;
  }

  size_t Number(const std::string& name, size_t otherwise) const {
    return named.count(name) ? strtoull(named.at(name).c_str(), nullptr, 10) : otherwise;
  }

  size_t Number(const std::string& name) const {
    if (!named.count(name)) Fail("--" + name + " is missing");
    return Number(name, 0);
  }
};

inline double Now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

inline double CpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

// Memory for a model, on huge pages where there are any, and touched. Of the file `fd`, or private.
inline char* Memory(size_t bytes, int fd = -1) {
  // A huge page is mapped as one only at a multiple of its size.
  void* room = mmap(nullptr, bytes + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) FailCall("mmap");
  auto place = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(room) + kHuge - 1) / kHuge * kHuge);
  int flags = MAP_FIXED | (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED);
  void* start = mmap(place, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (start == MAP_FAILED) FailCall("mmap");
  madvise(start, bytes, MADV_HUGEPAGE);
  if (madvise(start, bytes, 23 /* MADV_POPULATE_WRITE */)) memset(start, 0, bytes);
  return static_cast<char*>(start);
}

inline int Memfd(const char* name, size_t bytes) {
  int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, bytes)) FailCall("memfd_create");
  return fd;
}

// The first byte of share `index` of `count` of `bytes` bytes: whole pages apart from the last.
inline size_t ShareStart(size_t bytes, size_t index, size_t count) {
  size_t pages = (bytes + kPage - 1) / kPage;
  return std::min(bytes, pages * index / count * kPage);
}

// Gradients whose sums are known and exact: small whole numbers.
inline float Gradient(size_t index, size_t rank) { return index % 97 + rank + 1; }

inline void Fill(char* memory, size_t bytes, size_t rank) {
  for (size_t i = 0; i < bytes / 4; i++) reinterpret_cast<float*>(memory)[i] = Gradient(i, rank);
}

inline void CheckWeights(const char* weights, size_t bytes, size_t learners, size_t pushes) {
  for (size_t i = 0; i < bytes / 4; i++) {
    float right = 0, found = reinterpret_cast<const float*>(weights)[i];
    for (size_t rank = 0; rank < learners; rank++) right += Gradient(i, rank);
    if (found != right * pushes) Fail("element " + std::to_string(i) + " is " + std::to_string(found));
  }
}

// 256 bits it is: AVX-512 was no faster in cache and slower to warm up.
#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
inline void Add(float* __restrict weights, const char* __restrict gradients, size_t count) {
  for (size_t i = 0; i < count; i++) {
    float gradient;
    memcpy(&gradient, gradients + 4 * i, 4);
    weights[i] += gradient;
  }
}

// Calls `part(index)` for each, in a thread of its own but for the first.
template <typename Part>
void AtOnce(size_t count, Part part) {
  std::vector<std::thread> threads;
  for (size_t i = 1; i < count; i++) threads.emplace_back(part, i);
  part(0);
  for (std::thread& thread : threads) thread.join();
}

inline void SetBuffers(int socket, const Options& options) {
  int size = options.Number("socket-buffer", 0);
  if (size) setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
  if (size) setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

// Fails in the middle of the bytes; before them the connection may have ended.
inline bool ReceiveAll(int socket, void* to, size_t size) {
  for (size_t got = 0; got < size;) {
    // As much as there is to come, in one call.
    ssize_t count = recv(socket, static_cast<char*>(to) + got, size - got, MSG_WAITALL);
    if (count == 0 && got == 0) return false;
    if (count <= 0) FailCall("recv");
    got += count;
  }
  return true;
}

template <typename... Values>
void Tell(const char* line, Values... values) {
  printf(line, values...);
  putchar('\n');
  fflush(stdout);
}

// Serves the driver with `round(what)`, which gives the bytes that it moved, and `check(pushes)`.
template <typename Round, typename Checking>
[[noreturn]] void Learn(Round round, Checking check) {
  Tell(R"({"what": "ready"})");
  for (std::string line; std::getline(std::cin, line);) {
    size_t blank = line.find(' ');
    std::string request = line.substr(0, blank), what = blank == std::string::npos ? "" : line.substr(blank + 1);
    if (request == "round") {
      double cpu = CpuSeconds(), start = Now();
      size_t bytes = round(what);
      double end = Now();
      Tell(R"({"what": "%s", "bytes": %zu, "start": %.9f, "end": %.9f, "seconds": %.9f, "cpu_seconds": %.6f})",
           what.c_str(), bytes, start, end, end - start, CpuSeconds() - cpu);
    } else if (request == "repeat") {
      size_t count = strtoull(what.c_str(), nullptr, 10);
      what = what.substr(what.find(' ') + 1);
      std::string seconds;
      for (size_t i = 0; i < count; i++) {
        double start = Now();
        round(what);
        seconds += (i ? ", " : "") + std::to_string(1e6 * (Now() - start)) + "e-6";
      }
      Tell(R"({"what": "%s", "seconds": [%s]})", what.c_str(), seconds.c_str());
    } else if (request == "check") {
      check(strtoull(what.c_str(), nullptr, 10));
      Tell(R"({"what": "check"})");
    } else {
      Fail("unknown request " + line);
    }
  }
  _exit(0);  // Nobody is waiting for an orderly end.
}

// Tells the driver where the server is, whose own threads serve learners until the driver ends it.
[[noreturn]] inline void Serve(int port) {
  Tell(R"({"what": "ready", "address": "127.0.0.1:%d"})", port);
  for (std::string line; std::getline(std::cin, line);) Fail("unknown request " + line);
  _exit(0);
}
