//! Communicators and daemons: the rank's side, whose driver is remote, and the daemon's side.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hfreduce_plan::Plan;
use rustix::fd::AsFd;

use super::{Communicator, Session};
use crate::driver::{Backend, Shared};

impl Communicator {
    /// A communicator whose driver runs in another process, which has connected the group: its first
    /// barrier counts as operation 0.
    ///
    /// # Errors
    /// The background thread cannot be started.
    pub fn with_remote(
        shared: Arc<Shared>,
        driver: Box<dyn Backend>,
        plan: Plan,
        session: Box<dyn Session>,
    ) -> std::io::Result<Self> {
        shared.recorder.open();
        let communicator = Self::start(shared, driver, plan, session)?;
        communicator.inner.next.store(1, Ordering::SeqCst);
        Ok(communicator)
    }

    /// Ends this epoch without closing the connection to the daemon. Returns the driver once
    /// all operations have ended; none if it was taken before.
    pub fn detach(&self, timeout: Duration) -> Option<Box<dyn Any>> {
        self.end(timeout, |_, _, _| ());
        let driver = self.inner.take_driver(Instant::now() + Duration::from_secs(1));
        driver.map(|driver| driver.into_any())
    }

    /// Daemon: wakes the driver for messages of `client`, wherever it waits.
    pub fn watch_client(&self, client: impl AsFd) -> std::io::Result<()> {
        let mut served = Ok(());
        let soon = Instant::now() + Duration::from_secs(1);
        self.inner.with_driver(soon, |driver| served = driver.watch_client(client.as_fd()));
        served
    }

    /// Daemon: moves data until `done` holds, the client sends a message, or `until` is reached.
    /// `more` reads pending messages; true if there were any.
    pub fn wait_for_client(
        &self,
        until: Instant,
        done: impl Fn() -> bool,
        mut more: impl FnMut() -> bool,
    ) {
        let client_ready = &self.inner.shared.client_ready;
        let ready = || client_ready.load(Ordering::SeqCst) || done() || self.inner.is_claimed();
        let mapped = self.inner.try_driver(|driver| {
            // Events of messages read before are cleared, and then the messages are checked again.
            driver.poll_once();
            client_ready.store(false, Ordering::SeqCst);
            if !more() {
                driver.drive(until, &|_| ready());
            }
        });
        if !mapped {
            self.inner.wait(Instant::now(), until, ready);
            client_ready.store(false, Ordering::SeqCst);
        }
    }
}
