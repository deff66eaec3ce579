//! Threads of a client, and fork safety.
//!
//! A forked child has the client's memory but none of its threads. So a client records its process:
//! in another one every call is rejected, and dropping it has no effect.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::pin;
use std::time::Duration;

use pyo3::prelude::*;
use tokio::runtime::{Builder, Runtime};

use crate::errors;

/// How often a wait checks for pending signals of the interpreter (Ctrl-C).
const SIGNAL_PACE: Duration = Duration::from_millis(100);
/// One thread moves bytes, the other checks and copies them.
const WORKER_THREADS: usize = 2;

/// A client and its threads.
pub(crate) struct ClientRuntime {
    pub(crate) client: threefs_client::Client,
    runtime: ManuallyDrop<Runtime>,
    process: u32,
}

impl ClientRuntime {
    /// Starts the threads and the client on them.
    pub(crate) fn start(config: threefs_client::ClientConfig) -> PyResult<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(WORKER_THREADS)
            .thread_name("threefs-client")
            .enable_all()
            .build()?;
        let client = {
            let _entered = runtime.enter();
            threefs_client::Client::start(config)
        };
        Ok(Self { client, runtime: ManuallyDrop::new(runtime), process: std::process::id() })
    }

    /// Waits for `work` with the GIL released; a signal's exception ends the wait.
    pub(crate) fn wait<T: Send>(
        &self,
        py: Python<'_>,
        work: impl Future<Output = Result<T, threefs_client::ClientError>> + Send,
    ) -> PyResult<T> {
        if self.process != std::process::id() {
            return Err(errors::invalid(
                py,
                "this client was created by another process (before a fork); create a new one in this process",
            ));
        }
        let mut work = pin!(work);
        loop {
            let slice = async { tokio::time::timeout(SIGNAL_PACE, work.as_mut()).await };
            match py.detach(|| self.runtime.block_on(slice)) {
                Ok(result) => return result.map_err(|error| errors::from_client(py, &error)),
                Err(_) => py.check_signals()?,
            }
        }
    }
}

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: dropped once, here; not used after.
            unsafe { ManuallyDrop::take(&mut self.runtime) }.shutdown_background();
        }
    }
}
