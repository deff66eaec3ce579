//! Metadata services that register their store with the primary.

use threefs_core::time::Millis;

use crate::manager::{Manager, deadline};
use crate::ops::RegisterMeta;
use crate::protocol::{MetaRegistered, MetaRegistration, MgmtdError};
use crate::refusal::Refusal;

impl Manager {
    /// Registers the store of a metadata service, which must not serve before. `knows_snapshots`: it
    /// is not of an earlier release.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`], or why the store does not belong to this cluster.
    pub async fn register_meta(
        &self,
        registration: &MetaRegistration,
        knows_snapshots: bool,
        now: Millis,
    ) -> Result<MetaRegistered, MgmtdError> {
        let mut role = self.role.lock().await;
        let view = self.view(&mut role, now)?;
        if view.snapshots && !knows_snapshots {
            let refusal = MgmtdError::Outdated { service: "a metadata service".into() };
            tracing::error!("{refusal}");
            return Err(refusal);
        }
        let (fence, cluster) = (view.fence, view.routing.cluster);
        let register = RegisterMeta { fence, cluster, registration };
        let result = self.store.transact(deadline(), &register).await;
        let result = self.reply_or_step_down(&mut role, result.map_err(Refusal::Op))?;
        if let Err(refusal) = &result {
            tracing::error!("{refusal}");
            return result;
        }
        if !knows_snapshots {
            // Its store has none: it could not open one that has.
            self.end_publication(&mut role, now).await?;
        }
        result
    }
}
