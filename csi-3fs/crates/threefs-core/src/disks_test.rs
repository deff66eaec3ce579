use proptest::prelude::*;

use super::*;
use crate::ids::{ChainId, ChainVersion, TargetId};
use crate::routing::{Chain, ChainTarget};

const SERVICE: NodeId = NodeId(3);
const OURS: ClusterId = ClusterId(1);

fn host(registered: &[u32]) -> Host {
    let registered = registered.iter().filter_map(|disk| SERVICE.of_disk(*disk)).collect();
    let (cluster, leading) = (Some(OURS), BTreeSet::new());
    Host { service: SERVICE, paths: vec![], cluster, has_nodes: true, registered, leading }
}

fn disk(id: &str, node: NodeId) -> DiskIdentity {
    DiskIdentity { disk: DiskId(id.into()), node, cluster: Some(OURS) }
}

fn own(id: &str, number: u32) -> DiskIdentity {
    disk(id, SERVICE.of_disk(number).unwrap())
}

fn is_wait(step: &Step) -> bool {
    matches!(step, Step::Wait(_))
}

fn at<T: Clone>(entries: &[(&str, T)]) -> BTreeMap<String, T> {
    entries.iter().map(|(path, value)| ((*path).to_owned(), value.clone())).collect()
}

#[test]
fn a_node_names_its_service_and_disk() {
    let second = SERVICE.of_disk(2).unwrap();
    assert_eq!((second.service(), second.disk()), (SERVICE, 2));
    assert_eq!((SERVICE.to_string(), second.to_string()), ("node-3".into(), "node-3.2".into()));
    assert_eq!(second.of_disk(0), Some(SERVICE));
    assert_eq!(SERVICE.of_disk(NodeId::DISK_MAX + 1), None);
}

#[test]
fn a_disk_of_another_service_is_refused_by_name() {
    for (node, owner) in [(NodeId(4), "node-4"), (NodeId(4).of_disk(1).unwrap(), "node-4.1")] {
        let found = at(&[("/a", Found::Disk(disk("x", node)))]);
        let Step::Refuse(refusal) = &steps(&host(&[]), &BTreeMap::new(), &found)["/a"] else {
            panic!("not refused");
        };
        let message = format!("`/a` belongs to {owner} and this is service node-3: return it");
        assert!(refusal.to_string().contains(&message), "{refusal}");
    }
}

/// Alone, mgmtd refuses it: mgmtd may have lost its store.
#[test]
fn a_disk_of_another_cluster_never_keeps_one_of_this_cluster_from_being_served() {
    let foreign = DiskIdentity { cluster: Some(ClusterId(9)), ..own("x", 0) };
    let alone = at(&[("/a", Found::Disk(foreign.clone()))]);
    let started = steps(&host(&[0]), &BTreeMap::new(), &alone);
    assert_eq!(started["/a"], Step::Start(foreign.clone()));
    let both = at(&[("/a", Found::Disk(foreign)), ("/b", Found::Disk(own("y", 0)))]);
    let steps = steps(&host(&[0]), &BTreeMap::new(), &both);
    assert_eq!(steps["/b"], Step::Start(own("y", 0)));
    let Step::Refuse(refusal) = &steps["/a"] else { panic!("{steps:?}") };
    let text = refusal.to_string();
    assert!(text.contains("`/a` holds data of cluster-00000000000000000000000000000009"), "{text}");
}

#[test]
fn a_path_that_cannot_be_read_keeps_its_disk_and_delays_only_adoptions() {
    let found = at(&[
        ("/a", Found::Unknown("it hangs".into())),
        ("/b", Found::Unknown("it hangs".into())),
        ("/c", Found::Disk(own("c", 2))),
        ("/d", Found::New),
    ]);
    let steps = steps(&host(&[0, 1, 2]), &at(&[("/a", own("a", 0))]), &found);
    assert_eq!(steps["/a"], Step::Keep);
    assert!(is_wait(&steps["/b"]) && is_wait(&steps["/d"]), "{steps:?}");
    assert_eq!(steps["/c"], Step::Start(own("c", 2)));
}

#[test]
fn a_new_disk_replaces_an_absent_one_only_once_that_could_not_lead() {
    let absent = SERVICE.of_disk(1).unwrap();
    let found = at(&[("/a", Found::Disk(own("a", 0))), ("/new", Found::New)]);
    let host = Host { leading: [absent].into(), ..host(&[0, 1]) };
    let Step::Wait(reason) = &steps(&host, &BTreeMap::new(), &found)["/new"] else { panic!() };
    assert!(reason.contains("node-3.1") && reason.contains("threefs promote"), "{reason}");
    let host = Host { leading: [SERVICE].into(), ..host };
    assert_eq!(steps(&host, &BTreeMap::new(), &found)["/new"], Step::Adopt(absent));
}

#[test]
fn a_new_disk_gets_the_number_of_its_path_if_possible() {
    let paths = ["/2", "/1", "/10"].map(str::to_owned).to_vec();
    let new = at(&[("/1", Found::New), ("/10", Found::New), ("/2", Found::New)]);
    let numbers = |registered: &[u32]| {
        let host = Host { paths: paths.clone(), ..host(registered) };
        let steps = steps(&host, &BTreeMap::new(), &new);
        let number = |path: &String| match steps[path] {
            Step::Adopt(node) => node.disk(),
            _ => panic!("{steps:?}"),
        };
        paths.iter().map(number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&[]), [0, 1, 2]);
    assert_eq!(numbers(&[0, 1, 2]), [0, 1, 2]);
    assert_eq!(numbers(&[1]), [1, 0, 2], "unused numbers first");
}

#[test]
fn nodes_that_could_lead_are_those_with_data() {
    let states = [
        PublicState::Serving,
        PublicState::LastSrv,
        PublicState::Syncing,
        PublicState::Waiting,
        PublicState::Offline,
    ];
    let places = (1..).zip(states).map(|(number, state)| ChainTarget {
        target: TargetId(number),
        node: NodeId(number as u32),
        state,
    });
    let (id, version) = (ChainId(1), ChainVersion(1));
    let chain = Chain { id, version, targets: places.collect() };
    let empty = RoutingInfo { cluster: OURS, ..RoutingInfo::default() };
    assert!(!Host::new(SERVICE, vec![], &empty, false).has_nodes, "mgmtd has not replied");
    let new = Host::new(SERVICE, vec![], &empty, true);
    assert_eq!((new.cluster, new.has_nodes), (None, true));
    let routing = RoutingInfo { version: RoutingVersion(1), chains: [(id, chain)].into(), ..empty };
    let host = Host::new(SERVICE, vec![], &routing, false);
    assert_eq!((host.cluster, host.has_nodes), (Some(OURS), true));
    assert_eq!(host.leading, [1, 2, 3].map(NodeId).into());
}

#[test]
fn a_copy_is_refused_and_the_running_disk_continues() {
    let both = at(&[("/a", Found::Disk(own("x", 0))), ("/b", Found::Disk(own("x", 0)))]);
    for running in ["/a", "/b"] {
        let steps = steps(&host(&[0]), &at(&[(running, own("x", 0))]), &both);
        assert_eq!(steps[running], Step::Keep);
        let refused = steps.values().filter(|step| matches!(step, Step::Refuse(_))).count();
        assert_eq!(refused, 1, "{steps:?}");
    }
    let steps = steps(&host(&[0]), &BTreeMap::new(), &both);
    assert!(steps.values().all(|step| matches!(step, Step::Refuse(Refusal::Copy { .. }))));
}

#[test]
fn a_replaced_disk_that_returns_is_refused() {
    let found = at(&[("/a", Found::Disk(own("new", 1))), ("/b", Found::Disk(own("old", 1)))]);
    let steps = steps(&host(&[0, 1]), &at(&[("/a", own("new", 1))]), &found);
    assert_eq!(steps["/a"], Step::Keep);
    let Step::Refuse(refusal @ Refusal::Replaced { .. }) = &steps["/b"] else { panic!() };
    assert!(refusal.to_string().contains("node-3.1"), "{refusal}");
}

#[test]
fn a_new_disk_replaces_an_absent_one_only_if_no_path_is_spare() {
    let new = |registered: &[u32], paths: &[(&str, Found)]| {
        steps(&host(registered), &BTreeMap::new(), &at(paths)).remove("/new").unwrap()
    };
    let present = ("/a", Found::Disk(own("a", 0)));
    let spare = ("/c", Found::Nothing("missing".into()));
    let added = new(&[0, 1], &[present.clone(), ("/new", Found::New), spare]);
    assert_eq!(added, Step::Adopt(SERVICE.of_disk(2).unwrap()), "disk 1 may return");
    let replacing = new(&[0, 1], &[present, ("/new", Found::New)]);
    assert_eq!(replacing, Step::Adopt(SERVICE.of_disk(1).unwrap()));
}

#[test]
fn nothing_is_adopted_before_mgmtd_has_replied() {
    let host = Host { cluster: None, has_nodes: false, ..host(&[]) };
    let found = at(&[("/a", Found::New), ("/b", Found::Disk(own("x", 1)))]);
    let steps = steps(&host, &BTreeMap::new(), &found);
    assert!(is_wait(&steps["/a"]), "{steps:?}");
    assert_eq!(steps["/b"], Step::Start(own("x", 1)), "data that exists is served");
}

#[test]
fn a_disk_that_moves_ends_at_its_old_path_before_it_starts_at_the_new_one() {
    let found = at(&[("/a", Found::Disk(own("y", 1))), ("/b", Found::Disk(own("x", 0)))]);
    let running = at(&[("/a", own("x", 0)), ("/b", own("y", 1))]);
    let stopped = steps(&host(&[0, 1]), &running, &found);
    assert!(stopped.values().all(|step| matches!(step, Step::Stop(_))), "{stopped:?}");
    let away = at(&[("/a", Found::Disk(own("x", 0))), ("/z", Found::Nothing("empty".into()))]);
    let moving = steps(&host(&[0]), &at(&[("/z", own("x", 0))]), &away);
    assert!(is_wait(&moving["/a"]), "its stores are still open: {moving:?}");
    let started = steps(&host(&[0, 1]), &BTreeMap::new(), &found);
    assert_eq!(started["/a"], Step::Start(own("y", 1)));
    assert_eq!(started["/b"], Step::Start(own("x", 0)));
}

/// Paths, each with nothing, a new disk, or one of a few disks, foreign and copied ones among them.
fn machine() -> impl Strategy<Value = BTreeMap<String, Found>> {
    let there = prop_oneof![
        1 => Just(Found::Unknown("I/O error".into())),
        2 => Just(Found::Nothing("unmounted".into())),
        2 => Just(Found::New),
        6 => (0..5u32).prop_map(|it| Found::Disk(own(&it.to_string(), it % 4))),
        1 => Just(Found::Disk(disk("foreign", NodeId(8)))),
    ];
    proptest::collection::vec(there, 6).prop_map(|there| {
        let paths = ["/a", "/b", "/c", "/d", "/e", "/f"].map(str::to_owned);
        paths.into_iter().zip(there).collect()
    })
}

/// Executes the steps as the service does.
fn execute(
    host: &mut Host,
    running: &mut BTreeMap<String, DiskIdentity>,
    found: &mut BTreeMap<String, Found>,
    names: &mut u32,
) {
    for (path, step) in steps(host, running, found) {
        match step {
            Step::Keep | Step::Wait(_) | Step::Refuse(_) => {}
            Step::Start(disk) => {
                host.registered.insert(disk.node);
                running.insert(path, disk);
            }
            Step::Stop(_) => drop(running.remove(&path)),
            Step::Adopt(node) => {
                *names += 1;
                found.insert(path, Found::Disk(disk(&format!("adopted-{names}"), node)));
            }
        }
    }
}

proptest! {
    #[test]
    fn disks_are_served_once_under_their_own_id(machines in proptest::collection::vec(machine(), 1..6)) {
        let (mut host, mut running, mut names) = (host(&[]), BTreeMap::new(), 0);
        for mut found in machines {
            for _ in 0..4 {
                let before = running.clone();
                execute(&mut host, &mut running, &mut found, &mut names);
                let nodes: BTreeSet<NodeId> = running.values().map(|disk| disk.node).collect();
                let ids: BTreeSet<&DiskId> = running.values().map(|disk| &disk.disk).collect();
                prop_assert_eq!((nodes.len(), ids.len()), (running.len(), running.len()));
                for (path, disk) in &running {
                    prop_assert_eq!(disk.node.service(), SERVICE);
                    let there = &found[path];
                    let is_unknown = matches!(there, Found::Unknown(_));
                    prop_assert!(is_unknown || *there == Found::Disk(disk.clone()), "{there:?}");
                }
                // Whatever happens at other paths.
                for (path, disk) in before {
                    if found.get(&path) == Some(&Found::Disk(disk.clone())) {
                        prop_assert_eq!(running.get(&path), Some(&disk));
                    }
                }
            }
            let before = running.clone();
            execute(&mut host, &mut running, &mut found, &mut names);
            prop_assert_eq!(before, running.clone(), "it has converged");
        }
    }

    #[test]
    fn the_order_and_the_names_of_paths_do_not_matter(found in machine()) {
        let reversed: BTreeMap<String, Found> = found
            .values()
            .rev()
            .enumerate()
            .map(|(number, there)| (format!("/{number}"), there.clone()))
            .collect();
        let started = |found: &BTreeMap<String, Found>| -> BTreeSet<(DiskId, NodeId)> {
            let steps = steps(&host(&[]), &BTreeMap::new(), found).into_values();
            steps
                .filter_map(|step| match step {
                    Step::Start(disk) => Some((disk.disk, disk.node)),
                    _ => None,
                })
                .collect()
        };
        prop_assert_eq!(started(&found), started(&reversed));
    }

    #[test]
    fn adopted_nodes_are_distinct_and_of_no_disk_that_is_there(found in machine()) {
        let present = nodes_of(&BTreeMap::new(), &found);
        let steps = steps(&host(&[1]), &BTreeMap::new(), &found);
        let mut adopted = BTreeSet::new();
        for step in steps.into_values() {
            if let Step::Adopt(node) = step {
                prop_assert!(!present.contains(&node), "{node} is there");
                prop_assert!(adopted.insert(node), "{node} twice");
            }
        }
    }
}
