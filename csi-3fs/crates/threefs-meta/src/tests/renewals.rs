//! Renewals of a service's row.

use std::time::{Duration, Instant};

use crate::config::TreeConfig;
use crate::ops::{self, Renewed};
use crate::tests::fixture::{config, soon};
use crate::tests::services::{two, unlink};

/// An opening that hangs, or many removals, must not end a service that runs.
#[tokio::test]
async fn a_service_renews_its_row_during_a_long_check() {
    let (a, b) = two(TreeConfig { service_lease_ms: 200, ..config() }).await;
    a.create("/file").await;
    a.change(unlink("/file")).await.unwrap();
    a.tree.collect().await.unwrap();
    let opening = b.tree.openings.start();
    let run_id = b.tree.open_files.run_id();
    let renewal = async || {
        let services = b.store.transact(soon(), &ops::ListServices).await.unwrap();
        services.iter().find(|(id, _)| *id == run_id).unwrap().1.renewal
    };
    let before = renewal().await;
    let renewals = async {
        let deadline = Instant::now() + Duration::from_secs(60);
        while renewal().await < before + 3 {
            assert!(Instant::now() < deadline, "not renewed");
            tokio::task::yield_now().await;
        }
        drop(opening);
    };
    let (checked, ()) = tokio::join!(b.tree.check_removals(), renewals);
    assert_eq!(checked.unwrap(), Renewed::Alive);
    assert_eq!(b.tree.holds.checked.lock().await.round, 1, "it was checked");
    // Another service has removed it meanwhile: the check ends.
    let opening = b.tree.openings.start();
    a.create("/file").await;
    a.change(unlink("/file")).await.unwrap();
    a.tree.collect().await.unwrap();
    let (checked, ()) = tokio::join!(b.tree.check_removals(), async {
        let remove = ops::RemoveService { run_id, renewal: renewal().await };
        while !a.store.transact(soon(), &remove).await.unwrap() {}
    });
    assert_eq!(checked.unwrap(), Renewed::Removed);
    drop(opening);
}
