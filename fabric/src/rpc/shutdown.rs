//! How a service is told to end: one handle, any number of listeners.

use tokio::sync::watch;

/// Whoever holds it can end what listens to its [`Shutdown`]. Dropping it ends them too, so that
/// nothing outlives its owner.
#[derive(Debug)]
pub struct ShutdownHandle(watch::Sender<bool>);

/// The listening side; clones are cheap.
#[derive(Clone, Debug)]
pub struct Shutdown(watch::Receiver<bool>);

impl ShutdownHandle {
    /// Asks everybody who listens to end. Idempotent.
    pub fn request(&self) {
        self.0.send_replace(true);
    }
}

impl Shutdown {
    /// A handle and its listener.
    pub fn new() -> (ShutdownHandle, Shutdown) {
        let (sender, receiver) = watch::channel(false);
        (ShutdownHandle(sender), Shutdown(receiver))
    }

    /// Ends when shutdown is requested or the handle is gone.
    pub async fn requested(&self) {
        let mut receiver = self.0.clone();
        // An error means that the handle is gone, which says the same.
        let _ = receiver.wait_for(|requested| *requested).await;
    }

    /// True once shutdown is requested or the handle is gone.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}
