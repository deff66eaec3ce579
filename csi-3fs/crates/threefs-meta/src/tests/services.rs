//! Several services over one store.

use threefs_core::ids::ClientId;
use threefs_kv::Store;

use crate::Identity;
use crate::protocol::{At, MetaChange, MetaError, MetaRequest, MetaResult, RequestId};
use crate::tests::fixture::{Fixture, config, create, soon};

/// A change with a request id of the caller.
async fn change(fixture: &Fixture, id: RequestId, change: MetaChange) -> MetaResult {
    let request = MetaRequest::Change { id, caller: Identity::ROOT, change };
    fixture.tree.answer(request, soon()).await
}

fn is_finished(error: &MetaError) -> bool {
    matches!(error, MetaError::Invalid { field, .. } if field == "sequence")
}

/// A copy of a request that was delayed on its way to another service.
#[tokio::test]
async fn a_late_duplicate_through_another_service_is_refused_once_its_answer_is_dropped() {
    let store = Store::memory();
    let (a, b) =
        (Fixture::open(store.clone(), config()).await, Fixture::open(store, config()).await);
    let id = |sequence, finished_below| RequestId { client: ClientId(7), sequence, finished_below };
    let answer = change(&a, id(1, 1), create("/file")).await.unwrap();
    assert_eq!(change(&b, id(1, 1), create("/file")).await.unwrap(), answer);
    change(&a, id(2, 2), MetaChange::Unlink { at: At::path("/file") }).await.unwrap();
    let error = change(&b, id(1, 1), create("/file")).await.unwrap_err();
    assert!(is_finished(&error), "{error}");
    assert!(b.stat("/file").await.is_err(), "it was executed again");
}
