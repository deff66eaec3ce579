//! Moves of a replica to another node. Pure.
//!
//! The order keeps the number of serving replicas from falling below its initial value:
//! 1. [`start`]: the new target joins at the chain's end and is synced like any other.
//! 2. Once all other targets serve, including the new one, the old one [`retires`]: its node stops
//!    serving it and reports that, as for a replica that distrusts its data.
//! 3. mgmtd removes the retired target from the chain ([`finish`]). So no client is served by a
//!    replica that is no longer in the chain, however old its routing is.
//!
//! If another target dies in the meantime, the old one is synced again and the move waits. A new
//! target that is being synced yields to one that waits for its sync ([`follow`]): that one needs
//! less data, and may have the only good copy of a chunk that is damaged on the serving targets.

use crate::ids::{NodeId, TargetId};
use crate::routing::{Chain, ChainTarget, Move, PublicState};

/// The chain with an additional target, which must be synced.
#[must_use]
pub fn start(chain: &Chain, destination: TargetId, node: NodeId) -> Chain {
    let mut targets = chain.targets.clone();
    targets.push(ChainTarget { target: destination, node, state: PublicState::Offline });
    Chain { id: chain.id, version: chain.version.next(), targets }
}

/// Applies a move to the result of a scan: `next` is the result of the chain rules for `before`.
/// Returns true with the chain if the source has left and the move is complete.
#[must_use]
pub fn follow(before: &Chain, next: Chain, this: &Move) -> (Chain, bool) {
    let version = before.version.next();
    if let Some(targets) = finish(&next, this) {
        return (Chain { id: next.id, version, targets }, true);
    }
    let syncing = next.state_of(this.destination) == Some(PublicState::Syncing);
    if !syncing || next.targets.iter().all(|place| place.state != PublicState::Waiting) {
        return (next, false);
    }
    let mut targets = next.targets;
    for place in targets.iter_mut().filter(|place| place.target == this.destination) {
        place.state = PublicState::Offline;
    }
    targets.sort_by_key(|place| place.state);
    (Chain { id: next.id, version, targets }, false)
}

/// The chain without the destination, for an abandoned move whose destination will not return.
/// `None` unless the destination is offline and all other targets except the source serve:
/// otherwise every target with data is kept.
#[must_use]
pub fn abandon(chain: &Chain, this: &Move) -> Option<Chain> {
    let stays = |place: &&ChainTarget| place.target != this.destination;
    let is_needed = |place: &&ChainTarget| stays(place) && place.target != this.source;
    let serves = |place: &ChainTarget| place.state == PublicState::Serving;
    let away = chain.state_of(this.destination) == Some(PublicState::Offline);
    if !away
        || chain.serving().next().is_none()
        || !chain.targets.iter().filter(is_needed).all(serves)
    {
        return None;
    }
    let targets = chain.targets.iter().filter(stays).copied().collect();
    Some(Chain { id: chain.id, version: chain.version.next(), targets })
}

/// The targets without the source, if it has stopped serving and is replaced.
fn finish(chain: &Chain, this: &Move) -> Option<Vec<ChainTarget>> {
    let serves = chain.state_of(this.source) == Some(PublicState::Serving);
    if serves || !this.source_is_replaced(chain) {
        return None;
    }
    let stays = |place: &&ChainTarget| place.target != this.source;
    Some(chain.targets.iter().filter(stays).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ChainId, ChainVersion};
    use PublicState::{LastSrv, Offline, Serving, Syncing, Waiting};

    const MOVE: Move = Move { chain: ChainId(1), source: TargetId(1), destination: TargetId(4) };

    fn chain(states: [PublicState; 4]) -> Chain {
        let places = states.iter().zip(1..);
        let targets = places
            .map(|(&state, id)| ChainTarget {
                target: TargetId(id),
                node: NodeId(id as u32),
                state,
            })
            .collect();
        Chain { id: ChainId(1), version: ChainVersion(5), targets }
    }

    #[test]
    fn the_source_leaves_only_when_all_others_serve_and_it_does_not() {
        let states = [Serving, LastSrv, Syncing, Waiting, Offline];
        for source in states {
            for other in states {
                for destination in states {
                    let chain = chain([source, Serving, other, destination]);
                    let is_replaced = other == Serving && destination == Serving;
                    assert_eq!(MOVE.retires(&chain, TargetId(1)), is_replaced);
                    assert!(!MOVE.retires(&chain, TargetId(2)));
                    let next = finish(&chain, &MOVE);
                    assert_eq!(next.is_some(), is_replaced && source != Serving);
                    if let Some(targets) = next {
                        assert!(targets.iter().all(|place| place.state == Serving));
                        assert_eq!(targets.len(), 3);
                    }
                }
            }
        }
    }

    #[test]
    fn a_target_that_waits_for_its_sync_precedes_a_new_one() {
        let before = chain([Serving, Serving, Waiting, Syncing]);
        let (next, ended) = follow(&before, before.clone(), &MOVE);
        assert!(!ended);
        assert_eq!(next.version, ChainVersion(6));
        assert_eq!(next.state_of(TargetId(4)), Some(Offline));
        assert_eq!(next.targets[2].target, TargetId(3));
        for state in [Serving, Offline] {
            let before = chain([Serving, Serving, state, Syncing]);
            assert_eq!(follow(&before, before.clone(), &MOVE), (before, false));
        }
    }

    #[test]
    fn a_move_is_abandoned_only_if_its_destination_is_not_needed() {
        let states = [Serving, LastSrv, Syncing, Waiting, Offline];
        for source in states {
            for other in states {
                for destination in states {
                    let chain = chain([source, Serving, other, destination]);
                    let given_up = abandon(&chain, &MOVE);
                    let may = destination == Offline && other == Serving;
                    assert_eq!(given_up.is_some(), may);
                    if let Some(given_up) = given_up {
                        assert_eq!(given_up.version, ChainVersion(6));
                        assert_eq!(given_up.targets, chain.targets[..3]);
                    }
                }
            }
        }
        let alone = |source| {
            let mut chain = chain([source, Serving, Serving, Offline]);
            chain.targets.retain(|place| [MOVE.source, MOVE.destination].contains(&place.target));
            chain
        };
        assert!(abandon(&alone(Serving), &MOVE).is_some());
        assert!(abandon(&alone(LastSrv), &MOVE).is_none());
    }

    #[test]
    fn a_move_starts_with_an_empty_target() {
        let chain = chain([Serving, Serving, Serving, Serving]);
        let next = start(&chain, TargetId(9), NodeId(9));
        assert_eq!(next.version, ChainVersion(6));
        assert_eq!(next.state_of(TargetId(9)), Some(Offline));
        assert_eq!(next.targets[..4], chain.targets[..]);
    }
}
