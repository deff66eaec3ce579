//! Quota reservations of growing files.

use fabric::deadline::Deadline;
use rustix::io::Errno;
use threefs_client::ClientError;
use threefs_meta::{MetaChange, MetaError, MetaReply, Reservation};

use super::TRUNCATIONS_MAX;
use super::writeback::truncate_version_of;
use crate::daemon::{Daemon, unexpected};
use crate::files::{OpenFile, session_of};

/// Space that a growing file reserves ahead: its length up to `DOUBLED_MAX`, then an eighth of its
/// length, at least `DOUBLED_MAX` and at most `AHEAD_MAX`. Unused reservations count for the quota
/// for some minutes longer.
const DOUBLED_MAX: u64 = 1 << 20;
const AHEAD_MAX: u64 = 64 << 20;

impl Daemon {
    /// Reserves quota for a write up to `end` before it: with space ahead if the quota permits it,
    /// otherwise without.
    pub(crate) async fn reserve(
        &self,
        open: &OpenFile,
        end: u64,
        deadline: Deadline,
    ) -> Result<(), Errno> {
        let enough = |open: &OpenFile| {
            let state = open.state();
            !state.in_quota || end <= state.reserved
        };
        if enough(open) {
            return Ok(());
        }
        let _one_at_a_time = open.reporting.lock().await;
        let mut target = {
            let state = open.state();
            // Not beyond the maximum file length, which meta would reject.
            end.saturating_add(ahead(state.length)).min(state.file.layout.length_max()).max(end)
        };
        for _ in 0..TRUNCATIONS_MAX {
            if enough(open) {
                return Ok(());
            }
            let (id, truncate_version) = {
                let state = open.state();
                (state.file.inode, state.file.truncate_version)
            };
            let session = session_of(self.journal.client(), id);
            let reservation = Reservation { inode: id, session, end: target, truncate_version };
            let change = MetaChange::Reserve { reservations: vec![reservation] };
            let operation = format!("reserve {target} bytes for {id}");
            match self.notify(&operation, change, deadline).await {
                Ok(MetaReply::Inodes(mut inodes)) => {
                    let inode = inodes.pop().ok_or(Errno::IO)?;
                    let inode = inode.map_err(|error| {
                        self.errno_of(&operation, &ClientError::Meta(error), true)
                    })?;
                    let mut state = open.state();
                    if truncate_version_of(&inode) == Some(truncate_version) {
                        state.has_session = true;
                    }
                    state.follow(&inode);
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(ClientError::Meta(MetaError::QuotaExceeded { .. })) if target > end => {
                    target = end;
                }
                Err(error) => return Err(self.errno_of(&operation, &error, true)),
            }
        }
        Err(Errno::IO)
    }
}

/// Bytes that a file of this length reserves ahead.
fn ahead(length: u64) -> u64 {
    length.min(DOUBLED_MAX).max(length / 8).min(AHEAD_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_file_reserves_more_ahead() {
        const MIB: u64 = 1 << 20;
        for (length, expected) in [
            (0, 0),
            (4096, 4096),
            (3 * MIB, MIB),
            (16 * MIB, 2 * MIB),
            (800 * MIB, 64 * MIB),
            (u64::MAX, 64 * MIB),
        ] {
            assert_eq!(ahead(length), expected, "{length}");
        }
    }
}
