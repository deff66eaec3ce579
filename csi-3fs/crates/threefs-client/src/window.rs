//! Window of a client: limits on the number and bytes of concurrent chunk operations.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Client;
use crate::error::ClientError;
use crate::progress::{Progress, ProgressTimeout};

/// Limits the operations in flight. Shared by all operations of a client.
#[derive(Clone)]
pub(crate) struct Window {
    operations: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    bytes_max: usize,
    progress: Arc<Progress>,
}

/// Permit for one chunk operation, released when dropped.
pub(crate) struct Permit {
    _operation: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
}

impl Window {
    pub(crate) fn new(operations_max: usize, bytes_max: usize) -> Self {
        Self {
            operations: Arc::new(Semaphore::new(operations_max)),
            bytes: Arc::new(Semaphore::new(bytes_max)),
            bytes_max,
            progress: Arc::new(Progress::start()),
        }
    }

    /// Waits for a permit as long as earlier operations make progress. A single operation larger
    /// than the window gets all of it. `None` after the deadline.
    pub(crate) async fn acquire(&self, bytes: usize, patience: &ProgressTimeout) -> Option<Permit> {
        let bytes = u32::try_from(bytes.min(self.bytes_max)).unwrap_or(u32::MAX);
        let (operations, all_bytes) = (Arc::clone(&self.operations), Arc::clone(&self.bytes));
        let mut permit = std::pin::pin!(async move {
            // Fails only if the semaphore is closed, which never happens.
            let _operation = operations.acquire_owned().await.ok()?;
            Some(Permit { _operation, _bytes: all_bytes.acquire_many_owned(bytes).await.ok()? })
        });
        loop {
            let deadline = patience.deadline_with(&self.progress);
            match tokio::time::timeout_at(deadline.instant().into(), &mut permit).await {
                Ok(permit) => return permit,
                Err(_) if patience.deadline_with(&self.progress).passed() => return None,
                Err(_) => {}
            }
        }
    }
}

impl Client {
    /// Records that a chunk operation has succeeded.
    pub(crate) fn record_progress(&self, patience: &ProgressTimeout) {
        patience.record_progress();
        self.0.window.progress.record_progress();
    }
}

pub(crate) fn joined<T>(
    finished: Result<Result<T, ClientError>, tokio::task::JoinError>,
) -> Result<T, ClientError> {
    finished.unwrap_or_else(|error| {
        Err(ClientError::Protocol {
            who: "a task of this client".into(),
            detail: error.to_string(),
        })
    })
}
