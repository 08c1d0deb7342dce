//! `gradfs`: a parameter server that you mount.

fn main() {}
