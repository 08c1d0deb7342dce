//! Reduction kernels: from wire bytes to the next weights in one pass.
