//! Shutdown signal of a service: one handle, any number of listeners.

use tokio::sync::watch;

/// Requests shutdown of the tasks that wait on its [`Shutdown`]. Dropping it also requests
/// shutdown, so that no task outlives its owner.
#[derive(Debug)]
pub struct ShutdownHandle(watch::Sender<bool>);

/// The listening side; clones are cheap.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

impl ShutdownHandle {
    /// Requests shutdown. Idempotent.
    pub fn request(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    /// Creates a handle and its listener.
    pub fn new() -> (ShutdownHandle, Shutdown) {
        let (sender, receiver) = watch::channel(false);
        (ShutdownHandle(sender), Shutdown(receiver))
    }

    /// Completes when shutdown is requested or the handle is dropped.
    pub async fn requested(&self) {
        let mut receiver = self.0.clone();
        // An error means that the handle was dropped, which is also a shutdown.
        let _ = receiver.wait_for(|requested| *requested).await;
    }
}
