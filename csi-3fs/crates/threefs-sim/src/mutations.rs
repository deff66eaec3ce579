//! Bugs on purpose, in the simulator's driver and in the replica itself (its feature `simulator`).
//! Each must be found by the same schedules that find nothing without it.

use threefs_core::replica::Check;

/// A bug.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mutation {
    /// None: the product as it is.
    #[default]
    None,
    /// Updates are taken whatever version of the chain and of the chunk they are for.
    SkipVersionCheck,
    /// The head answers as soon as the update is durable on its own disk.
    AcknowledgeBeforeTail,
    /// An update is committed before the successor has answered.
    CommitBeforeReply,
    /// Reads are answered from the pending state.
    ReadPending,
    /// Reads are answered without a lease.
    IgnoreLease,
    /// The store says "durable" before it is.
    LoseFlush,
    /// Chunks forget which updates made them.
    ForgetTags,
    /// A SYNCING target calls itself up to date before its predecessor says so.
    ClaimSynced,
    /// A restarted target claims to be up to date.
    TrustRestart,
    /// A replica that has moved is left out of the chain before it has stopped serving.
    LeaveOutAtOnce,
    /// A move is given up while its destination serves.
    AbandonServing,
    /// Updates are begun whenever they come.
    IgnoreExpiry,
    /// The time in which an update may be begun counts from its arrival.
    ExpireFromArrival,
    /// A node that shall end reports OFFLINE and serves on until it does.
    ReportLeaveAtOnce,
    /// A store is opened without a flush of what a killed process left in the page cache.
    SkipFlushAtOpen,
    /// An empty disk in the place of a lost one passes for the lost one.
    TrustAnyStore,
    /// Ports have one budget for all classes of requests.
    OneBudget,
    /// Ports have one budget for the forwards of all hops.
    OneBudgetForForwards,
    /// A store that has failed stays closed.
    KeepClosed,
    /// A store that has failed is opened again over what its page cache shows.
    KeepCache,
    /// A store that is damaged is never set aside.
    KeepDamaged,
    /// A store that is damaged is set aside although it may be the last one.
    SetAsideLast,
    /// mgmtd promotes a target whose store is empty and lets it empty the others.
    PromoteEmpty,
    /// The replica does not make one of its checks.
    Without(Check),
}

impl Mutation {
    /// All bugs.
    pub const ALL: [Self; 34] = [
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
    ];

    /// So many schedules have to find it.
    #[must_use]
    pub fn schedules(self) -> u64 {
        // It needs an update whose answer is lost, a removal and a new head, in this order.
        if self == Self::Without(Check::PurgeAge) { 40_000 } else { 10_000 }
    }

    /// Only several chains with bounded ports find it.
    pub(crate) fn needs_budgets(self) -> bool {
        matches!(self, Self::OneBudget | Self::OneBudgetForForwards)
    }

    /// Only schedules in which removed chunks are purged find it.
    pub(crate) fn needs_purges(self) -> bool {
        let checks = [Check::PurgeAge, Check::PurgeDownChain];
        checks.into_iter().any(|check| self == Self::Without(check))
    }

    /// Only schedules with a removed file find it.
    pub(crate) fn needs_removal(self) -> bool {
        self == Self::Without(Check::ForgetDownChain)
    }
}
