//! Beside the library, not in it: compiling the kernels takes longest of all crates, and once is enough.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod formats;
mod reduce;
mod support;
mod triad;
mod wide;
