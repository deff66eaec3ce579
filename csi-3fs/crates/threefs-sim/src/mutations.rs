//! Mutations: seeded bugs in the simulator's driver and in the replica (its feature `simulator`).
//! The schedules must find each of them, and nothing without them.

use threefs_core::replica::Check;

/// A seeded bug.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// No bug.
    #[default]
    None,
    /// Updates are accepted for any version of the chain and of the chunk.
    SkipVersionCheck,
    /// The head replies as soon as the update is durable on its own disk.
    AcknowledgeBeforeTail,
    /// An update is committed before the successor has replied.
    CommitBeforeReply,
    /// Reads are served from the pending state.
    ReadPending,
    /// Reads are served without a lease.
    IgnoreLease,
    /// The store reports data as durable before it is.
    LoseFlush,
    /// Chunks lose the tags of their updates.
    ForgetTags,
    /// A SYNCING target reports itself up to date before its predecessor does.
    ClaimSynced,
    /// A restarted target reports itself up to date.
    TrustRestart,
    /// A moved replica is removed from the chain before it has stopped serving.
    LeaveOutAtOnce,
    /// A move is abandoned while its destination serves.
    AbandonServing,
    /// Expired updates are started.
    IgnoreExpiry,
    /// The expiry of an update counts from its arrival.
    ExpireFromArrival,
    /// A node that shuts down reports OFFLINE and continues to serve until it exits.
    ReportLeaveAtOnce,
    /// A store is opened without flushing what a killed process left in the page cache.
    SkipFlushAtOpen,
    /// An empty replacement disk is accepted as the lost one.
    TrustAnyStore,
    /// Ports have one budget for all classes.
    OneBudget,
    /// Ports have one budget for the forwards of all hops.
    OneBudgetForForwards,
    /// A failed store stays closed.
    KeepClosed,
    /// A failed store is reopened with the content of its page cache.
    KeepCache,
    /// A damaged store is never quarantined.
    KeepDamaged,
    /// A damaged store is quarantined although it may be the last one.
    SetAsideLast,
    /// mgmtd promotes a target with an empty store, which empties the others.
    PromoteEmpty,
    /// A restored manager continues from its old chain table, in newer versions.
    TrustBackup,
    /// A store accepts payloads that were damaged on the way.
    TrustPayload,
    /// Leases count before the fences that a restored manager lacks are published.
    TrustFences,
    /// A lease counts without the fences that the reply names.
    LeaseWithoutFences,
    /// A reopened store does not get the fences that its node knows.
    ForgetFences,
    /// A node confirms the fences that a reply names before its replicas have them.
    ConfirmEarly,
    /// A new primary of mgmtd ignores the leases that the former one may still grant.
    ForgetFormerPrimary,
    /// A former primary answers heartbeats until a write of it is refused.
    AnswerWithoutLease,
    /// The lease of a node is as long as the time after which it is dead.
    WholeLease,
    /// The lease of a node is half of that time: it ends during a failover of mgmtd.
    HalfLease,
    /// Another mgmtd takes over only when the lease of the primary has ended.
    TakeOverAfterLease,
    /// The replica skips one of its checks.
    Without(Check),
}

impl Mutation {
    /// All mutations.
    pub const ALL: [Self; 56] = [
        Self::SkipVersionCheck,
        Self::AcknowledgeBeforeTail,
        Self::CommitBeforeReply,
        Self::ReadPending,
        Self::IgnoreLease,
        Self::LoseFlush,
        Self::ForgetTags,
        Self::ClaimSynced,
        Self::TrustRestart,
        Self::LeaveOutAtOnce,
        Self::AbandonServing,
        Self::IgnoreExpiry,
        Self::ExpireFromArrival,
        Self::ReportLeaveAtOnce,
        Self::TrustAnyStore,
        Self::SkipFlushAtOpen,
        Self::OneBudget,
        Self::OneBudgetForForwards,
        Self::KeepClosed,
        Self::KeepCache,
        Self::KeepDamaged,
        Self::SetAsideLast,
        Self::PromoteEmpty,
        Self::TrustBackup,
        Self::TrustPayload,
        Self::TrustFences,
        Self::LeaseWithoutFences,
        Self::ForgetFences,
        Self::ConfirmEarly,
        Self::ForgetFormerPrimary,
        Self::AnswerWithoutLease,
        Self::WholeLease,
        Self::HalfLease,
        Self::TakeOverAfterLease,
        Self::Without(Check::Lease),
        Self::Without(Check::NothingPending),
        Self::Without(Check::Tags),
        Self::Without(Check::Expiry),
        Self::Without(Check::Sequence),
        Self::Without(Check::Demotion),
        Self::Without(Check::Stall),
        Self::Without(Check::Room),
        Self::Without(Check::ForgetDownChain),
        Self::Without(Check::PurgeAge),
        Self::Without(Check::PurgeDownChain),
        Self::Without(Check::PurgeOldest),
        Self::Without(Check::Epoch),
        Self::Without(Check::CopyContent),
        Self::Without(Check::CopyTags),
        Self::Without(Check::ShownVersions),
        Self::Without(Check::CompleteList),
        Self::Without(Check::Fence),
        Self::Without(Check::DrainedOperations),
        Self::Without(Check::DrainedInChain),
        Self::Without(Check::Confirmed),
        Self::Without(Check::Announced),
    ];

    /// Only several chains with bounded ports find it.
    pub(crate) fn needs_budgets(self) -> bool {
        matches!(self, Self::OneBudget | Self::OneBudgetForForwards)
    }

    /// Only schedules in which removed chunks are purged find it.
    pub(crate) fn needs_purges(self) -> bool {
        let checks = [Check::PurgeAge, Check::PurgeDownChain, Check::PurgeOldest];
        checks.into_iter().any(|check| self == Self::Without(check))
    }

    /// Only schedules with several epochs find it.
    pub(crate) fn needs_epochs(self) -> bool {
        let checks = [
            Check::PurgeOldest,
            Check::Epoch,
            Check::CopyContent,
            Check::CopyTags,
            Check::ShownVersions,
            Check::CompleteList,
            Check::Fence,
            Check::DrainedOperations,
            Check::DrainedInChain,
        ];
        let mutations =
            [Self::TrustFences, Self::LeaseWithoutFences, Self::ForgetFences, Self::ConfirmEarly];
        mutations.contains(&self) || checks.into_iter().any(|check| self == Self::Without(check))
    }

    /// Only schedules with a failover of mgmtd find it.
    pub(crate) fn needs_failovers(self) -> bool {
        matches!(self, Self::ForgetFormerPrimary | Self::AnswerWithoutLease) || self.stops_data()
    }

    /// It violates no safety, but reads and writes wait during a failover of mgmtd.
    pub(crate) fn stops_data(self) -> bool {
        matches!(self, Self::HalfLease | Self::TakeOverAfterLease)
    }

    /// Only schedules with a removed file find it.
    pub(crate) fn needs_removal(self) -> bool {
        self == Self::Without(Check::ForgetDownChain)
    }
}
