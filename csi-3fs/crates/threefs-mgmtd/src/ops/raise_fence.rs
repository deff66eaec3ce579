//! Storing of a volume's fence.

use threefs_core::fence::VolumeFence;
use threefs_core::ids::{FencesVersion, RoutingVersion};
use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence};
use crate::protocol::MgmtdError;
use crate::rows::{self, FENCES_VERSION, FenceRow, ROUTING};

/// Stores a fence with what is stored of it, or returns why the volume cannot have it. Unchanged
/// rows keep their version.
pub(crate) struct RaiseFence<'a> {
    pub fence: Fence,
    pub raised: &'a VolumeFence,
}

impl Operation for RaiseFence<'_> {
    type Output = Result<FenceRow, MgmtdError>;
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<Self::Output, OpError> {
        fence(txn, self.fence).await?;
        let key = rows::fence(self.raised.volume);
        let stored: Option<FenceRow> = rows::read(txn, &key).await?;
        let merged = match &stored {
            Some(row) if row.fence.epoch.volume != self.raised.epoch.volume => {
                let (volume, number) = (self.raised.volume, row.fence.epoch.volume);
                let reason =
                    format!("epoch {}: the volume has the number {number}", self.raised.epoch);
                return Ok(Err(MgmtdError::InvalidFence { volume, reason }));
            }
            Some(row) => row.fence.merged(self.raised),
            None => self.raised.clone(),
        };
        if let Some(row) = stored.filter(|row| row.fence == merged) {
            return Ok(Ok(row));
        }
        let routing: RoutingVersion = rows::read(txn, ROUTING).await?.unwrap_or_default();
        let last: FencesVersion = rows::read(txn, FENCES_VERSION).await?.unwrap_or_default();
        let version = last.max(FencesVersion::first_of(routing)).next();
        let row = FenceRow { version, fence: merged };
        rows::write(txn, FENCES_VERSION, &version)?;
        rows::write(txn, &key, &row)?;
        Ok(Ok(row))
    }
}
