//! The manager over a store that was restored from a backup.

use threefs_core::heartbeat::HeartbeatReply;
use threefs_core::ids::{NodeId, RoutingVersion};
use threefs_core::time::Millis;

use crate::manager::{Manager, Role, deadline};
use crate::ops::{Fence, MarkRestored};
use crate::protocol::MgmtdError;
use crate::report::UnconfirmedReport;

impl Manager {
    /// A node has seen newer state than the store has. Takes over again, and holds all chains.
    pub(crate) async fn hold_again(
        &self,
        role: &mut Role,
        fence: Fence,
        node: NodeId,
        seen: RoutingVersion,
    ) -> Result<HeartbeatReply, MgmtdError> {
        let marked =
            self.store.transact(deadline(), &MarkRestored { seen, fence: Some(fence) }).await;
        *role = Role::contender();
        match marked {
            Ok(()) => {
                tracing::error!(
                    "{node} has newer chains than the store of mgmtd, which is an old copy"
                );
                Err(MgmtdError::Starting { remaining_ms: self.timers.scan_ms })
            }
            // Most likely another mgmtd has become the primary and changed them.
            Err(error) => Err(MgmtdError::Store { detail: error.to_string() }),
        }
    }

    /// Chains that wait after a restore.
    ///
    /// # Errors
    /// [`MgmtdError::NotPrimary`].
    pub async fn unconfirmed(&self, now: Millis) -> Result<UnconfirmedReport, MgmtdError> {
        let mut role = self.role.lock().await;
        Ok(self.view(&mut role, now)?.unconfirmed())
    }
}
