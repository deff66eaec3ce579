//! The public interface of 3FS for reads and writes through rings, `hf3fs_usrbio.h`: programs that
//! are built for 3FS run with this library unchanged.
//!
//! | module | content |
//! |---|---|
//! | `control` | ioctl calls |
//! | `fork` | detection of forked children |
//! | `session` | the session of this process with the daemon of each mount |
//! | `memory` | memory for data and rings |
//! | `files` | registered descriptors |
//! | `ring` | preparing, submitting and awaiting I/O |
//! | `recovery` | registration again after the daemon was replaced |
//! | `mounts` | mount points |
//! | `abi` | the C functions |
//!
//! All I/O is done by the daemon of the mount, for files that the caller has open. This library
//! keeps its registrations; after the daemon was replaced it registers everything again and
//! submits what was not completed.

mod abi;
mod control;
mod files;
mod fork;
mod memory;
mod mounts;
mod numa;
mod recovery;
mod ring;
mod session;

pub use abi::{Cqe, Ior, Iov};
pub use files::{File, deregister, register, registered};
pub use memory::Memory;
pub use mounts::{extract_mount_point, is_3fs};
pub use ring::{Done, Ring, RingOptions, ring_bytes};
pub use session::Session;
