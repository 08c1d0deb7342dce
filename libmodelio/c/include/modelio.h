/*
 * libmodelio: models of gradfs without a mount, and batched asynchronous I/O.
 *
 * Everything is a handle: a number that no closed handle had. A call returns 0 or more, or a negative errno; then
 * modelio_error() says why, for the calling thread. Calls may come from any thread. None waits longer than its timeout,
 * but for modelio_close(). A process that was forked from one that uses the library cannot use it before exec.
 *
 *     cc train.c $(pkg-config --cflags --libs modelio)
 *
 * This file is made from libmodelio/c/src by cbindgen.
 */

#ifndef MODELIO_H
#define MODELIO_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/*
 What a request does.
 */
enum modelio_op {
  /*
   Reads into `data`.
   */
  MODELIO_READ = 0,
  /*
   Writes `data`.
   */
  MODELIO_WRITE = 1,
  /*
   Commits what was submitted before for the file, as fsync(2) does. It has no data.
   */
  MODELIO_SYNC = 2,
};

/*
 What is open: a model, weights, a learner, a publication or a queue. A number is given once in the life of a process.
 */
typedef int64_t modelio_handle;

/*
 The options of a connection. Fill it with zeros first: a zero, or NULL, is the default.
 */
struct modelio_options {
  /*
   "auto" (the default), "tcp", "shm" or "rdma".
   */
  const char *transport;
  /*
   Threads that move bytes (2).
   */
  uint32_t threads;
  /*
   The longest wait for the registry, the shards and the first version, in milliseconds (10,000).
   */
  uint32_t connect_timeout_ms;
};

/*
 A version that is held open.
 */
struct modelio_version_info {
  /*
   The bytes, laid out as `layout` says. They stay unchanged until the handle is closed.
   */
  const uint8_t *data;
  /*
   Their number.
   */
  uint64_t size;
  /*
   The number of the version.
   */
  uint64_t version;
  /*
   The life of the model that it is a version of. A restored job begins another one, and goes on counting.
   */
  uint64_t epoch;
};

/*
 The options of a queue. Fill it with zeros first: a zero is the default.
 */
struct modelio_queue_options {
  /*
   The most pieces under way (32).
   */
  uint32_t depth;
  /*
   The most bytes of a piece, into which requests are cut (1 MiB).
   */
  uint32_t piece;
  /*
   0: io_uring where it can be used, else threads. 1: io_uring. 2: threads.
   */
  uint32_t engine;
};

/*
 A function that is called with the context and the outcome of a request, by the thread that waits.
 */
typedef void (*modelio_callback)(void *context, int64_t result);

/*
 A request of a queue.
 */
struct modelio_request {
  /*
   The file's number in the queue.
   */
  int32_t file;
  /*
   One of `enum modelio_op`.
   */
  uint32_t op;
  /*
   Where in the file.
   */
  uint64_t offset;
  /*
   The memory. It belongs to the queue until the request has ended.
   */
  void *data;
  /*
   Its bytes.
   */
  size_t size;
  /*
   The request ends with -ETIMEDOUT after so many milliseconds, once the kernel has let go of its memory. A
   `modelio_wait` sees to that.
   */
  uint32_t timeout_ms;
  /*
   Called when it has ended. If it is NULL, `modelio_wait` stores a completion.
   */
  modelio_callback callback;
  /*
   Given to the callback, or stored with the completion.
   */
  void *context;
  /*
   `modelio_submit` stores a number here, for `modelio_cancel`.
   */
  uint64_t id;
};

/*
 A request that has ended.
 */
struct modelio_completion {
  /*
   The request's number.
   */
  uint64_t id;
  /*
   The request's context.
   */
  void *context;
  /*
   The bytes that were moved, or a negative errno.
   */
  int64_t result;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Closes a handle. A learner leaves its job, and what it has not committed does not count; so it is with a publication.
 A queue cancels its requests, whose callbacks are called, ends the waits of other threads, and returns when the kernel
 has let go of their memory; a mount that hangs can hold that up. A model stays connected until its learners, weights
 and publications are closed, too. A program that exits closes all.

 Returns 0, or -EBADF.
 */
int modelio_close(modelio_handle handle);

/*
 Joins the job as a learner. `name` is NULL for one of the library's choice. `modelio_close` leaves the job.

 -EEXIST if the name is in use, -EDQUOT if the job has as many learners as it may, -EINVAL for a wrong name.

 `name` is NULL or a string; `learner` points to a handle.
 */
int modelio_join(modelio_handle handle, const char *name, uint32_t timeout_ms, modelio_handle *learner);

/*
 Writes `size` bytes at `offset` of the model: into the learner's contribution, or of new weights. Blocks that become
 whole are sent while the program goes on. What is not written counts as zero in a contribution, and keeps its value
 in new weights. A byte is written once in a contribution.

 -EFBIG past the model's end, -EINVAL for a byte that was sent already, -EBUSY while a commit runs, -ENOTCONN if the
 learner is no longer in the job, -EIO if the contribution was dropped.

 `data` points to `size` bytes.
 */
int modelio_write(modelio_handle handle, const uint8_t *data, size_t size, uint64_t offset, uint32_t timeout_ms);

/*
 Ends a contribution, or publishes new weights. When it returns 0, the contribution is taken and counts, or the
 version is out.

 -ETIMEDOUT: the contribution is still open, and may be committed again or aborted. After another error only an abort
 helps. -EINVAL if nothing was written. New weights end in any case.
 */
int modelio_commit(modelio_handle handle, uint32_t timeout_ms);

/*
 Takes back what was written and not committed. Nothing of it counts when this has returned 0. A commit that another
 thread waits for ends with -EINTR then, unless it counts already.

 -EBUSY if that commit does not end in time.

 -EIO if a commit that had no answer counts, or may count; `modelio_error` says which.
 */
int modelio_abort(modelio_handle handle, uint32_t timeout_ms);

/*
 Says that the learner works on something else, such as an evaluation, so that others wait for it longer than
 `control/patience`. To be called more often than that.

 -ENOTCONN if it is no longer in the job.
 */
int modelio_touch(modelio_handle handle);

/*
 Reduces `count` numbers (64 at most) with those of all learners of the job: `op` is "mean", "sum", "min" or
 "max". Waits for the others, and stores the results in place of the numbers.

 -ETIMEDOUT if one of them does not come in time: the numbers do not count then.

 `op` is a string; `values` points to `count` numbers.
 */
int modelio_all_reduce(modelio_handle handle, const char *op, double *values, size_t count, uint32_t timeout_ms);

/*
 Connects to a model without a mount. `url` is "gradfs://HOST[:PORT]/MODEL", the place of the registry and the model's
 name; the port is 7070 if none is given. It is "etcd://A:2379,B:2379[/PREFIX]/MODEL" if the registry is in an
 etcd. Returns when a first version is here.

 -EINVAL for another URL, -ENOENT for no such model, -EHOSTUNREACH if nobody answers there, -EPROTONOSUPPORT if its
 shards cannot be reached by `transport`.

 `url` is a string; `options` is NULL or points to options; `model` points to a handle.
 */
int modelio_connect(const char *url, const struct modelio_options *options, modelio_handle *model);

/*
 Waits until there is a version newer than `newer_than`, and stores its number. Weights that are opened then are of it, or
 of a newer one.

 -ETIMEDOUT if there is none in time; the number of the newest one is stored then, too.
 A job that has failed gives its error: -ENOTCONN for one that was restored as another life, to which the caller
 connects anew.

 `version` is NULL or points to a number.
 */
int modelio_wait_version(modelio_handle handle,
                         uint64_t newer_than,
                         uint32_t timeout_ms,
                         uint64_t *version);

/*
 Opens the newest version, and holds it unchanged until the handle is closed. Of a learner it is one that has the
 learner's last step in it, for which this waits.

 -ETIMEDOUT if it does not come in time, -ENOMEM if as many versions are held as `control/max_versions` allows.

 `weights` points to a handle.
 */
int modelio_open_weights(modelio_handle model_or_learner, uint32_t timeout_ms, modelio_handle *weights);

/*
 Opens a version by its number, and holds it unchanged until the handle is closed. Versions are here that are held open,
 that `control/retain` keeps, or that is the newest. The newest one may still have to come.

 -ENOENT if it is not here, -ETIMEDOUT if it does not come in time, -ENOMEM if as many versions are held as
 `control/max_versions` allows.

 `weights` points to a handle.
 */
int modelio_open_version(modelio_handle handle, uint64_t version, uint32_t timeout_ms, modelio_handle *weights);

/*
 Stores what `weights` are.

 `version` points to memory for it.
 */
int modelio_weights(modelio_handle weights, struct modelio_version_info *version);

/*
 A descriptor of the memory of `weights`, which can be read and mapped, and not written. It is the caller's to close.
 Its bytes stay unchanged until `weights` is closed; with `passed_on` they never change, so that it may go to other
 processes: the memory is not used again.

 Returns the descriptor, or -EMFILE.
 */
int modelio_memfd(modelio_handle weights, int passed_on);

/*
 Why the thread's last call that failed did so. The text stays until its next call that fails. It is empty before the
 first one.
 */
const char *modelio_error(void);

/*
 The version of the library, such as "0.1.0".
 */
const char *modelio_version(void);

/*
 Begins new weights, to be written by `modelio_write` and published by `modelio_commit`.

 -EACCES where the job takes none: with another reducer than `assign`, after version 0.

 `publication` points to a handle.
 */
int modelio_publish(modelio_handle handle, modelio_handle *publication);

/*
 Opens a queue. `options` is NULL for the defaults.

 `options` is NULL or points to options; `queue` points to a handle.
 */
int modelio_queue(const struct modelio_queue_options *options, modelio_handle *queue);

/*
 Adds a file to a queue: one of a mount, of a disk, or a block device. The queue has a descriptor of its own then.

 Returns the file's number in the queue.
 */
int modelio_add_file(modelio_handle handle, int descriptor);

/*
 Adds a learner or weights to a queue, without a mount: writes go into the learner's contribution, and
 `MODELIO_SYNC` commits it; reads are of the weights.

 Returns the file's number in the queue.
 */
int modelio_add(modelio_handle handle, modelio_handle learner_or_weights);

/*
 Takes a file out of a queue. -EBUSY while a request uses it.
 */
int modelio_remove(modelio_handle handle, int file);

/*
 Registers memory, so that requests in it take less of the kernel's time: once for each, at the start. It stays
 registered, and must stay mapped, until the queue is closed.

 -ENOSPC after 64, -EINVAL for more than 1 GiB, -ENOMEM above `ulimit -l`. Requests work without.

 `data` points to `size` bytes that stay mapped as long as the queue is open.
 */
int modelio_register(modelio_handle handle, void *data, size_t size);

/*
 Submits `count` requests. Their memory belongs to the queue until each has ended.

 Returns how many were taken, in their order; the first of the others is wrong, and `modelio_error` says why. If it is
 the first of all, returns its error: -EBADF for no such file, -EINVAL, or -EAGAIN if the queue has 16,384 requests.

 `requests` points to `count` requests, and each one's data to `size` bytes.
 */
ptrdiff_t modelio_submit(modelio_handle handle, struct modelio_request *requests, size_t count);

/*
 Waits until `min` requests have ended, or all that there are, or the time is over. Of those that have ended it takes
 `max` at most: it calls callbacks, and stores the completions of the others. Callbacks may call the library, and must
 not throw.

 Returns the number of completions stored. -ECANCELED if the queue was closed.

 `completions` has room for `max`.
 */
ptrdiff_t modelio_wait(modelio_handle handle,
                       size_t min,
                       struct modelio_completion *completions,
                       size_t max,
                       uint32_t timeout_ms);

/*
 Cancels a request. It ends with -ECANCELED, unless it is over by then.
 */
int modelio_cancel(modelio_handle handle, uint64_t id);

/*
 A descriptor that poll(2) finds readable when something may have ended. `modelio_wait` makes it silent again; with a
 timeout of 0 it does not wait. The descriptor is the caller's to close.
 */
int modelio_queue_event(modelio_handle handle);

/*
 Copies the text of a file of the model, and of a learner, as a mount has it: "layout", "version", "status.json",
 "settings.json", "control/learning_rate", "control" (the names of all settings, a line each), "name", "header"
 (safetensors' JSON), "versions/N/meta.json" of a version that is held; and of a learner also "status", "error" and
 "weight". The text has no zero at its end unless there is room for one.

 Returns the length of the text, of which as much was copied as `size` allows, or -ENOENT.

 `file` is a string, and `buffer` has `size` bytes.
 */
ptrdiff_t modelio_get(modelio_handle model_or_learner, const char *file, char *buffer, size_t size);

/*
 Writes the text of a file. Of a model, "control/NAME" sets a setting of the whole job, and "settings.json" those that its
 object names, all or none. Of a learner, "weight" is how much its contributions count from the next one on. Of a
 publication, "user.NAME" is said of the version that it makes. When it has returned 0, the value holds.

 -ENOENT for another file, -EINVAL for a value that does not fit and for another name of a publication, -ETIMEDOUT if it
 is not known in time whether it was taken.

 `file` and `value` are strings.
 */
int modelio_set(modelio_handle model_learner_or_publication,
                const char *file,
                const char *value,
                uint32_t timeout_ms);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* MODELIO_H */
