//! One flush for several stores of a disk.
//!
//! The frames of all logs are written to the device at the same time. Then one flush empties its
//! volatile cache ([`crate::disk::Disk::shares_flushes`]), and with it all of them are durable. The
//! logs are written ahead with zeros, so this changes no file system metadata; the few frames that
//! do are flushed separately.

use std::io;
use std::time::{Duration, Instant};

use threefs_core::error::StoreError;

use crate::ChunkStore;

/// A flush of one store.
pub enum Started<'a> {
    /// The records were durable, or the store has failed.
    Ended(Result<(), StoreError>),
    /// Another thread flushes.
    Busy,
    /// [`LogFlush::end`] must follow. Until then the store flushes nothing else.
    Flush(Box<dyn LogFlush + 'a>),
}

/// A frame of a log that is to be made durable.
pub trait LogFlush {
    /// The device whose flush makes the frame durable, once it is written there; `None` if only
    /// [`Self::write`] makes it durable.
    fn device(&self) -> Option<u64>;

    /// Writes the frame durably, by itself.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn write(&self) -> io::Result<()>;

    /// Starts to write the frame to the device.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn start_writing(&self) -> io::Result<()>;

    /// Waits until the device has the frame.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn finish_writing(&self) -> io::Result<()>;

    /// Flushes the device.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn flush_device(&self) -> io::Result<()>;

    /// Ends the flush: the records are durable, or the store has failed.
    ///
    /// # Errors
    /// `Io`: the store has failed.
    fn end(self: Box<Self>, written: io::Result<()>) -> Result<(), StoreError>;
}

/// Results of [`flush_together`].
#[derive(Debug)]
pub struct Flushed {
    /// Of each store, in order. `None`: another thread flushes it; [`ChunkStore::settle`] waits for
    /// that.
    pub results: Vec<Option<Result<(), StoreError>>>,
    /// Time of the flushes, if there was one.
    pub took: Option<Duration>,
}

/// Makes staged updates durable ([`ChunkStore::stage`]), each up to its number.
pub fn flush_together(stores: &[(&dyn ChunkStore, u64)]) -> Flushed {
    let mut results = Vec::with_capacity(stores.len());
    let mut flushes = Vec::new();
    for (index, (store, number)) in stores.iter().enumerate() {
        results.push(match store.start_flush(*number) {
            Started::Ended(result) => Some(result),
            Started::Busy => None,
            Started::Flush(flush) => {
                flushes.push((index, flush));
                None
            }
        });
    }
    let started_at = (!flushes.is_empty()).then(Instant::now);
    let device = flushes.iter().find_map(|(_, flush)| flush.device());
    let (mut joint, mut alone): (Vec<_>, Vec<_>) =
        flushes.into_iter().partition(|(_, flush)| device.is_some() && flush.device() == device);
    if joint.len() == 1 {
        // Its own flush needs fewer system calls.
        alone.append(&mut joint);
    }
    let started: Vec<_> = joint.iter().map(|(_, flush)| flush.start_writing()).collect();
    let written = joint
        .iter()
        .zip(started)
        .map(|((_, flush), started)| started.and_then(|()| flush.finish_writing()));
    let written: Vec<_> = written.collect();
    let flushed = joint.first().map_or(Ok(()), |(_, flush)| flush.flush_device());
    for ((index, flush), written) in joint.into_iter().zip(written) {
        let of_device = match &flushed {
            Ok(()) => Ok(()),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        results[index] = Some(flush.end(written.and(of_device)));
    }
    for (index, flush) in alone {
        let written = flush.write();
        results[index] = Some(flush.end(written));
    }
    Flushed { results, took: started_at.map(|started_at| started_at.elapsed()) }
}
