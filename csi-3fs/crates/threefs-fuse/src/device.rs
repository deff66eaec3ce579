//! /dev/fuse: requests in, answers and notices out. The descriptor outlives this process.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use bytes::Bytes;
use rustix::io::Errno;

use crate::wire::{self, Body, REQUEST_BYTES_MAX, Request};

pub(crate) struct Device(OwnedFd);

/// What reading gives.
pub(crate) enum Received {
    Request(Request),
    /// Nothing that can be used; read on.
    Nothing,
    /// The file system was unmounted, or its connection aborted.
    End,
}

/// A buffer of a reading thread, used again unless its bytes are still needed.
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; REQUEST_BYTES_MAX])
    }
}

impl Device {
    pub(crate) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        // A holder may have it non-blocking; threads that wait want it otherwise.
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags - rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(descriptor))
    }

    /// Waits for a request.
    pub(crate) fn receive(&self, buffer: &mut Buffer) -> io::Result<Received> {
        let length = match rustix::io::read(&self.0, buffer.0.as_mut_slice()) {
            Ok(length) => length,
            // Interrupted before, or while, it was taken: nothing is lost.
            Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => return Ok(Received::Nothing),
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(Received::End),
            Err(error) => return Err(error.into()),
        };
        let bytes = if length > REQUEST_BYTES_MAX / 16 {
            let mut taken = std::mem::replace(&mut buffer.0, vec![0; REQUEST_BYTES_MAX]);
            taken.truncate(length);
            Bytes::from(taken)
        } else {
            Bytes::copy_from_slice(buffer.0.get(..length).unwrap_or_default())
        };
        let Some(request) = Request::parse(bytes) else {
            tracing::error!(length, "the kernel sent what is no request");
            return Ok(Received::Nothing);
        };
        Ok(Received::Request(request))
    }

    /// Answers a request.
    pub(crate) fn answer(&self, unique: u64, body: &[u8]) {
        self.send(unique, 0, body);
    }

    /// Answers a request with an error.
    pub(crate) fn refuse(&self, unique: u64, error: Errno) {
        self.send(unique, -error.raw_os_error(), &[]);
    }

    /// Asks for everything that a former daemon left unanswered; false where the kernel cannot.
    pub(crate) fn resend(&self) -> bool {
        self.send(0, wire::NOTIFY_RESEND, &[])
    }

    /// Has the kernel ask anew for an inode's attributes. Never waits for the inode's pages.
    pub(crate) fn invalidate_attributes(&self, node: u64) {
        let body = Body::default().u64(node).u64(u64::MAX).u64(0);
        self.send(0, wire::NOTIFY_INVALIDATE_INODE, &body.0);
    }

    fn send(&self, unique: u64, error: i32, body: &[u8]) -> bool {
        // A body has at most the bytes of a read.
        let length = (16 + body.len()) as u32;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..8].copy_from_slice(&error.to_le_bytes());
        header[8..].copy_from_slice(&unique.to_le_bytes());
        match rustix::io::writev(&self.0, &[IoSlice::new(&header), IoSlice::new(body)]) {
            Ok(_) => true,
            // Who asked does not wait any more, or the inode is not known.
            Err(Errno::NOENT | Errno::NODEV) => false,
            Err(error) => {
                tracing::debug!(unique, %error, "the kernel did not take an answer or notice");
                false
            }
        }
    }
}
