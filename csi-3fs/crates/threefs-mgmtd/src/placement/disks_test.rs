use proptest::prelude::*;

use super::*;

/// Services with these numbers of disks.
fn services(disks: &[u32]) -> BTreeMap<NodeId, Site> {
    let site = || Site { location: Location::default(), weight: WEIGHT_MAX, state: Use::Open };
    let nodes = disks.iter().zip(1..).flat_map(|(count, service)| {
        (0..*count).filter_map(move |disk| NodeId(service).of_disk(disk))
    });
    nodes.map(|node| (node, site())).collect()
}

fn grow(placement: &mut Placement, chains_per_node: u32) {
    let new = placement.new_chains(&placement.rule(), chains_per_node);
    let last = placement.chains.last_key_value().map_or(0, |(id, _)| id.0);
    placement.add((last + 1..).map(ChainId).zip(new));
}

fn are_on_different_services(placement: &Placement) -> bool {
    placement.chains.values().all(|chain| {
        let services: BTreeSet<NodeId> = chain.nodes.iter().map(|node| node.service()).collect();
        services.len() == chain.nodes.len()
    })
}

fn apply(placement: &mut Placement, moves: &[PlannedMove]) {
    for step in moves {
        assert!(placement.permits(&placement.rule(), step), "{step:?}");
        let Some(chain) = placement.chains.get_mut(&step.chain) else { panic!("{step:?}") };
        assert!(chain.nodes.remove(&step.from) && chain.nodes.insert(step.to), "{step:?}");
    }
}

/// A service with most of the space: its share of the data does not relax the rule.
#[test]
fn a_service_with_many_disks_has_one_replica_of_a_chain() {
    let mut placement =
        Placement { nodes: services(&[8, 1, 1]), replicas: 3, ..Placement::default() };
    grow(&mut placement, 2);
    assert!(!placement.chains.is_empty());
    assert!(are_on_different_services(&placement));
}

#[test]
fn too_few_services_get_no_chains() {
    let mut placement = Placement { nodes: services(&[4, 4]), replicas: 3, ..Placement::default() };
    grow(&mut placement, 1);
    assert!(placement.chains.is_empty(), "{:?}", placement.chains);
}

#[test]
fn a_drained_disk_is_emptied_and_may_use_the_other_disks_of_its_service() {
    let mut placement =
        Placement { nodes: services(&[2, 2, 2]), replicas: 3, ..Placement::default() };
    grow(&mut placement, 2);
    if let Some(site) = placement.nodes.get_mut(&NodeId(2)) {
        site.state = Use::Leaving;
    }
    assert!(placement.on_leaving() > 0);
    let moves = placement.moves(&placement.rule());
    apply(&mut placement, &moves);
    assert_eq!(placement.on_leaving(), 0);
    assert!(are_on_different_services(&placement));
    let from_drained = moves.iter().filter(|step| step.from == NodeId(2));
    assert!(from_drained.clone().all(|step| step.to.service() == NodeId(2)), "{moves:?}");
}

proptest! {
    #[test]
    fn no_plan_places_two_replicas_on_one_service(
        disks in prop::collection::vec(1u32..5, 3..7),
        replicas in 1u32..=3,
        events in prop::collection::vec((0u8..5, any::<prop::sample::Index>()), 1..8),
    ) {
        let mut placement = Placement { nodes: services(&disks), replicas, ..Placement::default() };
        grow(&mut placement, 1);
        prop_assert!(are_on_different_services(&placement));
        for (event, index) in events {
            let ids: Vec<NodeId> = placement.nodes.keys().copied().collect();
            let id = ids[index.index(ids.len())];
            let states = [Use::Dead, Use::Full, Use::Open, Use::Leaving];
            match states.get(usize::from(event)) {
                Some(state) => placement.nodes.get_mut(&id).unwrap().state = *state,
                // A disk is added to its service.
                None => {
                    let disk = (0..).filter_map(|disk| id.of_disk(disk));
                    let new = disk.take(9).find(|node| !placement.nodes.contains_key(node));
                    let site = placement.nodes[&id].clone();
                    placement.nodes.insert(new.unwrap(), Site { state: Use::Open, ..site });
                    grow(&mut placement, 1);
                }
            }
            let moves = placement.moves(&placement.rule());
            apply(&mut placement, &moves);
            prop_assert!(are_on_different_services(&placement));
        }
    }
}
