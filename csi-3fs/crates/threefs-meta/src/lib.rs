//! The metadata service: the tree of names, inodes, layouts and lengths.
//!
//! Every operation is a pure function over one transaction of `threefs_kv`, one operation a file;
//! the service only decodes, runs them and answers once they are durable.

mod ages;
mod chunk_page;
mod chunks;
mod client;
mod clients;
mod collector;
mod config;
mod error;
mod holds;
pub mod identity;
mod layouts;
mod ops;
pub mod protocol;
mod recount;
mod registration;
mod replies;
mod restore;
mod rows;
mod scope;
mod service;
mod tree;
mod written;

#[cfg(test)]
mod answers_test;
#[cfg(test)]
mod concurrent_test;
#[cfg(test)]
mod control_plane_test;
#[cfg(test)]
mod model_test;
#[cfg(test)]
mod permission_test;
#[cfg(test)]
mod quota_test;
#[cfg(test)]
mod removal_test;
#[cfg(test)]
mod testing;

pub use chunks::{ChunkTrimmer, DeadFile, NoChunks};
pub use client::{MetaClient, MetaClientError};
pub use config::{DEAD_GRACE_MS, MetaConfig, TreeConfig};
pub use identity::{Identity, Role};
pub use protocol::{
    At, Entry, EntryKind, Inode, InodeKind, LayoutDefaults, LengthReport, MetaChange, MetaError,
    MetaQuery, MetaReply, MetaRequest, MetaResult, Nanoseconds, QuotaUse, RenameMode, RequestId,
    Reservation, SessionId, SetMode, SetTime, SpecialKind, Written,
};
pub use registration::adopt;
pub use restore::{DUMP_KIND, restore};
pub use service::{Meta, MetaRunError, run};
pub use threefs_kv::MAP_BYTES_MAX;
pub use tree::Tree;
