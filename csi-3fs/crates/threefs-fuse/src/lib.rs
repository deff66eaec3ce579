//! 3FS as a mounted file system.
//!
//! The daemon serves a descriptor of /dev/fuse that somebody else opened and mounted, and keeps.
//! When the daemon dies, another one goes on with the same descriptor: open files, pages in the
//! kernel and programs in the middle of a system call go on, with no error.
//!
//! | module | what |
//! |---|---|
//! | `wire` | the kernel's protocol |
//! | `device` | the descriptor |
//! | `journal` | what one daemon leaves to the next, so that no change is made twice |
//! | `config` | how a daemon runs, and why it may not |
//! | `daemon` | requests as tasks: bounds, deadlines, interrupts; the handshake; what is told |
//! | `calls` | how an operation asks the cluster, for whom |
//! | `claim` | the right to serve what only one node may use |
//! | `files` | open files: lengths and reservations |
//! | `names`, `data`, `allocate`, `attributes`, `listing` | the operations |
//! | `errors` | the cluster's errors as errno |
//!
//! It holds no truth of its own: inodes are numbers of the metadata service, handles are inodes, and
//! a write is durable before it is answered.

mod allocate;
mod attributes;
mod calls;
mod claim;
mod config;
mod daemon;
mod data;
mod device;
mod errors;
mod files;
mod journal;
mod listing;
mod names;
mod wire;

pub use claim::ClaimConfig;
pub use config::{FuseConfig, FuseError, LeftOpen, Ready};
pub use daemon::serve;
