//! Beside the library, not in it: compiling the kernels takes most of a minute, and once is enough.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod formats;
mod reduce;
mod support;
mod triad;
mod wide;
