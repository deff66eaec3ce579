//! The metadata service: the tree of names, inodes, layouts and lengths.
//!
//! Every operation is a pure function over one transaction of `threefs_kv`, one operation a file;
//! the service only decodes, runs them and answers once they are durable.

mod chunks;
mod client;
mod clients;
mod collector;
mod config;
mod layouts;
mod ops;
pub mod protocol;
mod rows;
mod service;
mod tree;

#[cfg(test)]
mod concurrent_test;
#[cfg(test)]
mod model_test;
#[cfg(test)]
mod testing;

pub use chunks::{ChunkTrimmer, NoChunks};
pub use client::{MetaClient, MetaClientError};
pub use config::{MetaConfig, TreeConfig};
pub use protocol::{
    At, Entry, EntryKind, Inode, InodeKind, LayoutDefaults, LengthReport, MetaChange, MetaError,
    MetaQuery, MetaReply, MetaRequest, MetaResult, RequestId, SessionId,
};
pub use service::{Meta, MetaRunError, run};
pub use tree::Tree;
