// libmodelio for C++17: handles that close themselves, and errors as exceptions. See modelio.h for what each call does.

#ifndef MODELIO_HPP
#define MODELIO_HPP

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "modelio.h"

namespace modelio {

using std::chrono::milliseconds;

// A call has failed. `code()` has the errno, `what()` the words.
class Error : public std::system_error {
public:
    explicit Error(int errnum) : std::system_error(errnum, std::generic_category(), modelio_error()) {}
};

template <typename Number>
Number check(Number answer) {
    if (answer < 0) throw Error(static_cast<int>(-answer));
    return answer;
}

// As many milliseconds as a call takes: 49 days at most.
inline std::uint32_t count(milliseconds timeout) {
    const milliseconds::rep most = UINT32_MAX;
    return static_cast<std::uint32_t>(std::clamp<milliseconds::rep>(timeout.count(), 0, most));
}

// A handle, which is closed with the object.
class Handle {
public:
    Handle() = default;
    explicit Handle(modelio_handle handle) : handle_(handle) {}
    Handle(Handle &&other) noexcept : handle_(std::exchange(other.handle_, 0)) {}
    Handle &operator=(Handle &&other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Handle() { close(); }

    void close() noexcept {
        if (handle_ != 0) modelio_close(std::exchange(handle_, 0));
    }
    modelio_handle get() const noexcept { return handle_; }

protected:
    modelio_handle handle_ = 0;
};

// A version, whose bytes stay unchanged as long as the object.
class Weights : public Handle {
public:
    using Handle::Handle;

    modelio_version_info info() const {
        modelio_version_info info{};
        check(modelio_weights(handle_, &info));
        return info;
    }
    const void *data() const { return info().data; }
    std::uint64_t size() const { return info().size; }
    std::uint64_t version() const { return info().version; }
};

// What a model and a learner have in common.
class Reading : public Handle {
public:
    using Handle::Handle;

    std::string text(const std::string &file) const {
        std::string text(static_cast<std::size_t>(check(modelio_get(handle_, file.c_str(), nullptr, 0))), '\0');
        const auto length = check(modelio_get(handle_, file.c_str(), text.data(), text.size()));
        text.resize(std::min(text.size(), static_cast<std::size_t>(length)));
        return text;
    }
    void set(const std::string &file, const std::string &value, milliseconds timeout) {
        check(modelio_set(handle_, file.c_str(), value.c_str(), count(timeout)));
    }
    Weights weights(milliseconds timeout) const {
        modelio_handle weights = 0;
        check(modelio_open_weights(handle_, count(timeout), &weights));
        return Weights(weights);
    }
};

// What a learner and a publication have in common.
template <typename Base>
class Writing : public Base {
public:
    using Base::Base;

    void write(const void *data, std::size_t size, std::uint64_t offset, milliseconds timeout) {
        check(modelio_write(this->handle_, static_cast<const std::uint8_t *>(data), size, offset, count(timeout)));
    }
    void commit(milliseconds timeout) { check(modelio_commit(this->handle_, count(timeout))); }
    void abort(milliseconds timeout) { check(modelio_abort(this->handle_, count(timeout))); }
};

// New weights.
class Publication : public Writing<Handle> {
public:
    using Writing<Handle>::Writing;

    // Says something of the version that the commit makes.
    void describe(const std::string &name, const std::string &text) {
        check(modelio_set(handle_, ("user." + name).c_str(), text.c_str(), 0));
    }
};

// A learner, which leaves the job with the object.
class Learner : public Writing<Reading> {
public:
    using Writing<Reading>::Writing;

    void all_reduce(const std::string &op, std::vector<double> &values, milliseconds timeout) {
        check(modelio_all_reduce(handle_, op.c_str(), values.data(), values.size(), count(timeout)));
    }
};

// A model without a mount.
class Model : public Reading {
public:
    explicit Model(const std::string &url, const modelio_options *options = nullptr) {
        check(modelio_connect(url.c_str(), options, &handle_));
    }

    std::uint64_t wait(std::uint64_t newer_than, milliseconds timeout) const {
        std::uint64_t version = 0;
        check(modelio_wait_version(handle_, newer_than, count(timeout), &version));
        return version;
    }
    Learner join(milliseconds timeout, const char *name = nullptr) {
        modelio_handle learner = 0;
        check(modelio_join(handle_, name, count(timeout), &learner));
        return Learner(learner);
    }
    Publication publish() {
        modelio_handle publication = 0;
        check(modelio_publish(handle_, &publication));
        return Publication(publication);
    }
};

// Requests under way.
class Queue : public Handle {
public:
    explicit Queue(const modelio_queue_options *options = nullptr) { check(modelio_queue(options, &handle_)); }

    int add(int descriptor) { return check(modelio_add_file(handle_, descriptor)); }
    int add(const Handle &learner_or_weights) { return check(modelio_add(handle_, learner_or_weights.get())); }
    void remove(int file) { check(modelio_remove(handle_, file)); }
    void register_memory(void *data, std::size_t size) { check(modelio_register(handle_, data, size)); }
    // How many were taken. Of the first that was not, `modelio_error` says why.
    std::size_t submit(std::vector<modelio_request> &requests) {
        return static_cast<std::size_t>(check(modelio_submit(handle_, requests.data(), requests.size())));
    }
    std::vector<modelio_completion> wait(std::size_t min, std::size_t max, milliseconds timeout) {
        std::vector<modelio_completion> ended(max);
        ended.resize(static_cast<std::size_t>(check(modelio_wait(handle_, min, ended.data(), max, count(timeout)))));
        return ended;
    }
    void cancel(std::uint64_t id) { check(modelio_cancel(handle_, id)); }
};

}  // namespace modelio

#endif  // MODELIO_HPP
