//! What a communicator drives: its own driver, or the one that leaves the work to a daemon.

use std::time::Instant;

use rustix::fd::AsFd;

use super::Driver;
use crate::daemon::Attached;

/// See the module's text.
pub enum Mover {
    /// The connections and the sums are this process's.
    Own(Box<Driver>),
    /// They are a daemon's.
    Daemon(Box<Attached>),
}

impl Mover {
    /// True while something is under way.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Own(driver) => driver.is_busy(),
            Self::Daemon(driver) => driver.is_busy(),
        }
    }

    /// Moves data until `done` holds or `until` has come.
    pub fn drive(&mut self, until: Instant, done: impl Fn() -> bool) {
        match self {
            Self::Own(driver) => driver.drive(until, |_| done()),
            Self::Daemon(driver) => driver.drive(until, |_| done()),
        }
    }

    /// Moves data until all of it has moved, `stop` holds or `until` has come.
    pub fn drive_all(&mut self, until: Instant, stop: impl Fn() -> bool) {
        match self {
            Self::Own(driver) => driver.drive(until, |driver| !driver.is_busy() || stop()),
            Self::Daemon(driver) => driver.drive(until, |driver| !driver.is_busy() || stop()),
        }
    }

    /// One look at everything without sleeping.
    pub fn glance(&mut self) {
        match self {
            Self::Own(driver) => driver.glance(),
            Self::Daemon(driver) => driver.glance(),
        }
    }

    /// A thread panicked while it had the driver.
    pub fn give_up(&mut self) {
        match self {
            Self::Own(driver) => driver.give_up(),
            Self::Daemon(driver) => driver.give_up(),
        }
    }

    /// Takes leave of everybody, with at most until `until` for the words to get away.
    pub fn leave(&mut self, next: u64, until: Instant) {
        match self {
            Self::Own(driver) => driver.leave(next, until),
            Self::Daemon(driver) => driver.leave(until),
        }
    }

    /// Everybody is there: from now on silence counts.
    pub fn judge(&mut self) {
        match self {
            Self::Own(driver) => driver.judging = true,
            Self::Daemon(_) => {}
        }
    }

    /// Watches the process that is served: see [`Driver::serve`].
    ///
    /// # Errors
    /// What the kernel says.
    pub fn serve(&self, client: impl AsFd) -> std::io::Result<()> {
        match self {
            Self::Own(driver) => driver.serve(client),
            Self::Daemon(_) => Ok(()),
        }
    }
}
