//! Nodes without a zone, rack or host.

use super::*;

fn without_location(placement: &mut Placement, node: u32) {
    placement.nodes.get_mut(&NodeId(node)).unwrap().location = Location::default();
}

/// The largest number of replicas of a chain in one known zone.
fn replicas_in_a_zone(placement: &Placement) -> usize {
    let in_chain = |chain: &Members| {
        let zone = |node: &NodeId| {
            placement.nodes[node].location.domain(threefs_core::location::Level::Zone)
        };
        let mut zones: Vec<&str> = chain.nodes.iter().filter_map(zone).collect();
        zones.sort_unstable();
        zones.chunk_by(|one, other| one == other).map(<[&str]>::len).max().unwrap_or(0)
    };
    placement.chains.values().map(in_chain).max().unwrap_or(0)
}

#[test]
fn a_node_without_a_zone_does_not_turn_the_zones_of_the_others_off() {
    let mut placement = filled(grid(3, 8, 1), 3, 16);
    without_location(&mut placement, 24);
    assert_eq!(placement.moves(&rule(&placement)), [], "the others keep what they have");
    let rule = rule(&placement);
    assert_eq!(rule.level(), None, "two replicas may be in the zone of node 24");
    let reason = rule.reasons.first().unwrap();
    assert!(reason.starts_with("1 of 24 nodes have no zone, for example node-24"), "{reason}");
    // Replacements, and chains for a new node, keep the zones of the others apart.
    set(&mut placement, 1, Use::Leaving);
    placement.nodes.insert(NodeId(25), placement.nodes[&NodeId(2)].clone());
    let moves = placement.moves(&rule);
    apply(&mut placement, &moves);
    grow(&mut placement, 16);
    assert_eq!((placement.on_leaving(), replicas_in_a_zone(&placement)), (0, 1));
    // A draining node without a zone has no part in the rule.
    set(&mut placement, 24, Use::Leaving);
    assert_eq!(super::rule(&placement).level(), Some(threefs_core::location::Level::Zone));
}

/// The services of a cluster get their zones one after the other, in any order.
#[test]
fn zones_that_become_known_move_no_more_than_they_require_together() {
    for (zones, step) in [(2, 5), (2, 7), (3, 5), (3, 11)] {
        let all = grid(zones, 8, 1);
        let cap = Rule::new(&all, 3).cap_of(threefs_core::location::Level::Zone).unwrap();
        let count = all.len();
        let mut placement = filled(flat(count as u32), 3, 4);
        let mut at_once = placement.clone();
        at_once.nodes.clone_from(&all);
        let necessary = at_once.moves(&rule(&at_once)).len();
        let mut made = 0;
        for number in 0..count {
            let node = NodeId((number * step % count) as u32 + 1);
            placement.nodes.insert(node, all[&node].clone());
            let moves = placement.moves(&rule(&placement));
            made += moves.len();
            apply(&mut placement, &moves);
        }
        println!("{zones} zones: {made} moves, {necessary} at once");
        assert!(replicas_in_a_zone(&placement) <= cap as usize);
        assert!(made <= 2 * necessary + 8, "{zones} zones: {made} moves, {necessary} at once");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Some nodes have no zone, and some no host.
    #[test]
    fn the_known_domains_keep_their_limits(
        zones in 1usize..5, hosts in 1usize..4, disks in 1usize..3, replicas in 1u32..4,
        no_zone: u32, no_host: u32, leaving in 0u32..8,
    ) {
        let mut nodes = grid(zones, hosts, disks);
        for (site, bit) in nodes.values_mut().zip(0..) {
            let zone = site.location.part(threefs_core::location::Level::Zone);
            let host = site.location.part(threefs_core::location::Level::Host);
            let zone = if no_zone >> bit & 1 == 1 { "" } else { zone };
            let host = if no_host >> bit & 1 == 1 { "" } else { host };
            site.location = Location::new(zone, "", host).unwrap();
        }
        let mut placement = empty(nodes, replicas);
        prop_assume!(placement.staying() > replicas as usize);
        grow(&mut placement, 4);
        prop_assert_eq!(violations(&placement), 0);
        prop_assert_eq!(placement.chains.len(), placement.nodes.len() * 4, "all can be placed");
        let node = leaving % placement.nodes.len() as u32 + 1;
        set(&mut placement, node, Use::Leaving);
        let moves = placement.moves(&rule(&placement));
        apply(&mut placement, &moves);
        prop_assert_eq!(violations(&placement), 0);
        let again = placement.moves(&rule(&placement));
        prop_assert_eq!(again, [], "a plan is complete");
    }
}
