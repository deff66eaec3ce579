//! INIT: what the kernel offers and what is agreed.

use rustix::io::Errno;

use super::Daemon;
use crate::config::FuseError;
use crate::device::{Buffer, Received};
use crate::wire::{self, Body, Request, init, opcode};

/// Requests that the kernel sends without waiting for them: readahead, asynchronous writes.
const BACKGROUND_MAX: u16 = 64;

impl Daemon {
    /// Answers INIT. If the first request is another one, somebody has answered it before: gives
    /// that request.
    pub(super) fn shake_hands(&self) -> Result<Option<Request>, FuseError> {
        let mut buffer = Buffer::new();
        loop {
            let request = match self.device.receive(&mut buffer).map_err(FuseError::Device)? {
                Received::Request(request) => request,
                Received::Nothing => continue,
                Received::End => {
                    return Err(FuseError::Protocol(
                        "it was unmounted before it was served".into(),
                    ));
                }
            };
            if request.opcode != opcode::INIT {
                return Ok(Some(request));
            }
            if self.agree(&request)? {
                return Ok(None);
            }
        }
    }

    /// Answers INIT; false if the kernel will ask again.
    pub(super) fn agree(&self, request: &Request) -> Result<bool, FuseError> {
        let mut fields = wire::Fields(&request.body);
        let (Some(major), Some(minor), Some(readahead), Some(flags)) =
            (fields.u32(), fields.u32(), fields.u32(), fields.u32())
        else {
            return Err(FuseError::Protocol("INIT is too short".into()));
        };
        if major > wire::MAJOR {
            // It will say it again with ours.
            self.device.answer(request.unique, &Body::default().u32(wire::MAJOR).zeros(60).0);
            return Ok(false);
        }
        if major < wire::MAJOR || minor < 31 {
            self.device.refuse(request.unique, Errno::PROTO);
            return Err(FuseError::Protocol(format!(
                "the kernel speaks FUSE {major}.{minor}; 3FS needs 7.31 (Linux 5.4) or newer"
            )));
        }
        let mut offered = u64::from(flags);
        if offered & init::EXTENDED != 0 {
            offered |= u64::from(fields.u32().unwrap_or(0)) << 32;
        }
        let wanted = init::WANTED | if self.write_back { init::WRITE_BACK } else { 0 };
        let agreed = offered & wanted;
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
        self.device.answer(request.unique, &body.0);
        Ok(true)
    }
}
