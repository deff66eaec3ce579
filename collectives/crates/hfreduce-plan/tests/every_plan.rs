//! The invariants of a plan, for every small list of nodes and for many large ones.

use hfreduce_plan::{DEGREE_MAX, NodePlace, Plan};
use proptest::prelude::*;

/// Nodes of `sizes.len()` zones, zone after zone.
fn places(sizes: &[usize]) -> Vec<NodePlace> {
    let machines =
        sizes.iter().enumerate().flat_map(|(zone, &size)| (0..size).map(move |i| (zone, i)));
    machines
        .map(|(zone, i)| NodePlace::new(format!("z{zone}n{i}"), format!("zone-{zone}")))
        .collect()
}

fn ceil_log2(n: usize) -> usize {
    n.next_power_of_two().trailing_zeros() as usize
}

/// Checks the invariants independently of the crate.
fn check(plan: &Plan) {
    let n = plan.nodes().len();
    for tree in plan.trees() {
        let mut order = tree.from_the_root();
        assert_eq!(order.len(), n);
        order.sort_unstable();
        assert!(order.iter().copied().eq(0..n), "each node once");
        assert_eq!(tree.links.iter().filter(|links| links.parent.is_none()).count(), 1);
        for (node, links) in tree.links.iter().enumerate() {
            assert!(links.children.len() <= 2 && links.children.is_sorted());
            assert!(links.children.iter().all(|&child| tree.links[child].parent == Some(node)));
        }
    }
    assert!((0..n).all(|node| plan.degree(node) <= DEGREE_MAX));
    let mut crosses = vec![false; n];
    for edge in (0..2).flat_map(|tree| plan.crossings_of(tree)) {
        crosses[edge.parent] = true;
        crosses[edge.child] = true;
    }
    for (node, crosses) in crosses.into_iter().enumerate() {
        let leaf = plan.trees().iter().any(|tree| tree.degree(node) <= 1);
        assert!(crosses || leaf, "node {node} is interior in both trees");
    }
}

#[test]
fn one_zone_of_every_size_up_to_2048() {
    let names = places(&[2048]);
    for n in 1..=2048 {
        let plan = Plan::new(&names[..n]).unwrap();
        check(&plan);
        assert_eq!(plan.crossings(), [0, 0]);
        assert!(plan.depth().iter().all(|&depth| depth <= ceil_log2(n)), "n={n}");
        if n > 2 {
            // Balance: no node is idle in both trees, and about half of the nodes add in each.
            let adding = |tree: usize| {
                plan.trees()[tree].links.iter().filter(|links| !links.children.is_empty()).count()
            };
            assert!(adding(0).abs_diff(adding(1)) <= 1, "n={n}: {} and {}", adding(0), adding(1));
        }
    }
}

#[test]
fn every_split_of_two_zones_up_to_128_and_128_crosses_once_on_one_pair() {
    for a in 1..=128 {
        for b in 1..=128 {
            let plan = Plan::new(&places(&[a, b])).unwrap();
            check(&plan);
            assert_eq!(plan.crossings(), [1, 1], "{a}+{b}");
            let ends = |tree: usize| {
                let edge = plan.crossings_of(tree)[0];
                (edge.parent.min(edge.child), edge.parent.max(edge.child))
            };
            assert_eq!([ends(0), ends(1)], [(a - 1, a); 2], "{a}+{b}: neighbors in the list");
            // One pair for both trees costs one edge of depth over the best possible tree.
            let bound = ceil_log2(a + b) + 1;
            assert!(plan.depth().iter().all(|&depth| depth <= bound), "{a}+{b} {:?}", plan.depth());
        }
    }
}

#[test]
fn a_chain_of_zones_has_one_crossing_for_each_border_even_with_zones_of_one_node() {
    for a in 1..=9 {
        for b in 1..=9 {
            for c in 1..=9 {
                for d in [0, 1, 2, 5] {
                    let sizes: Vec<usize> = [a, b, c, d].into_iter().filter(|&s| s > 0).collect();
                    let plan = Plan::new(&places(&sizes)).unwrap();
                    check(&plan);
                    assert_eq!(plan.crossings(), [sizes.len() - 1; 2], "{sizes:?}");
                }
            }
        }
    }
}

#[test]
fn any_node_of_a_zone_can_be_its_end_of_the_bridge() {
    for (a, b) in [(1, 1), (2, 2), (3, 4), (5, 5), (8, 3), (16, 17)] {
        let nodes = places(&[a, b]);
        for i in 0..a {
            for j in 0..b {
                let (near, far) = (nodes[i].name.as_str(), nodes[a + j].name.as_str());
                // The order of the two names does not matter.
                let plan = Plan::with_bridge(&nodes, (near, far)).unwrap();
                assert_eq!(plan, Plan::with_bridge(&nodes, (far, near)).unwrap());
                check(&plan);
                for tree in 0..2 {
                    let edge = plan.crossings_of(tree)[0];
                    let ends = [edge.parent.min(edge.child), edge.parent.max(edge.child)];
                    assert_eq!(ends, [i, a + j]);
                }
            }
        }
    }
}

#[test]
fn a_plan_of_ten_thousand_nodes_takes_milliseconds() {
    let nodes = places(&[4_999, 5_001]);
    let plan = Plan::new(&nodes).unwrap();
    assert_eq!(plan.crossings(), [1, 1]);
    assert!(plan.depth().iter().all(|&depth| depth <= 14 + 1));
}

#[test]
fn invalid_lists_are_refused_with_name_and_position() {
    let text = |nodes: &[NodePlace]| Plan::new(nodes).unwrap_err().to_string();
    assert!(text(&[]).contains("empty"));
    assert!(text(&[NodePlace::new("", "A")]).contains("node 0 has an empty name"));
    let twice = [NodePlace::new("a0", "A"), NodePlace::new("b0", "B"), NodePlace::new("a0", "B")];
    assert_eq!(text(&twice), "nodes 0 and 2 are both named `a0`: name every node once");
    let nodes = places(&[2, 2]);
    for (pair, why) in [
        (("z0n0", "z0n1"), "same zone"),
        (("z0n0", "unknown"), "not in the list"),
        (("z0n0", "z0n0"), "same zone"),
    ] {
        let error = Plan::with_bridge(&nodes, pair).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(pair.1), "{error}");
    }
    let error = Plan::with_bridge(&places(&[3]), ("z0n0", "z0n1")).unwrap_err().to_string();
    assert!(error.contains("two zones"), "{error}");
}

#[test]
fn the_description_uses_node_names_instead_of_indices() {
    let json = Plan::new(&places(&[2, 2])).unwrap().describe();
    assert_eq!(json["crossings"], serde_json::json!([1, 1]));
    assert_eq!(json["nodes"][3], serde_json::json!({"name": "z1n1", "zone": "zone-1"}));
    let parents = json["trees"][0]["parents"].as_array().unwrap();
    assert_eq!(parents.iter().filter(|parent| parent.is_null()).count(), 1);
    assert_eq!(json["trees"][1]["crossings"].as_array().unwrap().len(), 1);
}

#[test]
fn every_rank_computes_the_same_plan() {
    // Ranks do not exchange the plan: equal lists must yield equal plans in every process, where hash tables
    // have other orders. These are its bits as JSON.
    let plans = [places(&[5, 3]), places(&[2, 3, 1])].map(|nodes| Plan::new(&nodes).unwrap());
    let parents = plans.map(|plan| {
        let links = plan.trees()[1].links.iter();
        links.map(|links| links.parent.map_or(-1, |parent| parent as i32)).collect::<Vec<_>>()
    });
    assert_eq!(parents, [vec![1, 3, 1, 4, -1, 4, 7, 5], vec![1, 2, -1, 4, 2, 4]]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random sizes, nodes of all zones in any order of the list: still one crossing for each border.
    #[test]
    fn any_order_of_any_zones(
        sizes in prop::collection::vec(1_usize..200, 1..6),
        order in any::<prop::sample::Index>(),
        stride in 1_usize..10_000,
    ) {
        let nodes = places(&sizes);
        let n = nodes.len();
        let stride = (stride..).find(|s| gcd(*s, n) == 1).unwrap();
        let mixed: Vec<_> = (0..n).map(|i| nodes[(order.index(n) + i * stride) % n].clone()).collect();
        let plan = Plan::new(&mixed).unwrap();
        check(&plan);
        prop_assert_eq!(plan.crossings(), [sizes.len() - 1; 2]);
        prop_assert_eq!(&plan, &Plan::new(&mixed).unwrap());
    }

    /// Beyond the exhaustive range: two zones of up to 3,000 nodes.
    #[test]
    fn large_zones(a in 1_usize..3_000, b in 1_usize..3_000) {
        let nodes = places(&[a, b]);
        let plan = Plan::new(&nodes).unwrap();
        check(&plan);
        prop_assert_eq!(plan.crossings(), [1, 1]);
        prop_assert!(plan.depth().iter().all(|&depth| depth <= ceil_log2(a + b) + 1));
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
