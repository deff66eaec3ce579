//! The two ends of a group that a daemon serves: the rank's, and the daemon's own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use std::os::unix::net::UnixStream;

use hfreduce_plan::Plan;
use rustix::fd::AsFd;

use super::{Communicator, SessionHandle};
use crate::daemon::{ClientDriver, ClientSession};
use crate::driver::{Backend, Shared};
use crate::message_socket::MessageSocket;

impl Communicator {
    /// Of a group that a daemon has connected: its meeting was the first operation.
    pub(crate) fn attached(
        shared: Arc<Shared>,
        driver: ClientDriver,
        plan: Plan,
        session: ClientSession,
    ) -> std::io::Result<Self> {
        shared.recorder.open();
        let driver = Backend::Daemon(Box::new(driver));
        let connected =
            Self::start(shared, driver, plan, SessionHandle::Daemon(Box::new(session)))?;
        connected.inner.next.store(1, Ordering::SeqCst);
        Ok(connected)
    }

    /// Ends this epoch without a farewell: the daemon says it when it goes on. The line to it, once all
    /// that was under way has ended; none where it was taken already.
    pub(crate) fn detach(&self, timeout: Duration) -> Option<MessageSocket<UnixStream>> {
        self.end(timeout, |_, _, _| ());
        match self.inner.take_driver(Instant::now() + Duration::from_secs(1)) {
            Some(Backend::Daemon(attached)) => attached.into_line(),
            _ => None,
        }
    }

    /// As a daemon: has `client` looked at wherever this rank's part waits.
    pub(crate) fn serve(&self, client: impl AsFd) -> std::io::Result<()> {
        let mut served = Ok(());
        let soon = Instant::now() + Duration::from_secs(1);
        self.inner.with_driver(soon, |driver| served = driver.serve(&client));
        served
    }

    /// As a daemon: moves data until `done` holds, the client says something, or `until` has come.
    /// `more` takes what it has said meanwhile; true if it said anything.
    pub(crate) fn wait_for_client(
        &self,
        until: Instant,
        done: impl Fn() -> bool,
        mut more: impl FnMut() -> bool,
    ) {
        let client_ready = &self.inner.shared.client_ready;
        let heard = || client_ready.load(Ordering::SeqCst) || done() || self.inner.is_claimed();
        let mapped = self.inner.try_driver(|driver| {
            // What was read before has left its mark: that is taken away, and then looked at again.
            driver.poll_once();
            client_ready.store(false, Ordering::SeqCst);
            if !more() {
                driver.drive(until, heard);
            }
        });
        if !mapped {
            self.inner.wait(Instant::now(), until, heard);
            client_ready.store(false, Ordering::SeqCst);
        }
    }
}
