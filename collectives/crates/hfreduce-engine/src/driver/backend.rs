//! Backend of a communicator: the driver in this process, or one that a daemon runs elsewhere.

use std::any::Any;
use std::io;
use std::time::Instant;

use rustix::fd::BorrowedFd;

/// What makes the progress of a communicator. Used by one thread at a time.
pub trait Backend: Send {
    /// True while operations are in progress.
    fn is_busy(&self) -> bool;

    /// Makes progress until `done` holds or `until` is reached.
    fn drive(&mut self, until: Instant, done: &dyn Fn(&dyn Backend) -> bool);

    /// Makes progress once, without sleeping.
    fn poll_once(&mut self);

    /// Fails all operations after a thread panicked while it held the backend: its state is not used
    /// any further.
    fn fail_after_panic(&mut self);

    /// Closes the communicator; `next` is the first operation that this rank will not start. Waits
    /// until `until` at most for the final frames to leave.
    fn close(&mut self, next: u64, until: Instant);

    /// Starts to judge the silence of peers: all of them are connected.
    fn start_liveness(&mut self) {}

    /// Watches the socket of a client process that this rank runs for, so that a waiting backend
    /// wakes up for its messages.
    ///
    /// # Errors
    /// A system call failed.
    fn watch_client(&self, _client: BorrowedFd<'_>) -> io::Result<()> {
        Ok(())
    }

    /// The backend itself, for the crate that made it.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}
