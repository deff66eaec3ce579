//! Registration of the metadata store.

use threefs_core::ids::ClusterId;
use threefs_kv::{Operation, Transaction};

use super::{Fence, OpError, fence};
use crate::protocol::{MetaRegistered, MetaRegistration, MgmtdError};
use crate::registration::register;
use crate::rows::{self, META};

/// Registers a store, or returns why it does not belong to this cluster.
pub(crate) struct RegisterMeta<'a> {
    pub fence: Fence,
    pub cluster: ClusterId,
    pub registration: &'a MetaRegistration,
}

impl Operation for RegisterMeta<'_> {
    type Output = Result<MetaRegistered, MgmtdError>;
    type Error = OpError;

    async fn run(
        &self,
        txn: &mut Transaction,
    ) -> Result<Result<MetaRegistered, MgmtdError>, OpError> {
        fence(txn, self.fence).await?;
        let registered = rows::read(txn, META).await?;
        let row = match register(registered.as_ref(), self.cluster, self.registration) {
            Ok(row) => row,
            Err(refusal) => return Ok(Err(refusal)),
        };
        rows::write(txn, META, &row)?;
        let (generation, adoptions) = (row.generation, row.adoptions);
        Ok(Ok(MetaRegistered { cluster: self.cluster, generation, adoptions }))
    }
}
