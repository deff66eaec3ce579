//! Snapshots while many clients change the volume: each shows one moment, and never changes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use threefs_core::ids::ClientId;
use threefs_kv::Store;

use crate::Identity;
use crate::protocol::{
    At, MetaChange, MetaError, MetaRequest, RequestId, SetMode, SnapshotChange, SnapshotEntry,
};
use crate::tests::backends::Yielding;
use crate::tests::fixture::{
    Fixture, collect_with_all, config, create, make_directory, rename, soon,
};
use crate::tests::invariants::check_tree;
use crate::tests::snapshots::{TestFences, create_snapshot, remove_snapshot};

const CLIENTS: usize = 4;

/// Steps of a client that leave a trace: the file of a step exists from it on, the one before it is
/// gone, an attribute and the mode of the directory have its number.
async fn client(fixture: &Fixture, number: usize, stop: &AtomicBool, steps: &AtomicU64) {
    let (id, home) = (ClientId(number as u128 + 100), format!("/v/{number}"));
    let mut sequence = 0;
    let mut send = async |change: MetaChange| {
        sequence += 1;
        let id = RequestId { client: id, sequence, finished_below: sequence };
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        fixture.tree.answer(request, soon()).await.unwrap();
    };
    send(make_directory(&home, false)).await;
    let mut step = 0u32;
    while !stop.load(SeqCst) {
        step += 1;
        send(create(&format!("{home}/new{step}"))).await;
        send(rename(&format!("{home}/new{step}"), &format!("{home}/at{step}"))).await;
        if step > 1 {
            let at = At::path(format!("{home}/at{}", step - 1));
            send(MetaChange::Unlink { at }).await;
        }
        send(MetaChange::SetAttribute {
            at: At::path(&home),
            name: "user.step".into(),
            value: Some(step.to_string().into_bytes()),
            mode: SetMode::Any,
        })
        .await;
        steps.fetch_add(1, SeqCst);
        tokio::task::yield_now().await;
    }
}

/// The states that a client's directory goes through.
fn check_home(names: &[String], attribute: Option<u32>) {
    let number = |name: &String, prefix: &str| name.strip_prefix(prefix)?.parse::<u32>().ok();
    let at: Vec<u32> = names.iter().filter_map(|name| number(name, "at")).collect();
    let new: Vec<u32> = names.iter().filter_map(|name| number(name, "new")).collect();
    let step = attribute.unwrap_or(0);
    let mut at = at;
    at.sort_unstable();
    let expected: [(Vec<u32>, Vec<u32>); 4] = [
        (if step > 0 { vec![step] } else { vec![] }, vec![]),
        (if step > 0 { vec![step] } else { vec![] }, vec![step + 1]),
        (if step > 0 { vec![step, step + 1] } else { vec![step + 1] }, vec![]),
        (vec![step + 1], vec![]),
    ];
    assert!(expected.contains(&(at, new)), "{names:?} with step {step}");
}

async fn storm(services: usize) {
    let store = match services {
        1 => Store::new(Yielding(Store::memory())),
        _ => Store::new(Yielding(Store::shared_memory())),
    };
    let fences = Arc::new(TestFences::default());
    let mut fixtures = Vec::new();
    for _ in 0..services {
        let fixture = Fixture::open(store.clone(), config()).await;
        fixtures.push(Arc::new(fixture.with_fences(Arc::clone(&fences) as Arc<_>)));
    }
    let fixture = Arc::clone(&fixtures[0]);
    fixture.volume("/v").await;
    let (stop, steps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let fixture = Arc::clone(&fixtures[number % services]);
        let (stop, steps) = (Arc::clone(&stop), Arc::clone(&steps));
        clients.push(tokio::spawn(async move { client(&fixture, number, &stop, &steps).await }));
    }
    let mut seen = BTreeMap::new();
    for number in 0..24u64 {
        let until = steps.load(SeqCst) + number % 3 * 2;
        while steps.load(SeqCst) < until {
            tokio::task::yield_now().await;
        }
        let name = format!("s{number}");
        let id = RequestId { client: ClientId(1), sequence: number + 1, finished_below: 0 };
        let change = create_snapshot("/v", &name);
        let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
        let creator = &fixtures[number as usize % services];
        creator.tree.answer(request, soon()).await.unwrap();
        let base = format!("/v/.snapshots/{name}");
        seen.insert(name, fixture.everything(&base).await);
        if number % 4 == 3 {
            let (name, shown) = seen.pop_first().unwrap();
            let base = format!("/v/.snapshots/{name}");
            assert_eq!(creator.everything(&base).await, shown, "{name} changed");
            creator.change(remove_snapshot("/v", &name)).await.unwrap();
            fixture.tree.drop_history().await.unwrap();
            fixture.tree.collect().await.unwrap();
        }
    }
    stop.store(true, SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    collect_with_all(&fixtures).await;
    check_tree(&store).await;
    for (name, shown) in &seen {
        let base = format!("/v/.snapshots/{name}");
        assert_eq!(&fixture.everything(&base).await, shown, "{name} changed");
        for number in 0..CLIENTS {
            let home = format!("{base}/{number}");
            if let Some(home_seen) = shown.get(&format!("/{number}")) {
                let step = home_seen.attributes.get("user.step");
                let step = step.map(|step| String::from_utf8(step.clone()).unwrap());
                let names = fixture.names(&home).await;
                check_home(&names, step.map(|step| step.parse().unwrap()));
            }
        }
    }
}

#[tokio::test]
async fn snapshots_of_a_changing_volume_show_one_moment() {
    storm(1).await;
}

#[tokio::test]
async fn snapshots_of_a_volume_that_two_services_change_show_one_moment() {
    storm(2).await;
}

/// Snapshots with one name, from many clients at once: one is made.
#[tokio::test]
async fn concurrent_creations_and_removals_leave_no_rows() {
    let store = Store::new(Yielding(Store::shared_memory()));
    let fences = Arc::new(TestFences::default());
    let fixture = Fixture::open(store.clone(), config()).await;
    let fixture = Arc::new(fixture.with_fences(Arc::clone(&fences) as Arc<_>));
    fixture.volume("/v").await;
    let mut tasks = Vec::new();
    for number in 0..8u128 {
        let fixture = Arc::clone(&fixture);
        tasks.push(tokio::spawn(async move {
            for sequence in 1..20 {
                let name = format!("s{}", sequence % 3);
                let at = At::path("/v");
                let change = match (number + u128::from(sequence)) % 2 {
                    0 => SnapshotChange::Create { at, name },
                    _ => SnapshotChange::Remove { at, name },
                };
                let client = ClientId(number + 10);
                let id = RequestId { client, sequence, finished_below: 0 };
                let change = MetaChange::Snapshot(change);
                let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
                if let Err(error) = fixture.tree.answer(request, soon()).await {
                    let expected = matches!(
                        error,
                        MetaError::Exists { .. }
                            | MetaError::NotFound { .. }
                            | MetaError::Unavailable { .. }
                    );
                    assert!(expected, "{error}");
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let left: Vec<SnapshotEntry> = fixture.snapshots("/v").await;
    for SnapshotEntry { name, .. } in left {
        assert_eq!(fixture.names(&format!("/v/.snapshots/{name}")).await, Vec::<String>::new());
        fixture.change(remove_snapshot("/v", &name)).await.unwrap();
    }
    fixture.tree.drop_history().await.unwrap();
    assert_eq!(crate::tests::snapshots::history_rows(&store).await, Vec::<String>::new());
    check_tree(&store).await;
}
