//! Rings in shared memory between a caller of 3FS and the FUSE daemon of the mount.
//!
//! | module | content |
//! |---|---|
//! | `layout` | where a ring's counters, submissions and completions are |
//! | `entry` | encoding of submissions and completions |
//! | `check` | validation of a submission: everything in a ring is hostile input |
//! | `control` | ioctl commands that register memory, files and rings, and announce submissions |
//! | `name` | names of registered memory in `/dev/shm` |
//!
//! A caller writes submissions into its ring and announces them with one ioctl, which carries the
//! new number of submissions. The daemon copies the submissions out of the ring once, executes
//! them, appends completions and adds their number to the ring's counter, on which the caller
//! waits. The daemon reads and writes the caller's memory with system calls only: memory that
//! disappears is an error of a call, not a fault of the daemon.

mod check;
pub mod control;
mod entry;
mod layout;
mod name;

pub use check::{Access, Checked, FileTerms, RegionTerms, RingTerms, check};
pub use entry::{COMPLETION_BYTES, Completion, SUBMISSION_BYTES, Submission};
pub use layout::{ENTRIES_MAX, HEADER_BYTES, Layout};
pub use name::{Id, MEMORY_FOLDER, memory_name};
