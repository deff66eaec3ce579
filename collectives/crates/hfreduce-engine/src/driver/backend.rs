//! Backend of a communicator: the driver in this process, or a daemon that runs it elsewhere.

use std::any::Any;
use std::time::Instant;

use rustix::fd::AsFd;

use super::Driver;

/// A driver whose connections and kernels run in another process.
pub trait RemoteDriver: Send {
    /// True while operations are in progress.
    fn is_busy(&self) -> bool;

    /// Makes progress until `done` holds or `until` is reached.
    fn drive(&mut self, until: Instant, done: &dyn Fn(&dyn RemoteDriver) -> bool);

    /// Makes progress once, without sleeping.
    fn poll_once(&mut self);

    /// Fails all operations after a thread panicked while it held the driver.
    fn fail_after_panic(&mut self);

    /// Closes the communicator, waiting until `until` at most.
    fn close(&mut self, until: Instant);

    /// The driver itself, for the crate that made it.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

/// What makes the progress of a communicator.
pub enum Backend {
    /// This process has the connections and runs the kernels.
    Local(Box<Driver>),
    /// Another process does.
    Remote(Box<dyn RemoteDriver>),
}

impl Backend {
    /// True while operations are in progress.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::Local(driver) => driver.is_busy(),
            Self::Remote(driver) => driver.is_busy(),
        }
    }

    /// Makes progress until `done` holds or `until` is reached.
    pub fn drive(&mut self, until: Instant, done: impl Fn() -> bool) {
        match self {
            Self::Local(driver) => driver.drive(until, |_| done()),
            Self::Remote(driver) => driver.drive(until, &|_| done()),
        }
    }

    /// Makes progress until nothing is in progress, `stop` holds or `until` is reached.
    pub fn drive_all(&mut self, until: Instant, stop: impl Fn() -> bool) {
        match self {
            Self::Local(driver) => driver.drive(until, |driver| !driver.is_busy() || stop()),
            Self::Remote(driver) => driver.drive(until, &|driver| !driver.is_busy() || stop()),
        }
    }

    /// Makes progress once, without sleeping.
    pub fn poll_once(&mut self) {
        match self {
            Self::Local(driver) => driver.poll_once(),
            Self::Remote(driver) => driver.poll_once(),
        }
    }

    /// Fails all operations after a thread panicked while it held the driver.
    pub fn fail_after_panic(&mut self) {
        match self {
            Self::Local(driver) => driver.fail_after_panic(),
            Self::Remote(driver) => driver.fail_after_panic(),
        }
    }

    /// Closes the connections; `next` is the first operation that this rank will not start. Waits
    /// until `until` at most for the final frames to leave.
    pub fn close(&mut self, next: u64, until: Instant) {
        match self {
            Self::Local(driver) => driver.close(next, until),
            Self::Remote(driver) => driver.close(until),
        }
    }

    /// Starts to judge the silence of peers: all of them are connected.
    pub fn start_liveness(&mut self) {
        match self {
            Self::Local(driver) => driver.start_liveness(),
            Self::Remote(_) => {}
        }
    }

    /// Wakes the driver when `client` becomes readable: see [`Driver::watch_client`].
    ///
    /// # Errors
    /// The system call failed.
    pub fn watch_client(&self, client: impl AsFd) -> std::io::Result<()> {
        match self {
            Self::Local(driver) => driver.watch_client(client),
            Self::Remote(_) => Ok(()),
        }
    }
}
