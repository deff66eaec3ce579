//! One test binary for all kernels: compiling the kernels takes longer than any other crate, so they are
//! compiled once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod formats;
mod reduce;
mod support;
mod triad;
mod wide;
