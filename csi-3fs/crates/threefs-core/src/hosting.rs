//! Policy for failed stores: when to reopen one, and when to set it aside. Pure; the storage
//! service and the simulator use the same code.
//!
//! A store that reports an I/O error is closed and reopened after a pause, which doubles with each
//! consecutive failure. A store with a damaged log cannot be opened. It is set aside, and an empty
//! one is synced in its place, only if another target serves the chain and mgmtd has taken this one
//! out: otherwise it may be the last store with the chain's data.

use crate::error::StoreError;
use crate::ids::TargetId;
use crate::routing::{Chain, PublicState};
use crate::time::Millis;

/// Pauses before a store is reopened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pauses {
    /// Pause after the first failure, in milliseconds.
    pub min_ms: u64,
    /// Maximum pause, in milliseconds.
    pub max_ms: u64,
    /// A failure at least this many milliseconds after the store was opened counts as a first one.
    pub recovered_ms: u64,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { min_ms: 500, max_ms: 60_000, recovered_ms: 300_000 }
    }
}

impl Pauses {
    /// The pause after `failures` earlier consecutive failures.
    #[must_use]
    pub fn after(&self, failures: u32) -> u64 {
        self.min_ms.saturating_mul(1 << failures.min(16)).min(self.max_ms)
    }
}

/// The failures of one target's store.
#[derive(Clone, Debug, Default)]
pub struct Reopening {
    pauses: Pauses,
    failures: u32,
    opened_at: Option<Millis>,
}

impl Reopening {
    /// Without failures.
    #[must_use]
    pub fn new(pauses: Pauses) -> Self {
        Self { pauses, failures: 0, opened_at: None }
    }

    /// Records that the store was opened.
    pub fn record_open(&mut self, now: Millis) {
        self.opened_at = Some(now);
    }

    /// Records a failure of the store or of opening it; returns the milliseconds to wait before it
    /// is opened again.
    pub fn record_failure(&mut self, now: Millis) -> u64 {
        let recovered = |at: Millis| now.since(at) >= self.pauses.recovered_ms;
        if self.opened_at.take().is_some_and(recovered) {
            self.failures = 0;
        }
        let pause_ms = self.pauses.after(self.failures);
        self.failures = self.failures.saturating_add(1);
        pause_ms
    }
}

/// Whether a store that could not be opened is to be quarantined. `chain` is the published chain,
/// `lease_valid` whether mgmtd has replied recently.
#[must_use]
pub fn sets_aside(
    error: &StoreError,
    chain: Option<&Chain>,
    target: TargetId,
    lease_valid: bool,
) -> bool {
    let served_without = |chain: &Chain| {
        chain.head().is_some() && chain.state_of(target) == Some(PublicState::Offline)
    };
    matches!(error, StoreError::Damaged { .. }) && lease_valid && chain.is_some_and(served_without)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ChainId, ChainVersion, NodeId};
    use crate::routing::ChainTarget;

    #[test]
    fn pauses_double_and_a_long_success_resets_them() {
        let mut store = Reopening::new(Pauses { min_ms: 10, max_ms: 50, recovered_ms: 100 });
        assert_eq!([0, 1, 2, 3].map(|at| store.record_failure(Millis(at))), [10, 20, 40, 50]);
        store.record_open(Millis(100));
        assert_eq!(store.record_failure(Millis(199)), 50, "it has not recovered yet");
        store.record_open(Millis(200));
        assert_eq!(store.record_failure(Millis(300)), 10);
        assert_eq!(store.record_failure(Millis(1_000)), 20, "it was not open in between");
        assert_eq!(Pauses::default().after(u32::MAX), 60_000);
    }

    #[test]
    fn a_damaged_store_is_set_aside_only_if_the_chain_serves_without_it() {
        use PublicState::{LastSrv, Offline, Serving, Syncing};
        let damage = StoreError::Damaged { reason: "a frame is missing".into() };
        let io = StoreError::Io { operation: "open".into(), reason: "no".into() };
        let chain = |state, other_state| Chain {
            id: ChainId(1),
            version: ChainVersion(3),
            targets: vec![
                ChainTarget { target: TargetId(1), node: NodeId(1), state: other_state },
                ChainTarget { target: TargetId(2), node: NodeId(2), state },
            ],
        };
        let set_aside =
            |error, chain: Option<&Chain>, lease| sets_aside(error, chain, TargetId(2), lease);
        let without = chain(Offline, Serving);
        assert!(set_aside(&damage, Some(&without), true));
        assert!(!set_aside(&io, Some(&without), true));
        assert!(!set_aside(&damage, Some(&without), false), "the routing may be outdated");
        assert!(!set_aside(&damage, None, true));
        for (state, other_state) in
            [(Serving, Serving), (Syncing, Serving), (LastSrv, Offline), (Offline, LastSrv)]
        {
            assert!(
                !set_aside(&damage, Some(&chain(state, other_state)), true),
                "{state} {other_state}"
            );
        }
    }
}
