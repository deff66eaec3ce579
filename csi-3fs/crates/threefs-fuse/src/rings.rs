//! Rings of callers in shared memory: registered memory, files and rings, by session.
//!
//! | module | content |
//! |---|---|
//! | `links` | names that programs give to memory in `3fs-virt/iovs` |
//! | `region` | access to a caller's memory, by system calls only |
//! | `ring` | submissions and completions of one ring |
//! | `session` | what one caller has registered |
//! | `sessions` | all sessions, and limits for each user |
//!
//! The operations are in `ops::control` (registration), `ops::ring_io` (I/O) and `ops::ring_reads`
//! (small reads).

mod links;
mod region;
mod ring;
mod session;
mod sessions;

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub(crate) use links::{Link, Links};
pub(crate) use region::Region;
pub(crate) use ring::Ring;
pub(crate) use session::{Entry, RegisteredFile, Session};
pub(crate) use sessions::Sessions;

/// Maximum number of submissions of all rings that are executed at once.
const SUBMISSIONS_MAX: usize = 1024;
/// Memory of this daemon for data of writes, in KiB.
const WRITE_KIB_MAX: usize = 64 << 10;

/// A ring with submissions that no task executes yet.
pub(crate) type Work = (Arc<Session>, Arc<Ring>);

/// Rings of a mount.
pub(crate) struct Rings {
    pub sessions: Sessions,
    pub links: Links,
    /// Permits of submissions.
    pub submissions: Arc<Semaphore>,
    /// Permits for memory, each for 1 KiB.
    pub write_kib: Arc<Semaphore>,
    pub work: UnboundedSender<Work>,
}

impl Rings {
    /// Also returns the queue of rings to execute.
    pub(crate) fn new() -> (Self, UnboundedReceiver<Work>) {
        let (work, queue) = unbounded_channel();
        let rings = Self {
            sessions: Sessions::default(),
            links: Links::default(),
            submissions: Arc::new(Semaphore::new(SUBMISSIONS_MAX)),
            write_kib: Arc::new(Semaphore::new(WRITE_KIB_MAX)),
            work,
        };
        (rings, queue)
    }
}
