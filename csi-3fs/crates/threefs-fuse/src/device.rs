//! /dev/fuse: reads requests, writes answers and notifications. The descriptor outlives this
//! process.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::wire::{self, Body, REQUEST_BYTES_MAX, Request};

pub(crate) struct Device(OwnedFd);

/// Result of a read.
pub(crate) enum ReadResult {
    Request(Request),
    /// Nothing usable; read again.
    Nothing,
    /// The kernel has no request.
    Empty,
    /// The file system was unmounted, or its connection was aborted.
    End,
}

/// Buffer of a reader thread, reused unless its bytes are still needed.
pub(crate) struct Buffer(Vec<u8>);

impl Buffer {
    pub(crate) fn new() -> Self {
        Self(vec![0; REQUEST_BYTES_MAX])
    }
}

impl AsRawFd for Device {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Device {
    pub(crate) fn new(descriptor: OwnedFd) -> io::Result<Self> {
        // Of the open file description: a daemon of an earlier release resets it.
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(descriptor))
    }

    /// Waits, without the runtime, until there may be a request.
    pub(crate) fn wait(&self) -> io::Result<()> {
        let mut set = [PollFd::new(&self.0, PollFlags::IN)];
        match rustix::event::poll(&mut set, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a request, if there is one.
    pub(crate) fn receive(&self, buffer: &mut Buffer) -> io::Result<ReadResult> {
        let length = match rustix::io::read(&self.0, buffer.0.as_mut_slice()) {
            Ok(length) => length,
            // Interrupted before or during the read: nothing is lost.
            Err(Errno::INTR | Errno::NOENT) => return Ok(ReadResult::Nothing),
            Err(Errno::AGAIN) => return Ok(ReadResult::Empty),
            Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(ReadResult::End),
            Err(error) => return Err(error.into()),
        };
        // A request in the reader's buffer keeps all of it: memory in use stays below twice the
        // requests' length.
        let bytes = if length > REQUEST_BYTES_MAX / 2 {
            let mut bytes = std::mem::replace(&mut buffer.0, vec![0; REQUEST_BYTES_MAX]);
            bytes.truncate(length);
            Bytes::from(bytes)
        } else {
            Bytes::copy_from_slice(buffer.0.get(..length).unwrap_or_default())
        };
        let Some(request) = Request::parse(bytes) else {
            tracing::error!(length, "invalid request from the kernel");
            return Ok(ReadResult::Nothing);
        };
        Ok(ReadResult::Request(request))
    }

    /// Answers a request with a body, and data that follows it.
    pub(crate) fn answer(&self, unique: u64, body: &[u8], data: &[Bytes]) {
        self.send(unique, 0, body, data);
    }

    /// Answers a request with an error.
    pub(crate) fn refuse(&self, unique: u64, error: Errno) {
        self.send(unique, -error.raw_os_error(), &[], &[]);
    }

    /// Asks the kernel to resend all unanswered requests; false if it does not support that.
    pub(crate) fn resend(&self) -> bool {
        self.send(0, wire::NOTIFY_RESEND, &[], &[])
    }

    /// Makes the kernel reload an inode's attributes. Never waits for the inode's pages.
    pub(crate) fn invalidate_attributes(&self, node: u64) {
        let body = Body::default().u64(node).u64(u64::MAX).u64(0);
        self.send(0, wire::NOTIFY_INVALIDATE_INODE, &body.0, &[]);
    }

    /// Makes the kernel drop a range of its pages of an inode, and its attributes. Waits for requests
    /// that this daemon has not answered yet: not to be called by a thread that answers them.
    pub(crate) fn invalidate_range(&self, node: u64, offset: u64, length: u64) {
        let body = Body::default().u64(node).u64(offset).u64(length);
        self.send(0, wire::NOTIFY_INVALIDATE_INODE, &body.0, &[]);
    }

    fn send(&self, unique: u64, error: i32, body: &[u8], data: &[Bytes]) -> bool {
        // At most the size of a read.
        let length = (16 + body.len() + data.iter().map(Bytes::len).sum::<usize>()) as u32;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&length.to_le_bytes());
        header[4..8].copy_from_slice(&error.to_le_bytes());
        header[8..].copy_from_slice(&unique.to_le_bytes());
        let mut parts = vec![IoSlice::new(&header), IoSlice::new(body)];
        parts.extend(data.iter().map(|piece| IoSlice::new(piece)));
        match rustix::io::writev(&self.0, &parts) {
            Ok(_) => true,
            // The caller does not wait any more, or the kernel does not know the inode.
            Err(Errno::NOENT | Errno::NODEV) => false,
            Err(error) => {
                tracing::debug!(unique, %error, "the kernel rejected an answer or notification");
                false
            }
        }
    }
}
