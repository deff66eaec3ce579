//! The end of a publication of all fences.

use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence};
use crate::rows::UNPUBLISHED;

/// No fence is missing any more.
pub(crate) struct FencesPublished(pub Fence);

impl Operation for FencesPublished {
    type Output = ();
    type Error = OpError;

    async fn run(&self, txn: &mut Transaction) -> Result<(), OpError> {
        fence(txn, self.0).await?;
        txn.clear(UNPUBLISHED);
        Ok(())
    }
}
