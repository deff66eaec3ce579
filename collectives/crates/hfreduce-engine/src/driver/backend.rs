//! What a communicator drives: its own driver, or the one that leaves the work to a daemon.

use std::time::Instant;

use rustix::fd::AsFd;

use super::Driver;
use crate::daemon::ClientDriver;

/// See the module's text.
pub enum Backend {
    /// The connections and the sums are this process's.
    Local(Box<Driver>),
    /// They are a daemon's.
    Daemon(Box<ClientDriver>),
}

impl Backend {
    /// True while something is under way.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Local(driver) => driver.is_busy(),
            Self::Daemon(driver) => driver.is_busy(),
        }
    }

    /// Moves data until `done` holds or `until` has come.
    pub fn drive(&mut self, until: Instant, done: impl Fn() -> bool) {
        match self {
            Self::Local(driver) => driver.drive(until, |_| done()),
            Self::Daemon(driver) => driver.drive(until, |_| done()),
        }
    }

    /// Moves data until all of it has moved, `stop` holds or `until` has come.
    pub fn drive_all(&mut self, until: Instant, stop: impl Fn() -> bool) {
        match self {
            Self::Local(driver) => driver.drive(until, |driver| !driver.is_busy() || stop()),
            Self::Daemon(driver) => driver.drive(until, |driver| !driver.is_busy() || stop()),
        }
    }

    /// One look at everything without sleeping.
    pub fn poll_once(&mut self) {
        match self {
            Self::Local(driver) => driver.poll_once(),
            Self::Daemon(driver) => driver.poll_once(),
        }
    }

    /// A thread panicked while it had the driver.
    pub fn fail_after_panic(&mut self) {
        match self {
            Self::Local(driver) => driver.fail_after_panic(),
            Self::Daemon(driver) => driver.fail_after_panic(),
        }
    }

    /// Takes leave of everybody, with at most until `until` for the words to get away.
    pub fn leave(&mut self, next: u64, until: Instant) {
        match self {
            Self::Local(driver) => driver.leave(next, until),
            Self::Daemon(driver) => driver.leave(until),
        }
    }

    /// Everybody is there: from now on silence counts.
    pub fn start_liveness(&mut self) {
        match self {
            Self::Local(driver) => driver.liveness_active = true,
            Self::Daemon(_) => {}
        }
    }

    /// Watches the process that is served: see [`Driver::serve`].
    ///
    /// # Errors
    /// What the kernel says.
    pub fn serve(&self, client: impl AsFd) -> std::io::Result<()> {
        match self {
            Self::Local(driver) => driver.serve(client),
            Self::Daemon(_) => Ok(()),
        }
    }
}
