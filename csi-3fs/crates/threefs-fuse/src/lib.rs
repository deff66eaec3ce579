//! 3FS as a mounted file system.
//!
//! The daemon serves a descriptor of /dev/fuse that another process opened, mounted and keeps. When
//! the daemon dies, another one continues with the same descriptor: open files, cached pages and
//! programs in the middle of a system call see no error.
//!
//! | module | content |
//! |---|---|
//! | `wire` | FUSE protocol |
//! | `device` | the /dev/fuse descriptor |
//! | `config` | configuration, readiness message, errors |
//! | `errors` | mapping of the cluster's errors to errno |
//! | `journal` | state left to the next daemon, so that no change is made twice |
//! | `claim` | exclusive claim of a mount |
//! | `files`, `listings` | open files and directories |
//! | `locks` | lock session, files with locks |
//! | `appends` | append leases |
//! | `write_behind` | writes that are answered and not durable |
//! | `daemon` | daemon state, running requests, metadata calls |
//! | `ops` | file system operations |
//! | `virtual_nodes` | node numbers of the virtual directory |
//! | `rings` | memory, files and rings that callers have registered |
//! | `serve` | startup, handshake, request tasks, periodic reports, shutdown |
//!
//! The daemon has no authoritative state: inode numbers come from the metadata service, handles are
//! inodes, and a write is durable, or in the journal, before it is answered.

mod appends;
mod claim;
mod config;
mod daemon;
mod device;
mod errors;
mod files;
mod journal;
mod listings;
mod locks;
mod ops;
mod rings;
mod serve;
#[cfg(test)]
mod tests;
mod virtual_nodes;
mod wire;
mod write_behind;

pub use claim::ClaimConfig;
pub use config::{FuseConfig, FuseError, Ready, UnansweredCalls};
pub use journal::READS_OFFSET;
pub use serve::serve;
