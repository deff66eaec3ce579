//! `fallocate`: preallocation, holes, zeros.

use rustix::io::Errno;
use threefs_client::ClientError;

use super::data::now;
use crate::daemon::{Call, Daemon};
use crate::wire::{Body, Fields};

const KEEP_SIZE: u32 = 0x01;
const PUNCH_HOLE: u32 = 0x02;
const ZERO_RANGE: u32 = 0x10;

/// Effect of a `fallocate` mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mode {
    /// The range within the file is zeroed.
    zeros: bool,
    /// The file is extended to the end of the range.
    extends: bool,
}

impl Mode {
    /// `None`: not supported. Chunks have fixed positions, so ranges cannot be collapsed or
    /// inserted.
    fn of(bits: u32) -> Option<Self> {
        match bits {
            0 => Some(Self { zeros: false, extends: true }),
            KEEP_SIZE => Some(Self { zeros: false, extends: false }),
            ZERO_RANGE => Some(Self { zeros: true, extends: true }),
            bits if bits == KEEP_SIZE | ZERO_RANGE || bits == KEEP_SIZE | PUNCH_HOLE => {
                Some(Self { zeros: true, extends: false })
            }
            _ => None,
        }
    }
}

impl Daemon {
    /// Charges the allocated range to the quota, so that writes to it cannot exceed it: permanently
    /// if the file is extended, otherwise until the file is closed. Holes cost nothing, so nothing
    /// else needs to be done.
    pub(crate) async fn allocate<'a>(&'a self, call: &mut Call<'a>) -> Result<Body, Errno> {
        let mut fields = Fields(&call.request.body);
        let (handle, offset, length, bits) = (
            fields.u64().ok_or(Errno::INVAL)?,
            fields.u64().ok_or(Errno::INVAL)?,
            fields.u64().ok_or(Errno::INVAL)?,
            fields.u32().ok_or(Errno::INVAL)?,
        );
        let mode = Mode::of(bits).ok_or(Errno::OPNOTSUPP)?;
        let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
        let id = self.inode(call.request.node);
        let open = self.file_of(call, handle).await?;
        self.drain(id, call.deadline).await?;
        let (file, current_length) = {
            let state = open.state();
            (state.file.clone(), state.length)
        };
        if end > u64::from(file.layout.chunk_bytes) << 32 {
            return Err(Errno::FBIG);
        }
        if bits & PUNCH_HOLE == 0 {
            self.reserve(&open, end, call.deadline).await?;
        }
        if mode.zeros && offset < current_length {
            let end = end.min(current_length);
            let mut punched =
                self.client_for(id)?.punch_hole(&file, offset, end, call.deadline).await;
            if matches!(punched, Err(ClientError::NotReserved { .. })) {
                // Another client truncated the file meanwhile.
                open.state().reserved = 0;
                self.reserve(&open, end, call.deadline).await?;
                punched = self.client_for(id)?.punch_hole(&file, offset, end, call.deadline).await;
            }
            punched.map_err(|error| self.errno_of(&format!("punch {id}"), &error, true))?;
        }
        let (longer, changed) = {
            let mut state = open.state();
            let longer = mode.extends && end > state.length;
            if longer {
                state.length = end;
            }
            let changed = longer || mode.zeros;
            if changed {
                state.dirty = true;
                state.written = now();
            }
            (longer, changed)
        };
        // A length without chunks is reported at once: a later daemon could not find it. Zeroing is
        // like any write.
        if longer || (changed && !self.journal.mark_dirty(id)) {
            self.report_length(id, &open, false, call.deadline).await?;
        }
        Ok(Body::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_modes_are_rejected() {
        assert_eq!(Mode::of(0), Some(Mode { zeros: false, extends: true }));
        assert_eq!(Mode::of(KEEP_SIZE), Some(Mode { zeros: false, extends: false }));
        assert_eq!(Mode::of(3), Some(Mode { zeros: true, extends: false }));
        assert_eq!(Mode::of(0x10), Some(Mode { zeros: true, extends: true }));
        assert_eq!(Mode::of(0x11), Some(Mode { zeros: true, extends: false }));
        for bits in [PUNCH_HOLE, 0x08, 0x20, 0x40, 0x12, 0x13] {
            assert_eq!(Mode::of(bits), None, "{bits:#x}");
        }
    }
}
