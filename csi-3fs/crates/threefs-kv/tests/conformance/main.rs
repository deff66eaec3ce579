//! Conformance suite: the guarantees of [`threefs_kv::Backend`], one per test, on every backend.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod backends;
mod embedded;
mod phantoms;
mod serialisable;
mod transactions;
