//! The C interface of libmodelio. `include/modelio.h` is made of it, and documents it for its users.
//!
//! Everything is a handle: a number that no closed handle had. A wrong one is an error, as a wrong descriptor is, and so
//! is one of the process from which this one was forked. A call returns 0 or more, or a negative errno with a text for
//! the calling thread. Every call may come from any thread, and none waits longer than its `timeout_ms`, but for
//! `modelio_close`.
//!
//! | file | holds |
//! |---|---|
//! | `handles`, `outcome` | handles; errors |
//! | `model`, `texts` | a model, its versions and its settings |
//! | `learner`, `publication` | what is written |
//! | `queue` | batched asynchronous I/O |
//!
//! This crate holds `unsafe` in each function that C calls: it trusts C's pointers as its header tells C to make them.

mod handles;
mod learner;
mod model;
mod outcome;
mod publication;
mod queue;
mod texts;
