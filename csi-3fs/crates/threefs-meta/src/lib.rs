//! The metadata service: the tree of names, inodes, layouts and lengths.
//!
//! Every operation is a pure function of one transaction of `threefs_kv`, one operation a file. The
//! service decodes requests, runs operations and replies once they are durable.
//!
//! | module | content |
//! |---|---|
//! | [`protocol`] | requests, replies and their types |
//! | [`identity`], [`permission`] | the caller and its POSIX permissions |
//! | `service` | the RPC server, registration with mgmtd, scopes of volume credentials |
//! | `tree` | execution of requests on a store, without sockets |
//! | `ops` | the operations, each one transaction |
//! | `rows` | keys and values in the store |
//! | `clients` | activity and open files of clients, in memory |
//! | `services` | the view of the other services over the store |
//! | `locks` | advisory locks of one file |
//! | `background` | garbage collection and recounts, services over one store |
//! | `fences` | fences of volumes at the storage services |
//! | `queue_clock` | ages of queued removals, independent of the wall clock |
//! | `written` | sets of chunks that are known to exist |
//! | `client` | the RPC client |
//! | [`mod@check`] | check of a dump's rows against each other |
//! | `restore` | restoring a tree from a dump |
//!
//! To add an operation:
//! 1. `protocol/change.rs` or `protocol/query.rs`: its variant, with the reply, at the end; any other
//!    change of a type increases [`protocol::VERSION`].
//! 2. `ops`: the operation, in a new file.
//! 3. `tree/change.rs` or, for a query, `tree.rs`: its execution; `tree/checks.rs`: whether it adds
//!    rows.
//! 4. `service/scope.rs`: which credentials may call it, and the inodes that it names;
//!    `service/reply_size.rs`.
//! 5. `tests/tree.rs`, `tests/scope.rs`, `tests/permission.rs`.

mod background;
pub mod check;
mod chunk_trimmer;
mod client;
mod clients;
mod config;
mod error;
mod fences;
pub mod identity;
mod locks;
mod ops;
pub mod permission;
pub mod protocol;
mod queue_clock;
mod restore;
mod rows;
mod service;
mod services;
mod tree;
mod written;

#[cfg(test)]
mod tests;

pub use chunk_trimmer::{ChunkTrimmer, DeadFile, NoChunks, Pending};
pub use client::{MetaClient, MetaClientError};
pub use config::{DEAD_GRACE_MS, MetaConfig, TreeConfig};
pub use fences::{Fences, NoFences};
pub use identity::{Identity, Role};
pub use protocol::{
    AUDIT_RANGES_MAX, At, AuditAnswer, AuditQuery, AuditedFile, CORRECTIONS_PER_STEP, Correction,
    Entry, EntryKind, Inode, InodeKind, LayoutDefaults, LengthReport, LockAnswer, LockChange,
    LockKind, LockQuery, LockRequest, MetaChange, MetaError, MetaQuery, MetaReply, MetaRequest,
    MetaResult, Nanoseconds, QuotaUse, RECALLS_MAX, RenameMode, RequestId, Reservation,
    SNAPSHOTS_MAX, SNAPSHOTS_NAME, SessionId, SetMode, SetTime, ShownFile, SnapshotAnswer,
    SnapshotChange, SnapshotEntry, SnapshotQuery, SpecialKind, TRASH_PAGE_MAX, TrashAnswer,
    TrashChange, TrashEntry, TrashId, TrashQuery, Written, WrittenCursor,
};
pub use restore::{DUMP_KIND, restore};
pub use rows::CLUSTER as CLUSTER_ROW;
pub use service::ownership::owner;
pub use service::registration::adopt;
pub use service::{Meta, MetaRunError, run};
pub use threefs_kv::{MAP_BYTES_MAX, StoreConfig};
pub use tree::Tree;
