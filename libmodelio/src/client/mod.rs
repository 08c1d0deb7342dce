//! Taking part in a job whose shards are on a network.

pub mod core;

#[cfg(test)]
mod tests;
