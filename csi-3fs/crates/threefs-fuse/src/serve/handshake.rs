//! FUSE INIT handshake: negotiation of protocol version and flags.

use rustix::io::Errno;

use crate::config::FuseError;
use crate::daemon::Daemon;
use crate::device::{Buffer, ReadResult};
use crate::wire::{self, Body, Request, init, opcode};

/// Maximum number of background requests of the kernel: readahead, asynchronous writes.
const BACKGROUND_MAX: u16 = 64;

impl Daemon {
    /// Answers INIT. If the first request is another one, a previous daemon has answered INIT:
    /// returns that request.
    pub(super) fn handshake(&self) -> Result<Option<Request>, FuseError> {
        let mut buffer = Buffer::new();
        loop {
            let request = match self.device.receive(&mut buffer).map_err(FuseError::Device)? {
                ReadResult::Request(request) => request,
                ReadResult::Nothing => continue,
                ReadResult::Empty => {
                    self.device.wait().map_err(FuseError::Device)?;
                    continue;
                }
                ReadResult::End => {
                    return Err(FuseError::Protocol("unmounted before it was served".into()));
                }
            };
            if request.opcode != opcode::INIT {
                return Ok(Some(request));
            }
            if self.answer_init(&request)? {
                return Ok(None);
            }
        }
    }

    /// Answers INIT; false if the kernel will send it again.
    pub(super) fn answer_init(&self, request: &Request) -> Result<bool, FuseError> {
        let mut fields = wire::Fields(&request.body);
        let (Some(major), Some(minor), Some(readahead), Some(flags)) =
            (fields.u32(), fields.u32(), fields.u32(), fields.u32())
        else {
            return Err(FuseError::Protocol("INIT is too short".into()));
        };
        if major > wire::MAJOR {
            // The kernel will send INIT again with our version.
            self.device.answer(request.unique, &Body::default().u32(wire::MAJOR).zeros(60).0, &[]);
            return Ok(false);
        }
        if major < wire::MAJOR || minor < 31 {
            self.device.refuse(request.unique, Errno::PROTO);
            return Err(FuseError::Protocol(format!(
                "the kernel supports FUSE {major}.{minor}; 3FS needs 7.31 (Linux 5.4) or newer"
            )));
        }
        let mut offered = u64::from(flags);
        if offered & init::EXTENDED != 0 {
            offered |= u64::from(fields.u32().unwrap_or(0)) << 32;
        }
        let write_back = if self.write_back { init::WRITE_BACK } else { 0 };
        let locks = if self.locks.enabled { init::POSIX_LOCKS | init::FLOCK_LOCKS } else { 0 };
        // Rings need the caller of every request.
        let idmapped = if self.write_back { init::IDMAPPED } else { 0 };
        let supported = init::SUPPORTED | write_back | locks | idmapped;
        let agreed = offered & supported;
        let body = Body::default()
            .u32(wire::MAJOR)
            .u32(wire::MINOR)
            .u32(readahead.max(wire::WRITE_BYTES_MAX as u32))
            .u32(agreed as u32)
            .u16(BACKGROUND_MAX)
            .u16(BACKGROUND_MAX / 4 * 3)
            .u32(wire::WRITE_BYTES_MAX as u32)
            .u32(1)
            .u16((wire::WRITE_BYTES_MAX / 4096) as u16)
            .u16(0)
            .u32((agreed >> 32) as u32)
            .zeros(28);
        self.device.answer(request.unique, &body.0, &[]);
        Ok(true)
    }
}
