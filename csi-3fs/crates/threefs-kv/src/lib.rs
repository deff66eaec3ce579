//! The small serialisable transaction interface on which the cluster manager and the metadata
//! service stand, and its stores.
//!
//! A [`Transaction`] reads from one consistent snapshot, keeps its writes to itself, and commits
//! them all or not at all, only if nothing that it read has been written meanwhile. So committed
//! transactions behave as if they had run one after the other, in the order of their
//! [`Versionstamp`]s. When `commit` returns `Ok`, the transaction survives a kill at any moment.
//!
//! Stores: [`Store::memory`] for simulators and tests, [`Store::embedded`] (LMDB, many
//! transactions a disk write) for one machine. Others go behind [`Backend`].
//!
//! Absent on purpose: queries, indexes, nested transactions, and long ones: a transaction that is
//! older than a few seconds is refused as [`KvError::TooOld`].

mod backend;
mod dump;
mod embedded;
mod error;
mod memory;
mod resolver;
pub mod rows;
mod store;
mod transaction;
mod watch;

pub use backend::{
    Backend, BoundedAdd, Commit, KeyRange, Mutation, Room, Row, Snapshot, Versionstamp,
};
pub use dump::{DumpError, Dumped, dump, load, verify};
pub use embedded::{EmbeddedConfig, MAP_BYTES_MAX};
pub use error::KvError;
pub use store::{Operation, Retry, Store};
pub use transaction::Transaction;
pub use watch::Watch;

/// The longest key: LMDB's 511 bytes, less room for a versionstamp.
pub const KEY_BYTES_MAX: usize = 500;
/// The longest value. Rows are small; lists are many rows.
pub const VALUE_BYTES_MAX: usize = 512 << 10;
/// The most that one transaction writes.
pub const COMMIT_BYTES_MAX: usize = 4 << 20;
/// The most mutations of one transaction.
pub const MUTATIONS_MAX: usize = 10_000;

#[cfg(test)]
mod serialisable_test;
#[cfg(test)]
mod store_test;
