//! The membership record of a target: written before a newer chain takes effect.

use threefs_core::heartbeat::LocalState;
use threefs_core::membership::MembershipRecord;
use threefs_core::replica::{Event, Replica};
use threefs_core::routing::Chain;

use super::Target;

impl Target {
    /// The event for a published chain, once it is recorded. Blocks. While it waits for the disk, no
    /// other event is processed: nothing is served by an older chain, whose lease may have ended.
    pub(super) fn recorded(&self, replica: &Replica, chain: Chain) -> Event {
        let (memberships, id) = (&self.context.memberships, self.config.target);
        let store = self.snapshot().usage.id;
        let before = memberships.get(id);
        if before.as_ref().is_some_and(|before| before.supersedes(&chain)) {
            tracing::warn!(
                "{id} ignores version {} of {}, which is older than the one that it has recorded: \
                 the store of mgmtd is an old copy",
                chain.version,
                chain.id
            );
            return Event::Tick;
        }
        let now = self.context.clock.now();
        let up_to_date = replica.report(now).state == LocalState::UpToDate;
        let next = MembershipRecord::next(before.as_ref(), id, store, &chain, up_to_date);
        match next.map_or(Ok(()), |next| memberships.write(&self.folder, next)) {
            Ok(()) => Event::Routing(chain),
            Err(error) => Event::Failed { reason: format!("membership record: {error}") },
        }
    }
}
