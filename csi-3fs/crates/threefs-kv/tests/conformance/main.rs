//! Conformance suite: the guarantees of [`threefs_kv::Backend`], one per test, on every backend.
// A test fails by panicking, also in its helpers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod access;
mod backends;
mod cluster;
mod dump;
mod dump_races;
mod embedded;
mod faults;
mod outcomes;
mod owner;
mod owner_stores;
mod phantoms;
mod postgres;
mod postgres_access;
mod postgres_dump;
mod postgres_failover;
mod postgres_faults;
mod proxy;
mod rate;
mod serialisable;
mod tls;
mod transactions;
mod two_processes;
