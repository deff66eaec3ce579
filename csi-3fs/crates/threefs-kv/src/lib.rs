//! Serialisable key-value transactions for the cluster manager and the metadata service, and their
//! stores.
//!
//! A [`Transaction`] reads from a consistent snapshot, buffers its writes, and commits them
//! atomically, if no row that it has read was written in the meantime. So committed transactions
//! are equivalent to a serial execution in the order of their [`Versionstamp`]s. When `commit`
//! returns `Ok`, the transaction is durable.
//!
//! Stores: [`Store::memory`] for simulators and tests, [`Store::embedded`] (LMDB with group commit)
//! for one machine, [`Store::etcd`] and [`Store::postgres`] for several. Others implement
//! [`Backend`].
//!
//! Intentionally absent: queries, indexes, nested and long transactions: a transaction older than a
//! few seconds is refused as [`KvError::TooOld`].

mod backend;
mod config;
mod dump;
mod embedded;
mod error;
mod etcd;
mod folder;
mod guard;
mod layer;
mod memory;
mod owner;
mod owner_error;
mod owner_row;
mod postgres;
mod rekey;
mod resolver;
pub mod rows;
mod seen;
mod store;
mod transaction;
mod watch;

pub use backend::{
    Backend, BoundedAdd, Commit, KeyRange, Limits, Mutation, Room, Row, Seen, Snapshot,
    Versionstamp,
};
pub use config::StoreConfig;
pub use dump::{Amendment, DumpError, Dumped, Report, Values, dump, load, scan, verify};
pub use embedded::{EmbeddedConfig, MAP_BYTES_MAX};
pub use error::KvError;
pub use etcd::EtcdConfig;
pub use owner::{Entry, OWNER_ROW, Owner, Rekeyed};
pub use owner_error::OwnerError;
pub use owner_row::{Fingerprint, Fingerprints};
pub use postgres::PostgresConfig;
pub use rekey::rekey;
pub use store::{Operation, Retry, Store};
pub use transaction::Transaction;
pub use watch::Watch;

/// Maximum key size: LMDB's 511 bytes, less a versionstamp.
pub const KEY_BYTES_MAX: usize = 500;
/// Maximum value size. Rows are small; lists are many rows.
pub const VALUE_BYTES_MAX: usize = 512 << 10;
/// Maximum bytes written by one transaction.
pub const COMMIT_BYTES_MAX: usize = 4 << 20;
/// Maximum number of mutations of one transaction.
pub const MUTATIONS_MAX: usize = 10_000;
