//! One device's primary context, streams and events, released when dropped.

use std::ffi::c_int;
use std::sync::Arc;

use crate::cuda::{Cuda, Handle};
use crate::error::DeviceError;

/// The primary context, which torch and other users in the process share.
#[derive(Debug)]
pub struct Context {
    pub(crate) cuda: Arc<Cuda>,
    pub(crate) ordinal: i32,
    device: c_int,
    context: Handle,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks for itself.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn new(cuda: Arc<Cuda>, ordinal: i32) -> Result<Arc<Self>, DeviceError> {
        let device = cuda.device(ordinal)?;
        let context = cuda.retain(ordinal, device)?;
        Ok(Arc::new(Self { cuda, ordinal, device, context }))
    }

    pub(crate) fn pci(&self) -> Result<String, DeviceError> {
        self.cuda.pci(self.ordinal, self.device)
    }

    /// Makes it the calling thread's context until the guard is dropped.
    pub(crate) fn enter(&self) -> Result<Current<'_>, DeviceError> {
        self.cuda.push(self.ordinal, self.context)?;
        Ok(Current { context: self })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Err(error) = self.cuda.release(self.ordinal, self.device) {
            tracing::warn!(%error, "cannot release a GPU's context");
        }
    }
}

/// See [`Context::enter`].
pub struct Current<'a> {
    context: &'a Context,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let _ = self.context.cuda.pop(self.context.ordinal);
    }
}

/// A stream of this crate.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    pub(crate) handle: Handle,
}

// SAFETY: as for the context.
unsafe impl Send for Stream {}

impl Stream {
    /// The context must be current.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let handle = context.cuda.new_stream(context.ordinal)?;
        Ok(Self { context: context.clone(), handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Queued work continues; the driver frees the stream after it.
        let _current = self.context.enter();
        if let Err(error) = self.context.cuda.end_stream(self.context.ordinal, self.handle) {
            tracing::warn!(%error, "cannot destroy a stream");
        }
    }
}

/// An event in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: as for the context.
unsafe impl Send for Event {}

impl Event {
    /// An event that is not recorded yet. The context must be current.
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, DeviceError> {
        let handle = context.cuda.new_event(context.ordinal)?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Records the event in a stream of another user, which may be one of the driver's default streams.
    pub(crate) fn mark(&self, stream: usize) -> Result<(), DeviceError> {
        let stream = std::ptr::without_provenance_mut(stream);
        self.context.cuda.record(self.context.ordinal, self.handle, stream)
    }

    /// Records the event: it completes when all work queued in `stream` so far has completed.
    pub(crate) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.context.cuda.record(self.context.ordinal, self.handle, stream.handle)
    }

    pub(crate) fn ordinal(&self) -> i32 {
        self.context.ordinal
    }

    /// Makes work that is queued in `stream` from now on wait for the event.
    pub(crate) fn before(&self, stream: &Stream) -> Result<(), DeviceError> {
        self.context.cuda.follow(self.context.ordinal, stream.handle, self.handle)
    }

    pub(crate) fn has_passed(&self) -> Result<bool, DeviceError> {
        self.context.cuda.has_passed(self.context.ordinal, self.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _current = self.context.enter();
        if let Err(error) = self.context.cuda.end_event(self.context.ordinal, self.handle) {
            tracing::warn!(%error, "cannot destroy an event");
        }
    }
}
